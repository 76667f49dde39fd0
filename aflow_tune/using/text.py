"""A solved problem as text for a terminal: the workflow, the verdict, the answer, what it took.

Whatever a model wrote is shown with its unprintable characters spelled out, so that a terminal
obeys none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aflow_tune.using.solved import LEVEL_WORDS, Solved

_INDENT = "    "


def solved_text(solved: Solved, *, drawing: bool = True) -> str:
    """Everything about one problem.

    Args:
        drawing: whether the workflow's graph is in it, as a Mermaid text.
    """
    return "\n".join(_lines(solved, drawing)) + "\n"


def shown(text: str) -> str:
    """Text with its unprintable characters spelled out, but for line ends and tabs."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def usd_text(value: float | None) -> str:
    """An amount of money, or that it is not known."""
    if value is None:
        return "not known"
    return "$0" if value == 0 else f"${value:.2g}" if value < 0.01 else f"${value:.4f}"


def _lines(solved: Solved, drawing: bool) -> Iterator[str]:
    yield f"workflow: {_verdict(solved)}"
    for refusal in solved.refusals:
        yield f"  refused: {shown(str(refusal))}"
    if solved.code:
        yield ""
        yield from _block(solved.code)
    else:
        yield "  the model wrote:"
        yield from _block(solved.text)
    if solved.prompts:
        yield ""
        yield "prompts:"
        for name, prompt in solved.prompts.items():
            yield f"  {shown(name)}:"
            yield from _block(prompt)
    if drawing and solved.mermaid:
        yield ""
        yield "graph:"
        yield from _block(solved.mermaid.rstrip("\n"))
    if solved.level:
        yield ""
        yield f"what ran instead: {LEVEL_WORDS[solved.level]}"
        for attempt in solved.attempts:
            yield f"  {_attempt(attempt)}"
        yield from _block(solved.ran_code)
    yield ""
    if solved.answer is None:
        yield f"no answer: the last workflow ended with {solved.ending}"
        if solved.reason:
            yield from _block(solved.reason)
    else:
        yield f"answer ({LEVEL_WORDS[solved.level]}):"
        yield from _block(solved.answer)
    yield ""
    yield _spent(solved)
    if solved.problem.truth is not None:
        yield _rewarded(solved)


def _verdict(solved: Solved) -> str:
    read = f"read as {solved.form}" if solved.form else "could not be read"
    told = [read, "passed the check" if solved.valid else "refused by the check"]
    if solved.turns > 1:
        told.append(f"after {solved.turns} turns")
    if solved.bound is not None:
        bound = solved.bound
        calls = f"{bound.model_calls} model call{'' if bound.model_calls == 1 else 's'}"
        most = f"at worst {calls} and {bound.tokens} tokens"
        told.append(most if bound.usd is None else f"{most}, {usd_text(bound.usd)}")
    return "; ".join(told)


def _attempt(attempt: Mapping[str, Any]) -> str:
    reason = f": {shown(str(attempt['reason']))}" if attempt.get("reason") else ""
    name = "as written" if attempt["level"] == 0 else f"fallback {attempt['level']}"
    return f"{name}: {attempt['ending']}{reason}"


def _spent(solved: Solved) -> str:
    return "  ".join(
        [
            f"cost {usd_text(solved.usd)}",
            f"seconds {solved.seconds:.1f}",
            f"model calls {solved.model_calls}",
            f"tokens {_number(solved.tokens)}",
            f"policy tokens {_number(solved.policy_tokens)}",
        ]
    )


def _rewarded(solved: Solved) -> str:
    if solved.reward is None:
        return f"reward: not known, {shown(solved.score_reason) or 'the answer was not scored'}"
    parts = ", ".join(f"{name} {_part(value)}" for name, value in solved.parts.items())
    reason = f" ({shown(solved.score_reason)})" if solved.score_reason else ""
    return f"reward {solved.reward:.2f}, score {_part(solved.score)}{reason}: {parts}"


def _part(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"


def _number(value: int | None) -> str:
    return "not counted" if value is None else str(value)


def _block(text: str) -> Sequence[str]:
    return [f"{_INDENT}{line}" for line in shown(text).splitlines()]
