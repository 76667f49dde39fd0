"""Graphs that might solve a problem, from templates and from what earlier runs wrote.

A template fits every problem of its types. What a run wrote belongs to the problem that it was
written for; of each structure the best is taken, and it is tried again like any other: its
reward may have been luck. Whoever solved a problem in an earlier run is found by the problem's
text, so rollouts of problems that are not in the training task set fall away.

Asking a teacher is done while the harvest runs (`harvest.py`); files of runs are read above.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.harvest.harvest import Candidate, Problem
from aflow_tune.writer.form import as_text
from aflow_tune.writer.results import MAX_PROBLEM
from aflow_tune.writer.templates import Template
from aflow_tune.writer.types import PROBLEM_TYPES, Level


@dataclass(frozen=True)
class PastRun:
    """What a run of the writer kept about one rollout, as it stands in its file."""

    run: str
    """Name of the run."""
    reward: float
    kept: Mapping[str, Any]


def template_candidates(
    problem: Problem, templates: Iterable[Template], operators: Collection[str]
) -> list[Candidate]:
    """The templates for the problem's type that are made of these operators only."""
    return [
        Candidate("templates", template.name, as_text(template.prompts, template.code))
        for template in templates
        if problem.problem_type in template.problem_types
        and set(template.operators) <= set(operators)
    ]


def read_templates(folder: Path, where: str) -> list[Template]:
    """The templates of a user's folder: a YAML each, as the shipped ones are written.

    Args:
        where: the setting that names the folder, for messages.

    Raises:
        BadInput: with every file that is no template.
    """
    import yaml

    files = sorted(folder.glob("*.yaml")) if folder.is_dir() else []
    if not files:
        found = "no .yaml file there" if folder.is_dir() else "no such folder"
        cure = "name a folder of templates, or leave it out for the shipped ones"
        fault = Fault(where, "a folder with a .yaml for each template", f"{folder}: {found}", cure)
        raise BadInput("There are no templates.", [fault])
    found_templates: list[Template] = []
    faults: list[Fault] = []
    for file in files:
        try:
            held = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
            shown = " ".join(str(error).split())[:200]
            faults.append(Fault(str(file), "YAML in UTF-8", shown, "correct the file"))
            continue
        wrong = _faults_of(held, str(file))
        faults += wrong
        if not wrong:
            found_templates.append(Template.of(file.stem, held))
    if faults:
        raise BadInput("The templates cannot be used.", faults)
    return found_templates


def past_candidates(
    past: Iterable[PastRun], problems: Sequence[Problem], min_score: float
) -> tuple[dict[str, list[Candidate]], int]:
    """The best rollouts by problem, and how many belonged to none of the problems.

    The best are those that ran as they were written and scored enough: of each structure the one
    with the highest reward, highest first.
    """
    by_text: dict[str, list[str]] = {}
    for problem in problems:  # long ones may begin alike; which it was, trying it will tell
        by_text.setdefault(problem.text[:MAX_PROBLEM], []).append(problem.key)
    found: dict[str, list[Candidate]] = {}
    strangers = 0
    taken: set[tuple[str, str]] = set()
    for item in sorted(past, key=lambda item: -item.reward):
        kept = item.kept
        if not _is_good(kept, min_score):
            continue
        keys = by_text.get(kept["problem"], [])
        strangers += not keys
        text = as_text(kept["prompts"], kept["code"])
        for key in keys:
            place = key, str(kept.get("structure"))
            if place not in taken:
                taken.add(place)
                found.setdefault(key, []).append(Candidate("runs", item.run, text))
    return found, strangers


def _is_good(kept: Mapping[str, Any], min_score: float) -> bool:
    """Whether a rollout's notes are whole and tell of a graph that solved its problem."""
    score, prompts = kept.get("score"), kept.get("prompts")
    return (
        kept.get("level") == Level.CLEAN
        and isinstance(score, int | float)
        and score >= min_score
        and isinstance(kept.get("problem"), str)
        and isinstance(kept.get("code"), str)
        and isinstance(prompts, Mapping)
        and all(isinstance(text, str) for text in prompts.values())
    )


def _faults_of(held: Any, where: str) -> list[Fault]:
    """What keeps the content of a file from being a template."""
    if not isinstance(held, Mapping):
        cure = "write problem_types, prompts and graph_code"
        return [Fault(where, "an object", f"{held!r:.80}", cure)]
    faults = []
    types = held.get("problem_types")
    if not isinstance(types, list) or not types or not set(map(str, types)) <= {*PROBLEM_TYPES}:
        expected = f"a list of {', '.join(PROBLEM_TYPES)}"
        cure = "problem_types: [math]"
        faults.append(Fault(f"{where}: problem_types", expected, f"{types!r:.80}", cure))
    prompts = held.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(
        isinstance(name, str) and isinstance(text, str) for name, text in prompts.items()
    ):
        cure = "prompts: {solve: Solve the problem.}"
        expected = "an object from instances to texts"
        faults.append(Fault(f"{where}: prompts", expected, f"{prompts!r:.80}", cure))
    if not isinstance(held.get("graph_code"), str):
        found = f"{held.get('graph_code')!r:.80}"
        cure = "graph_code: |, with the class indented below it"
        faults.append(Fault(f"{where}: graph_code", "Python: `class Workflow`", found, cure))
    return faults
