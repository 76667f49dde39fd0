r"""Scoring answers that are mathematics, MATH's: the published rule and the strict one.

published (benchmarks/math.py of the public AFlow code): the last `\boxed{}` with at most one
level of braces inside, else the last sentence, of answer and reference alike; equal by
`symbolic.published_equal`.

strict: the boxed answers as a set equal those of the reference, by math-verify. No box is 0, as
are boxes that differ where the reference has one, lists, 'a or b', `\pm` and equations where
the reference has none: math-verify would pick a side of `3 = 5` that suits the answer.
"""

from __future__ import annotations

import re

from aflow_tune.math_equality import equal_answers
from aflow_tune.scoring.boxed import boxed_answers, shallow_boxed
from aflow_tune.scoring.symbolic import published_equal
from aflow_tune.scoring.types import RIGHT, CannotScore, Score, wrong

MAX_ANSWER_CHARACTERS = 400
"""What is longer is no final answer."""
MAX_BOXES = 20
"""More boxes that differ as texts are several answers, whatever they are worth."""
_SENTENCE_END = re.compile(r"(?<!\d)[.!?]\s+")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|,\\!|\\,|\s)(?=\d{3}(?!\d))")
_THIN = re.compile(r"(?<=\d)\\[,!](?=\d{3}(?!\d))")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"\b(?:or|either)\b|\\(?:lor|vee)\b|[|]{1,2}(?=\s*[\d\\])", re.IGNORECASE)
_RELATION = re.compile(
    r"=|[<>≤≥≈≠]|\\(?:n?eq(?:uiv)?|approx|sim(?:eq)?|cong|leq?|geq?|ne|lt|gt|in|to|iff)(?![a-zA-Z])"
    r"|\\(?:Right|right|Long)\w*arrow"
)
_NAMES_ANSWER = re.compile(
    r"(?:[a-zA-Z\\][\w\\{}'()]*|\([a-zA-Z\s,\\]+\))\s*(?:=|\\in(?![a-zA-Z]))"
)
# A blank or a space of LaTeX between numbers; but 3 1/2 and 3 \frac12 are one number.
_SIDE_BY_SIDE = re.compile(r"\d(?:\s|\\[;,:! ]|\\q?quad)+-?\d+(?!\s*/|[\d.]*\s*/)")
_BASE = re.compile(r"(?<=\d)_\{?\s*(\w+)")
_BETWEEN_GROUPS = re.compile(
    r"(?:[\s,;]|\\cup|\\cap|\\setminus|\\text|\\(?:left|right|[bB]igg?)|\\[,;!])*"
)


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
    expected = _distinct(boxed_answers(solution)) or [solution.strip()]
    if not expected[0]:
        raise CannotScore("an empty reference")
    given = boxed_answers(answer)
    if not given:
        return wrong("no boxed answer")
    if max(map(len, given)) > MAX_ANSWER_CHARACTERS:
        return wrong("too long for a final answer")
    if len(set(given)) > MAX_BOXES:
        return wrong("several boxed answers that differ")
    given = _distinct([_THIN.sub("", box).strip().rstrip(".").rstrip() for box in given])
    joined, truth = ", ".join(given), ", ".join(expected)
    if len(expected) == 1:
        if len(given) > 1:
            return wrong("several boxed answers that differ")
        if open_choice := _open_choice(given[0], truth):
            return wrong(open_choice)
    if equal_answers(joined, truth):
        return RIGHT
    return wrong(f"{_short(joined)} is not {_short(truth)}")


def _distinct(boxes: list[str]) -> list[str]:
    """The boxes without those that are equal to one before."""
    kept: list[str] = []
    for box in boxes:
        if not any(equal_answers(box, other) for other in kept):
            kept.append(box)
    return kept


def _open_choice(answer: str, truth: str) -> str:
    """In which way the answer leaves open what the reference does not; empty if it does not."""
    if _entries(answer) > 1 and _entries(truth) == 1:
        return "a list of candidates"
    for pattern, reason in ((_CHOICE, "a choice of candidates"), (r"\\[pm][mp]\b", "two signs")):
        if re.search(pattern, _TEXT.sub(r" \1 ", answer)) and not re.search(
            pattern, _TEXT.sub(r" \1 ", truth)
        ):
            return reason
    if _SIDE_BY_SIDE.search(_THOUSANDS.sub("", answer)) and not _SIDE_BY_SIDE.search(truth):
        return "numbers side by side"
    bases = _BASE.findall(answer)
    if bases and bases != _BASE.findall(truth):
        return "another number base"
    if _is_brackets(truth) and "," in truth and not _is_brackets(answer):
        return "more or other than the brackets asked for"
    relations = len(_RELATION.findall(answer))
    named = relations == 1 and _NAMES_ANSWER.match(answer.strip())
    if relations and not named and not _RELATION.search(truth):
        return "a relation where a value is asked for"
    return ""


def _is_brackets(text: str) -> bool:
    """Whether the text is one or more bracketed groups, named at most, and nothing else."""
    depth, outside = 0, ""
    for character in _NAMES_ANSWER.sub("", text.strip(), count=1):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth <= 0:
            outside += character
    return _BETWEEN_GROUPS.fullmatch(outside.replace("\\\\", "")) is not None


def _entries(text: str) -> int:
    """How many entries a list without brackets has; 1 for what is no list."""
    depth = 0
    count = 1
    for character in _THOUSANDS.sub("", _TEXT.sub(r" \1 ", text)):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character in ",;" and depth <= 0:
            count += 1
    return count


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
