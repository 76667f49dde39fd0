r"""Scoring answers that are mathematics, MATH's: the published rule and the strict one.

published (benchmarks/math.py of the public AFlow code): the last `\boxed{}` with at most one
level of braces inside, else the last sentence, of answer and reference alike; equal by
`symbolic.published_equal`.

strict: every boxed answer equals the reference, in whichever spelling (`math_spelling.py`) and as
whatever it consists of (`math_reading.py`); values by math-verify. No box is 0, as are lists,
'a or b', `\pm` and relations where the reference has none: math-verify would pick a side of
`3 = 5` that suits the answer.
"""

from __future__ import annotations

import re

from aflow_tune.scoring.boxed import boxed_answers, shallow_boxed
from aflow_tune.scoring.math_equality import Reading, equal_answers, kind_of
from aflow_tune.scoring.math_reading import read, value_of
from aflow_tune.scoring.math_spelling import plain_spelling
from aflow_tune.scoring.symbolic import published_equal
from aflow_tune.scoring.types import RIGHT, CannotScore, Score, wrong

MAX_ANSWER_CHARACTERS = 400
"""What is longer is no final answer."""
MAX_BOXES = 20
"""More boxes that differ as texts are several answers, whatever they are worth."""
_SENTENCE_END = re.compile(r"(?<!\d)[.!?]\s+")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_OPEN = (
    (
        re.compile(r"\b(?:or|either)\b|\\(?:lor|vee)\b|[|]{1,2}(?=\s*[\d\\])", re.IGNORECASE),
        "a choice of candidates",
    ),
    (re.compile(r"\\(?:pm|mp)(?![a-zA-Z])"), "two signs"),
)
_RELATION = re.compile(
    r"=|[<>≤≥≈≠]|\\(?:n?eq(?:uiv)?|approx|sim(?:eq)?|cong|leq?|geq?|ne|lt|gt|in|to|iff)(?![a-zA-Z])"
    r"|\\(?:Right|right|Long)\w*arrow"
)
# But 3 1/2 and 3 \frac12 are one number.
_SIDE_BY_SIDE = re.compile(r"\d\s+-?\d+(?!\s*/|[\d.]*\s*/)")
_NO_VALUE = "a relation where a value is asked for"
_BASE = re.compile(r"(?<=\d)_\{?\s*(\w+)")


def final_answer(text: str) -> str:
    """What the published rule takes for the answer: the last box, else the last sentence."""
    boxes = shallow_boxed(text)
    if boxes:
        return boxes[-1].strip()
    sentences = [part.strip() for part in _SENTENCE_END.split(text) if part.strip()]
    return sentences[-1] if sentences else ""


def score_published(answer: str, solution: str) -> Score:
    """1 if the final answers are equal by the published rule.

    Raises:
        Undecided: the comparison took too long.
    """
    given, expected = final_answer(answer), final_answer(solution)
    if published_equal(given, expected):
        return RIGHT
    return wrong(f"{_short(given)} is not {_short(expected)}")


def score_strict(answer: str, solution: str) -> Score:
    """1 if the boxed answers equal those of the reference, which may be a bare answer.

    Raises:
        CannotScore: the reference is empty.
        Undecided: the comparison took too long.
    """
    expected = _distinct([plain_spelling(box) for box in boxed_answers(solution) or [solution]])
    if not expected[0]:
        raise CannotScore("an empty reference")
    boxes = boxed_answers(answer)
    if not boxes:
        return wrong("no boxed answer")
    if max(map(len, boxes)) > MAX_ANSWER_CHARACTERS:
        return wrong("too long for a final answer")
    boxes = list(dict.fromkeys(boxes))
    if len(boxes) > MAX_BOXES:
        return wrong("several boxed answers that differ")
    given = list(dict.fromkeys(map(plain_spelling, boxes)))
    if len(expected) > 1:
        given = [", ".join(given)]
    for one in given:
        if fault := _fault(one, ", ".join(expected)):
            return wrong(fault if len(given) == 1 else "several boxed answers that differ")
    return RIGHT


def _distinct(boxes: list[str]) -> list[str]:
    """The reference's boxes without those that are equal to one before."""
    kept: list[str] = []
    for box in boxes:
        if not any(equal_answers(box, other) for other in kept):
            kept.append(box)
    return kept


def _fault(answer: str, truth: str) -> str:
    """Why the answer is not the one that the reference gives; empty where it is."""
    given, expected = read(answer), read(truth)
    if open_choice := _open_choice(answer, given, truth, expected):
        return open_choice
    if equal_answers(given, expected):
        return ""
    if kind_of(value_of(given)) == "same":
        return _NO_VALUE
    return f"{_short(answer)} is not {_short(truth)}"


def _open_choice(answer: str, given: Reading, truth: str, expected: Reading) -> str:
    """In which way the answer leaves open what the reference does not; empty if it does not."""
    answer, truth = (_TEXT.sub(r" \1 ", text) for text in (answer, truth))
    if not _is_several(expected):
        for pattern, reason in _OPEN:
            if pattern.search(answer) and not pattern.search(truth):
                return reason
        named = (kind_of(given), kind_of(expected)) == ("assigned", "()")  # x=1, y=2 for (1,2)
        if _is_several(given) and not named:
            return "a list of candidates"
    if _SIDE_BY_SIDE.search(answer) and not _SIDE_BY_SIDE.search(truth):
        return "numbers side by side"
    bases = _BASE.findall(answer)
    if bases and bases != _BASE.findall(truth):
        return "another number base"
    if _RELATION.search(_values(given)) and not _RELATION.search(_values(expected)):
        return _NO_VALUE
    return ""


def _is_several(reading: Reading) -> bool:
    """Whether it holds values of which each could be an answer."""
    return kind_of(value_of(reading)) in ("list", "union", "assigned")


def _values(reading: Reading) -> str:
    """The values of which a reading consists, without the names of unknowns."""
    if isinstance(reading, str):
        return reading
    return " ; ".join(map(_values, reading[2 if reading[0] == "named" else 1 :]))


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
