"""Whether two mathematical answers are equal, decided by math-verify in a process of its own.

An answer such as `9^{9^{9^{9}}}` computes for ever, so the question goes to an `AskedProcess`.

Left to others: finding the answer in a text (the scoring room), and what an undecided answer
costs.
"""

from __future__ import annotations

import functools
from typing import Any

from aflow_tune.asked_process import AskedProcess, Undecided, serve

__all__ = ["Undecided", "equal_answers"]

CPU_SECONDS = 3
"""Processor time for one question."""
_CHILD = AskedProcess("aflow_tune.math_equality", "math-verify", CPU_SECONDS)


@functools.lru_cache(maxsize=4096)
def equal_answers(answer: str, truth: str) -> bool:
    """Whether `answer` equals `truth`: as text without spaces, or by math-verify.

    Both are LaTeX without delimiters, or plain text. What cannot be read as mathematics is
    compared as text. May be called from any thread; a question waits for the one before.

    Raises:
        Undecided: the comparison took more than `CPU_SECONDS`, or too much memory.
        QuestionFailed: math-verify raised an exception.
    """
    if "".join(answer.split()) == "".join(truth.split()):
        return True
    return bool(_CHILD.ask(answer, truth))


def _serve() -> None:
    from math_verify import LatexExtractionConfig, parse, verify

    reading = LatexExtractionConfig(boxed_match_priority=0)

    def expression(text: str) -> list[Any]:
        return parse(f"\\boxed{{{text}}}", extraction_config=[reading], parsing_timeout=None)

    def equal(answer: str, truth: str) -> bool:
        return bool(verify(expression(truth), expression(answer), timeout_seconds=None))

    serve(equal)


if __name__ == "__main__":
    _serve()
