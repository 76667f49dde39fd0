"""Whether two mathematical answers are equal, by the strict rule and by the published one.

strict: equal as text without spaces, or by math-verify, value by value of what they consist of.
published (benchmarks/math.py of the public AFlow code): equal texts; or numbers within 1e-3; or
equal by SymPy after `parse_latex`, or `parse_expr` where that fails (`expressions.py`).

An answer such as `9^{9^{9^{9}}}` computes for ever, so each rule asks a process that may be lost.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from math import isclose
from typing import Any

from aflow_tune.scoring.asked_process import AskedProcess, serve

Reading = str | tuple[Any, ...]
"""One value as a text, or a kind and what belongs to it: `mathematics.py`."""
_UNORDERED = ("list", "union")
VERIFY_SECONDS = 3
"""Processor time for one question to math-verify."""
_VERIFY = AskedProcess("aflow_tune.scoring.equality", "math-verify", VERIFY_SECONDS, "strict")


@functools.lru_cache(maxsize=4096)
def equal_answers(answer: Reading, truth: Reading) -> bool:
    """Whether `answer` equals `truth`: as text without spaces, or by math-verify.

    Both are LaTeX without delimiters, or plain text, or what was read of these. What cannot be
    read as mathematics is compared as text. May be called from any thread; a question waits for
    the one before.

    Raises:
        Undecided: the comparison took more than `VERIFY_SECONDS`, or too much memory.
        QuestionFailed: math-verify raised an exception.
    """
    if answer == truth or _letters(answer) == _letters(truth):
        return True
    return bool(_VERIFY.ask(answer, truth))


def kind_of(reading: Reading) -> str:
    """What a reading is; empty for one value."""
    return "" if isinstance(reading, str) else reading[0]


def _letters(text: Reading) -> Reading:
    return "".join(text.split()) if isinstance(text, str) else text


def _serve_strict() -> None:
    from math_verify import LatexExtractionConfig, parse, verify

    reading = LatexExtractionConfig(boxed_match_priority=0)

    @functools.lru_cache(maxsize=64)
    def expression(text: str) -> list[Any]:
        return parse(f"\\boxed{{{text}}}", extraction_config=[reading], parsing_timeout=None)

    def same_value(answer: str, truth: str) -> bool:
        if _letters(answer) == _letters(truth):
            return True
        if ("\\infty" in answer) != ("\\infty" in truth):
            return False  # whether SymPy takes 22 oo - 42 for 0 depends on its order of hashes
        return bool(verify(expression(truth), expression(answer), timeout_seconds=None))

    def same_share(answer: str, truth: str) -> bool:
        """A percent sign may be left out or be counted in: 12% is 12, and is 0.12."""
        bare = [text.strip().removesuffix("\\%").rstrip() for text in (answer, truth)]
        signed = [text.strip() != left for text, left in zip((answer, truth), bare, strict=True)]
        if same_value(*bare):
            return True
        if signed[0] == signed[1]:
            return False
        part, whole = bare if signed[0] else reversed(bare)
        return same_value(f"\\frac{{{part}}}{{100}}", whole)

    def equal(answer: Reading, truth: Reading) -> bool:
        if isinstance(answer, str) and isinstance(truth, str):
            return same_share(answer, truth)
        kinds = kind_of(answer), kind_of(truth)
        if kinds == ("named", "named") and answer[1] != truth[1]:
            sides = [answer[2], truth[2]]
            equations = [f"{one[1]} = {one[2]}" for one in (answer, truth)]
            return all(isinstance(side, str) for side in sides) and same_value(*equations)
        if "named" in kinds:  # a value without a name is that of the name asked for
            return equal(*(one[2] if kind_of(one) == "named" else one for one in (answer, truth)))
        if kinds[0] == "same":
            return all(equal(side, truth) for side in answer[1:])
        if kinds[1] == "same":
            return equal(answer, truth[-1])
        if "assigned" in kinds:
            rows = [
                one[1:] if kind_of(one) in ("assigned", "list", "()") else ()
                for one in (answer, truth)
            ]
            return in_order(*rows)
        if kinds[0] != kinds[1]:
            return False
        if kinds[0] in _UNORDERED:
            return covers(answer, truth) and covers(truth, answer)
        return in_order(answer[1:], truth[1:])

    def in_order(answer: Sequence[Reading], truth: Sequence[Reading]) -> bool:
        return len(answer) == len(truth) and all(map(equal, answer, truth))

    def covers(answer: Reading, truth: Reading) -> bool:
        return all(any(equal(one, other) for other in truth[1:]) for one in answer[1:])

    serve(equal)


TOLERANCE = 1e-3
SYMPY_SECONDS = 10
"""Processor time for one comparison; the public rule has no limit."""
_SYMPY = AskedProcess("aflow_tune.scoring.equality", "SymPy", SYMPY_SECONDS, "published")


@functools.lru_cache(maxsize=4096)
def published_equal(answer: str, truth: str) -> bool:
    """Whether `answer` equals `truth` by the published rule. Raises Undecided: the comparison took
    more than `SYMPY_SECONDS`, or too much memory."""
    if answer == truth:
        return True
    numbers = as_number(answer), as_number(truth)
    if numbers[0] is not None and numbers[1] is not None:
        return isclose(numbers[0], numbers[1], abs_tol=TOLERANCE)
    return bool(_SYMPY.ask(answer, truth))


def as_number(text: str) -> float | None:
    """What Python's `float` reads, thousands separators and a percent sign allowed."""
    text = text.replace(",", "")
    try:
        return float(text)
    except ValueError:
        pass
    if not text.endswith("%"):
        return None
    try:
        return float(text[:-1].removesuffix("\\")) / 100
    except ValueError:
        return None


def _serve_published() -> None:
    from sympy import N, simplify
    from sympy.parsing.sympy_parser import parse_expr

    from aflow_tune.scoring.expressions import guard_sympy, latex_parser

    guard_sympy()
    parsers = (latex_parser(), parse_expr)

    def expression(text: str) -> Any:
        for parse in parsers:
            try:
                return parse(text)
            except Exception:
                continue
        return text

    def equal(answer: str, truth: str) -> bool:
        left, right = expression(answer), expression(truth)
        try:
            if simplify(left - right) == 0:
                return True
        except Exception:
            pass
        try:
            return isclose(N(left), N(right), abs_tol=TOLERANCE)
        except Exception:
            return False

    serve(equal)


if __name__ == "__main__":
    {"strict": _serve_strict, "published": _serve_published}[sys.argv[2]]()
