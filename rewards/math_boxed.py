"""Reward for answers in `\\boxed{...}`: symbolic equality by math-verify.

math-verify limits its own time with signals, which exist in a process's main thread only, and
workflow functions run in threads of their own. Its limits are therefore switched off here;
what bounds the time is the length of what it is given, and the run's own time-out behind it.
"""

from __future__ import annotations

from math_verify import LatexExtractionConfig, parse, verify

MAX_ANSWER_CHARACTERS = 400


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` with balanced braces, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin + 1 : position]
    return None


def is_correct(answer: str, truth: str) -> bool:
    """Whether two answers are equal as text without spaces, or symbolically."""
    if answer.replace(" ", "") == truth.replace(" ", ""):
        return True
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    return bool(verify(_expression(truth), _expression(answer), timeout_seconds=None))


def math_boxed_reward(response: str, truth: str) -> float:
    """1 if the last boxed answer of `response` equals `truth`, else 0.

    `truth` may be a whole solution that ends in a boxed answer.
    """
    answer = boxed(response)
    if answer is None:
        return 0.0
    return float(is_correct(answer, boxed(truth) or truth))


def _expression(text: str) -> list:
    return parse(
        f"\\boxed{{{text}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        parsing_timeout=None,
    )
