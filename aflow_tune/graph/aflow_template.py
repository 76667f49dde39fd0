"""What AFlow's template of a data set offers a round: its operators and how each is called.

Each data set of AFlow has a template with operators of its own, and they differ: the ensemble of
DROP takes no problem, that of MATH needs one. Where a round is written into a workspace that has
the template (`DATASET/workflows/template/operator.py`), that file is read; else what AFlow's six
data sets offer is known here. Nothing is imported.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aflow_tune.graph.shape import parse

_BUILT = inspect.Signature(
    [
        inspect.Parameter("llm", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        inspect.Parameter("name", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
    ]
)
_CALLS = {
    "Custom": "input, instruction",
    "AnswerGenerate": "input, mode=None",
    "CustomCodeGenerate": "problem, entry_point, instruction",
    "Programmer": "problem, analysis='None'",
    "ScEnsemble": "solutions, problem",
    "Test": "problem, solution, entry_point, test_loop=3",
}
_MATH = ("Custom", "Programmer", "ScEnsemble")
_CODE = ("Custom", "CustomCodeGenerate", "ScEnsemble", "Test")
_QA = ("Custom", "AnswerGenerate", "ScEnsemble")
_OFFERED = {
    "GSM8K": _MATH,
    "MATH": _MATH,
    "HumanEval": _CODE,
    "MBPP": _CODE,
    "HotpotQA": _QA,
    "DROP": _QA,
}
AFLOW_NAMES = {name.casefold(): name for name in _OFFERED}
"""AFlow's spelling of its data sets, by the name in lower case: paths and imports depend on it."""


@dataclass(frozen=True)
class Interface:
    """How an operator of a template is built and called, without `self`."""

    built: inspect.Signature
    called: inspect.Signature


@dataclass(frozen=True)
class Template:
    """What a template offers."""

    where: str
    """For messages."""
    operators: Mapping[str, Interface]
    entry_point: bool | None
    """Whether AFlow hands a workflow of this data set an entry point; None: not known."""


def template_of(dataset: str, workflows: Path) -> Template | None:
    """The template that a round of this data set runs with; None where it cannot be known.

    Args:
        workflows: the folder that the round's folder lies in.
    """
    file = workflows / "template" / "operator.py"
    known = _OFFERED.get(AFLOW_NAMES.get(dataset.casefold(), ""))
    entry_point = None if known is None else known is _CODE
    if file.is_file():
        try:
            tree = parse(file.read_text(encoding="utf-8-sig"), str(file))[0]
        except (OSError, UnicodeDecodeError):
            tree = None
        found = {} if tree is None else _operators(tree)
        if found:
            return Template(str(file), found, entry_point)
    if known is None:
        return None
    calls = {name: _CALLS[name] for name in known}
    if known is _QA:
        calls["ScEnsemble"] = "solutions"
    offered = {name: Interface(_BUILT, _signature(text)) for name, text in calls.items()}
    return Template(f"AFlow's template of {AFLOW_NAMES[dataset.casefold()]}", offered, entry_point)


def _operators(tree: ast.Module) -> dict[str, Interface]:
    """The operators of a template's file: its classes that can be called."""
    found = {}
    for node in tree.body:
        members = {
            item.name: item.args
            for item in getattr(node, "body", ())
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        if isinstance(node, ast.ClassDef) and "__call__" in members:
            built = _of(members["__init__"]) if "__init__" in members else _BUILT
            found[node.name] = Interface(built, _of(members["__call__"]))
    return found


def _signature(parameters: str) -> inspect.Signature:
    function = ast.parse(f"def call(self, {parameters}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return _of(function.args)


def _of(arguments: ast.arguments) -> inspect.Signature:
    """The signature of a method, without self. A default is only known to be there."""
    kind = inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args][1:]
    without = len(plain) - len(arguments.defaults)
    made = [
        kind(item.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if i < without else None)
        for i, item in enumerate(plain)
    ]
    if arguments.vararg:
        made.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    made += [
        kind(item.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None)
        for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        made.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(made)
