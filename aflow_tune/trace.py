"""What happened inside one rollout: model calls, operators, programs run in the sandbox.

A traced rollout has one `Trace` in a context variable; outside of one `note` does nothing. Events
hold names, counts and outcomes, never API keys, and no text except the reason of a failure. An
event's `caller` is the path of open `context.caller` blocks; an operator opens `Operator.instance`.
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
"""The role of the model being tuned."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened. `started` is a time of the monotonic clock, `seconds` a duration."""

    caller: str = field(default_factory=current_caller)
    started: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelCall(Event):
    """One model call, retries included. `cost` is in US dollars, None if the price is unknown.
    `failure` is None if the call was answered, else a word such as 'rate_limited'."""

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
    """One program run in the sandbox: the level of isolation, and how it ended."""

    level: str
    outcome: str
    limits_hit: tuple[str, ...] = ()


@dataclass
class Trace:
    events: list[Event] = field(default_factory=list)

    @contextlib.contextmanager
    def activate(self) -> Iterator[Trace]:
        """Collect the events of the current context and of everything it starts."""
        with within(_trace, self):
            yield self

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    def metrics(self) -> dict[str, float]:
        """Metrics of the rollout: outcomes of operators and programs, cost by role in USD."""
        numbers: Counter[str] = Counter()
        for use in self.of(OperatorCall):
            numbers[f"operator/{use.operator}/{use.outcome}"] += 1
        for program in self.of(ProgramRun):
            numbers[f"sandbox/{program.outcome}"] += 1
        found = {name: float(count) for name, count in numbers.items()}
        for call in self.of(ModelCall):
            name = f"unpriced_calls/{call.role}" if call.cost is None else f"cost/{call.role}"
            # Every rollout calls the policy, which usually has no price: do not report that.
            if call.cost is not None or call.role != POLICY:
                found[name] = found.get(name, 0.0) + (1.0 if call.cost is None else call.cost)
        return found


_trace: ContextVar[Trace | None] = ContextVar("aflow_tune_trace", default=None)


def note(event: Event) -> None:
    if (trace := _trace.get()) is not None:
        trace.events.append(event)
