"""What is wrong with a configuration that is to be harvested with.

Settings and templates; what rows and earlier runs hold is read when the harvest begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aflow_tune.config.schema_names import nearest
from aflow_tune.errors import BadInput, Fault
from aflow_tune.harvest.candidates import SOURCES, read_templates
from aflow_tune.shipping.arrival import travelled
from aflow_tune.trace import POLICY
from aflow_tune.writer.templates import TEMPLATES, Template

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

_LEAST = ("teacher_tries", "per_problem", "limit")


def check_harvest(config: AflowConfig) -> list[Fault]:
    """Every fault of the section `harvest`, and of what else a harvest needs."""
    section, where = config.harvest, config.positions.where
    faults = []
    if not config.writer.executor:
        cure = "writer: {executor: NAME}, a role of `models` or a name of auxiliary_models"
        expected = "the model that runs the graphs"
        faults.append(Fault(where("writer.executor"), expected, "none", cure))
    if not section.sources:
        cure = "sources: [templates]"
        expected = f"at least one of {', '.join(SOURCES)}"
        faults.append(Fault(where("harvest.sources"), expected, "none", cure))
    for number, source in enumerate(section.sources):
        if source not in SOURCES:
            close = nearest(source, SOURCES, 0.5)
            cure = f"did you mean {close}?" if close else f"choose one, such as {SOURCES[0]}"
            key = where(f"harvest.sources.{number}")
            faults.append(Fault(key, f"one of {', '.join(SOURCES)}", repr(source), cure))
    if "templates" in section.sources:
        try:
            templates_of(config)
        except BadInput as error:
            faults += error.faults
    if "teacher" in section.sources:
        faults += _teacher(config)
    if "runs" in section.sources:
        faults += _runs(config)
    for name in _LEAST:
        value = getattr(section, name)
        if value is not None and value < 1:
            faults.append(Fault(where(f"harvest.{name}"), "1 or more", str(value), f"{name}: 1"))
    if not 0 < section.min_score <= 1:
        cure = "min_score: 1.0"
        key = where("harvest.min_score")
        faults.append(Fault(key, "above 0, at most 1", str(section.min_score), cure))
    if section.per_structure is not None and not 0 < section.per_structure <= 1:
        cure = "per_structure: 0.5, or null for no limit"
        key = where("harvest.per_structure")
        faults.append(Fault(key, "above 0, at most 1", str(section.per_structure), cure))
    inputs = config.buffer.explorer_input
    if not inputs.taskset and not inputs.tasksets:
        cure = "add below buffer.explorer_input: taskset: {name: train, path: data/train.jsonl}"
        key = where("buffer.explorer_input.taskset")
        faults.append(Fault(key, "a training task set to take problems from", "none", cure))
    return faults


def run_folders(config: AflowConfig) -> list[Path]:
    """The folders of `harvest.runs`: relative to here, or else to `positions.base`."""
    return [config.positions.beside(name) for name in config.harvest.runs]


def templates_of(config: AflowConfig) -> list[Template]:
    """The templates that are tried: those of the user's folder, or the shipped ones.

    Raises:
        BadInput: with every file of the folder that is no template.
    """
    name = config.harvest.templates
    if name is None:
        return list(TEMPLATES.values())
    where = config.positions.where("harvest.templates")
    return read_templates(config.positions.beside(travelled(name)), where)


def _teacher(config: AflowConfig) -> list[Fault]:
    role, where = config.harvest.teacher, config.positions.where
    known = [name for name in config.models if name != POLICY]
    expected = f"a role of `models:` ({', '.join(known) or 'none is there'})"
    if role is None:
        cure = f"teacher: {known[0] if known else 'NAME, and models: {NAME: {model: ...}}'}"
        return [Fault(where("harvest.teacher"), expected, "none", cure)]
    if role in known:
        return []
    close = nearest(role, known, 0.5)
    cure = f"did you mean {close}?" if close else f"models: {{{role}: {{model: ...}}}}"
    return [Fault(where("harvest.teacher"), expected, repr(role), cure)]


def _runs(config: AflowConfig) -> list[Fault]:
    where = config.positions.where
    if not config.harvest.runs:
        cure = "runs: [checkpoints/PROJECT/NAME]"
        return [Fault(where("harvest.runs"), "run folders of the writer", "none", cure)]
    faults = []
    for number, (name, folder) in enumerate(
        zip(config.harvest.runs, run_folders(config), strict=True)
    ):
        if not any(folder.glob("rollouts/step_*.jsonl")):
            found = f"{name}: no rollouts there" if folder.is_dir() else f"{name}: no such folder"
            cure = "name the folder of a training run, which has a folder `rollouts`"
            key = where(f"harvest.runs.{number}")
            faults.append(Fault(key, "a run folder with rollouts", found, cure))
    return faults
