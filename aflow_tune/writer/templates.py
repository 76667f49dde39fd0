"""Shipped workflows: examples for the policy, seeds of the warm start, and the default ones.

Each is a file of `templates/`: what it is about, the types of problem that it is for, its
prompts and its code, in the words of the hybrid form. They pass the same check as what the
policy writes, and are run by the same code.

Left to others: showing them to the policy (`prompting.py`), pairing them with problems
(`harvest.py`), the check (`check.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.graph import inside
from aflow_tune.graph.graph import Graph
from aflow_tune.operators import OPERATORS, Operator
from aflow_tune.writer.simpler import straight_line
from aflow_tune.writer.types import PROBLEM_TYPES, ProblemType

_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "math": ("program_or_answer", "program", "self_consistency", "answer", "one_call"),
    "code": ("code_with_tests", "code_once"),
    "qa": ("extract_then_answer", "answer", "one_call"),
}
"""By problem type, what is the default workflow if its operators are allowed: the first."""


@dataclass(frozen=True)
class Template:
    """One shipped workflow."""

    name: str
    """Of its file."""
    about: str
    """What it does, in one line."""
    problem_types: tuple[ProblemType, ...]
    prompts: Mapping[str, str]
    """Instruction by operator instance."""
    code: str

    @functools.cached_property
    def graph(self) -> Graph:
        """The workflow, ready to run."""
        sources = {inside.GRAPH_FILE: self.code}
        return Graph(f"template {self.name}", sources, instructions=dict(self.prompts))

    @classmethod
    def of(cls, name: str, held: Mapping[str, Any]) -> Template:
        """From what its file holds."""
        types = tuple(kind for kind in PROBLEM_TYPES if kind in held["problem_types"])
        about, prompts = str(held.get("about") or ""), dict(held.get("prompts") or {})
        return cls(name, about, types, prompts, held["graph_code"])

    @functools.cached_property
    def operators(self) -> tuple[str, ...]:
        """Names of the operators that it is made of, in the order of its code."""
        return tuple(dict.fromkeys(self.graph.shape.instances.values()))


def load_templates() -> dict[str, Template]:
    """The shipped templates by name."""
    import yaml

    folder = resources.files(__package__).joinpath("templates")
    texts = {
        item.name.removesuffix(".yaml"): item.read_text(encoding="utf-8")
        for item in folder.iterdir()
        if item.name.endswith(".yaml")
    }
    return {name: Template.of(name, yaml.safe_load(texts[name])) for name in sorted(texts)}


TEMPLATES: Mapping[str, Template] = load_templates()
"""By name."""


def templates_for(
    problem_type: str | None = None, operators: Collection[str] | None = None
) -> list[Template]:
    """Those for a type of problem that are made of these operators only; None: of any."""
    return [
        template
        for template in TEMPLATES.values()
        if (problem_type is None or problem_type in template.problem_types)
        and (operators is None or set(template.operators) <= set(operators))
    ]


def default_graph(
    problem_type: str,
    operators: Mapping[str, type[Operator]] = OPERATORS,
    entry_point: bool = True,
) -> Graph:
    """The default workflow of a type of problem, of the allowed operators only.

    Where none of the fixed ones fits them, it is a straight line of what is allowed.

    Args:
        entry_point: whether the problem, if it is one of code, names the function to write.

    Raises:
        BadInput: no operator that is allowed can answer a problem.
    """
    for name in _DEFAULTS[problem_type]:
        template = TEMPLATES[name]
        asks_too_much = template.graph.shape.needs_entry_point and not entry_point
        if set(template.operators) <= set(operators) and not asks_too_much:
            return template.graph
    names_entry = entry_point and problem_type == "code"
    line = straight_line(list(operators), operators, problem_type, names_entry)
    if line is None:
        expected = "an operator that answers a problem, such as Custom or AnswerGenerate"
        found = ", ".join(sorted(operators)) or "none"
        fault = Fault("writer.operators", expected, found, "allow one of these as well")
        raise BadInput("There is no default workflow of these operators.", [fault])
    return line
