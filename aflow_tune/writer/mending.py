"""JSON that a model damaged while it wrote Python into it: mended in one pass.

What is mended: trailing and missing commas at a bracket, raw line breaks in texts, texts in
single, triple or typographic quotes, backslashes that JSON does not know, comments, Python's
True, False and None, brackets and texts that were never closed. Quotes inside of a text that
nobody escaped cannot be told apart by a pass over characters; `text_after` finds the value of one
key nevertheless, by where it must end.

Time is linear in the text. What is then still no JSON is left to json_repair
(`aflow_tune.operators.objects`), which gets only the small rest of it.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

_ESCAPES = frozenset('"\\/bfnrt')
_CLOSING = {"{": "}", "[": "]"}
_QUOTES = {'"': '"', "'": "'", "\u201c": "\u201d"}
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_COMMENT = re.compile(r"(?:#|//)[^\n]*|/\*.*?\*/", re.DOTALL)
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
_MEANING = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def mended(text: str) -> Any:
    """The value that a damaged object begins, or None. `text` begins with its brace."""
    try:
        return json.loads(_as_json(text), strict=False)
    except (ValueError, RecursionError):
        return None


def _as_json(text: str) -> str:
    """One object of JSON: the mended text up to the bracket that closes the first one."""
    made: list[str] = []
    opened: list[str] = []
    place = 0
    while place < len(text):
        char = text[place]
        if char in _QUOTES:
            value, place = _text_at(text, place)
            made.append(value)
            continue
        if char in "#/" and (comment := _COMMENT.match(text, place)):
            place = comment.end()
            continue
        if char in "TFN":
            word = next((word for word in _PYTHONS if text.startswith(word, place)), "")
            if word:
                made.append(_PYTHONS[word])
                place += len(word)
                continue
        if char in "{[":
            opened.append(char)
        elif char in "}]":
            if opened and _CLOSING[opened[-1]] == char:
                opened.pop()
            _drop_comma(made)
            made.append(char)
            if not opened:
                return "".join(made)
            place += 1
            continue
        made.append(char)
        place += 1
    _drop_comma(made)
    return "".join(made) + "".join(_CLOSING[bracket] for bracket in reversed(opened))


def _drop_comma(made: list[str]) -> None:
    """Take a comma in front of a closing bracket off again."""
    for number in range(len(made) - 1, -1, -1):
        if made[number] == ",":
            del made[number]
            return
        if not made[number].isspace():
            return


def _text_at(text: str, start: int) -> tuple[str, int]:
    """The text whose opening quote stands at `start`, as JSON, and the place behind it."""
    quote = _QUOTES[text[start]]
    if text.startswith(quote * 3, start):
        stop = text.find(quote * 3, start + 3)
        stop = len(text) if stop < 0 else stop
        return json.dumps(unescaped(text[start + 3 : stop])), min(stop + 3, len(text))
    place = start + 1
    made = ['"']
    while place < len(text) and text[place] != quote:
        char = text[place]
        if char == "\\" and place + 1 < len(text):
            following = text[place + 1]
            known = following in _ESCAPES or (
                following == "u" and _HEX.match(text, place + 2) is not None
            )
            if following in "'\n" and not known:
                made.append(following if following == "'" else "\\\\\n")
            else:
                made.append(char + following if known else f"\\\\{following}")
            place += 2
            continue
        made.append('\\"' if char == '"' else "\\\\" if char == "\\" else char)
        place += 1
    made.append('"')
    return "".join(made), min(place + 1, len(text))


def text_after(text: str, key: str) -> tuple[str, str] | None:
    """The text under a key whose end cannot be told by its quotes, and the rest without it.

    It ends at the last quote in front of a closing brace, of the key `prompts`, or of the end.
    """
    places = rf"[\"'`]?{key}[\"'`]?\s{{0,20}}:\s{{0,20}}([\"'`]{{1,3}})"
    found = list(re.finditer(places, text))
    if not found:
        return None
    begin = found[-1]
    quote = begin[1] if len(begin[1]) != 2 else begin[1][0]
    start = begin.end(1) - (len(begin[1]) - len(quote))
    behind = text[start:]
    quotes = re.escape(quote)
    ends = list(re.finditer(rf"{quotes}(?=\s{{0,50}},\s{{0,50}}[\"']?prompts)", behind))
    ends = ends or list(re.finditer(rf"{quotes}(?=\s{{0,50}}(?:\}}|$))", behind))
    stop = start + ends[-1].start() if ends else len(text)
    rest = f'{text[: begin.start(1)]}""{text[stop + len(quote) :]}'
    return unescaped(text[start:stop]), rest


def unescaped(code: str) -> str:
    """Code as it was meant: with the escapes of JSON read, unless only without that it is Python.

    Code with line breaks of its own may have been written as it is, so that a backslash in it
    is Python's.
    """
    read = _ESCAPE.sub(_meaning, code)
    if "\n" in code and not is_python(read) and is_python(code):
        return code
    return read


def _meaning(match: re.Match[str]) -> str:
    what = match[1]
    if len(what) == 5:
        return chr(int(what[1:], 16))
    if what in _MEANING:
        return _MEANING[what]
    return what if what in "\"'\\/" else match[0]


def is_python(code: str) -> bool:
    """Whether it can be parsed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True
