"""Typed fields: what an operator asks a model for, and how a text becomes a value.

A field knows what its values look like and which texts mean one. Where in a reply its text
stands is for `reading.py`; how it is asked for is for `forms.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from aflow_tune.operators.python_code import program_in


class Kind(StrEnum):
    """What a field's value is."""

    TEXT = "text"
    BOOL = "bool"
    INT = "int"
    CHOICE = "choice"
    """One of `Field.choices`."""
    CODE = "code"
    """A Python program."""


class Unreadable(ValueError):
    """A text is no value of the field. The message completes 'the field NAME ...'."""


MAX_SHORT_TEXT = 200
"""Characters of a text in which a truth value, a number or a choice is looked for."""
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
"""Labels that are also words: in a sentence they count only where they are marked as labels."""


@dataclass(frozen=True)
class Field:
    """One thing that an operator asks for.

    `required`: False where the model may leave it out or empty. `choices`: of a choice.
    `entry_point`: name that a program must define; empty for none.
    """

    name: str
    kind: Kind = Kind.TEXT
    description: str = ""
    required: bool = True
    choices: tuple[str, ...] = ()
    entry_point: str = ""

    @property
    def fallback(self) -> Any:
        """The value where none could be read: '' for texts and code, False, else None."""
        if self.kind in (Kind.TEXT, Kind.CODE):
            return ""
        return False if self.kind is Kind.BOOL else None

    def value_of(self, raw: Any) -> tuple[Any, bool]:
        """The value that a text (or a value of JSON) means, and whether it had to be repaired.

        Raises:
            Unreadable: none, or it cannot be told which.
        """
        if self.kind is Kind.BOOL:
            return _truth(raw)
        if self.kind is Kind.INT:
            return _number(raw)
        text = raw.strip() if isinstance(raw, str) else _as_text(raw)
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

    def schema(self) -> dict[str, Any]:
        """Its part of a JSON schema."""
        schema: dict[str, Any] = {"type": _JSON_TYPES[self.kind]}
        if self.kind is Kind.CHOICE:
            schema["enum"] = list(self.choices)
        if self.description:
            schema["description"] = self.description
        return schema


_JSON_TYPES = {
    Kind.TEXT: "string",
    Kind.BOOL: "boolean",
    Kind.INT: "integer",
    Kind.CHOICE: "string",
    Kind.CODE: "string",
}


def schema_of(fields: Sequence[Field]) -> dict[str, Any]:
    """The JSON schema of an object with these fields."""
    return {
        "type": "object",
        "properties": {field.name: field.schema() for field in fields},
        "required": [field.name for field in fields],
        "additionalProperties": False,
    }


def labels(count: int) -> tuple[str, ...]:
    """`count` labels as spreadsheets have them: A to Z, AA, AB and so on."""
    made = []
    for number in range(count):
        label, rest = "", number + 1
        while rest:
            rest, letter = divmod(rest - 1, 26)
            label = chr(ord("A") + letter) + label
        made.append(label)
    return tuple(made)


def _as_text(raw: Any) -> str:
    if raw is None:
        return ""
    if isinstance(raw, bool | dict | list):
        return json.dumps(raw, ensure_ascii=False)
    return str(raw).strip()


def _truth(raw: Any) -> tuple[bool, bool]:
    if isinstance(raw, bool):
        return raw, False
    text = _as_text(raw).casefold()
    word = text.strip(_DECORATION)
    if word in _TRUE or word in _FALSE:
        return word in _TRUE, word != text
    words = _WORDS.findall(text[:MAX_SHORT_TEXT])
    found = {word in _TRUE for word in words if word in _TRUE or word in _FALSE}
    if len(found) == 1 and words[0] in _TRUE | _FALSE:
        return found.pop(), True
    raise Unreadable(f"is neither true nor false: {_shown(text)}")


def _number(raw: Any) -> tuple[int, bool]:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw, False
    text = _as_text(raw)
    found = {int(number) for number in _INT.findall(text[:MAX_SHORT_TEXT])}
    if len(found) == 1 and len(text) <= MAX_SHORT_TEXT:
        return found.pop(), _INT.fullmatch(text) is None
    raise Unreadable(f"is not one whole number: {_shown(text)}")


def _choice(text: str, choices: tuple[str, ...]) -> tuple[str, bool]:
    if text in choices:
        return text, False
    by_word = {choice.casefold(): choice for choice in choices}
    bare = text[: MAX_SHORT_TEXT + 1].strip(_DECORATION).casefold()
    if bare in by_word and len(text) <= MAX_SHORT_TEXT:
        return by_word[bare], True
    if len(text) <= MAX_SHORT_TEXT:
        first = _FIRST.match(text)
        marked = [match[2] for match in _MARKED.finditer(text) if not _goes_on(match, text)]
        named = {word for word in [*marked, first[1] if first else ""] if word in choices}
        words = {word for word in _WORDS.findall(text) if word in choices}
        if not named and not words & _ENGLISH:
            named = words
        if len(named) == 1:
            return named.pop(), True
    shown = ", ".join(choices[:8]) + (f", ... {choices[-1]}" if len(choices) > 8 else "")
    raise Unreadable(f"is not one of {shown}: {_shown(text)}")


def _goes_on(match: re.Match[str], text: str) -> bool:
    """Whether the label after 'answer' is a word of a sentence: 'answer: I would take B'."""
    following = text[match.end() :]
    in_sentence = following.startswith(" ") and following.lstrip()[:1].islower()
    return bool(match[1]) and match[2] in _ENGLISH and in_sentence


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...") if text else "empty"
