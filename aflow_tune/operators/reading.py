"""From a reply to the values of fields, in the form that was asked for or in any other.

    text    the whole reply is the one field
    xml     an element a field (rules: `elements.py`)
    json    one object; of several the last with all fields (`objects.py`)
    code    the one field is a Python program (rules: `python_code.py`)

The form that was asked for is tried first, then repairs of it, then the other forms, then lines
like `answer: 42`, then, for a single truth value, number or choice, the whole reply. The first
that gives every required field wins. A field that cannot be read gets no value, never an empty
one. Nothing here takes more than linear time, whatever the reply holds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from aflow_tune.operators.elements import elements, unescaped
from aflow_tune.operators.fields import MAX_SHORT_TEXT, Field, Kind, Unreadable
from aflow_tune.operators.objects import objects_in, repaired_object, whole_object
from aflow_tune.operators.python_code import names_entities, program_in

MAX_REPLY_CHARACTERS = 4_000_000
"""A longer reply is not read."""
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


class Form(StrEnum):
    """How fields are asked for."""

    TEXT = "text"
    XML = "xml"
    JSON = "json"
    CODE = "code"


@dataclass(frozen=True)
class Reading:
    """What could be read: values by field, and what is wrong with the required ones that lack."""

    values: Mapping[str, Any]
    faults: tuple[str, ...] = ()
    repaired: bool = False


def forms_for(fields: Sequence[Field]) -> tuple[Form, ...]:
    """The forms that these fields can be asked for in."""
    forms = [Form.XML, Form.JSON]
    if len(fields) == 1 and fields[0].kind is Kind.TEXT:
        forms.append(Form.TEXT)
    if len(fields) == 1 and fields[0].kind is Kind.CODE:
        forms.append(Form.CODE)
    return tuple(forms)


def read_reply(reply: str, fields: Sequence[Field], form: Form) -> Reading:
    """Read `fields` from a reply that was asked for in `form`."""
    if len(reply) > MAX_REPLY_CHARACTERS:
        return Reading({}, (f"the reply is longer than {MAX_REPLY_CHARACTERS:,} characters",))
    text, cleaned = _clean(reply)
    if not text.strip():
        return Reading({}, ("the reply is empty",))
    best: Reading | None = None
    for number, find in enumerate(_WAYS[form]):
        found = find(text, fields)
        if found is None:
            continue
        reading = _values(found, fields, repaired=cleaned or number > 0)
        if not reading.faults:
            return reading
        if best is None or len(reading.values) > len(best.values):
            best = reading
    return best or Reading({}, tuple(f"there is no {field.name}" for field in _required(fields)))


def _clean(reply: str) -> tuple[str, bool]:
    """The reply without what no text can hold: lone surrogates, null characters."""
    text = _NO_TEXT.sub("\ufffd", reply)
    return text, text != reply


def _required(fields: Sequence[Field]) -> list[Field]:
    return [field for field in fields if field.required]


Raw = tuple[Any, bool]
"""A value before it is converted, and whether finding it took a repair."""
Found = Mapping[str, Raw]


def _values(found: Found, fields: Sequence[Field], repaired: bool) -> Reading:
    values: dict[str, Any] = {}
    faults = []
    for field in fields:
        raw, mended = found.get(field.name, (None, False))
        if raw is None:
            if field.required:
                faults.append(f"there is no {field.name}")
            continue
        try:
            values[field.name], converted = field.value_of(raw)
        except Unreadable as error:
            if field.required:
                faults.append(f"{field.name} {error}")
            continue
        repaired |= mended or converted
    return Reading(values, tuple(faults), repaired)


def _whole_text(text: str, fields: Sequence[Field]) -> Found | None:
    return {fields[0].name: (text.strip(), False)}


def _code(text: str, fields: Sequence[Field]) -> Found | None:
    required = _required(fields)
    if len(required) != 1 or required[0].kind is not Kind.CODE:
        return None
    try:
        code, mended = program_in(text, required[0].entry_point)
    except ValueError:
        return {required[0].name: (text, True)}  # the field says what is wrong with it
    return {required[0].name: (code, mended or code.strip() == text.strip())}


def _xml(text: str, fields: Sequence[Field]) -> Found | None:
    return _from_elements(text, fields, through_fences=False)


def _xml_in_fences(text: str, fields: Sequence[Field]) -> Found | None:
    return _from_elements(text, fields, through_fences=True)


def _from_elements(text: str, fields: Sequence[Field], through_fences: bool) -> Found | None:
    found = elements(text, [field.name for field in fields], through_fences)
    raws: dict[str, Raw] = {}
    for field in fields:
        element = found.get(field.name)
        if element is None:
            continue
        content = element.content
        if field.kind is not Kind.CODE or _is_escaped(content, field):
            content = unescaped(content)
        raws[field.name] = (content, element.repaired)
    return raws or None


def _is_escaped(text: str, field: Field) -> bool:
    """Whether a program is one only without XML's entities; `a &lt; b` is valid Python, too."""
    try:
        return names_entities(program_in(text, field.entry_point)[0])
    except ValueError:
        return True


def _json(text: str, fields: Sequence[Field]) -> Found | None:
    return _object(whole_object(text), fields)


def _json_within(text: str, fields: Sequence[Field]) -> Found | None:
    candidates = [item for value in objects_in(text) if (item := _object(value, fields))]
    needed = {field.name for field in _required(fields)}
    full = [item for item in candidates if needed <= set(item)]
    best = full or candidates
    return best[-1] if best else None


def _json_repaired(text: str, fields: Sequence[Field]) -> Found | None:
    value = repaired_object(text, [field.name for field in fields])
    if isinstance(value, list):  # text after the object makes it a list
        value = next((item for item in reversed(value) if _object(item, fields)), None)
    return _object(value, fields)


def _object(value: Any, fields: Sequence[Field]) -> Found | None:
    """The fields in an object, or in the one object in it."""
    if not isinstance(value, dict):
        return None
    by_name = {str(key).casefold(): (key, item) for key, item in value.items()}
    found: dict[str, Raw] = {}
    for field in fields:
        if field.name.casefold() in by_name:
            key, item = by_name[field.name.casefold()]
            found[field.name] = (item, key != field.name)
    if not found and len(value) == 1:
        inner = _object(next(iter(value.values())), fields)
        found = {name: (item, True) for name, (item, _) in (inner or {}).items()}
    return found or None


def _labelled(text: str, fields: Sequence[Field]) -> Found | None:
    """Lines such as `**Answer:** 42`; what follows belongs to it up to the next such line."""
    known = {field.name.replace("_", " ").casefold(): field.name for field in fields}
    words = "|".join(re.escape(word).replace(r"\ ", "[ _]") for word in known)
    label = re.compile(
        rf"^[ \t>#*_-]{{0,10}}({words})[ \t]{{0,3}}[*_]{{0,3}}[ \t]{{0,3}}[:=][*_]{{0,3}}",
        re.IGNORECASE | re.MULTILINE,
    )
    marks: list[re.Match[str] | None] = [*label.finditer(text), None]
    found: dict[str, Raw] = {}
    for mark, following in itertools.pairwise(marks):
        assert mark is not None  # only the last is None, and no pair begins with it
        content = text[mark.end() : following.start() if following else len(text)].strip()
        if content:
            found[known[mark[1].replace("_", " ").casefold()]] = (content, True)
    return found or None


def _nothing_else(text: str, fields: Sequence[Field]) -> Found | None:
    """The reply is just the value, where such a value cannot be mistaken."""
    required = _required(fields)
    short = len(required) == 1 and len(text.strip()) <= MAX_SHORT_TEXT
    if short and required[0].kind in (Kind.BOOL, Kind.INT, Kind.CHOICE):
        return {required[0].name: (text.strip(), True)}
    return None


_Way = Callable[[str, Sequence[Field]], Found | None]
_FROM_XML: tuple[_Way, ...] = (_xml, _xml_in_fences)
_FROM_JSON: tuple[_Way, ...] = (_json, _json_within, _json_repaired)
_FROM_REST: tuple[_Way, ...] = (_labelled, _nothing_else)
_WAYS: Mapping[Form, tuple[_Way, ...]] = {
    Form.TEXT: (_whole_text,),
    Form.XML: (*_FROM_XML, *_FROM_JSON, _code, *_FROM_REST),
    Form.JSON: (*_FROM_JSON, *_FROM_XML, _code, *_FROM_REST),
    Form.CODE: (_code, *_FROM_XML, *_FROM_JSON),
}
