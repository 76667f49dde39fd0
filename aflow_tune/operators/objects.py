"""JSON objects in a reply: the reply itself, objects within it, one that has to be repaired.

The repair is json_repair's. It takes quadratic time in its quotes and brackets, so it gets only
what an object of a few fields can need; measured over hostile texts within these limits it took
at most 0.4 s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from aflow_tune.operators.python_code import fenced_blocks

MAX_REPAIRED = 8_000
"""Characters of a faulty object that is repaired."""
MAX_REPAIRED_BRACKETS = 20
MAX_REPAIRED_QUOTES = 300
MAX_PLACES = 50
"""Opening braces at which an object is looked for: half from each end of the reply."""
_QUOTES = "\"'`\u201c\u201d"


def whole_object(text: str) -> Any:
    """The reply as JSON, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def objects_in(text: str) -> Iterator[Any]:
    """Valid objects in the reply, in order, those inside of others left out."""
    places = [match.start() for match in re.finditer(r"\{", text)]
    if len(places) > MAX_PLACES:
        places = [*places[: MAX_PLACES // 2], *places[-MAX_PLACES // 2 :]]
    decoder, read_to = json.JSONDecoder(strict=False), 0
    for place in places:
        if place < read_to:
            continue
        try:
            value, read_to = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        yield value


def repaired_object(text: str, names: Sequence[str]) -> Any:
    """What json_repair makes of the last fenced object, or of all from the first one on.

    An object begins with a brace and one of `names`: other braces may be anything.
    """
    begin = re.compile(
        rf"\{{\s{{0,20}}[{_QUOTES}]?(?:{'|'.join(map(re.escape, names))})[{_QUOTES}]?\s{{0,5}}:",
        re.IGNORECASE,
    )
    fenced = [block.code for block in fenced_blocks(text) if begin.search(block.code)]
    text = fenced[-1] if fenced else text
    start = begin.search(text)
    faulty = text[start.start() : start.start() + MAX_REPAIRED + 1] if start else ""
    brackets = sum(map(faulty.count, "{["))
    quotes = sum(map(faulty.count, _QUOTES))
    too_much = brackets > MAX_REPAIRED_BRACKETS or quotes > MAX_REPAIRED_QUOTES
    if not faulty or len(faulty) > MAX_REPAIRED or too_much:
        return None
    from json_repair import repair_json

    try:
        return repair_json(faulty, return_objects=True, skip_json_loads=True)
    except Exception:  # its own limits, such as on nesting
        return None
