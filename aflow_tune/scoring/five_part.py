"""The five-part reward: is the answer right, and was it cheap, simple, well formed and terse?

Each part is a function to [0, 1] and usable alone. The reward is their weighted sum, 0 mapped to
`lowest` and 1 to `highest`: with the defaults 20 * sum - 10. The weight of a part that is not known
falls to the others; it is never taken for 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aflow_tune.scoring.rewards import WEIGHTS, weighted
from aflow_tune.sections import FivePartSection
from aflow_tune.trace import ModelCall, OperatorCall, Trace

N = TypeVar("N", int, float)

NGRAM = 4
"""Words that stand together when repetition is looked for."""


@dataclass(frozen=True)
class Usage:
    """What one run used. None: not known."""

    usd: float | None
    tokens: int | None
    seconds: float
    operators: int

    @classmethod
    def of(cls, trace: Trace) -> Usage:
        """The sums over a trace; seconds from the first event's start to the last one's end."""
        calls = [call for call in trace.of(ModelCall) if call.failure is None]
        tokens = [n for call in calls for n in (call.prompt_tokens, call.completion_tokens)]
        ends = [event.started + event.seconds for event in trace.events]
        starts = [event.started for event in trace.events]
        return cls(
            usd=total([call.cost for call in calls]),
            tokens=total(tokens),
            seconds=max(ends) - min(starts) if ends else 0.0,
            operators=len(trace.of(OperatorCall)),
        )


@dataclass(frozen=True)
class FivePart:
    """The reward, and its parts in [0, 1] by name; None for a part that is not known."""

    reward: float
    parts: Mapping[str, float | None]

    def metrics(self) -> dict[str, float]:
        """Each known part under `five_part/NAME`."""
        return {f"five_part/{name}": v for name, v in self.parts.items() if v is not None}


def five_part(
    score: float,
    answer: str,
    usage: Usage,
    settings: FivePartSection | None = None,
    form: str = r"\S",
) -> FivePart:
    """The reward of an answer that scored `score` in [0, 1]. `form` is `format_part`'s."""
    chosen = settings or FivePartSection()
    parts = {
        "correctness": correctness_part(score),
        "efficiency": efficiency_part(usage, chosen.usd_limit, chosen.token_limit),
        "simplicity": simplicity_part(usage, chosen.seconds_limit, chosen.operator_limit),
        "format": format_part(answer, form),
        "repetition": repetition_part(answer),
    }
    weights = {name: getattr(chosen, name) for name in WEIGHTS["five_part"]}
    scale = chosen.highest - chosen.lowest
    return FivePart(chosen.lowest + scale * weighted(parts, weights), parts)


def correctness_part(score: float) -> float:
    """The score, held within [0, 1]."""
    return min(1.0, max(0.0, score))


def efficiency_part(usage: Usage, usd_limit: float, token_limit: int) -> float | None:
    """1 at no cost, falling in a line to 0 at the limit: in money, else in tokens, else None."""
    if usage.usd is not None:
        return _left(usage.usd, usd_limit)
    if usage.tokens is not None:
        return _left(usage.tokens, token_limit)
    return None


def simplicity_part(usage: Usage, seconds_limit: float, operator_limit: int) -> float:
    """The mean of two lines from 1 to 0: of the time, and of the number of operator calls."""
    return (_left(usage.seconds, seconds_limit) + _left(usage.operators, operator_limit)) / 2


def format_part(answer: str, form: str = r"\S") -> float:
    """1 if the regular expression `form` is found in the answer, else 0."""
    return float(re.search(form, answer, re.MULTILINE) is not None)


def repetition_part(answer: str) -> float:
    """The share of the answer's runs of four words, compared without case, that are not repeats of
    one before; 1 for an answer of fewer words."""
    words = answer.lower().split()
    runs = [tuple(words[start : start + NGRAM]) for start in range(len(words) - NGRAM + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def _left(used: float, limit: float) -> float:
    return max(0.0, 1.0 - used / limit)


def total(values: Sequence[N | None]) -> N | None:
    """The sum; None where there is none, or one of them is not known."""
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(values) else None
