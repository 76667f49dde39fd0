"""Reads a configuration from a YAML, `key=value` overrides and the arguments of `tune()`.

All faults of file and command line are reported together; whether settings fit each other is left
to `prepare`. AgentScope's `DatasetConfig`, `TunerModelConfig`, `TinkerConfig` and `AlgorithmConfig`
(as in `agentscope.tuner` 1.0.21) are read by attribute, since importing its tuner needs an extra.
Only keys that the caller set in them count as given by the user.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from trinity.common.config import InferenceModelConfig, TasksetConfig

from aflow_tune.config.changes import READ_FROM, renamed
from aflow_tune.config.schema import Check, as_field, nearest, note_lines
from aflow_tune.config.settings import AflowConfig, value_of
from aflow_tune.config.stages import check_stages, merge_stages
from aflow_tune.errors import BadInput, Fault
from aflow_tune.models.redaction import masked
from aflow_tune.operators.aflow_prompts import PRESET, with_preset
from aflow_tune.sandbox.policy import of_setting
from aflow_tune.sections import KeyPositions, canonical, display

__all__ = ["AflowConfig", "apply_agentscope_args", "load_config", "read_config"]

# OmegaConf's loader, so that values are read here exactly as the merge reads them.
_Loader = get_yaml_loader()

# Defaults of AgentScope's template and AlgorithmConfig, used without a YAML. Otherwise a bare
# `tune(f, train_dataset=..., model=...)` would get Trinity's: PPO on single rollouts.
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
    "max_tokens": "model.max_response_tokens",
    "inference_engine_num": "explorer.rollout_model.engine_num",
    **{
        name: f"model.{name}"
        for name in ("model_path", "max_model_len", "temperature", "top_p", "enable_thinking")
    },
    **{
        name: f"explorer.rollout_model.{name}"
        for name in ("tensor_parallel_size", "tool_call_parser", "reasoning_parser")
    },
}

_ALGORITHM_KEYS = {
    "algorithm_type": "algorithm.algorithm_type",
    "group_size": "algorithm.repeat_times",
    "learning_rate": "algorithm.optimizer.lr",
    "batch_size": "buffer.batch_size",
    "save_interval_steps": "trainer.save_interval",
    "eval_interval_steps": "explorer.eval_interval",
}

_TINKER_KEYS = {
    name: f"model.tinker.{name}"
    for name in ("rank", "seed", "train_mlp", "train_attn", "train_unembed", "base_url")
}


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> AflowConfig:
    """Read a YAML file (None: defaults only) and `key=value` overrides, which win over it.

    Raises BadInput: the file cannot be read, or keys or values are wrong; every fault is listed."""
    config, faults = read_config(path, overrides)
    if faults:
        raise BadInput(f"The configuration {path or 'given'} cannot be used.", faults)
    return config


@functools.cache
def _schema() -> Any:
    return OmegaConf.structured(AflowConfig)


def read_config(
    path: str | Path | None, overrides: Sequence[str] = ()
) -> tuple[AflowConfig, list[Fault]]:
    """As `load_config`, but returns the faults, with a configuration without the faulty parts.

    Raises BadInput: the file is missing or no YAML, or OmegaConf cannot merge the rest."""
    positions = KeyPositions()
    content: dict[str, Any] = {}
    faults: list[Fault] = []
    schema = _schema()
    if path:
        positions.file, positions.base = str(path), _base_of(Path(path))
        content, faults = _read_yaml(Path(path), positions)
    for item in overrides:
        faults += _override(content, item, positions)
    if positions.raw:
        merged = None
        with contextlib.suppress(OmegaConfBaseException):  # told below
            merged = OmegaConf.merge(schema, OmegaConf.create(content))
        for key, text in positions.raw.items() if merged is not None else ():
            try:
                OmegaConf.select(merged, display(key), throw_on_missing=True)
            except OmegaConfBaseException as error:
                problem = str(error).splitlines()[0]
                fix = "use ${oc.env:NAME,default} or the full path of another key, or export NAME"
                expected = f"a value that resolves: {text}"
                faults.append(Fault(positions.where(key), expected, problem, fix))
                _cut(content, key)
    faults += check_stages(content, positions)
    merge_stages(content)
    try:
        merged = OmegaConf.merge(schema, OmegaConf.create(content))
        config: AflowConfig = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        where = positions.where(canonical(error.full_key or ""))
        expected, found = "a value that fits the schema", str(error).splitlines()[0]
        fault = Fault(where, expected, found, "correct this value")
        raise BadInput("The configuration does not fit together.", [*faults, fault]) from error
    config.prepared.positions = positions
    try:
        config.sandbox = of_setting(config.sandbox)
    except BadInput as error:
        faults += [
            replace(one, where=positions.where(canonical(one.where))) for one in error.faults
        ]
        config.sandbox = "auto"
    if PRESET in config.prompts:
        try:
            file = positions.beside(str(config.prompts[PRESET]))
            config.prompts = with_preset(config.prompts, file)
        except BadInput as error:
            where = positions.where(f"prompts.{PRESET}")
            faults += [replace(fault, where=f"{where}: {fault.where}") for fault in error.faults]
            del config.prompts[PRESET]
    return config, sorted(faults, key=_in_reading_order)


def _base_of(path: Path) -> Path:
    """The folder that relative paths of a configuration refer to: its own; of a saved configuration
    that of the original file, if it still exists."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(READ_FROM):
                original = Path(json.loads(line.removeprefix(READ_FROM))).parent
                return original if original.is_dir() else path.parent
            if not line.startswith("#"):
                break
    return path.parent


def _read_yaml(path: Path, positions: KeyPositions) -> tuple[dict[str, Any], list[Fault]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        near = nearest(path.name, [item.name for item in path.parent.glob("*.y*ml")], 0.4)
        fix = f"check the path; there is {near}" if near else "check the path"
        found = getattr(error, "strerror", None) or str(error)
        raise _unreadable(path, "a YAML file in UTF-8", found, fix) from None
    try:
        loader = _Loader(text)  # refuses control characters
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            place = path if node is None else f"{path}:{node.start_mark.line + 1}"
            fix = "begin with `workflow: path/file.py:function`, `model:`, `buffer:` ..."
            found = "nothing" if node is None else f"a {node.id}"
            raise _unreadable(place, "`key: value` lines at the top level", found, fix)
        twice = list(note_lines(node, positions))
        check = Check(AflowConfig, positions.where, positions.raw)
        content = check.check(loader.construct_document(node), AflowConfig)
        return renamed(content), [*twice, *check.faults]
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        fix = "check quotes, brackets and indentation there; UTF-8, indented with spaces, no tabs"
        raise _unreadable(f"{path}{line}", "YAML", _problem(error), fix) from error


def _problem(error: Exception) -> str:
    parts = (getattr(error, name, None) for name in ("context", "problem"))
    return " ".join(filter(None, parts)) or str(error).splitlines()[0]


def _unreadable(where: object, expected: str, found: str, fix: str) -> BadInput:
    return BadInput.of("The configuration cannot be read.", str(where), expected, found, fix)


def _override(content: dict[str, Any], item: str, positions: KeyPositions) -> list[Fault]:
    """Check one `key=value` and, if it is sound, put it into `content`."""
    name, equals, text = item.partition("=")
    name = name.strip()
    where = f"command line: {name}{equals}{masked(name, text)}"
    if not equals or not re.fullmatch(r"[\w.\-]+(\[\d+\][\w.\-\[\]]*)?", name) or name[0] in "-.":
        fix = "write key=value, such as buffer.total_steps=20; quote it for the shell"
        return [Fault(where, "key=value", repr(item), fix)]
    key, raw = canonical(name), dict[str, str]()
    check = Check(AflowConfig, lambda _: where, raw, numbered=True)
    try:
        nested = value = _Loader(text).get_single_data()
        for part in reversed(key.split(".")):
            nested = {part: nested}
        check.check(nested, AflowConfig)
    except (yaml.YAMLError, RecursionError) as error:
        return [Fault(where, f"a value in YAML for `{name}`", _problem(error), "quote the value")]
    positions.overrides[key] = item
    if check.faults:
        return check.faults
    positions.raw.update(raw)
    problem = _put(content, as_field(key).split("."), value)
    if problem:
        return [Fault(where, "a list item that the file has", problem, "set the whole list")]
    return []


def _put(content: Any, parts: list[str], value: Any) -> str | None:
    """Set a nested item, creating what is missing above it. Returns what prevents it, or None."""
    at = content
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        key: Any = part
        if isinstance(at, list):
            if not part.isdigit() or int(part) > len(at):
                return f"item {part} of a list of {len(at)}"
            key = int(part)
            at += [{}] * (key == len(at))
        if last:
            at[key] = value
        else:
            below = at[key] if isinstance(at, list) else at.get(key)
            if not isinstance(below, (list, dict, str, type(None))):
                return f"the value {below!r} of `{'.'.join(parts[: position + 1])}`"
            if below is None or isinstance(below, str):
                at[key] = [] if parts[position + 1].isdigit() else {}
            at = at[key]
    return None


def _cut(content: Any, key: str) -> None:
    *parents, last = key.split(".")
    for part in parents:
        content = content[int(part)] if isinstance(content, list) else content.get(part, {})
    if isinstance(content, dict):
        content.pop(last, None)
    else:
        content[int(last)] = None


def _in_reading_order(fault: Fault) -> tuple[bool, int]:
    line = re.search(r":(\d+)(:|$)", fault.where)
    return fault.where.startswith("command line"), int(line.group(1)) if line else 0


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
    """Write the arguments of `tune()` into `config`; they win over the YAML. A configuration
    without a YAML gets AgentScope's defaults first. `judge_func` is ignored: it is no setting.

    Raises BadInput: arguments that describe a single run, for a configuration with `stages`."""
    del judge_func
    names = ("train_dataset", "eval_dataset", "model", "auxiliary_models", "algorithm")
    given = (train_dataset, eval_dataset, model, auxiliary_models, algorithm)
    named = [name for name, value in zip(names, given, strict=True) if value is not None]
    if config.stages and named:
        expected = "no such argument beside `stages`: each stage has its own"
        fix = "write it into the YAML, at the top level or in the stage that it is for"
        faults = [Fault(f"tune({name}=...)", expected, "one", fix) for name in named]
        raise BadInput("These arguments describe a single run.", faults)
    positions, inputs = config.positions, config.buffer.explorer_input
    if positions.file is None:
        for key, value in _TEMPLATE.items():
            if not positions.given(key):
                _set(config, key, value, None)
    if train_dataset is not None:
        source, fresh = "tune(train_dataset=...)", _taskset(train_dataset, "train_taskset")
        inputs.tasksets = []
        inputs.taskset = inputs.taskset or fresh
        for name in ("path", "split", "subset_name"):
            setattr(inputs.taskset, name, getattr(fresh, name))
        positions.arguments["buffer.explorer_input.taskset.path"] = source
        for name in ("total_epochs", "total_steps"):
            if _chosen(train_dataset, name):
                _set(config, f"buffer.{name}", getattr(train_dataset, name), source)
    if eval_dataset is not None:
        key = f"buffer.explorer_input.eval_tasksets.{len(inputs.eval_tasksets)}"
        inputs.eval_tasksets.append(_taskset(eval_dataset, "eval_taskset"))
        positions.arguments[f"{key}.path"] = "tune(eval_dataset=...)"
    tinker = getattr(model, "tinker_config", None)
    if tinker is not None:
        _set(config, "model.tinker.enable", True, "tune(model=...)")
    for given_by, keys, argument in (
        (model, _MODEL_KEYS, "tune(model=...)"),
        (tinker, _TINKER_KEYS, "tune(model=...)"),
        (algorithm, _ALGORITHM_KEYS, "tune(algorithm=...)"),
    ):
        for name, key in keys.items():
            value, chosen = getattr(given_by, name, None), _chosen(given_by, name)
            if value is not None and (chosen or not positions.given(key)):
                _set(config, key, value, argument if chosen else None)
    for name, auxiliary in (auxiliary_models or {}).items():
        values = {
            key.rpartition(".")[2]: value
            for own, key in _MODEL_KEYS.items()
            if (value := getattr(auxiliary, own, None)) is not None
        }
        models = config.explorer.auxiliary_models
        key = f"explorer.auxiliary_models.{len(models)}"
        models.append(InferenceModelConfig(name=name, enable_auto_tool_choice=True, **values))
        positions.arguments[key] = f"tune(auxiliary_models={{{name!r}: ...}})"
    for key, value, argument in (
        ("project", project_name, "project_name"),
        ("name", experiment_name, "experiment_name"),
        ("monitor.monitor_type", monitor_type, "monitor_type"),
    ):
        if value is not None:
            _set(config, key, value, f"tune({argument}=...)")


def _taskset(dataset: Any, name: str) -> TasksetConfig:
    return TasksetConfig(
        name=name,
        path=dataset.path,
        split=getattr(dataset, "split", None) or "train",
        subset_name=getattr(dataset, "name", None),
    )


def _chosen(source: Any, name: str) -> bool:
    """Whether the caller set this attribute, rather than AgentScope's class by default."""
    fields_set = getattr(source, "model_fields_set", None)
    return getattr(source, name, None) is not None if fields_set is None else name in fields_set


def _set(config: AflowConfig, key: str, value: Any, argument: str | None) -> None:
    parent, _, last = key.rpartition(".")
    setattr(value_of(config, parent) if parent else config, last, value)
    if argument:
        config.positions.arguments[key] = argument
