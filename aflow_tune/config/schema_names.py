"""Finds the key that a user most likely meant.

A wrong key is usually a typing error, a key at the wrong level, or the name that another
framework gives to the same thing. The last kind is the table below.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

SYNONYMS = {
    "learning_rate": "algorithm.optimizer.lr",
    "warmup_steps": "algorithm.optimizer.lr_warmup_steps",
    "warmup_ratio": "algorithm.optimizer.lr_warmup_steps_ratio",
    "lr_scheduler": "algorithm.optimizer.lr_scheduler_type",
    "max_grad_norm": "trainer.grad_clip",
    "group_size": "algorithm.repeat_times",
    "num_generations": "algorithm.repeat_times",
    "rollout_n": "algorithm.repeat_times",
    "epochs": "buffer.total_epochs",
    "num_epochs": "buffer.total_epochs",
    "num_train_epochs": "buffer.total_epochs",
    "max_steps": "buffer.total_steps",
    "steps": "buffer.total_steps",
    "save_steps": "trainer.save_interval",
    "eval_steps": "explorer.eval_interval",
    "max_tokens": "model.max_response_tokens",
    "max_new_tokens": "model.max_response_tokens",
    "max_completion_length": "model.max_response_tokens",
    "max_prompt_length": "model.max_prompt_tokens",
    "base_model": "model.model_path",
    "model_name": "model.model_path",
    "model_name_or_path": "model.model_path",
    "lora": "model.lora_configs",
    "lora_config": "model.lora_configs",
    "lora_r": "model.lora_configs[].lora_rank",
    "r": "model.lora_configs[].lora_rank",
    "dataset": "buffer.explorer_input.taskset",
    "train_dataset": "buffer.explorer_input.taskset",
    "eval_dataset": "buffer.explorer_input.eval_tasksets",
    "eval_taskset": "buffer.explorer_input.eval_tasksets",
    "workflow_func": "workflow",
    "reward": "judge",
    "reward_fn": "judge",
    "judge_func": "judge",
    "timeout": "rollout.run_timeout",
    "output_dir": "checkpoint_root_dir",
    "experiment_name": "name",
}


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, or None."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def elsewhere(name: str, parent: str, siblings: list[str], index: Mapping[str, Any]) -> str | None:
    """The key path that an unknown `name` under `parent` stands for, or None.

    In this order: a sibling spelled almost so, or with more behind it; the same name at another
    level (the least deep one); another framework's name; a sibling somewhat like it; a key
    anywhere almost so.
    """
    prefix = f"{parent}." if parent else ""
    bare = name.rpartition(".")[2]
    if prefix + name in index and name != bare:
        return prefix + name
    if close := nearest(name, siblings, 0.8):
        return prefix + close
    longer = [sibling for sibling in siblings if sibling.startswith(f"{name}_")]
    if len(longer) == 1:  # `api_key_env` for `api_key`
        return prefix + longer[0]
    by_leaf: dict[str, list[str]] = {}
    for path in index:
        by_leaf.setdefault(path.rpartition(".")[2], []).append(path)
    if bare in by_leaf:
        return _least_deep(by_leaf[bare], parent)
    if bare.lower() in SYNONYMS and SYNONYMS[bare.lower()] in index:
        return SYNONYMS[bare.lower()]
    if close := nearest(name, siblings):
        return prefix + close
    if close := nearest(bare, by_leaf, 0.8):
        return _least_deep(by_leaf[close], parent)
    return None


def _least_deep(paths: list[str], parent: str) -> str:
    top = parent.partition(".")[0] + "."

    def distance(path: str) -> tuple[int, bool, bool, str]:
        return path.count("."), "[]" in path, not path.startswith(top), path

    return min(paths, key=distance)
