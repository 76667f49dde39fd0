"""Settings that cannot train, each with its cure.

Two tables (choices and ranges) and the rules for single settings, and all other rooms' rules
called from one place: the local engine's, the writer's, those over several settings. All faults
are collected. Data sets are looked at only for their number of rows; what the rows hold is
checked in `validate.py`.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from aflow_tune.config.accounting import check_spend
from aflow_tune.config.devices import check_devices
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.mixes import check_mix
from aflow_tune.config.mode_rules import WITHOUT_TASKS, check_mode
from aflow_tune.config.rules.experience_checks import check_experiences
from aflow_tune.config.rules.harvest_rules import check_harvest
from aflow_tune.config.rules.model_checks import check_model
from aflow_tune.config.rules.refusals_cluster import check_cluster
from aflow_tune.config.rules.refusals_local import check_local
from aflow_tune.config.rules.refusals_together import check_together
from aflow_tune.config.rules.refusals_writer import check_writer
from aflow_tune.config.schema_names import nearest
from aflow_tune.config.tasksets import (
    is_file,
    taskset_fault,
    user_tasksets,
)
from aflow_tune.contract.annotations import Names, read
from aflow_tune.data.checks import Findings
from aflow_tune.errors import Fault
from aflow_tune.scoring.rewards import reward_faults
from aflow_tune.sections import KeyPositions, display

ADAPTER = "aflow_tune.engines.trinity.rollout.adapter.WorkflowAdapter"
REPLACED_ADAPTERS = ("agentscope_workflow_adapter", "agentscope_workflow_adapter_v1")

_CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("both", "explore", "train", "bench", "harvest", "serve", "colocate"),
    "explorer.concurrent_mode": ("asynchronous", "sequential", "multi-threading"),
    "trainer.trainer_type": ("verl", "tinker"),
    "trainer.save_hf_checkpoint": ("last", "always", "never"),
    "algorithm.loss_agg_mode": (
        "token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ),
    "algorithm.optimizer.lr_scheduler_type": ("constant", "linear", "cosine"),
}

Range = tuple[str, Callable[[Any], bool], str, Any]

_RANGES: tuple[Range, ...] = (
    ("algorithm.optimizer.lr", lambda v: 0 < v < math.inf, "a number above 0", "1e-5"),
    ("algorithm.optimizer.weight_decay", lambda v: 0 <= v < math.inf, "0 or more", "0.01"),
    ("algorithm.optimizer.min_lr_ratio", lambda v: 0 <= v <= 1, "between 0 and 1", "0.01"),
    ("algorithm.optimizer.lr_warmup_steps_ratio", lambda v: 0 <= v < 1, "from 0 to below 1", "0.0"),
    (
        "algorithm.optimizer.betas",
        lambda v: len(v) == 2 and all(0 <= beta < 1 for beta in v),
        "two numbers from 0 to below 1",
        "[0.9, 0.999]",
    ),
    ("algorithm.repeat_times", lambda v: v >= 1, "1 or more", "8"),
    ("buffer.batch_size", lambda v: v >= 1, "1 or more", "8"),
    ("buffer.train_batch_size", lambda v: v >= 0, "0 (automatic) or more", "0"),
    ("buffer.total_epochs", lambda v: v >= 1, "1 or more", "1"),
    ("buffer.total_steps", lambda v: v is None or v >= 1, "1 or more", "20"),
    ("trainer.total_steps", lambda v: v is None or v >= 1, "1 or more", "20"),
    ("trainer.save_interval", lambda v: v >= 0, "0 (only at the end) or more", "10"),
    ("trainer.max_checkpoints_to_keep", lambda v: v >= 0, "0 (keep all) or more", "0"),
    ("checkpoints.keep_best", lambda v: v >= 0, "0 or more", "1"),
    ("trainer.grad_clip", lambda v: 0 <= v < math.inf, "0 (off) or more", "1.0"),
    ("explorer.eval_interval", lambda v: v >= 1, "1 or more", "10"),
    ("explorer.runner_per_model", lambda v: v >= 1, "1 or more", "8"),
    ("explorer.max_timeout", lambda v: v >= 1, "1 second or more", "1800"),
    ("explorer.max_retry_times", lambda v: v >= 0, "0 or more", "2"),
    ("explorer.rollout_model.engine_num", lambda v: v >= 1, "1 or more", "1"),
    ("explorer.max_repeat_times_per_runner", lambda v: v is None or v >= 1, "1 or more", "null"),
    ("synchronizer.sync_interval", lambda v: v >= 1, "1 or more", "1"),
    ("synchronizer.sync_offset", lambda v: v >= 0, "0 or more", "0"),
    ("synchronizer.sync_timeout", lambda v: v >= 1, "1 second or more", "3600"),
    ("model.temperature", lambda v: 0 < v < math.inf, "above 0: greedy runs are all alike", "1.0"),
    ("model.top_p", lambda v: 0 < v <= 1, "above 0, at most 1", "1.0"),
    ("rollout.run_timeout", lambda v: 0 < v < math.inf, "seconds above 0", "300.0"),
    ("rollout.max_failed_fraction", lambda v: 0 < v <= 1, "above 0, at most 1", "1.0"),
    ("local.threads", lambda v: v is None or v >= 1, "1 or more", "null"),
    ("local.max_batch", lambda v: v >= 1, "1 or more", "64"),
    ("local.micro_batch_tokens", lambda v: v >= 1, "1 or more", "2048"),
    ("report.transcripts", lambda v: v >= 0, "0 or more", "4"),
    ("report.score", lambda v: bool(v.strip()), "'reward' or the name of a metric", "reward"),
    ("quick_eval", lambda v: v is None or v >= 1, "1 row or more", "50"),
    ("seed", lambda v: 0 <= v < 2**32, "from 0 to 4294967295", "0"),
    ("name", lambda v: bool(v.strip()), "a name for the run folder", "first_run"),
)


def refusals(
    config: AflowConfig,
    workflow: Callable[..., Any] | None = None,
    *,
    whole_model: bool = True,
) -> Findings:
    """Everything that keeps this configuration from training, as the user wrote it.

    Args:
        whole_model: as `check_model` takes it.
    """
    found = Findings()
    rules: tuple[Callable[[AflowConfig], Iterable[Fault]], ...] = (
        _ranges,
        _choices,
        _function_arguments,
        _needed_switches,
        check_mode,
        check_experiences,
        _tasksets,
        check_mix,
        check_spend,
        check_devices,
        _rewards,
        _lengths,
        _folders,
        _monitor,
    )
    for rule in rules:
        found.faults += rule(config)
    found.faults += _system_prompt(config, workflow)
    found.add(check_model(config, whole=whole_model))
    found.add(check_writer(config, workflow))
    if config.mode == "harvest":
        found.faults += check_harvest(config)
    if config.engine == "local":
        found.add(check_local(config))
    else:
        found.add(check_cluster(config))
    if not found.faults:
        found.add(check_together(config, workflow))
    # Several rules may take offence at one value; the first says it best.
    found.faults = list({fault.where: fault for fault in reversed(found.faults)}.values())[::-1]
    return found


def _rewards(config: AflowConfig) -> Iterable[Fault]:
    """Weights that are not 1 together, limits of nothing, an unknown benchmark."""
    for fault in reward_faults(config.rewards):
        yield replace(fault, where=config.positions.where(fault.where))


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key path of dataclasses."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _system_prompt(config: AflowConfig, workflow: Callable[..., Any] | None) -> Iterable[Fault]:
    """A function that cannot do without a `system_prompt` needs a configured one."""
    if workflow is None or config.rollout.system_prompt is not None:
        return
    asked = inspect.signature(workflow).parameters.get("system_prompt")
    if asked is None or asked.default is not asked.empty:
        return
    names = Names(getattr(inspect.unwrap(workflow), "__globals__", {}), {})
    if any(meaning.name != "str" for meaning in read(asked.annotation, names)):
        return  # None will do
    yield Fault(
        config.positions.where("rollout.system_prompt"),
        "a text: the workflow function takes `system_prompt` and has no default for it",
        "nothing",
        "set `rollout: {system_prompt: ...}`, or give the parameter a default",
    )


def _ranges(config: AflowConfig) -> Iterable[Fault]:
    for key, good, expected, example in _RANGES:
        value = value_of(config, key)
        if not good(value):
            name, shown = key.rpartition(".")[2], repr(value) if value == "" else str(value)
            yield Fault(config.positions.where(key), expected, shown, f"{name}: {example}")


def _choices(config: AflowConfig) -> Iterable[Fault]:
    for key, choices in _CHOICES.items():
        value = value_of(config, key)
        if value is not None and value not in choices:
            yield _unknown_name(config.positions, key, value, choices)
    from trinity.algorithm import (
        ADVANTAGE_FN,
        ALGORITHM_TYPE,
        ENTROPY_LOSS_FN,
        KL_FN,
        POLICY_LOSS_FN,
        SAMPLE_STRATEGY,
    )
    from trinity.buffer.operators import EXPERIENCE_OPERATORS
    from trinity.buffer.selector import SELECTORS

    algorithm = config.algorithm
    registered: list[tuple[str, Any, Any]] = [
        ("algorithm.algorithm_type", algorithm.algorithm_type, ALGORITHM_TYPE),
        ("algorithm.advantage_fn", algorithm.advantage_fn, ADVANTAGE_FN),
        ("algorithm.policy_loss_fn", algorithm.policy_loss_fn, POLICY_LOSS_FN),
        ("algorithm.kl_loss_fn", algorithm.kl_loss_fn, KL_FN),
        ("algorithm.kl_penalty_fn", algorithm.kl_penalty_fn, KL_FN),
        ("algorithm.entropy_loss_fn", algorithm.entropy_loss_fn, ENTROPY_LOSS_FN),
        ("algorithm.sample_strategy", algorithm.sample_strategy, SAMPLE_STRATEGY),
    ]
    for number, operator in enumerate(config.data_processor.experience_pipeline.operators):
        key = f"data_processor.experience_pipeline.operators.{number}.name"
        registered.append((key, operator.name, EXPERIENCE_OPERATORS))
    for key, taskset, _ in user_tasksets(config):
        for name in ("data_selector", "task_selector"):
            selector = getattr(taskset, name)
            if selector is not None:
                kind = selector.selector_type or ""
                registered.append((f"{key}.{name}.selector_type", kind, SELECTORS))
    for key, value, registry in registered:
        if value is None:
            continue
        words = [*registry._default_mapping, *registry.modules]
        if value in words:
            continue
        if "." not in value:
            yield _unknown_name(config.positions, key, value, words)
            continue
        try:
            registry.get(value)
        except (ImportError, AttributeError, KeyError) as error:
            where = config.positions.where(key)
            cure = "write package.module.ClassName of something that can be imported"
            yield Fault(where, "a class given by its dotted path", f"{value}: {error}", cure)


def _function_arguments(config: AflowConfig) -> Iterable[Fault]:
    """Arguments of the algorithm's functions that these do not take."""
    from trinity.algorithm import (
        ADVANTAGE_FN,
        ALGORITHM_TYPE,
        ENTROPY_LOSS_FN,
        KL_FN,
        POLICY_LOSS_FN,
    )

    registries = {
        "policy_loss_fn": POLICY_LOSS_FN,
        "kl_loss_fn": KL_FN,
        "kl_penalty_fn": KL_FN,
        "entropy_loss_fn": ENTROPY_LOSS_FN,
        "advantage_fn": ADVANTAGE_FN,
    }
    algorithm = config.algorithm
    taken: dict[str, tuple[str, list[str] | None]] = {}
    for name, registry in registries.items():
        try:  # a name that nothing stands for is told by `_choices`
            usual = ALGORITHM_TYPE.get(algorithm.algorithm_type).default_config()
            function = getattr(algorithm, name) or usual.get(name) or "none"
            taken[name] = function, _parameters(registry.get(function))
        except (ImportError, AttributeError, KeyError, ValueError):
            taken[name] = "", None
    for name, (function, known) in taken.items():
        for given in getattr(algorithm, f"{name}_args") or {}:
            if known is None or given in known:
                continue
            homes = [other for other, (_, names) in taken.items() if names and given in names]
            close = nearest(str(given), known, 0.5)
            cure = f"did you mean `{close}`?" if close else "leave it out"
            cure = f"write it under `algorithm.{homes[0]}_args`" if homes else cure
            where = config.positions.where(f"algorithm.{name}_args.{given}")
            expected = f"an argument of {function}: {', '.join(known) or 'it has none'}"
            yield Fault(where, expected, f"`{given}`", cure)


def _parameters(kind: type) -> list[str] | None:
    """What a class is made with, those that it hands on to its bases included; None: anything."""
    names: list[str] = []
    for base in kind.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        named = [item.name for item in parameters if item.kind is not item.VAR_KEYWORD]
        names += [name for name in named if name not in ("self", "backend", *names)]
        if len(named) == len(parameters):
            return names
    return None


def _unknown_name(positions: KeyPositions, key: str, value: str, words: Iterable[str]) -> Fault:
    words = sorted(set(words))
    close = nearest(str(value), words, 0.5)
    name = key.rpartition(".")[2]
    cure = f"did you mean `{name}: {close}`?" if close else f"choose one, such as {words[0]}"
    return Fault(positions.where(key), "one of " + ", ".join(words), repr(value), cure)


def _needed_switches(config: AflowConfig) -> Iterable[Fault]:
    reasons = {
        "enable_history": "without recorded calls there is nothing to train on",
        "enable_openai_api": "workflow functions call the model through this API",
    }
    for name, reason in reasons.items():
        key = f"explorer.rollout_model.{name}"
        if config.positions.given(key) and not getattr(config.explorer.rollout_model, name):
            cure = f"remove the line or write {name}: true ({reason})"
            yield Fault(config.positions.where(key), "true", "false", cure)


def _tasksets(config: AflowConfig) -> Iterable[Fault]:
    positions, inputs = config.positions, config.buffer.explorer_input
    key = "buffer.explorer_input.taskset"
    if inputs.taskset and inputs.tasksets:
        expected, found = "either `taskset` or `tasksets`", "both"
        cure = "move `taskset` into the list `tasksets`"
        yield Fault(positions.where("buffer.explorer_input.tasksets"), expected, found, cure)
    if not inputs.taskset and not inputs.tasksets and config.mode not in WITHOUT_TASKS:
        cure = "add below buffer.explorer_input: taskset: {name: train, path: data/train.jsonl}"
        yield Fault(positions.where(key), "a task set to train on", "none", cure)
    names: dict[str, str] = {}
    for key, taskset, held_out in user_tasksets(config):
        if not is_file(taskset) and str(taskset.storage_type).lower() != "sql":
            where = positions.where(f"{key}.storage_type")
            yield Fault(where, "file or sql", repr(taskset.storage_type), "storage_type: file")
        elif not taskset.path:
            cure = "path: data/train.jsonl (a file, a folder of data files, or a hub id)"
            yield Fault(positions.where(f"{key}.path"), "a path", "none", cure)
        elif fault := taskset_fault(config, key, taskset):
            yield fault
        if held_out and taskset.repeat_times < 1:
            where = positions.where(f"{key}.repeat_times")
            yield Fault(where, "1 or more", str(taskset.repeat_times), "repeat_times: 1")
        if "/" in taskset.name or taskset.name in (".", ".."):
            where = positions.where(f"{key}.name")
            yield Fault(where, "a name without slashes", repr(taskset.name), "name: held_out")
        if taskset.name and taskset.name in names and held_out:
            where = positions.where(f"{key}.name")
            found = f"{taskset.name!r}, as in {display(names[taskset.name])}"
            yield Fault(where, "a name of its own", found, f"name: {taskset.name}_2")
        names.setdefault(taskset.name, key)
        yield from _workflow_types(config, key, taskset)
    for name in ("default_workflow_type", "default_eval_workflow_type"):
        yield from _workflow_type(config, f"buffer.explorer_input.{name}", getattr(inputs, name))


def _workflow_types(config: AflowConfig, key: str, taskset: Any) -> Iterable[Fault]:
    yield from _workflow_type(config, f"{key}.default_workflow_type", taskset.default_workflow_type)
    if taskset.format.workflow_key:
        where = config.positions.where(f"{key}.format.workflow_key")
        found = f"{taskset.format.workflow_key!r}: a workflow of its own for every row"
        yield Fault(where, "one workflow function for all rows", found, "remove workflow_key")


def _workflow_type(config: AflowConfig, key: str, value: str | None) -> Iterable[Fault]:
    if not value or value == ADAPTER or value in REPLACED_ADAPTERS:
        return
    cure = "remove the line and name your function with `workflow: path/file.py:function`"
    where = config.positions.where(key)
    yield Fault(where, "our adapter, which is set by itself", repr(value), cure)


def _lengths(config: AflowConfig) -> Iterable[Fault]:
    model, positions = config.model, config.positions
    for name in ("max_model_len", "max_prompt_tokens", "max_response_tokens"):
        value = getattr(model, name)
        if value is not None and value < 1:
            where = positions.where(f"model.{name}")
            yield Fault(where, "1 or more tokens", str(value), f"{name}: 512")
            return
    total, prompt, response = (
        model.max_model_len,
        model.max_prompt_tokens,
        model.max_response_tokens,
    )
    if total is None:
        if prompt is None or response is None:
            cure = "model: {max_model_len: 2048, max_response_tokens: 512}"
            where = positions.where("model.max_model_len")
            yield Fault(where, "the tokens of prompt and response together", "not set", cure)
            return
        total = prompt + response
    if prompt is not None and response is not None and prompt + response > total:
        found = f"{prompt} + {response} = {prompt + response} of {total}"
        where = positions.where("model.max_prompt_tokens")
        cure = f"max_model_len: {prompt + response}"
        yield Fault(where, "room for max_prompt_tokens + max_response_tokens", found, cure)
        return
    if prompt is None:
        prompt = total - response if response is not None else total // 2
    if prompt <= 1:
        key = "max_response_tokens" if response is not None else "max_model_len"
        if positions.given("model.max_prompt_tokens"):
            key = "max_prompt_tokens"
        found = f"{max(prompt, 0)} (max_model_len {total}"
        found += f", max_response_tokens {response})" if response is not None else ")"
        cure = f"max_response_tokens: {max(1, total // 2)}, or raise max_model_len"
        where = positions.where(f"model.{key}")
        yield Fault(where, "a prompt budget of more than one token", found, cure)


def _folders(config: AflowConfig) -> Iterable[Fault]:
    folder = Path(config.checkpoint_root_dir or "checkpoints").expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        found = "a file" if not existing.is_dir() else "no right to write"
        where = config.positions.where("checkpoint_root_dir")
        cure = "checkpoint_root_dir: ./checkpoints"
        yield Fault(where, "a folder that can be written", f"{existing}: {found}", cure)


def _monitor(config: AflowConfig) -> Iterable[Fault]:
    kind, key = config.monitor.monitor_type, "monitor.monitor_type"
    words = ("tensorboard", "wandb", "mlflow", "swanlab")
    if "." not in kind and kind not in words:
        yield _unknown_name(config.positions, key, kind, words)
    elif kind in words[1:] and importlib.util.find_spec(kind) is None:
        where = config.positions.where(key)
        yield Fault(where, f"{kind} installed", "not installed", f"pip install {kind}")
