"""Counting calls, tokens and money by role and by model, within one process.

A call is what the caller asked for, retries included. Tokens and money are those of replies:
every reply that reported its usage is counted exactly once, whether it could be read or not,
and also when its caller had gone away meanwhile. What is not known is counted as not known:
`unpriced` replies have no known price, `unreported` ones told no usage.

Limits on all this are set in `budget.py`, which counts across processes.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, fields
from typing import Any

from aflow_tune.models.types import Usage


@dataclass
class Tally:
    """Sums. `cost` is in US dollars, over the replies whose price is known."""

    calls: int = 0
    failed: int = 0
    cancelled: int = 0
    retries: int = 0
    cache_hits: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float = 0.0
    unpriced: int = 0
    unreported: int = 0

    def add(self, other: Tally) -> None:
        """Add every field of `other`."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    @property
    def known_cost(self) -> float | None:
        """US dollars, or None where a part of it is not known."""
        return None if self.unpriced else self.cost


class Meter:
    """Tallies by role and model. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[tuple[str, str], Tally] = {}

    def count(self, role: str, model: str, **amounts: float) -> None:
        """Add to a role's and model's tally, by names of its fields."""
        with self._lock:
            tally = self._tallies.setdefault((role, model), Tally())
            for name, amount in amounts.items():
                setattr(tally, name, getattr(tally, name) + amount)

    def count_reply(self, role: str, model: str, usage: Usage | None, cost: float | None) -> None:
        """Add what one reply used. None: it did not say, or its price is not known."""
        told = usage or Usage(0, 0)
        self.count(
            role,
            model,
            prompt_tokens=told.prompt_tokens,
            completion_tokens=told.completion_tokens,
            cached_tokens=told.cached_tokens,
            cost=cost or 0.0,
            unpriced=int(cost is None),
            unreported=int(usage is None),
        )

    def total(self) -> Tally:
        """Over everything."""
        return _sum(self._snapshot().values())

    def by_role(self) -> dict[str, Tally]:
        """For each role, over its models."""
        return self._by(0)

    def by_model(self) -> dict[str, Tally]:
        """For each model, over its roles."""
        return self._by(1)

    def to_json(self) -> dict[str, Any]:
        """`total`, `roles` and `models`."""
        return {
            "total": asdict(self.total()),
            "roles": {name: asdict(tally) for name, tally in self.by_role().items()},
            "models": {name: asdict(tally) for name, tally in self.by_model().items()},
        }

    def _by(self, part: int) -> dict[str, Tally]:
        sums: dict[str, Tally] = {}
        for key, tally in self._snapshot().items():
            sums.setdefault(key[part], Tally()).add(tally)
        return sums

    def _snapshot(self) -> dict[tuple[str, str], Tally]:
        with self._lock:
            return {key: Tally(**asdict(tally)) for key, tally in self._tallies.items()}


def _sum(tallies: Any) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total
