"""Reads `stages:` of a YAML: a chain of runs, each of which continues from the one before.

The form is Trinity's, but a stage states only what differs: when the file is read, the top level's
sections are merged beneath the stage's own, so that Trinity's `for stage in config` yields complete
runs. A stage's lists replace those of the top level. Two things are not inherited: a stage with
another `algorithm_type` does not get the functions of the top level's algorithm (`policy_loss_fn`
...), and one with `tasksets` does not get `taskset`, nor the reverse.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from aflow_tune.config.settings import AflowConfig, Prepared, StageSection
from aflow_tune.errors import Fault
from aflow_tune.sections import CoresetSection, KeyPositions, ReplaySection

STAGE_PATH = "stage://"
"""Prefix of a path to another stage's output: `stage://warm_up/sft.jsonl`."""

_NAME = re.compile(r"\w[\w.\-]*")
_KEPT_WITH_ANOTHER_ALGORITHM = ("algorithm_type", "optimizer", "repeat_times")
_OTHER = {"taskset": "tasksets", "tasksets": "taskset"}

TRAINING = ("both", "train")
"""Modes of the local engine that produce a trained model."""

SECTIONS = tuple(item.name for item in fields(StageSection) if item.name != "stage_name")


def check_stages(content: dict[str, Any], positions: KeyPositions) -> list[Fault]:
    """Faults of the names of the stages; replaces a faulty name in `content` by a usable one."""
    faults = []
    taken: set[str] = set()
    stages = [stage for stage in content.get("stages") or [] if isinstance(stage, dict)]
    for number, stage in enumerate(stages):
        name = str(stage.get("stage_name") or "")
        if not _NAME.fullmatch(name) or name in taken:
            where = positions.where(f"stages.{number}.stage_name")
            expected = "a name for the stage, which is that of its folder, and of no other stage"
            faults.append(Fault(where, expected, repr(name), "stage_name: warm_up"))
            stage["stage_name"] = f"stage_{number}"
        taken.add(str(stage["stage_name"]))
    return faults


def merge_stages(content: dict[str, Any]) -> None:
    """Merge the top level's sections beneath the sections that a stage has, in place."""
    for stage in content.get("stages") or []:
        for name in SECTIONS:
            own, base = stage.get(name), content.get(name)
            if isinstance(own, dict) and isinstance(base, dict):
                stage[name] = _merged(base, own, name)


def stage_configs(config: AflowConfig) -> list[AflowConfig]:
    """The configuration of every stage, as Trinity's own iteration yields it."""
    found = []
    # Trinity yields the section objects of `stages` themselves: they must not be shared.
    for number, stage in enumerate(copy.deepcopy(config)):
        positions = _stage_positions(config.positions, number)
        stage.prepared = Prepared(positions=positions, command=config.command)
        if stage.mode != "train":  # what the top level says of rows is for other stages
            for name, unset in (("coreset", CoresetSection()), ("replay", ReplaySection())):
                if not any(f"{key}.".startswith(f"{name}.") for key in positions.shown):
                    setattr(stage, name, unset)
        found.append(stage)
    return found


def parts_of(config: AflowConfig) -> tuple[list[tuple[str, AflowConfig]], list[Fault]]:
    """The runs of a configuration by name: its stages, or itself under ''. Resolves `stage://`
    paths and returns their faults; `prepare` finds all others."""
    if not config.stages:
        return [("", config)], []
    stages = stage_configs(config)
    faults = []
    folder = chain_folder(config)
    names = [section.stage_name for section in config.stages]
    for number, stage in enumerate(stages):
        buffer = stage.buffer.trainer_input.experience_buffer
        if buffer is None or not (buffer.path or "").startswith(STAGE_PATH):
            continue
        name, _, rest = str(buffer.path).removeprefix(STAGE_PATH).partition("/")
        inside = bool(rest) and ".." not in Path(rest).parts and not rest.startswith("/")
        if name in names[:number] and inside:
            buffer.path = str(folder / name / rest)
            stage.prepared.awaited = buffer.path
            continue
        key = "buffer.trainer_input.experience_buffer.path"
        expected = f"{STAGE_PATH}STAGE/FILE of an earlier stage ({', '.join(names[:number])})"
        fix = f"path: {STAGE_PATH}{names[0] if number else 'STAGE'}/sft.jsonl"
        faults.append(stage.fault(key, expected, repr(buffer.path), fix))
    return list(zip(names, stages, strict=True)), faults


def chain_folder(config: AflowConfig) -> Path:
    """The folder of all stages together: `checkpoint_root_dir/project/group/name`."""
    root = Path(config.checkpoint_root_dir or "checkpoints").expanduser().absolute()
    return root / config.project / config.group / config.name


def _merged(base: Mapping[str, Any], own: Mapping[str, Any], section: str) -> dict[str, Any]:
    """A stage's section over the top level's section of the same name."""
    chosen = own.get("algorithm_type") if section == "algorithm" else None
    other_algorithm = chosen is not None and chosen != base.get("algorithm_type")
    # A stage that names `tasksets` does not get `taskset`, nor the reverse.
    inputs = section == "buffer.explorer_input"
    dropped = {_OTHER[name] for name in _OTHER if inputs and own.get(name)}
    kept = {
        name: value
        for name, value in base.items()
        if not (other_algorithm and name not in _KEPT_WITH_ANOTHER_ALGORITHM)
        and not (name in dropped and name not in own)
    }
    for name, value in own.items():
        below = kept.get(name)
        if isinstance(value, dict) and isinstance(below, dict):
            value = _merged(below, value, f"{section}.{name}")
        kept[name] = value
    return copy.deepcopy(kept)


def _stage_positions(base: KeyPositions, number: int) -> KeyPositions:
    prefix = f"stages.{number}"
    found = KeyPositions(base.file, base.base, stage=prefix, stage_sections=SECTIONS)
    if prefix in base.lines:
        found.lines[prefix] = base.lines[prefix]
    own = {
        path.removeprefix(prefix + ".")
        for place in (base.lines, base.overrides, base.arguments)
        for path in place
        if path.startswith(prefix + ".")
    }
    # Positions of items do not apply where the stage replaces the list.
    lists = [path for path in own if f"{path}.0" in own or f"{path}.0" in base.lines]
    for name in ("lines", "overrides", "arguments", "raw"):
        for path, place in getattr(base, name).items():
            key = path.removeprefix(prefix + ".")
            anew = key in own or any(key.startswith(one + ".") for one in lists)
            if key != path:
                found.shown[key] = path
                getattr(found, name)[key] = place
            elif not path.startswith("stages") and not anew:
                getattr(found, name)[path] = place
    return found
