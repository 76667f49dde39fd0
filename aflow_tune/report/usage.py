"""What evaluations used: tokens, money, and how it spreads over callers and operators.

Everything here is counted from `EvalRecord`s. Tokens are those of the evaluated model, from every
call that its server counted. Money is that of all roles together: the evaluated model's from its
tokens and its price, other roles' from what their clients noted in the trace. Where a price or a
count is missing the sum is unknown, which is None and never 0.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aflow_tune.report.records import EvalRecord
from aflow_tune.trace import POLICY

_COST, _UNPRICED = "cost/", "unpriced_calls/"

Price = Callable[[int, int], float]
"""US dollars of one call of the evaluated model, for its prompt tokens and its drawn tokens."""


@dataclass(frozen=True)
class Usage:
    """Calls and tokens of the evaluated model in `runs` rollouts (the field's name in
    `eval.json`). Tokens are None if a call was not counted."""

    runs: int
    calls: int
    failed_calls: int
    truncated_calls: int
    prompt_tokens: int | None
    tokens: int | None

    @property
    def total_tokens(self) -> int | None:
        """Prompt and drawn tokens together."""
        if self.prompt_tokens is None or self.tokens is None:
            return None
        return self.prompt_tokens + self.tokens


@dataclass(frozen=True)
class CallerUse:
    """The calls of one caller; `outcomes` counts its operator's, where it is one.

    `token_share` is its part of the drawn tokens; None where they are not known, or none.
    """

    caller: str
    usage: Usage
    token_share: float | None
    outcomes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """US dollars by role. A role whose price is unknown is listed in `unknown` and not there."""

    by_role: dict[str, float]
    unknown: tuple[str, ...]

    @property
    def total(self) -> float | None:
        """All roles together; None as long as one is unknown."""
        return None if self.unknown else math.fsum(self.by_role.values())


def usage(records: Sequence[EvalRecord]) -> Usage:
    """Calls and tokens of all `records`, failed rollouts included."""
    return _usage(len(records), [call for record in records for call in record.calls])


def callers(records: Sequence[EvalRecord]) -> list[CallerUse]:
    """One entry a caller, those with the most drawn tokens first.

    An operator's calls are attributed to `.../Operator.instance`; its outcomes are put beside
    the callers of that name, and get an entry of their own where it called no model.
    """
    by_caller: dict[str, list[dict[str, Any]]] = defaultdict(list)
    rollouts: Counter[str] = Counter()
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        for call in record.calls:
            by_caller[str(call.get("caller"))].append(call)
        rollouts.update({str(call.get("caller")) for call in record.calls})
        for use in record.operators:
            outcomes[_operator_name(use)][str(use.get("outcome"))] += 1
    total = usage(records).tokens
    found = []
    for caller, calls in by_caller.items():
        own = _usage(rollouts[caller], calls)
        share = own.tokens / total if total and own.tokens is not None else None
        of_operator = dict(outcomes.get(caller.rpartition("/")[2], ()))
        found.append(CallerUse(caller, own, share, of_operator))
    found.sort(key=lambda use: (-(use.usage.tokens or 0), use.caller))
    calling = {caller.rpartition("/")[2] for caller in by_caller}
    silent = [
        CallerUse(name, _usage(0, []), 0.0 if total else None, dict(counts))
        for name, counts in sorted(outcomes.items())
        if name not in calling
    ]
    return found + silent


def cost(records: Sequence[EvalRecord], price: Price | None) -> Cost:
    """What the rollouts cost. `price` is that of the evaluated model; None where it is unknown.

    The evaluated model's own noted costs are passed over: its calls are all in the records,
    while only those made through a client of ours are noted.
    """
    by_role: dict[str, float] = defaultdict(float)
    unknown: set[str] = set()
    for record in records:
        for name, value in record.metrics.items():
            if name.startswith(_COST) and name != _COST + POLICY:
                by_role[name.removeprefix(_COST)] += value
            elif name.startswith(_UNPRICED) and name != _UNPRICED + POLICY and value > 0:
                unknown.add(name.removeprefix(_UNPRICED))
    calls = [call for record in records for call in record.calls if not call.get("failed")]
    counted = all(isinstance(call.get("tokens"), int) for call in calls)
    if price is not None and counted:
        by_role[POLICY] = math.fsum(price(call["prompt_tokens"], call["tokens"]) for call in calls)
    elif calls:
        unknown.add(POLICY)
    known = {role: value for role, value in by_role.items() if role not in unknown}
    return Cost(known, tuple(sorted(unknown)))


def per_solved(amount: float | None, solved: int) -> float | None:
    """`amount` for each solved rollout, what failed attempts used included; None if none was."""
    return amount / solved if amount is not None and solved else None


def _operator_name(use: dict[str, Any]) -> str:
    """`Operator.instance`, as in callers' names."""
    operator, instance = str(use.get("operator")), str(use.get("instance") or "")
    if not instance or instance == operator or instance.startswith(f"{operator}."):
        return instance or operator
    return f"{operator}.{instance}"


def _usage(rollouts: int, calls: Sequence[dict[str, Any]]) -> Usage:
    answered = [call for call in calls if not call.get("failed")]

    def total(name: str) -> int | None:
        counts = [call.get(name) for call in answered]
        known = [count for count in counts if isinstance(count, int)]
        return sum(known) if len(known) == len(counts) else None

    return Usage(
        runs=rollouts,
        calls=len(calls),
        failed_calls=len(calls) - len(answered),
        truncated_calls=sum(bool(call.get("truncated")) for call in answered),
        prompt_tokens=total("prompt_tokens"),
        tokens=total("tokens"),
    )
