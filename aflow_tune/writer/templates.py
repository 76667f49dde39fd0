"""Workflows that the policy did not write: shipped templates, and generated straight lines.

Templates (`templates/*.yaml`) are examples for the policy, candidates of the warm start, default
workflows. A straight line replaces a graph that failed: one operator answers the problem, then Test
or Format works on its answer, called by their signatures. It contains no text of the policy's.
"""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aflow_tune.errors import BadInput
from aflow_tune.graph import inside
from aflow_tune.graph.graph import Graph
from aflow_tune.operators import OPERATORS, Operator
from aflow_tune.writer.types import PROBLEM_TYPES, ProblemType

_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "math": ("program_or_answer", "program", "self_consistency", "answer", "one_call"),
    "code": ("code_with_tests", "code_once"),
    "qa": ("extract_then_answer", "answer", "one_call"),
}
"""By problem type, the candidates for the default workflow: the first that is allowed wins."""


@dataclass(frozen=True)
class Template:
    """One workflow: the name of its file, a one-line description, its problem types, its
    instructions by operator instance, and its code."""

    name: str
    about: str
    problem_types: tuple[ProblemType, ...]
    prompts: Mapping[str, str]
    code: str

    @classmethod
    def of(cls, name: str, held: Mapping[str, Any]) -> Template:
        """From the parsed YAML of its file."""
        types = tuple(kind for kind in PROBLEM_TYPES if kind in held["problem_types"])
        about, prompts = str(held.get("about") or ""), dict(held.get("prompts") or {})
        return cls(name, about, types, prompts, held["graph_code"])

    @functools.cached_property
    def graph(self) -> Graph:
        """The workflow, ready to run."""
        sources = {inside.GRAPH_FILE: self.code}
        return Graph(f"template {self.name}", sources, instructions=dict(self.prompts))

    def fits(self, problem_type: str | None, operators: Collection[str]) -> bool:
        """Whether it is for this type of problem (None: any) and uses these operators only."""
        known = problem_type is None or problem_type in self.problem_types
        return known and set(self.operators) <= set(operators)

    @functools.cached_property
    def operators(self) -> tuple[str, ...]:
        """Names of its operators, in source order."""
        return tuple(dict.fromkeys(self.graph.shape.instances.values()))


TEMPLATES: Mapping[str, Template] = {
    file.stem: Template.of(file.stem, yaml.safe_load(file.read_text(encoding="utf-8")))
    for file in sorted(Path(__file__).with_name("templates").glob("*.yaml"))
}
"""The shipped templates by name."""


def default_graph(
    problem_type: str, operators: Mapping[str, type[Operator]] = OPERATORS, entry_point: bool = True
) -> Graph:
    """The default workflow of a problem type with these operators: a template, else a straight
    line. `entry_point`: whether a code problem names the function to write. Raises `BadInput` if
    none of the operators can answer a problem."""
    for name in _DEFAULTS[problem_type]:
        template = TEMPLATES[name]
        callable_ = entry_point or not template.graph.shape.needs_entry_point
        if callable_ and template.fits(None, operators):
            return template.graph
    names_entry = entry_point and problem_type == "code"
    line = straight_line(list(operators), operators, problem_type, names_entry)
    if line is None:
        title, where = "There is no default workflow of these operators.", "writer.operators"
        expected = "an operator that answers a problem, such as Custom or AnswerGenerate"
        found = ", ".join(sorted(operators)) or "none"
        raise BadInput.of(title, where, expected, found, "allow one of these as well")
    return line


INSTRUCTIONS: Mapping[str, str] = {
    "math": "Solve the problem step by step, and end with the final answer.",
    "code": "Write the Python function that the task asks for.",
    "qa": "Answer the question from what is given, in as few words as it allows.",
}
"""By problem type: the instruction for operators that take one and were given none."""

_FIRST: Mapping[str, tuple[str, ...]] = {
    "math": ("Programmer", "AnswerGenerate", "Custom"),
    "code": ("CustomCodeGenerate", "Custom", "Programmer"),
    "qa": ("AnswerGenerate", "Custom", "Programmer"),
}
"""By problem type: preferred operators for the answer, best first."""
PROBLEM_ARGUMENTS = ("problem", "input", "question", "task")
"""Names of an operator's argument that takes the problem."""
_ANSWERS = ("answer", "output", "response", "solution")
"""Keys of a result that may hold the answer, best first."""

_CODE = """\
class Workflow:
    def __init__(self, name, llm_config, dataset):
        self.llm = create_llm_instance(llm_config)
{built}

    async def __call__(self, problem{entry_point}):
{line}
        return solution, self.llm.get_usage_summary()["total_cost"]
"""


def straight_line(
    named: Sequence[str],
    operators: Mapping[str, type[Operator]],
    problem_type: str,
    entry_point: bool,
) -> Graph | None:
    """A graph of one or two of the operators `named`, each called once; None if none of them can
    answer. `entry_point`: whether the problem names a function to write."""
    known, ranks = [name for name in named if name in operators], _FIRST.get(problem_type, ())
    # Stable: operators without a rank keep their order, after the others.
    known.sort(key=lambda name: ranks.index(name) if name in ranks else len(ranks))
    have = {*PROBLEM_ARGUMENTS} | ({"entry_point"} if entry_point else set())
    used: list[str] = []
    for name in known:  # the first that can answer a problem alone
        takes, answers = parameters_of(operators[name]), answer_key(operators[name]) is not None
        needed = {item for item, required in takes.items() if required}
        if needed <= have and {*PROBLEM_ARGUMENTS} & {*takes} and answers:
            used = [name]
            break
    if not used:
        return None
    second = "Format" if problem_type != "code" else "Test" if entry_point else ""
    used += [second] if second in known else []
    have |= {"solution"}
    own = {name: operators[name] for name in used}
    built, calls = "", ""
    for name, kind in own.items():
        taken = [item for item in parameters_of(kind) if item in have]
        given = ", ".join(f"{n}={'problem' if n in PROBLEM_ARGUMENTS else n}" for n in taken)
        built += f"\n        self.{instance_name(name)} = operator.{name}(self.llm)"
        call = f"await self.{instance_name(name)}({given})"
        calls += f"\n        solution = ({call})['{answer_key(kind)}']"
    code = _CODE.format(
        built=built[1:], line=calls[1:], entry_point=", entry_point" if entry_point else ""
    )
    instances = {instance_name(name): name for name in used}
    return Graph(
        "a straight line of " + ", ".join(used),
        {inside.GRAPH_FILE: code},
        operators=own,
        instructions=default_instructions(instances, own, problem_type),
    )


def default_instructions(
    instances: Mapping[str, str], operators: Mapping[str, type[Operator]], problem_type: str
) -> dict[str, str]:
    """The default instruction by instance, for operators with an argument `instruction`."""
    return {
        instance: INSTRUCTIONS.get(problem_type, INSTRUCTIONS["math"])
        for instance, name in instances.items()
        if name in operators and "instruction" in parameters_of(operators[name])
    }


def parameters_of(kind: type[Operator]) -> dict[str, bool]:
    """The parameters of a call of the operator by name, and whether each is required."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    items = list(inspect.signature(kind.__call__).parameters.values())[1:]
    return {item.name: item.default is item.empty for item in items if item.kind not in variable}


def answer_key(kind: type[Operator]) -> str | None:
    """The key of its result that may hold an answer; None if there is none."""
    keys = tuple(kind.returns) or tuple(item.name for item in kind.fields)
    return next((key for key in _ANSWERS if key in keys), None)


def instance_name(name: str) -> str:
    """The attribute of a workflow that holds its only instance of an operator."""
    lower = name.lower()
    return f"{lower}_" if keyword.iskeyword(lower) or lower == "llm" else lower
