"""The answers file of `--answers`: what a good and a bad policy would say, a JSON line an item.

    {"item": 0, "good": "<answer>13</answer>", "bad": "<answer>7</answer>"}
    {"item": "What is 5?", "good": ["a draft", "the final answer"], "bad": "No idea."}
    {"item": "*", "good": {"first_sum": "<answer>{partial}</answer>", "second_sum": "{answer}"}}

`item` is the number of a row of the training data from 0, or a text that one of its fields has
(an id, the question), or "*" for every row without a line of its own. A line without `item` stands
for the row of its number among such lines. At least one of `good` and `bad` is there; what is left
out is said by default (`script.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aflow_tune.dry_run.script import ANY, BAD, GOOD, TRUTH_FIELDS, Answers, Script
from aflow_tune.errors import BadInput, Fault

_KEYS = ("item", GOOD, BAD)
_SHOWN = 20
_FORM = '{"item": 0, "good": "the right answer", "bad": "a wrong one"}'


def read_answers(
    path: Path,
    *,
    benchmark: str | None = None,
    truth_fields: tuple[str, ...] | None = None,
    numbered: bool = True,
) -> Script:
    """The script of an answers file.

    Args:
        benchmark, truth_fields: as in `Script`; None for its defaults.
        numbered: whether a number names one row only: not with several task sets.

    Raises:
        BadInput: with every faulty line.
    """
    by_number: dict[int, Answers] = {}
    by_text: dict[str, Answers] = {}
    anywhere: Answers | None = None
    faults: list[Fault] = []
    lines: dict[int | str, str] = {}
    unnamed = 0
    for place, entry in _entries(path):
        found = [entry] if isinstance(entry, Fault) else _entry_faults(place, entry)
        if found:
            faults += found
            continue
        assert isinstance(entry, dict)
        item = entry.get("item")
        if item is None:
            item, unnamed = unnamed, unnamed + 1
        if isinstance(item, int) and not numbered:
            faults.append(_ambiguous(place))
        if item in lines:
            cure = "keep one line for an item"
            faults.append(Fault(place, f"another item than {lines[item]}", repr(item), cure))
            continue
        lines[item] = f"that of line {place.rpartition(':')[2]}"
        answers = Answers(entry.get(GOOD), entry.get(BAD))
        if item == ANY:
            anywhere = answers
        elif isinstance(item, int):
            by_number[item] = answers
        else:
            by_text[item] = answers
    if not lines and not faults:
        faults.append(Fault(str(path), "at least one line", "none", f"write {_FORM}"))
    if faults:
        more = f" {len(faults) - _SHOWN} more faults are not shown." if len(faults) > _SHOWN else ""
        raise BadInput(f"The answers file cannot be used.{more}", faults[:_SHOWN])
    fields = TRUTH_FIELDS if truth_fields is None else truth_fields
    return Script(by_number, by_text, anywhere, benchmark, fields, str(path))


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any] | Fault]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        found = getattr(error, "strerror", None) or str(error)
        fault = Fault(str(path), "a readable file of JSON lines in UTF-8", found, "check the path")
        raise BadInput("The answers file cannot be read.", [fault]) from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield place, Fault(place, "one JSON object in a line", str(error), f"write {_FORM}")
            continue
        if isinstance(entry, dict):
            yield place, entry
        else:
            found = f"a {type(entry).__name__}"
            yield place, Fault(place, "one JSON object in a line", found, f"write {_FORM}")


def _entry_faults(place: str, entry: Mapping[str, Any]) -> list[Fault]:
    faults = []
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        expected = "the keys " + ", ".join(_KEYS)
        faults.append(Fault(place, expected, ", ".join(unknown), f"write {_FORM}"))
    item = entry.get("item")
    sound = item is None or (isinstance(item, str) and item != "") or type(item) is int
    if not sound or (type(item) is int and item < 0):
        expected = f'a row\'s number from 0, a text of one of its fields, or "{ANY}"'
        faults.append(Fault(f"{place}: item", expected, repr(item), f"write {_FORM}"))
    if not any(entry.get(key) is not None for key in (GOOD, BAD)):
        faults.append(Fault(place, "`good` or `bad`", "neither", f"write {_FORM}"))
    for key in (GOOD, BAD):
        value = entry.get(key)
        if value is not None and not _is_saying(value):
            expected = "a text, a list of texts (call by call), or either of them by caller"
            cure = f'"{key}": ["first call", "second call"]'
            faults.append(Fault(f"{place}: {key}", expected, f"{value!r:.80}", cure))
    return faults


def _is_saying(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(_is_texts(inner) for inner in value.values())
    return _is_texts(value)


def _is_texts(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(text, str) for text in value)
    return isinstance(value, str)


def _ambiguous(place: str) -> Fault:
    expected = "a text of one of the row's fields: there are several training task sets"
    cure = '{"item": "the question or an id", ...}'
    return Fault(f"{place}: item", expected, "a number, or no item", cure)
