"""AFlow's own prompts as a preset, read from a checkout that the user has.

    prompts: {preset: AFlow/workspace/GSM8K/workflows/template/op_prompt.py}

so that scores compare with published ones. The texts are AFlow's and stay in its files: they are
parsed, never executed, and become prompts of our operators. Beside `op_prompt.py` two more files
are read where they are: `operator_an.py` (what AFlow says about each field) and
`scripts/formatter.py` of the checkout (how it asks for a form). With all three a first question is
AFlow's to the letter; where one is missing, our own sentences about the form stand at the end. What
differs in any case: what is said after a failed program or test, and being asked again.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from aflow_tune.errors import BadInput, Fault
from aflow_tune.operators.prompts import FORMS, MAIN, NO_FORM, Texts

PRESET = "preset"  # the key under `prompts:`
_FAILED = "\nThis program was written before:\nCode: {code}\n\nStatus: Error, {error}"
_REPLACED = {"question": "problem", "problem_description": "problem"}
"""AFlow's words for values, where they are not ours."""


class _Constant(NamedTuple):
    """What one constant of AFlow's is for."""

    operator: str
    prompt: str
    fields: str
    """The class in operator_an.py with the fields that are asked for; empty for code."""
    values: Mapping[str, str]
    """What stands for placeholders that our operator has no value for."""


_PLACES = {"solutions": "{solutions}\n\n"}
_CONSTANTS = {
    "ANSWER_GENERATION_PROMPT": [_Constant("AnswerGenerate", MAIN, "AnswerGenerateOp", {})],
    "SC_ENSEMBLE_PROMPT": [_Constant("ScEnsemble", MAIN, "ScEnsembleOp", _PLACES)],
    "MD_ENSEMBLE_PROMPT": [_Constant("MdEnsemble", MAIN, "MdEnsembleOp", _PLACES)],
    "PYTHON_CODE_VERIFIER_PROMPT": [
        _Constant("Programmer", MAIN, "", {"feedback": ""}),
        _Constant("Programmer", "again", "", {"feedback": _FAILED}),
    ],
    "REFLECTION_ON_PUBLIC_TEST_PROMPT": [
        _Constant("Test", "revise", "", {"exec_pass": "it was run", "test_fail": "{failure}"})
    ],
    "FORMAT_PROMPT": [_Constant("Format", MAIN, "", {})],
    "REVIEW_PROMPT": [_Constant("Review", MAIN, "ReviewOp", {})],
    "REVISE_PROMPT": [_Constant("Revise", MAIN, "ReviseOp", {})],
}
_ENTRY_POINTS = {"Programmer": "solve"}
_CANDIDATE = "{label}: \n{solution}\n"


def with_preset(prompts: Mapping[str, Texts], path: Path) -> dict[str, Texts]:
    """A run's prompts over those of AFlow's file; an operator's own entry replaces AFlow's.

    Raises:
        BadInput: the file cannot be read, or holds no prompt of an operator.
    """
    given = {name: text for name, text in prompts.items() if name != PRESET}
    merged: dict[str, Texts] = {**aflow_prompts(path), **given}
    if FORMS in given and isinstance(given[FORMS], Mapping):
        merged[FORMS] = {"candidate": _CANDIDATE, **given[FORMS]}  # type: ignore[dict-item]
    return merged


def aflow_prompts(path: Path) -> dict[str, Texts]:
    """Prompts by operator, from AFlow's op_prompt.py.

    Raises:
        BadInput: as `with_preset`.
    """
    texts = _constants(path)
    asks = _Asking(path)
    found: dict[str, dict[str, str]] = {}
    for name, uses in _CONSTANTS.items():
        for use in uses if name in texts else ():
            text = _ours(texts[name], use.values, f"{path}: {name}")
            text += asks.suffix(use.fields, _ENTRY_POINTS.get(use.operator, ""), use.operator)
            found.setdefault(use.operator, {})[use.prompt] = text
    if not found:
        expected = f"constants such as {', '.join(list(_CONSTANTS)[:3])}"
        shown = ", ".join(list(texts)[:5]) or "no texts"
        fix = "name workspace/DATASET/workflows/template/op_prompt.py of an AFlow checkout"
        raise BadInput("These are no prompts of AFlow.", [Fault(str(path), expected, shown, fix)])
    if (code := asks.code("{entry_point}")) is not None:
        found["CustomCodeGenerate"] = {MAIN: f"{{instruction}}{{problem}}{code}{{{NO_FORM}}}"}
    return {**found, FORMS: {"candidate": _CANDIDATE}}


def _constants(path: Path) -> dict[str, str]:
    """The texts that a file assigns at its top level."""
    return {
        target.id: node.value.value
        for node in _parsed(path).body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        fix = "name workspace/DATASET/workflows/template/op_prompt.py of an AFlow checkout"
        fault = Fault(str(path), "a Python file with prompts", str(error), fix)
        raise BadInput("The prompts of AFlow cannot be read.", [fault]) from None


def _ours(text: str, values: Mapping[str, str], where: str) -> str:
    """A text for `str.format` as a template of ours."""
    made, put = "", []
    try:
        for plain, name, _, _ in string.Formatter().parse(text):
            made += plain
            if name is not None:
                known = _REPLACED.get(name, name)
                made += "\0"  # braces around it may be text
                put.append(values.get(known, f"{{{known}}}"))
    except ValueError as error:
        fix = "leave the file as AFlow has it"
        fault = Fault(where, "a text for str.format", str(error), fix)
        raise BadInput("A prompt of AFlow cannot be read.", [fault]) from None
    pieces = _escaped(made).split("\0")
    return "".join(piece + value for piece, value in zip(pieces, [*put, ""], strict=True))


class _Asking:
    """How AFlow asks for a form, from the files around op_prompt.py; None for what lacks."""

    def __init__(self, path: Path) -> None:
        self._fields: dict[str, list[str]] = {}
        beside = path.with_name("operator_an.py")
        for node in _parsed(beside).body if beside.is_file() else ():
            for item in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(item, ast.AnnAssign) and isinstance(item.value, ast.Call):
                    words = {word.arg: word.value for word in item.value.keywords}
                    about = words.get("description")
                    if isinstance(item.target, ast.Name) and isinstance(about, ast.Constant):
                        asked = self._fields.setdefault(node.name, [])  # type: ignore[attr-defined]
                        asked.append(f"<{item.target.id}>{about.value!s}</{item.target.id}>")
        tops = [folder / "scripts" / "formatter.py" for folder in path.resolve().parents]
        formatter = next((file for file in tops if file.is_file()), None)
        methods = {
            node.name: item
            for node in (_parsed(formatter).body if formatter else ())
            if isinstance(node, ast.ClassDef)
            for item in node.body
            if isinstance(item, ast.FunctionDef) and item.name == "prepare_prompt"
        }
        self._xml = max(_written(methods.get("XmlFormatter")), key=len, default="")
        self._code = _written(methods.get("CodeFormatter"))

    def suffix(self, fields: str, entry_point: str, operator: str) -> str:
        """What follows an operator's prompt: all about the form, or nothing, so that our own
        sentence is put there."""
        if operator == "Format":
            return ""
        if not fields:
            code = self.code(entry_point)
            return "" if code is None else f"{code}{{{NO_FORM}}}"
        asked = self._fields.get(fields)
        if not self._xml or not asked:
            return ""
        lines = "\n".join(asked)
        return f"{_escaped(self._xml)}{_escaped(lines)}{{{NO_FORM}}}"

    def code(self, entry_point: str) -> str | None:
        """How it asks for a program that defines this, a name or a placeholder."""
        if not self._code:
            return None
        text = _escaped(self._code[0])
        if entry_point and len(self._code) > 1:
            text += _escaped(self._code[1]).replace("\0", entry_point)
        return text


def _escaped(text: str) -> str:
    return re.sub(r"\{(\w+)\}", r"{{\1}}", text)


def _written(method: ast.FunctionDef | None) -> list[str]:
    """The texts that a formatter puts together, in order; a value within one becomes a null
    character, one at its end (the fields) is left out."""
    found = []
    for node in ast.walk(method) if method else ():
        if isinstance(node, ast.Assign | ast.AugAssign):
            for part in ast.walk(node.value):
                if isinstance(part, ast.JoinedStr):
                    pieces = [
                        str(item.value) if isinstance(item, ast.Constant) else "\0"
                        for item in part.values
                    ]
                    found.append((node.lineno, "".join(pieces).rstrip("\0")))
                    break
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    found.append((node.lineno, part.value))
                    break
    return [text for _, text in sorted(found) if text.startswith("\n")]
