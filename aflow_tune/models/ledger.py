"""The books of a run: every call passes them before it starts and when it has ended.

A `Ledger` is a meter, perhaps a budget, and prices for roles whose client knows none (such as
the model being tuned). Clients find the one that is in force: that of their context
(`activate`), else that of their process (`install`), else one that only counts.

`Call` is one call in the books and `Attempt` one request of it. Whoever calls a model without
one of our clients can keep the books with them too:

    call = current_ledger().call("policy", "my-model")
    call.start()
    try:
        async with call.attempt(prompt_bytes, max_tokens) as attempt:
            ...
            attempt.settle(usage)
    finally:
        call.end(failure)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from aflow_tune.errors import BadInput, BudgetReached
from aflow_tune.models.budget import Budget, picodollars
from aflow_tune.models.prices import Price
from aflow_tune.models.types import Usage
from aflow_tune.models.usage import Meter
from aflow_tune.trace import ModelCall, note

CANCELLED = "cancelled"
"""The failure of a call whose caller went away."""


@dataclass
class Ledger:
    """What is counted, what limits it, and prices by role."""

    meter: Meter = field(default_factory=Meter)
    budget: Budget | None = None
    prices: Mapping[str, Price] = field(default_factory=dict)

    @contextlib.contextmanager
    def activate(self) -> Iterator[Ledger]:
        """Keep the books of the current context, and of everything it starts, here."""
        token = _current.set(self)
        try:
            yield self
        finally:
            # A run that was given up may be closed by the collector, in another context.
            with contextlib.suppress(ValueError):
                _current.reset(token)

    def install(self) -> None:
        """Keep the books of this process here, wherever no ledger is active."""
        global _of_process
        _of_process = self

    def call(self, role: str, model: str, price: Price | None = None) -> Call:
        """A call in these books; not started yet."""
        return Call(self, role, model, self.prices.get(role) if price is None else price)


_of_process = Ledger()
_current: ContextVar[Ledger | None] = ContextVar("aflow_tune_ledger", default=None)
_booked: ContextVar[bool] = ContextVar("aflow_tune_booked", default=False)


def current_ledger() -> Ledger:
    """The ledger in force here."""
    return _current.get() or _of_process


def is_booked() -> bool:
    """Whether this code runs inside an attempt of a call that keeps the books already.

    A model that keeps them itself, such as the recording one, asks before it counts, so that a
    call through one of our clients is not counted twice.
    """
    return _booked.get()


class Call:
    """One call: counted when it starts, noted in the trace when it ends."""

    def __init__(self, ledger: Ledger, role: str, model: str, price: Price | None) -> None:
        self.ledger, self.role, self.model, self.price = ledger, role, model, price
        self.usage: Usage | None = None
        """Summed over the replies; None where none told its usage."""
        self.cost: float | None = 0.0
        """US dollars, summed over the replies; None where a part is not known."""
        self.attempts = 0
        self._started: float | None = None
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    def start(self) -> None:
        """Count the call.

        Raises:
            BudgetReached: it may not start; then nothing is counted.
        """
        if self.ledger.budget is not None:
            self.ledger.budget.count_call(self.role, self.model)
        self._started = time.monotonic()
        self.ledger.meter.count(self.role, self.model, calls=1)

    @contextlib.asynccontextmanager
    async def attempt(
        self, prompt_tokens: int, max_tokens: int | None, seconds: float | None = None
    ) -> AsyncIterator[Attempt]:
        """One request. What it holds of the budget is given back unless it is settled inside.

        Args:
            prompt_tokens: at most so many; matters only under a budget.
            max_tokens: of the answer. None: there is no bound.
            seconds: the request's time-out. None: it has none.

        Raises:
            BudgetReached: it may not start.
            BadInput: there is a limit on money and the price is not known.
        """
        budget = self.ledger.budget
        hold = None
        if budget is not None:
            try:
                hold = await budget.hold(
                    self.role,
                    self.model,
                    self.price,
                    prompt_tokens,
                    max_tokens,
                    seconds,
                    wait=not is_booked(),
                )
            except (BudgetReached, BadInput, asyncio.CancelledError):
                self._withdraw()
                raise
        if self.attempts:
            self.ledger.meter.count(self.role, self.model, retries=1)
        self.attempts += 1
        attempt = Attempt(self)
        token = _booked.set(True)
        try:
            yield attempt
        finally:
            with contextlib.suppress(ValueError):  # closed by the collector, in another context
                _booked.reset(token)
            if budget is not None and hold is not None:
                if attempt.replied:
                    cost = attempt.cost
                    pico = None if cost is None else picodollars(cost)
                    budget.account.settle(hold, self.role, self.model, attempt.usage, pico)
                else:
                    budget.account.release(hold)

    def _withdraw(self) -> None:
        """Undo the start of a call that made no attempt: it was none."""
        if self.attempts or self._started is None:
            return
        self._started = None
        self.ledger.meter.count(self.role, self.model, calls=-1)
        if self.ledger.budget is not None:
            self.ledger.budget.account.uncount_call(self.role, self.model)

    def cost_of(self, usage: Usage | None) -> float | None:
        """US dollars; None where it is not known."""
        if self.price is None:
            return None
        if usage is None:  # known only where nothing costs anything
            return 0.0 if self.price.cost(Usage(1, 1)) == 0.0 else None
        return self.price.cost(usage)

    def end(self, failure: str | None = None, *, from_cache: bool = False) -> None:
        """Note the call in the trace; `failure` is a word, or None for an answer."""
        if self._started is None:
            return
        if failure == CANCELLED:
            self.ledger.meter.count(self.role, self.model, cancelled=1)
        elif failure is not None:
            self.ledger.meter.count(self.role, self.model, failed=1)
        note(
            ModelCall(
                started=self._started,
                seconds=self.seconds,
                role=self.role,
                model=self.model,
                prompt_tokens=None if self.usage is None else self.usage.prompt_tokens,
                completion_tokens=None if self.usage is None else self.usage.completion_tokens,
                cost=self.cost,
                retries=max(self.attempts - 1, 0),
                from_cache=from_cache,
                failure=failure,
            )
        )

    def answered_from_cache(self, usage: Usage | None) -> None:
        """Note a call that cost nothing, with what its answer had cost. Counts no call."""
        self._started = time.monotonic()
        self.usage, self.cost = usage, self.cost_of(usage)
        self.ledger.meter.count(self.role, self.model, cache_hits=1)
        self.end(from_cache=True)

    def _add(self, usage: Usage | None, cost: float | None) -> None:
        with self._lock:
            if usage is not None:
                so_far = self.usage or Usage(0, 0)
                self.usage = Usage(
                    so_far.prompt_tokens + usage.prompt_tokens,
                    so_far.completion_tokens + usage.completion_tokens,
                    so_far.cached_tokens + usage.cached_tokens,
                )
            self.cost = None if cost is None or self.cost is None else self.cost + cost


@dataclass
class Attempt:
    """One request of a call. `settle` when its reply is there, readable or not."""

    call: Call
    usage: Usage | None = None
    cost: float | None = None
    replied: bool = False

    def settle(self, usage: Usage | None) -> None:
        """Count what the reply used; None: it did not say. Only the first time counts."""
        if self.replied:
            return
        self.replied = True
        self.usage, self.cost = usage, self.call.cost_of(usage)
        self.call.ledger.meter.count_reply(self.call.role, self.call.model, usage, self.cost)
        self.call._add(usage, self.cost)
