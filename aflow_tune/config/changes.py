"""What `prepare` changed in a configuration, its saved file, and what a resumed run must keep.

Changes are the differences between the settings as loaded and as run, each with its reason, without
those that Trinity fills in for its own use.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from aflow_tune.config.settings import AflowConfig, Change, words
from aflow_tune.files import write_whole
from aflow_tune.models.redaction import masked
from aflow_tune.sections import display

HIDDEN = words(
    """
    checkpoint_job_dir ray_namespace *.ray_namespace log.save_dir monitor.cache_dir
    monitor.monitor_args* model.critic_model_path model.custom_chat_template cluster.*
    synchronizer.explorer_world_size synchronizer.explorer_sync_interval
    synchronizer.trainer_sync_interval explorer.rollout_model.model_path explorer.*.temperature
    explorer.*.top_p explorer.*.top_k explorer.*.logprobs explorer.*.repetition_penalty
    explorer.*.max_model_len explorer.*.max_prompt_tokens explorer.*.max_response_tokens
    explorer.*.min_response_tokens explorer.*.enable_prompt_truncation explorer.*.rope_*
    explorer.*.chat_template explorer.*.enable_thinking explorer.*.sync_method
    explorer.*.checkpoint_job_dir explorer.*.gpu_per_engine explorer.*.cuda_visible_devices
    explorer.*.enable_lora explorer.*.lora_modules* explorer.*.lora_kwargs*
    explorer.*.extra_engine_args* explorer.auxiliary_models.*.enable_* buffer.cache_dir
    buffer.tokenizer_path buffer.explorer_input.*tasksets.*.rollout_args.*
    buffer.explorer_input.*tasksets.*.workflow_args* buffer.explorer_input.*tasksets.*.format.*
    buffer.explorer_input.*tasksets.*.is_eval buffer.explorer_input.*tasksets.*.batch_size
    buffer.explorer_input.*tasksets.*.total_* buffer.explorer_input.*tasksets.*.repeat_times
    buffer.trainer_input.experience_buffer* trainer.trainer_config* trainer.trust_remote_code
    model.lora_configs.*.is_dummy buffer.explorer_input.taskset buffer.explorer_input.tasksets
    """
)

READ_FROM = "# read from: "
"""Precedes, in a saved configuration, the path of the original file as a JSON string."""

_LOCAL_WHY = {
    "local.dtype": "`deterministic: true` computes in fp32",
    "synchronizer.*": "the local engine rolls out, trains and synchronises in turn, in memory",
    "explorer.runner_per_model": "tasks at once: slots of one process",
    "trainer.save_interval": "so that an interrupted run loses at most a tenth of its steps",
    "trainer.max_checkpoints_to_keep": "full weights are large; the newest and the best are enough",
    "data_processor.experience_pipeline.save_input": "a copy of every experience is not kept",
    "algorithm.sample_strategy": "trains on whole steps, however many calls their rollouts made",
    "explorer.eval_interval": "would never be reached in this run",
}
"""Reasons that hold for the local engine only."""

_WHY = {
    "synchronizer.sync_method": "the only one that works in this mode or with LoRA",
    "synchronizer.sync_interval": "synchronised when saved",
    "mode": "chosen for this machine",
    "name": "the folder of that name is in use and `continue_from_checkpoint` is false",
    "checkpoint_root_dir": "made absolute: workers start elsewhere",
    "*model_path": "made absolute: workers start elsewhere",
    "explorer.rollout_model.enable_*": "calls of your function are served and recorded with this",
    "*.default*_workflow_type": "runs your workflow function",
    "explorer.runner_per_model": "no more runners than tasks of a batch",
    "explorer.eval_interval": "evaluated as often as weights are synchronised",
    "explorer.max_timeout": "longer than `rollout.run_timeout`, which is the limit that counts",
    "rollout.run_timeout": "no longer than `explorer.max_timeout`",
    "monitor.monitor_type": "writes TensorBoard and the metrics.jsonl of the live panel",
    "data_processor.experience_pipeline.operators*": "drops failed rollouts",
    "algorithm.*": "the default of this algorithm",
    "model.max_*": "prompt and response share `max_model_len`",
    "model.temperature": "that of the task set, which is what is sampled with",
    "buffer.train_batch_size": "batch_size x repeat_times",
    "buffer.explorer_input.*tasksets.*.path": "made absolute, or a folder as Trinity needs it",
    "buffer.explorer_input.*tasksets.*.s[pu]*": "a single file is one split, named train",
    "*": "filled in so that Trinity can run it",
}
"""Reason by key pattern; the first match counts."""

_ARGUMENTS = re.compile(r"(algorithm\.\w+_args|.*\.operators\.\d+)\.?(.*)$")
_WIDTH = 48


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], reasons: Mapping[str, str]
) -> list[Change]:
    """The changes from `before` to `after`, two flattened configurations; `reasons`, by key, win
    over the tables."""
    local = _LOCAL_WHY if after.get("engine") == "local" else {}
    patterns = [*local.items(), *_WHY.items()]
    # Trinity turns the one `taskset` into the first of `tasksets`.
    single, first = "buffer.explorer_input.taskset.", "buffer.explorer_input.tasksets.0."
    written = _collapsed({key.replace(single, first, 1): before[key] for key in before})
    run = _collapsed(after)
    changes = []
    for key in dict.fromkeys([*run, *written]):
        old, new = written.get(key), run.get(key)
        if old == new or callable(new) or (_empty(old) and _empty(new)):
            continue
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in HIDDEN):
            continue
        matching = (why for pattern, why in patterns if fnmatch.fnmatchcase(key, pattern))
        why = reasons.get(key) or next(matching)
        changes.append(Change(key, masked(key, old), masked(key, new), why))
    return changes


def render_changes(changes: Sequence[Change]) -> str:
    """The changes as a table: key, from, to, why. Empty if there are none."""
    if not changes:
        return ""
    rows = [("setting", "from", "to", "why")]
    rows += [(display(c.key), _short(c.before), _short(c.after), c.why) for c in changes]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    return "\n".join(["settings that were filled in or changed:", *(f"  {line}" for line in lines)])


def save_resolved(config: AflowConfig, changes: Sequence[Change], path: Path) -> None:
    """Write the configuration as run, after comments that list the changes; `load_config` reads it.
    A secret is written as the interpolation that it came from, or masked."""
    header = "".join(
        f"# {display(c.key)}: {_short(c.before)} -> {_short(c.after)} ({c.why})\n" for c in changes
    )
    if config.positions.file:
        header += f"{READ_FROM}{json.dumps(os.path.abspath(config.positions.file))}\n"
    title = "# The configuration as it was run. Changed since it was loaded:\n"
    content = _plain(config, "", config.positions.raw)
    write_whole(path, title + header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _plain(value: Any, key: str, raw: Mapping[str, str]) -> Any:
    """Dataclasses, enums and containers as plain YAML values."""
    if hasattr(value, "__dataclass_fields__"):
        value = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {
            str(name): _plain(item, f"{key}.{name}".lstrip("."), raw)
            for name, item in value.items()
            if not callable(item)
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{key}.{number}", raw) for number, item in enumerate(value)]
    if hasattr(value, "value") and hasattr(value, "name"):
        return value.value
    if value is None or isinstance(value, (bool, int, float)):
        return value
    hidden = masked(key, str(value))
    if hidden != value and key in raw:
        return raw[key]
    return hidden


def _collapsed(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flat configuration in which all arguments of one function are one value."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        match = _ARGUMENTS.match(key)
        if match is None or not match.group(2):
            found[key] = value
            continue
        arguments = found.get(match.group(1))
        if not isinstance(arguments, dict):
            arguments = found[match.group(1)] = {}
        arguments[match.group(2)] = masked(key, value)
    return found


def _empty(value: Any) -> bool:
    return value is None or value == "" or value == [] or value == {}


def _short(value: Any) -> str:
    """A value in at most `_WIDTH` characters; of a dotted path the end tells more."""
    if isinstance(value, dict):
        value = ", ".join(f"{key.rpartition('.')[2]}={item}" for key, item in value.items())
    text = "-" if _empty(value) else str(value)
    return text if len(text) <= _WIDTH else "..." + text[3 - _WIDTH :]


_ENGINE = "aflow_tune.engines.trinity."
RENAMED = {
    f"{_ENGINE}settings.readers.": f"{_ENGINE}readers.",
    f"{_ENGINE}rollout.anchors.": f"{_ENGINE}rollout.operators.",
    f"{_ENGINE}training.sampling.": f"{_ENGINE}rollout.operators.",
}
"""Moved modules: dotted paths of their classes stand in the files of earlier runs."""


def renamed(value: Any) -> Any:
    """Content of a YAML or a state file with the current dotted paths of moved classes."""
    if isinstance(value, dict):
        return {key: renamed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item) for item in value]
    if isinstance(value, str):
        for old, new in RENAMED.items():
            value = value.replace(old, new)
    return value


_FREE_KEYS = words(
    """
    budget. buffer.total_steps buffer.total_epochs checkpoints. cluster. continue_from_checkpoint
    trainer.total_steps trainer.save_interval trainer.max_checkpoints_to_keep
    explorer.eval_interval explorer.max_timeout explorer.runner_per_model inline local.threads
    local.max_batch log. monitor. physical_gpus protected_pids quick_eval report.
    rollout.run_timeout runtime_env. search.
    """
)
_FREE_OF_A_MODEL = re.compile(
    r"models\.[^.]+\.(retries|backoff|timeout|max_concurrency|api_key_env|headers_env)(\.|$)"
)
_PRIVATE = words(
    """
    workflow_func judge_func total_epochs total_steps batch_size eval_dir ray_namespace run_dir
    """
)
_PLAIN = (int, float, str, bool, type(None))


def fingerprint_of(config: AflowConfig) -> dict[str, Any]:
    """The settings that must not change when a run is resumed, as JSON values; secrets masked."""
    # With `mode: train` it is the batch; with rollouts the local engine does not read it.
    own = ("buffer.batch_size", *(("buffer.train_batch_size",) if config.mode == "train" else ()))
    # Runs of before these sections have none of their keys.
    asked = {"coreset.": config.coreset.size, "replay.": config.replay.buffer}
    unused = tuple(section for section, what in asked.items() if what is None)
    return {
        key: masked(key, value if isinstance(value, _PLAIN) else str(value))
        for key, value in config.flatten().items()
        if key in own or not (is_free(key) or key.endswith(_PRIVATE) or key.startswith(unused))
    }


def is_free(key: str) -> bool:
    """Whether a setting may change when a run is resumed."""
    return key.startswith(_FREE_KEYS) or _FREE_OF_A_MODEL.match(key) is not None
