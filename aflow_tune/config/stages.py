"""`stages:` of a YAML, read: several runs, each beginning where the one before ended.

The form is Trinity's: an item of `stages` has a `stage_name` and sections that replace those of
the top level. Here a stage holds only what differs: while the file is read, the top level's
sections are merged beneath the stage's own, so that going through the configuration as Trinity
does (`for stage in config`) yields whole runs. Values win over values, lists over lists.

Two things are not inherited. A stage with another `algorithm_type` does not get the functions of
the top level's algorithm (`policy_loss_fn`, `kl_loss_fn` ... belong to the algorithm they were
written for), and a stage that names `tasksets` does not get `taskset`, nor the reverse.

What each stage does, and in which folder, is left to `stage_chain.py`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trinity.common.config import AlgorithmConfig

from aflow_tune.config.settings import AflowConfig, Prepared, StageSection
from aflow_tune.errors import Fault
from aflow_tune.sections import KeyPositions, display

STAGE_PATH = "stage://"
"""`stage://warm_up/sft.jsonl`: a file that the stage `warm_up` leaves in its folder."""

_NAME = re.compile(r"\w[\w.\-]*")
_KEPT_WITH_ANOTHER_ALGORITHM = ("algorithm_type", "optimizer", "repeat_times")
_EITHER = (("taskset", "tasksets"),)


TRAINING = ("both", "train")
"""Modes of the local engine that leave a trained model behind."""

SECTIONS = tuple(item.name for item in fields(StageSection) if item.name not in ("stage_name",))


@dataclass
class StagePositions(KeyPositions):
    """Where the keys of one stage were written: in the stage, or at the top level.

    Keys are those of the stage's own configuration (`algorithm.repeat_times`); `shown` holds how
    those that the stage wrote itself are called in the file (`stages.1.algorithm.repeat_times`).
    """

    prefix: str = ""
    first_line: int | None = None
    shown: dict[str, str] = field(default_factory=dict)

    def inherited(self, key: str) -> bool:
        """Whether it is the top level that sets this key."""
        return self.given(key) and key not in self.shown

    def where(self, key: str) -> str:
        """`file:line: stages[1].key`, or the argument that set it, or the top level's key."""
        path = key
        while path:
            name = display(self.shown.get(path, path) + key[len(path) :])
            if path in self.overrides:
                return f"command line: {self.overrides[path]}"
            if path in self.arguments:
                return f"{self.arguments[path]}: {name}"
            if path in self.lines:
                return f"{self.file}:{self.lines[path]}: {name}"
            path = path.rpartition(".")[0]
        if key.partition(".")[0] not in SECTIONS:
            return super().where(key)
        name = display(f"{self.prefix}.{key}")
        line = f":{self.first_line}" if self.first_line is not None else ""
        return f"{self.file}{line}: {name}" if self.file else name


def check_stages(content: dict[str, Any], positions: KeyPositions) -> list[Fault]:
    """What is wrong with the names of the stages; a faulty one gets a name to go on with."""
    faults = []
    taken: dict[str, str] = {}
    stages = [stage for stage in content.get("stages") or [] if isinstance(stage, dict)]
    for number, stage in enumerate(stages):
        name, key = stage.get("stage_name"), f"stages.{number}.stage_name"
        expected, fix = "a name for the stage, which is that of its folder", "stage_name: warm_up"
        found = None
        if name is None or name == "":
            found = "none"
        elif not _NAME.fullmatch(str(name)):
            found = f"{name!r}"
        elif str(name) in taken:
            found = f"{name!r}, as in {display(taken[str(name)])}"
            fix = f"stage_name: {name}_2"
        if found is not None:
            faults.append(Fault(positions.where(key), expected, found, fix))
            stage["stage_name"] = f"stage_{number}"
        taken.setdefault(str(stage["stage_name"]), key)
    return faults


def merge_stages(content: dict[str, Any]) -> None:
    """Put the top level's sections beneath those of every stage, in place."""
    for stage in content.get("stages") or []:
        for name in SECTIONS:
            own, base = stage.get(name), content.get(name)
            if isinstance(own, dict) and isinstance(base, dict):
                stage[name] = _merged(base, own, name)


def stage_configs(config: AflowConfig) -> list[AflowConfig]:
    """The configuration of every stage, as Trinity's own iteration yields it."""
    found = []
    # Trinity hands out the section objects of `stages` themselves: they must not be shared.
    for number, stage in enumerate(copy.deepcopy(config)):
        positions = _stage_positions(config.positions, number, config)
        stage._prepared = Prepared(positions=positions, command=config.command)
        found.append(stage)
    return found


def parts_of(config: AflowConfig) -> tuple[list[tuple[str, AflowConfig]], list[Fault]]:
    """What a configuration runs, by name: itself under no name, or its stages.

    Also the faults of `stage://` paths; all others are found when the parts are prepared.
    """
    if not config.stages:
        return [("", config)], []
    stages = stage_configs(config)
    faults = resolve_stage_paths(config, stages)
    names = [section.stage_name for section in config.stages]
    return list(zip(names, stages, strict=True)), faults


def resolve_stage_paths(config: AflowConfig, stages: list[AflowConfig]) -> list[Fault]:
    """Put folders in the place of `stage://NAME`, in every stage's experience buffer."""
    faults = []
    folder = chain_folder(config)
    names = [section.stage_name for section in config.stages]
    for number, stage in enumerate(stages):
        buffer = stage.buffer.trainer_input.experience_buffer
        written = buffer.path if buffer is not None else None
        if buffer is None or written is None or not written.startswith(STAGE_PATH):
            continue
        name, _, rest = written.removeprefix(STAGE_PATH).partition("/")
        inside = bool(rest) and ".." not in Path(rest).parts and not rest.startswith("/")
        if name in names[:number] and inside:
            buffer.path = str(folder / name / rest)
            stage.prepared.awaited = buffer.path
            continue
        earlier = ", ".join(names[:number]) or "none: this is the first one"
        faults.append(
            Fault(
                stage.positions.where("buffer.trainer_input.experience_buffer.path"),
                f"{STAGE_PATH}STAGE/FILE of an earlier stage ({earlier})",
                repr(written),
                f"path: {STAGE_PATH}{names[0] if number else 'STAGE'}/sft.jsonl",
            )
        )
    return faults


def chain_folder(config: AflowConfig) -> Path:
    """The folder of all stages together: `checkpoint_root_dir/project/group/name`."""
    root = Path(config.checkpoint_root_dir or "checkpoints").expanduser().absolute()
    return root / config.project / config.group / config.name


def _merged(base: Mapping[str, Any], own: Mapping[str, Any], section: str) -> dict[str, Any]:
    kept = dict(_inherited(base, own, section))
    for name, value in own.items():
        below = kept.get(name)
        if isinstance(value, dict) and isinstance(below, dict):
            kept[name] = _merged(below, value, f"{section}.{name}")
        else:
            kept[name] = value
    return copy.deepcopy(kept)


def _inherited(
    base: Mapping[str, Any], own: Mapping[str, Any], section: str
) -> Iterator[tuple[str, Any]]:
    """What a stage's section gets of the top level's section of the same name."""
    chosen = own.get("algorithm_type") if section == "algorithm" else None
    other_algorithm = chosen is not None and chosen != base.get("algorithm_type")
    dropped = {
        other
        for pair in _EITHER
        for name, other in (pair, pair[::-1])
        if own.get(name) and section == "buffer.explorer_input"
    }
    for name, value in base.items():
        if name in dropped and name not in own:
            continue
        if other_algorithm and name not in _KEPT_WITH_ANOTHER_ALGORITHM:
            continue
        yield name, value


def _stage_positions(base: KeyPositions, number: int, config: AflowConfig) -> StagePositions:
    prefix = f"stages.{number}"
    found = StagePositions(base.file, base.base, prefix=prefix, first_line=base.lines.get(prefix))
    own = {
        path.removeprefix(prefix + ".")
        for place in (base.lines, base.overrides, base.arguments)
        for path in place
        if path.startswith(prefix + ".")
    }
    stage = config.stages[number].algorithm
    other = stage is not None and stage.algorithm_type != config.algorithm.algorithm_type
    dropped = _overwritten(own, base, other_algorithm=other)
    for name in ("lines", "overrides", "arguments", "raw"):
        places, target = getattr(base, name), getattr(found, name)
        for path, place in places.items():
            if not path.startswith("stages") and not _below(path, dropped):
                target[path] = place
        for path, place in places.items():
            if path.startswith(prefix + "."):
                key = path.removeprefix(prefix + ".")
                for others in (found.lines, found.overrides, found.arguments):
                    others.pop(key, None)
                target[key] = place
                found.shown[key] = path
    return found


def _overwritten(own: set[str], base: KeyPositions, *, other_algorithm: bool) -> set[str]:
    """Keys of the top level that say nothing about this stage."""
    found = {path for path in own if f"{path}.0" in own or f"{path}.0" in base.lines}
    if other_algorithm:
        found |= {
            f"algorithm.{item.name}"
            for item in fields(AlgorithmConfig)
            if item.name not in _KEPT_WITH_ANOTHER_ALGORITHM
        }
    for pair in _EITHER:
        for name, other in (pair, pair[::-1]):
            key = "buffer.explorer_input."
            if key + name in own and key + other not in own:
                found.add(key + other)
    return found


def _below(path: str, keys: set[str]) -> bool:
    return any(path == key or path.startswith(key + ".") for key in keys)
