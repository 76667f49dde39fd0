"""Graphs that might solve a problem, from templates and from earlier runs.

A template is a candidate for every problem of its types. A graph from a run is one for the problems
with its text; the best of each structure is tried again, since its reward may have been luck.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aflow_tune.errors import BadInput, Fault
from aflow_tune.report.records import read_rollouts
from aflow_tune.writer.form import as_text
from aflow_tune.writer.results import MAX_PROBLEM
from aflow_tune.writer.templates import Template
from aflow_tune.writer.types import PROBLEM_TYPES, Level, ProblemType

SOURCES = ("templates", "teacher", "runs")


@dataclass(frozen=True)
class Problem:
    """One problem of the training task set. Equal rows have equal `key`s; `entry_point` is the name
    of the function to write, for code problems."""

    key: str
    text: str
    problem_type: ProblemType
    row: Mapping[str, Any]
    entry_point: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A graph that might solve a problem. `source` is one of SOURCES, `name` that of the template,
    teacher or run."""

    source: str
    name: str
    text: str


def template_candidates(
    problem: Problem, templates: Iterable[Template], operators: Collection[str]
) -> list[Candidate]:
    """The templates for the problem's type that use these operators only."""
    return [
        Candidate("templates", template.name, as_text(template.prompts, template.code))
        for template in templates
        if template.fits(problem.problem_type, operators)
    ]


def read_templates(folder: Path, where: str) -> list[Template]:
    """The templates in a user's folder, one YAML file each, like the shipped ones. `where` is the
    setting that names the folder. Raises `BadInput` with every file that is no template."""
    files = sorted(folder.glob("*.yaml")) if folder.is_dir() else []
    if not files:
        found, cure = f"none in {folder}", "name a folder of templates, or leave it out"
        title, expected = "There are no templates.", "a folder with a .yaml for each template"
        raise BadInput.of(title, where, expected, found, cure)
    templates: list[Template] = []
    faults: list[Fault] = []
    for file in files:
        try:
            held = yaml.safe_load(file.read_text(encoding="utf-8"))
            template = Template.of(file.stem, held)
            known = template.problem_types and {*held["problem_types"]} <= {*PROBLEM_TYPES}
            if not (known and _are_texts({**template.prompts, "": template.code})):
                raise ValueError("a type that is none, or something that is no text")
            templates.append(template)
        except (yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            expected = f"problem_types (of {', '.join(PROBLEM_TYPES)}), prompts, graph_code in YAML"
            shown = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            faults.append(Fault(str(file), expected, shown, "correct the file"))
    if faults:
        raise BadInput("The templates cannot be used.", faults)
    return templates


def past_candidates(
    folders: Iterable[Path], problems: Sequence[Problem], min_score: float
) -> tuple[dict[str, list[Candidate]], int]:
    """Candidates from rollouts of these runs, by problem key; and how many good ones match none.

    Good rollouts ran as written and scored at least `min_score`. Of each problem and structure, the
    one with the highest reward is taken, highest first. Rollouts of other workflows are ignored.
    """
    by_text: dict[str, list[str]] = {}
    for problem in problems:  # records cut long texts, so several problems may match
        by_text.setdefault(problem.text[:MAX_PROBLEM], []).append(problem.key)
    past: list[tuple[float, str, Any]] = [
        (rollout.reward, folder.name, kept)
        for folder in folders
        for rollout in read_rollouts(folder)
        if _is_good(kept := rollout.kept.get("writer"), min_score) and rollout.reward is not None
    ]
    found: dict[str, list[Candidate]] = {}
    strangers = 0
    taken: set[tuple[str, str]] = set()
    for _, name, kept in sorted(past, key=lambda item: -item[0]):
        keys = by_text.get(kept["problem"], [])
        strangers += not keys
        for key in keys:
            place = key, str(kept.get("structure"))
            if place not in taken:
                taken.add(place)
                text = as_text(kept["prompts"], kept["code"])
                found.setdefault(key, []).append(Candidate("runs", name, text))
    return found, strangers


def _is_good(kept: Any, min_score: float) -> bool:
    if not isinstance(kept, Mapping) or kept.get("level") != Level.CLEAN:
        return False
    score = kept.get("score")
    texts = {name: kept.get(name) for name in ("problem", "code")}
    solved = isinstance(score, int | float) and score >= min_score
    return solved and _are_texts(texts) and _are_texts(kept.get("prompts"))


def _are_texts(prompts: Any) -> bool:
    return isinstance(prompts, Mapping) and all(
        isinstance(name, str) and isinstance(text, str) for name, text in prompts.items()
    )
