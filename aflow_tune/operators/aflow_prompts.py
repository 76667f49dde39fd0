"""AFlow's own prompts as a preset, read from a checkout that the user has.

    prompts: {preset: AFlow/workspace/GSM8K/workflows/template/op_prompt.py}

so that scores can be compared with published ones. AFlow's files are parsed, never executed.
Besides `op_prompt.py`, `operator_an.py` (descriptions of the fields) and `scripts/formatter.py` of
the checkout (how a form is asked for) are read. With all three, a first prompt equals AFlow's; if
one is missing, our sentences about the form follow at the end. Prompts after a failed program or
test, or an unreadable reply, contain our own text in any case.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Mapping
from pathlib import Path

from aflow_tune.errors import BadInput
from aflow_tune.operators.prompts import FORMS, MAIN, NO_FORM, Texts

PRESET = "preset"  # the key under `prompts:`
_FAILED = "\nThis program was written before:\nCode: {code}\n\nStatus: Error, {error}"
_WORDS = {"question": "{problem}", "problem_description": "{problem}"}
"""Our replacements for AFlow's placeholders with other names."""
_LIST = _WORDS | {"solutions": "{solutions}\n\n"}
_TESTED = _WORDS | {"exec_pass": "it was run", "test_fail": "{failure}"}
_USES = (
    ("ANSWER_GENERATION_PROMPT", "AnswerGenerate", MAIN, "AnswerGenerateOp", _WORDS),
    ("SC_ENSEMBLE_PROMPT", "ScEnsemble", MAIN, "ScEnsembleOp", _LIST),
    ("MD_ENSEMBLE_PROMPT", "MdEnsemble", MAIN, "MdEnsembleOp", _LIST),
    ("PYTHON_CODE_VERIFIER_PROMPT", "Programmer", MAIN, "solve", _WORDS | {"feedback": ""}),
    ("PYTHON_CODE_VERIFIER_PROMPT", "Programmer", "again", "solve", _WORDS | {"feedback": _FAILED}),
    ("REFLECTION_ON_PUBLIC_TEST_PROMPT", "Test", "revise", "", _TESTED),
    ("FORMAT_PROMPT", "Format", MAIN, None, _WORDS),
    ("REVIEW_PROMPT", "Review", MAIN, "ReviewOp", _WORDS),
    ("REVISE_PROMPT", "Revise", MAIN, "ReviseOp", _WORDS),
)
"""AFlow's constant; our operator and prompt; what is asked for (a class of operator_an.py, or the
function that a program defines, '' for any; None: nothing); replacements of placeholders."""
_CANDIDATE = "{label}: \n{solution}\n"


def with_preset(prompts: Mapping[str, Texts], path: Path) -> dict[str, Texts]:
    """The run's `prompts` on top of those in AFlow's op_prompt.py at `path`, by operator.

    Raises:
        BadInput: a file cannot be read, or op_prompt.py has no prompt of an operator.
    """
    texts = {
        target.id: node.value.value
        for node in _parsed(path).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    fields = _fields(path)
    xml, code = _formats(path)
    found: dict[str, dict[str, str]] = {}
    for name, operator, prompt, asked, values in _USES:
        if name not in texts:
            continue
        text = _ours(texts[name], values, f"{path}: {name}")
        if asked in fields and xml:
            text += f"{_escaped(xml + fields[asked])}{{{NO_FORM}}}"
        elif asked in ("", "solve") and code:
            text += _for_code(code, asked)
        found.setdefault(operator, {})[prompt] = text
    if not found:
        expected = f"constants such as {', '.join(use[0] for use in _USES[:3])}"
        title, fix = "These are no prompts of AFlow.", "name op_prompt.py of an AFlow checkout"
        raise BadInput.of(title, str(path), expected, f"{list(texts)[:5]}", fix)
    if code:
        found["CustomCodeGenerate"] = {
            MAIN: f"{{instruction}}{{problem}}{_for_code(code, '{entry_point}')}"
        }
    given = {name: text for name, text in prompts.items() if name != PRESET}
    merged: dict[str, Texts] = {**found, FORMS: {"candidate": _CANDIDATE}, **given}
    if isinstance(forms := given.get(FORMS), Mapping):
        merged[FORMS] = {"candidate": _CANDIDATE, **forms}
    return merged


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        title, expected = "The prompts of AFlow cannot be read.", "a Python file with prompts"
        fix = "name op_prompt.py of an AFlow checkout"
        raise BadInput.of(title, str(path), expected, str(error), fix) from None


def _ours(text: str, values: Mapping[str, str], where: str) -> str:
    """Convert a template for `str.format` to one of ours."""
    made, put = "", []
    try:
        for plain, name, _, _ in string.Formatter().parse(text):
            made += plain
            if name is not None:
                made += "\0"  # braces around it may be text
                put.append(values.get(name, f"{{{name}}}"))
    except ValueError as error:
        title, expected = "A prompt of AFlow cannot be read.", "a text for str.format"
        raise BadInput.of(title, where, expected, str(error), "correct the file") from None
    pieces = _escaped(made).split("\0")
    return "".join(piece + value for piece, value in zip(pieces, [*put, ""], strict=True))


def _escaped(text: str) -> str:
    return re.sub(r"\{(\w+)\}", r"{{\1}}", text)


def _fields(path: Path) -> dict[str | None, str]:
    """The fields in operator_an.py as XML elements, by the class that holds them."""
    beside, asked = path.with_name("operator_an.py"), {}
    for node in _parsed(beside).body if beside.is_file() else ():
        lines = []
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(item, ast.AnnAssign) and isinstance(item.value, ast.Call):
                words = {word.arg: word.value for word in item.value.keywords}
                about = words.get("description")
                if isinstance(item.target, ast.Name) and isinstance(about, ast.Constant):
                    lines.append(f"<{item.target.id}>{about.value!s}</{item.target.id}>")
        if lines:
            asked[getattr(node, "name", None)] = "\n".join(lines)
    return asked


def _formats(path: Path) -> tuple[str, list[str]]:
    """How formatter.py of the checkout asks for XML and for code; empty if missing."""
    tops = [folder / "scripts" / "formatter.py" for folder in path.resolve().parents]
    formatter = next((file for file in tops if file.is_file()), None)
    methods = {
        node.name: _written(item)
        for node in (_parsed(formatter).body if formatter else ())
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.FunctionDef) and item.name == "prepare_prompt"
    }
    return max(methods.get("XmlFormatter", []), key=len, default=""), methods.get(
        "CodeFormatter", []
    )


def _for_code(written: list[str], entry_point: str) -> str:
    """How AFlow asks for a program that defines a name or placeholder; '' for any."""
    text = _escaped(written[0])
    if entry_point and len(written) > 1:
        text += _escaped(written[1]).replace("\0", entry_point)
    return f"{text}{{{NO_FORM}}}"


def _written(method: ast.FunctionDef) -> list[str]:
    """The text pieces that a formatter's method joins, in order; an inserted value becomes a null
    character, or is dropped at the end of a piece (the fields)."""
    found = []
    for node in ast.walk(method):
        parts = ast.walk(node.value) if isinstance(node, ast.Assign | ast.AugAssign) else ()
        for part in parts:
            pieces = part.values if isinstance(part, ast.JoinedStr) else [part]
            texts = [getattr(piece, "value", None) for piece in pieces]
            if isinstance(part, ast.JoinedStr) or isinstance(texts[0], str):
                text = "".join(t if isinstance(t, str) else "\0" for t in texts)
                found.append((getattr(node, "lineno", 0), text.rstrip("\0")))
                break
    return [text for _, text in sorted(found) if text.startswith("\n")]
