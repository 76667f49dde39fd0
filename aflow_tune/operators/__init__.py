"""The operators that workflows are built from.

    review = Review(model, name="strict")
    verdict = await review(problem, solution)
    verdict["review_result"], verdict.outcome

AFlow's ten, with its arguments and result keys, and the base class for more. A call returns an
`OperatorResult`: a dict with the operator's keys, plus a typed outcome. A workflow function calls a
user's subclass of `Operator` directly; graphs refer to operators by name, so for them it is listed
in the configuration: `operators: {Summarise: my_operators.py:Summarise}`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.operators.asking import (
    AnswerGenerate,
    Custom,
    CustomCodeGenerate,
    Format,
    MdEnsemble,
    Review,
    Revise,
    ScEnsemble,
)
from aflow_tune.operators.base import READ_OUTCOMES, Operator, OperatorResult, Outcome
from aflow_tune.operators.fields import Field, Form, Kind
from aflow_tune.operators.programs import Programmer, Test, TestCases, use_test_cases
from aflow_tune.operators.prompts import FORM_PROMPTS, FORMS, Prompt, checked, use_prompts

__all__ = [
    "OPERATORS",
    "READ_OUTCOMES",
    "AnswerGenerate",
    "Custom",
    "CustomCodeGenerate",
    "Field",
    "Form",
    "Format",
    "Kind",
    "MdEnsemble",
    "Operator",
    "OperatorResult",
    "Outcome",
    "Programmer",
    "Prompt",
    "Review",
    "Revise",
    "ScEnsemble",
    "Test",
    "TestCases",
    "check_prompts",
    "load_operators",
    "use_prompts",
    "use_test_cases",
]

OPERATORS: dict[str, type[Operator]] = {
    kind.__name__: kind
    for kind in (
        Custom, AnswerGenerate, CustomCodeGenerate, ScEnsemble, Programmer, Test, Format, Review,
        Revise, MdEnsemble,
    )
}  # fmt: skip
"""The shipped operators, by the name that graphs use."""


def load_operators(
    named: Mapping[str, Any] | Sequence[Any], base_dir: Path | None = None
) -> dict[str, type[Operator]]:
    """The operators that a configuration names.

    Args:
        named: from names to `module:Class`, `path/file.py:Class` or the class itself; or a list
            of these, each under its class's name.
        base_dir: base of relative paths, besides the current folder.

    Raises:
        BadInput: with every entry that is no operator, or whose name is taken or not its class's.
    """
    from aflow_tune.contract.plugins import resolve

    pairs: list[tuple[str, str | None, Any]]
    pairs = [(f"operators[{number}]", None, spec) for number, spec in enumerate(named)]
    if isinstance(named, Mapping):
        pairs = [(f"operators.{name}", name, spec) for name, spec in named.items()]
    found: dict[str, type[Operator]] = {}
    faults: list[Fault] = []
    for where, name, spec in pairs:
        try:
            kind = resolve(spec, base_dir) if isinstance(spec, str) else spec
        except BadInput as error:
            faults += error.faults
            continue
        is_operator = inspect.isclass(kind) and issubclass(kind, Operator) and "run" in dir(kind)
        name = str(name or getattr(kind, "__name__", ""))
        taken = found.get(name) or OPERATORS.get(name)
        if not is_operator:
            expected = "a subclass of aflow_tune.operators.Operator with `async def run`"
            shown = f"{kind!r:.80}"
            faults.append(Fault(where, expected, shown, "name the class: path/file.py:Class"))
        elif taken not in (None, kind) or kind.__name__ != name:
            # Traces, experiences and prompts identify an operator by its class name.
            expected = f"the class's name, {kind.__name__}, which no other operator has"
            faults.append(Fault(where, expected, name, "use that name, or rename the class"))
        else:
            found[name] = kind
    if faults:
        raise BadInput("These operators cannot be used.", faults)
    return found


def check_prompts(
    prompts: Mapping[str, Any],
    where: str = "prompts",
    operators: Mapping[str, type[Operator]] = OPERATORS,
) -> None:
    """Check the prompts of a run, by operator, `Operator.instance` or `forms`. Raises `BadInput`
    with every unknown name and every text with wrong placeholders."""
    faults: list[Fault] = []
    slots = {FORMS: FORM_PROMPTS, **{name: kind.asks for name, kind in operators.items()}}
    for key, texts in prompts.items():
        name = str(key).partition(".")[0]
        if name in slots:
            faults += checked(texts, slots[name], f"{where}.{key}")[1]
            continue
        known = [*operators, FORMS]
        near = difflib.get_close_matches(name, known, 1)
        fix = f"did you mean {near[0]}?" if near else "name the operator, or Operator.instance"
        faults.append(Fault(f"{where}.{key}", f"one of {', '.join(known)}", name, fix))
    if faults:
        raise BadInput("The prompts do not fit the operators.", faults)
