"""AgentScope's `tune()` arguments, written into a configuration.

`DatasetConfig`, `TunerModelConfig`, `TinkerConfig` and `AlgorithmConfig` are read by their
attributes: importing AgentScope's tuner would need its extra. Their meaning is that of
`agentscope.tuner` 1.0.21; where it replaces whole sections of a YAML (the rollout model), we
set only the keys that the argument speaks of. Every key set here counts as given by the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trinity.common.config import InferenceModelConfig, TasksetConfig

from aflow_tune.errors import BadInput, Fault

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

# What AgentScope's template and AlgorithmConfig give where there is no YAML. Without these a
# bare `tune(f, train_dataset=..., model=...)` would get Trinity's defaults: PPO on single runs.
_TEMPLATE: dict[str, Any] = {
    "project": "AgentScope",
    "name": "Experiment",
    "checkpoint_root_dir": "./checkpoints",
    "algorithm.algorithm_type": "multi_step_grpo",
    "algorithm.repeat_times": 8,
    "algorithm.optimizer.lr": 1e-6,
    "buffer.batch_size": 32,
}

_MODEL_KEYS = {
    "model_path": "model.model_path",
    "max_model_len": "model.max_model_len",
    "max_tokens": "model.max_response_tokens",
    "temperature": "model.temperature",
    "top_p": "model.top_p",
    "enable_thinking": "model.enable_thinking",
    "tensor_parallel_size": "explorer.rollout_model.tensor_parallel_size",
    "inference_engine_num": "explorer.rollout_model.engine_num",
    "tool_call_parser": "explorer.rollout_model.tool_call_parser",
    "reasoning_parser": "explorer.rollout_model.reasoning_parser",
}

_ALGORITHM_KEYS = {
    "algorithm_type": "algorithm.algorithm_type",
    "group_size": "algorithm.repeat_times",
    "learning_rate": "algorithm.optimizer.lr",
    "batch_size": "buffer.batch_size",
    "save_interval_steps": "trainer.save_interval",
    "eval_interval_steps": "explorer.eval_interval",
}

_AUXILIARY_KEYS = {
    "model_path": "model_path",
    "max_model_len": "max_model_len",
    "max_tokens": "max_response_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "enable_thinking": "enable_thinking",
    "tensor_parallel_size": "tensor_parallel_size",
    "inference_engine_num": "engine_num",
    "tool_call_parser": "tool_call_parser",
    "reasoning_parser": "reasoning_parser",
}


def apply_agentscope_args(
    config: AflowConfig,
    *,
    judge_func: Callable[..., Any] | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    model: Any = None,
    auxiliary_models: Mapping[str, Any] | None = None,
    algorithm: Any = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    monitor_type: str | None = None,
) -> None:
    """Write the arguments of `tune()` into `config`; they win over the YAML.

    A configuration without a YAML gets AgentScope's defaults first. `judge_func` is not stored:
    a function is no setting, it is handed to the adapter at the start.

    Raises:
        BadInput: arguments that describe a single run, for a configuration with `stages`.
    """
    del judge_func
    if config.stages:
        _refuse_for_stages(
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            model=model,
            auxiliary_models=auxiliary_models,
            algorithm=algorithm,
        )
    if config.positions.file is None:
        for key, value in _TEMPLATE.items():
            if not config.positions.given(key):
                _set(config, key, value, None)
    if train_dataset is not None:
        _apply_train_dataset(config, train_dataset)
    if eval_dataset is not None:
        tasksets = config.buffer.explorer_input.eval_tasksets
        key = f"buffer.explorer_input.eval_tasksets.{len(tasksets)}"
        tasksets.append(_taskset(eval_dataset, "eval_taskset"))
        config.positions.arguments[f"{key}.path"] = "tune(eval_dataset=...)"
    if model is not None:
        _copy(config, model, _MODEL_KEYS, "tune(model=...)")
        _apply_tinker(config, getattr(model, "tinker_config", None))
    for name, auxiliary in (auxiliary_models or {}).items():
        values = {key: getattr(auxiliary, name, None) for name, key in _AUXILIARY_KEYS.items()}
        values = {key: value for key, value in values.items() if value is not None}
        models = config.explorer.auxiliary_models
        key = f"explorer.auxiliary_models.{len(models)}"
        models.append(InferenceModelConfig(name=name, enable_auto_tool_choice=True, **values))
        config.positions.arguments[key] = f"tune(auxiliary_models={{{name!r}: ...}})"
    if algorithm is not None:
        _copy(config, algorithm, _ALGORITHM_KEYS, "tune(algorithm=...)")
    for key, value, argument in (
        ("project", project_name, "project_name"),
        ("name", experiment_name, "experiment_name"),
        ("monitor.monitor_type", monitor_type, "monitor_type"),
    ):
        if value is not None:
            _set(config, key, value, f"tune({argument}=...)")


def _refuse_for_stages(**arguments: Any) -> None:
    """Which stage would they be for?"""
    faults = [
        Fault(
            f"tune({name}=...)",
            "no such argument beside `stages`: each stage has its own",
            type(value).__name__,
            "write it into the YAML, at the top level or in the stage that it is for",
        )
        for name, value in arguments.items()
        if value is not None
    ]
    if faults:
        raise BadInput("These arguments describe a single run.", faults)


def _apply_train_dataset(config: AflowConfig, dataset: Any) -> None:
    inputs = config.buffer.explorer_input
    source = "tune(train_dataset=...)"
    fresh = _taskset(dataset, "train_taskset")
    inputs.tasksets = []
    if inputs.taskset is None:
        inputs.taskset = fresh
    else:
        inputs.taskset.path = fresh.path
        inputs.taskset.split = fresh.split
        inputs.taskset.subset_name = fresh.subset_name
    config.positions.arguments["buffer.explorer_input.taskset.path"] = source
    for name in ("total_epochs", "total_steps"):
        if _chosen(dataset, name):
            _set(config, f"buffer.{name}", getattr(dataset, name), source)


def _apply_tinker(config: AflowConfig, tinker: Any) -> None:
    if tinker is None:
        return
    config.model.tinker.enable = True
    config.positions.arguments["model.tinker.enable"] = "tune(model=...)"
    names = ("rank", "seed", "train_mlp", "train_attn", "train_unembed", "base_url")
    _copy(config, tinker, {name: f"model.tinker.{name}" for name in names}, "tune(model=...)")


def _taskset(dataset: Any, name: str) -> TasksetConfig:
    return TasksetConfig(
        name=name,
        path=dataset.path,
        split=getattr(dataset, "split", None) or "train",
        subset_name=getattr(dataset, "name", None),
    )


def _copy(config: AflowConfig, source: Any, keys: Mapping[str, str], argument: str) -> None:
    for name, key in keys.items():
        value = getattr(source, name, None)
        if value is None or (config.positions.given(key) and not _chosen(source, name)):
            continue
        _set(config, key, value, argument if _chosen(source, name) else None)


def _chosen(source: Any, name: str) -> bool:
    """Whether the caller set this attribute; a default of AgentScope's class is no choice."""
    fields_set = getattr(source, "model_fields_set", None)
    return getattr(source, name, None) is not None if fields_set is None else name in fields_set


def _set(config: AflowConfig, key: str, value: Any, argument: str | None) -> None:
    *parents, last = key.split(".")
    target: Any = config
    for parent in parents:
        target = getattr(target, parent)
    setattr(target, last, value)
    if argument:
        config.positions.arguments[key] = argument
