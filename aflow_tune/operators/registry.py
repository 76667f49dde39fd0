"""All operators in one visible dict, and how users add theirs.

An operator of a user is a subclass of `Operator`. A workflow function may just call it: nothing
has to be registered. For graphs, which know operators by name, name it in the configuration:

    operators: {Summarise: my_operators.py:Summarise}
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.operators import asking, programs
from aflow_tune.operators.base import Operator
from aflow_tune.operators.prompts import FORM_PROMPTS, FORMS, checked

OPERATORS: dict[str, type[Operator]] = {
    "Custom": asking.Custom,
    "AnswerGenerate": asking.AnswerGenerate,
    "CustomCodeGenerate": asking.CustomCodeGenerate,
    "ScEnsemble": asking.ScEnsemble,
    "Programmer": programs.Programmer,
    "Test": programs.Test,
    "Format": asking.Format,
    "Review": asking.Review,
    "Revise": asking.Revise,
    "MdEnsemble": asking.MdEnsemble,
}
"""Every operator that graphs can name."""
BUILT_IN = frozenset(OPERATORS)


def load_operators(
    named: Mapping[str, Any] | Sequence[Any], base_dir: Path | None = None
) -> dict[str, type[Operator]]:
    """The operators that a configuration names.

    Args:
        named: name to `module:Class` or `path/file.py:Class`, or to the class itself; or a list
            of these, each under its class's name.
        base_dir: what paths are relative to beside the current folder.

    Raises:
        BadInput: with everything that is no operator, or has the name of another.
    """
    from aflow_tune.contract.plugins import resolve

    pairs: list[tuple[str, str | None, Any]]
    if isinstance(named, Mapping):
        pairs = [(f"operators.{name}", name, spec) for name, spec in named.items()]
    else:
        pairs = [(f"operators[{number}]", None, spec) for number, spec in enumerate(named)]
    found: dict[str, type[Operator]] = {}
    faults: list[Fault] = []
    for where, name, spec in pairs:
        try:
            kind = resolve(spec, base_dir) if isinstance(spec, str) else spec
        except BadInput as error:
            faults += error.faults
            continue
        if not (inspect.isclass(kind) and issubclass(kind, Operator) and "run" in dir(kind)):
            expected = "a subclass of aflow_tune.operators.Operator with `async def run`"
            fix = "name the class: path/file.py:Class"
            faults.append(Fault(where, expected, f"{kind!r:.80}", fix))
            continue
        name = name or kind.__name__
        taken = found.get(name) or OPERATORS.get(name)
        if taken not in (None, kind):
            found_there = f"{name} is {taken.__module__}.{taken.__name__}"
            faults.append(Fault(where, "a name of its own", found_there, "name it otherwise"))
        elif kind.__name__ != name:
            # Traces, experiences and prompts name an operator by its class.
            faults.append(Fault(where, f"the class's name, {kind.__name__}", name, "use that name"))
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
    """Check the prompts of a run: by operator, by `Operator.instance`, and under `forms`.

    Raises:
        BadInput: with every name that no operator has, and every text that does not fit.
    """
    faults: list[Fault] = []
    for key, texts in prompts.items():
        name = str(key).partition(".")[0]
        if name == FORMS:
            faults += checked(texts, FORM_PROMPTS, f"{where}.{key}")[1]
        elif name in operators:
            faults += checked(texts, operators[name].asks, f"{where}.{key}")[1]
        else:
            near = difflib.get_close_matches(name, [*operators, FORMS], 1)
            fix = f"did you mean {near[0]}?" if near else "name the operator, or Operator.instance"
            expected = "one of " + ", ".join([*operators, FORMS])
            faults.append(Fault(f"{where}.{key}", expected, name, fix))
    if faults:
        raise BadInput("The prompts do not fit the operators.", faults)
