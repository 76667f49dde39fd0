r"""Scores answers that are one number (GSM8K), and finds the `\boxed{...}` of an answer.

published (benchmarks/gsm8k.py of the public AFlow code): the last number of the text, thousands
separators removed, within 1e-6 of the reference's. strict: docs/scoring.md lists what it refuses.
"""

from __future__ import annotations

import re

from aflow_tune.scoring.types import RIGHT, CannotScore, Score, wrong

TOLERANCE = 1e-6
_PUBLISHED = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?")
# A minus after a word, a number or a bracket is a difference or a range, not a sign.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
)
# Bounded repetitions: no text can make the search backtrack for long.
_OPENING = r"[\s:=*_$\\({\[]{0,40}(?P<number>" + _NUMBER.pattern + ")"
_MARKED = re.compile("####" + _OPENING)
_DECLARED = re.compile(
    r"\banswer\b(?:\s+(?:is|are|was|equals|would\s+be|should\s+be)\b|\s{0,40}[*_]{0,8}[:=]){1,8}"
    + _OPENING,
    re.IGNORECASE,
)
_DENIED = re.compile(r"\b(?:not|never|isn't|cannot\s+be)[^\w\n#]+$", re.IGNORECASE)
_DOUBT = re.compile(
    r"\b(?:or|either|maybe|perhaps|possibly|alternatively|not\s+sure|unsure|"
    r"(?:could|might|may|can)\s+(?:also\s+)?be|one\s+of|guess)\b",
    re.IGNORECASE,
)
# Between the entries of a list of candidates; an operator or an = makes it a calculation.
_BETWEEN_ENTRIES = re.compile(
    r"[\s,;|/&*•_$()\[\]{}'\"-]{0,200}(?:\b(?:and|or)\b)?[\s*$\d.):-]{0,200}"
)
_SENTENCE_END = re.compile(r"(?<=[^\d\s])[.!?](?:\s+|$)|(?<=\d)[.!?](?:\s+|$)|\n\s*\n")
_SEPARATOR = re.compile(r"[,;|/]|\b(?:and|or)\b")


def last_number(text: str) -> float | None:
    """The last number in a text, thousands separators removed; None if there is none."""
    found = _NUMBER.findall(text)
    return _value(found[-1]) if found else None


def published_number(text: str) -> float | None:
    found = _PUBLISHED.findall(text)
    return _value(found[-1]) if found else None


def score_published(answer: str, reference: str) -> Score:
    """1 if the last numbers are equal, else 0. Raises CannotScore: the reference has none."""
    expected = published_number(reference)
    if expected is None:
        raise CannotScore(f"a reference without a number: {reference[-200:]!r}")
    return _compare(published_number(answer), expected)


def score_strict(answer: str, reference: str) -> Score:
    """1 if the one number that the answer settles on is the reference's, else 0. Raises
    CannotScore: the reference has no number (after its `####`, if it has one)."""
    expected = last_number(reference.rpartition("####")[2])
    if expected is None:
        raise CannotScore(f"a reference without a number: {reference[-200:]!r}")
    # LaTeX writes thousands as 1{,}000 or 1,\!000.
    plain = answer.replace("{,}", ",").replace("\\!", "").replace("\N{MINUS SIGN}", "-")
    boxes = boxed_answers(plain)
    given = last_number(boxes[-1] if boxes else plain)
    if given is not None and (doubt := _open_candidates(plain, boxes)):
        return wrong(doubt)
    return _compare(given, expected)


def _open_candidates(text: str, boxes: list[str]) -> str:
    """Why the text does not settle on one number; empty if it does."""
    declared = _declared(text)
    if boxes:
        settled = {_value(number) for box in boxes for number in _NUMBER.findall(box)}
        if len(settled) > 1:
            return "several boxed answers that differ"
        if declared - settled:
            return "an answer in words differs from the boxed one"
        return ""
    if len(declared) > 1:
        return "several declared answers that differ"
    sentences = [part for part in _SENTENCE_END.split(text) if _NUMBER.search(part)]
    final = sentences[-1]
    last = list(_NUMBER.finditer(final))[-1]
    if _DENIED.search(final[: last.start()]):
        return "the last number is denied"
    if _DOUBT.search(final) and "####" not in final:
        doubted = " ".join(part for part in sentences if _DOUBT.search(part))
        if len({_value(number) for number in _NUMBER.findall(doubted)}) > 1:
            return "several candidates in doubt"
    # Numbers at the end, not all equal, with only separators between them, are a list: from two
    # on if a comma, a slash or a word separates them, else from three on.
    numbers = list(_NUMBER.finditer(text))
    entries, separated = [numbers[-1]], False
    for number in reversed(numbers[:-1]):
        between = text[number.end() : entries[-1].start()]
        if not between or not _BETWEEN_ENTRIES.fullmatch(between):
            break
        separated |= bool(_SEPARATOR.search(between))
        entries.append(number)
    listed = len(entries) >= (2 if separated else 3)
    listed = listed and len({_value(entry.group()) for entry in entries}) > 1
    return "a list of candidates" if listed else ""


def _declared(text: str) -> set[float]:
    """The numbers that the text declares as its answer: after `####` if present, else in words."""
    marked = {_value(match["number"]) for match in _MARKED.finditer(text)}
    if marked:
        return marked
    return {
        _value(match["number"])
        for match in _DECLARED.finditer(text)
        # 'the answer is 5 * 3 = 15' declares 15.
        if "=" not in _SENTENCE_END.split(text[match.end() : match.end() + 500], maxsplit=1)[0]
    }


def _compare(given: float | None, expected: float) -> Score:
    if given is None:
        return wrong("no number in the answer")
    if abs(given - expected) <= TOLERANCE:
        return RIGHT
    return wrong(f"{given:g} is not {expected:g}")


def _value(number: str) -> float:
    return float(number.replace(",", ""))


# Boxes

# At most one level of braces inside, as in the public AFlow code.
_SHALLOW = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\boxed 7`) with balanced braces, or None."""
    _, found, rest = text.rpartition("\\boxed")
    return _content(rest) if found else None


def boxed_if_asked(value: str, task: str) -> str:
    r"""The value in a `\boxed{}` if the task asks for one and the value has none."""
    asked = "\\boxed" in task and "\\boxed" not in value
    return f"\\boxed{{{value}}}" if asked else value


def boxed_answers(text: str) -> list[str]:
    r"""The contents of all boxes in order; an unclosed box, or one around others, is left out."""
    contents = [_content(rest) for rest in text.split("\\boxed")[1:]]
    return [content for content in contents if content is not None]


def shallow_boxed(text: str) -> list[str]:
    """All boxes with at most one level of braces inside, which is what published rules see."""
    return _SHALLOW.findall(text)


def _content(rest: str) -> str | None:
    if not rest.startswith("{"):
        words = rest.split("$")[0].split()
        return words[0] if words else None
    depth = 0
    for position, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:position]
    return None
