"""Whether two answers are equal by the rule that AFlow publishes for MATH.

The rule (benchmarks/math.py of the public AFlow code): equal texts; else, if both are numbers
(thousands separators removed, a trailing % divides by 100), equal within 1e-3; else both are
read by SymPy's `parse_latex`, or `parse_expr` where that fails, and are equal if their
difference simplifies to 0 or their numerical values lie within 1e-3.

The last part may compute for ever and runs in an `AskedProcess`. It differs in one thing:
`parse_expr` evaluates mathematics only (`expressions.py`).
"""

from __future__ import annotations

import functools
from math import isclose
from typing import Any

from aflow_tune.scoring.asked_process import AskedProcess, serve

TOLERANCE = 1e-3
CPU_SECONDS = 10
"""Processor time for one comparison; the public rule has no limit."""
_CHILD = AskedProcess("aflow_tune.scoring.symbolic", "SymPy", CPU_SECONDS)


@functools.lru_cache(maxsize=4096)
def published_equal(answer: str, truth: str) -> bool:
    """Whether `answer` equals `truth` by the published rule.

    Raises:
        Undecided: the comparison took more than `CPU_SECONDS`, or too much memory.
    """
    if answer == truth:
        return True
    numbers = as_number(answer), as_number(truth)
    if numbers[0] is not None and numbers[1] is not None:
        return isclose(numbers[0], numbers[1], abs_tol=TOLERANCE)
    return bool(_CHILD.ask(answer, truth))


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


def _serve() -> None:
    from sympy import N, simplify
    from sympy.parsing.sympy_parser import parse_expr

    from aflow_tune.scoring.expressions import guard_sympy
    from aflow_tune.scoring.latex import latex_parser

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
    _serve()
