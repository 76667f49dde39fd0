"""Typed fields: what an operator asks a model for, how, and how a text becomes a value.

`reading.py` finds a field's text in a reply. The sentences that ask are prompts (`forms:` in
`prompts.yaml`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from aflow_tune.operators.prompts import form_text
from aflow_tune.operators.python_code import program_in


class Kind(StrEnum):
    """The type of a field's value."""

    TEXT = "text"
    BOOL = "bool"
    INT = "int"
    CHOICE = "choice"
    """One of `Field.choices`."""
    CODE = "code"
    """A Python program."""


class Form(StrEnum):
    """How fields are asked for."""

    TEXT = "text"
    XML = "xml"
    JSON = "json"
    CODE = "code"


class Unreadable(ValueError):
    """A text has no value of the field's type. The message completes 'the field NAME ...'."""


MAX_SHORT_TEXT = 200  # longest text that is searched for a bool, a number or a choice
_TYPES = {
    Kind.TEXT: ("string", ""),
    Kind.BOOL: ("boolean", "true or false"),
    Kind.INT: ("integer", "a whole number"),
    Kind.CHOICE: ("string", "one of "),
    Kind.CODE: ("string", "a Python program"),
}
"""The JSON type, and how a prompt describes it."""
_DECORATION = " \t\r\n*_`\"'()[]{}.,:;#!"
_TRUE = frozenset({"true", "yes", "correct", "1"})
_FALSE = frozenset({"false", "no", "incorrect", "wrong", "0"})
_INT = re.compile(r"(?<![\w.])[-+]?\d{1,18}(?![\w]|\.\d)")
_WORDS = re.compile(r"[A-Za-z0-9_]+")
_MARKED = re.compile(
    r"(?:(answer)|solution|option|choice|letter|candidate)\s{0,3}(?:is|:|=|-)?\s{0,3}"
    r"[*_`\"'(\[]{0,4}([A-Za-z0-9]{1,8})\b",
    re.IGNORECASE,
)
_FIRST = re.compile(r"[*_`\"'(\[]{0,4}([A-Za-z0-9]{1,8})[*_`\"')\]]{0,4}\s{0,3}(?:[:.,;)\-]|$)")
_ENGLISH = frozenset({"A", "I"})
"""Labels that are also words: in a sentence they count only if marked as labels."""


@dataclass(frozen=True)
class Field:
    """One thing that an operator asks for.

    `required`: False if the model may leave it out or empty. `choices`: for `Kind.CHOICE`.
    `entry_point`: for `Kind.CODE`, the name that the program must define; empty: any.
    """

    name: str
    kind: Kind = Kind.TEXT
    description: str = ""
    required: bool = True
    choices: tuple[str, ...] = ()
    entry_point: str = ""

    @property
    def fallback(self) -> Any:
        """The value if none could be read: '' for text and code, False for a bool, else None."""
        return {Kind.TEXT: "", Kind.CODE: "", Kind.BOOL: False}.get(self.kind)

    def value_of(self, raw: Any) -> tuple[Any, bool]:
        """Convert a text or a JSON value. Returns the value and whether it had to be repaired.

        Raises:
            Unreadable: there is no value, or it is ambiguous.
        """
        if self.kind is Kind.BOOL:
            return _truth(raw)
        if self.kind is Kind.INT:
            return _number(raw)
        text = _as_text(raw)
        if self.kind is Kind.CHOICE:
            return _choice(text, self.choices)
        if not text and self.required:
            raise Unreadable("is empty")
        if self.kind is Kind.CODE and text:
            try:
                return program_in(text, self.entry_point)
            except ValueError as error:
                raise Unreadable(str(error)) from None
        return text, False


def forms_for(fields: Sequence[Field]) -> tuple[Form, ...]:
    """The forms that these fields can be asked for in."""
    kind = fields[0].kind if len(fields) == 1 else None
    alone = {Kind.TEXT: (Form.TEXT,), Kind.CODE: (Form.CODE,)}
    return (Form.XML, Form.JSON, *(alone.get(kind, ()) if kind else ()))


def schema_of(fields: Sequence[Field]) -> dict[str, Any]:
    """The JSON schema of an object with these fields."""
    properties: dict[str, dict[str, Any]] = {}
    for field in fields:
        schema = properties[field.name] = {"type": _TYPES[field.kind][0]}
        if field.kind is Kind.CHOICE:
            schema["enum"] = list(field.choices)
        if field.description:
            schema["description"] = field.description
    required = [field.name for field in fields]
    closed = {"required": required, "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


def described(fields: Sequence[Field], form: Form) -> str:
    """The description of the answer's form in a prompt; empty if the whole reply is the answer."""
    if form is Form.TEXT:
        return ""
    said = []
    for field in fields:
        # The prompt around the field of a program already says that it is Python.
        what = "" if form is Form.CODE else _TYPES[field.kind][1]
        if field.kind is Kind.CHOICE:
            what += ", ".join(field.choices)
        if field.entry_point:
            what += f"{', ' if what else ''}defines `{field.entry_point}`"
        if field.description:
            what = f"{field.description} ({what})" if what else field.description
        line = {Form.XML: "<{0}>{1}</{0}>", Form.JSON: '"{0}": {1}', Form.CODE: "{1}"}[form]
        said.append(line.format(field.name, what or "the program"))
    return form_text(form.value, {"fields": "\n".join(said)})


def labels(count: int) -> tuple[str, ...]:
    """`count` labels in spreadsheet order: A to Z, AA, AB and so on."""
    letters = [chr(ord("A") + number) for number in range(26)]
    words = (map("".join, itertools.product(letters, repeat=size)) for size in itertools.count(1))
    return tuple(itertools.islice(itertools.chain.from_iterable(words), count))


def _as_text(raw: Any) -> str:
    if isinstance(raw, bool | dict | list):
        return json.dumps(raw, ensure_ascii=False)
    return "" if raw is None else str(raw).strip()


def _truth(raw: Any) -> tuple[bool, bool]:
    text = _as_text(raw).casefold()
    word = text.strip(_DECORATION)
    if word in _TRUE | _FALSE:
        return word in _TRUE, word != text
    words = _WORDS.findall(text[:MAX_SHORT_TEXT])
    found = {word in _TRUE for word in words if word in _TRUE | _FALSE}
    if len(found) == 1 and words[0] in _TRUE | _FALSE:
        return found.pop(), True
    raise Unreadable(f"is neither true nor false: {_shown(text)}")


def _number(raw: Any) -> tuple[int, bool]:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw, False
    text = _as_text(raw)
    found = {int(number) for number in _INT.findall(text)} if len(text) <= MAX_SHORT_TEXT else ()
    if len(found) == 1:
        return next(iter(found)), _INT.fullmatch(text) is None
    raise Unreadable(f"is not one whole number: {_shown(text)}")


def _choice(text: str, choices: tuple[str, ...]) -> tuple[str, bool]:
    if text in choices:
        return text, False
    if len(text) <= MAX_SHORT_TEXT:
        by_word = {choice.casefold(): choice for choice in choices}
        bare = text.strip(_DECORATION).casefold()
        if bare in by_word:
            return by_word[bare], True
        first = _FIRST.match(text)
        named = {first[1]} if first else set()
        for match in _MARKED.finditer(text):
            following = text[match.end() :]
            in_sentence = following.startswith(" ") and following.lstrip()[:1].islower()
            # `I` in 'answer: I would take B' is a word, not a label.
            if not (match[1] and match[2] in _ENGLISH and in_sentence):
                named.add(match[2])
        named &= {*choices}
        words = {word for word in _WORDS.findall(text) if word in choices}
        if not named and not words & _ENGLISH:
            named = words
        if len(named) == 1:
            return named.pop(), True
    raise Unreadable(f"is not one of {', '.join(choices):.80}: {_shown(text)}")


def _shown(text: str) -> str:
    return f"{text!r:.60}" if text else "empty"
