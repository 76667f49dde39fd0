"""What happened inside one rollout: model calls, operators, programs run in the sandbox.

One `Trace` travels with a traced rollout in a context variable; outside of one `note` does nothing.
Events hold names, counts and outcomes, never keys, and no text but the reason of a failure. An
event's `caller` is the path that `context.caller` had opened, `Operator.instance` within operators.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from aflow_tune.context import current_caller, within

POLICY = "policy"
"""The role of the model that is tuned."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened. `started` and `seconds` are of the monotonic clock."""

    caller: str = field(default_factory=current_caller)
    started: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelCall(Event):
    """One call of a model, retries included. `cost` is in US dollars, None where the price is not
    known. `failure` is None where an answer came, else a word such as 'rate_limited'."""

    role: str
    model: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None
    retries: int = 0
    from_cache: bool = False
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class OperatorCall(Event):
    """One use of an operator. `outcome` is one of `aflow_tune.operators`' outcomes."""

    operator: str
    instance: str
    outcome: str
    attempts: int = 1
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ProgramRun(Event):
    """One program run in the sandbox: how it ended, and at which level of the sandbox."""

    level: str
    outcome: str
    limits_hit: tuple[str, ...] = ()


@dataclass
class Trace:
    events: list[Event] = field(default_factory=list)

    @contextlib.contextmanager
    def activate(self) -> Iterator[Trace]:
        """For the current context and everything it starts."""
        with within(_trace, self):
            yield self

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    def metrics(self) -> dict[str, float]:
        """Counts for a rollout's metrics: operator outcomes, program outcomes, cost by role."""
        numbers: Counter[str] = Counter()
        for use in self.of(OperatorCall):
            numbers[f"operator/{use.operator}/{use.outcome}"] += 1
        for program in self.of(ProgramRun):
            numbers[f"sandbox/{program.outcome}"] += 1
        found = {name: float(count) for name, count in numbers.items()}
        for call in self.of(ModelCall):
            name = f"unpriced_calls/{call.role}" if call.cost is None else f"cost/{call.role}"
            # Every rollout calls the policy; that it has no price is no news.
            if call.cost is not None or call.role != POLICY:
                found[name] = found.get(name, 0.0) + (1.0 if call.cost is None else call.cost)
        return found


_trace: ContextVar[Trace | None] = ContextVar("aflow_tune_trace", default=None)


def note(event: Event) -> None:
    if (trace := _trace.get()) is not None:
        trace.events.append(event)
