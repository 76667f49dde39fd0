"""The budget of a run and its spend: one SQLite file for all its processes.

Every `Call` of a model reserves its worst case before it starts and is settled with its reply, each
in one transaction, so threads, processes and Ray workers of one machine may share a file. The
reservations of a killed process are dropped. Guarantees:

- calls: never more than the limit. Retries do not count as calls.
- money and tokens, if a call has `max_tokens`: it starts only if spend, reservations and its own
  worst case together stay within the limit; if only reservations prevent it, it waits for them. A
  prompt's worst case is a token per byte of its JSON and a margin for the template, images aside.
- money and tokens, without `max_tokens`: no call starts once the limit is spent. The answers under
  way at that moment can exceed it.
- A reply counts once, with the usage it reported, even if the rest of it is unusable; without usage
  it counts its worst case. A failed call counts only as a call unless it reported usage.

A model without a known price is refused under a limit on money. Without limits nothing is written.
Not covered: processes on several machines (SQLite does not lock reliably over network file
systems), and a power failure, which may lose the last few calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from aflow_tune.context import within
from aflow_tune.errors import BadInput, BudgetReached, Fault
from aflow_tune.models.prices import Price
from aflow_tune.models.types import ModelError, Usage
from aflow_tune.sections import BudgetSection
from aflow_tune.trace import ModelCall, note

PICO = 10**12  # picodollars in a dollar: sums of integers do not depend on their order
_BUSY_SECONDS = 60.0
_LONGEST_PAUSE = 0.1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS spent (
    role TEXT, model TEXT, calls INTEGER DEFAULT 0, replies INTEGER DEFAULT 0,
    prompt_tokens INTEGER DEFAULT 0, completion_tokens INTEGER DEFAULT 0,
    estimated_tokens INTEGER DEFAULT 0, pico INTEGER DEFAULT 0,
    unpriced INTEGER DEFAULT 0, unreported INTEGER DEFAULT 0, PRIMARY KEY (role, model)
);
CREATE TABLE IF NOT EXISTS held (
    id INTEGER PRIMARY KEY, pid INTEGER, pico INTEGER, tokens INTEGER
);
CREATE TABLE IF NOT EXISTS reached (reason TEXT);
"""


def check_budget(limits: BudgetSection) -> list[Fault]:
    """The faults of the section `budget`."""
    faults = []
    for name in ("wall_seconds", "usd", "tokens", "calls"):
        value: Any = getattr(limits, name)
        if value is not None and not 0 <= value < float("inf"):
            fix = f"give `budget.{name}` a number from 0, or null for no limit"
            faults.append(Fault(f"budget.{name}", "a number from 0", str(value), fix))
    return faults


@dataclass(frozen=True)
class Spent:
    """Sums over all processes. `estimated_tokens`: worst cases of replies without usage."""

    calls: int = 0
    replies: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated_tokens: int = 0
    pico: int = 0
    unpriced: int = 0
    unreported: int = 0

    @property
    def usd(self) -> float:
        return self.pico / PICO

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens + self.estimated_tokens


_SUMS = ", ".join(f"COALESCE(SUM({name}), 0)" for name in Spent.__dataclass_fields__)


class Spend:
    """The limits, and the file that counts calls. Survives a fork.

    Args:
        limits: the section `budget`; `wall_seconds` is not enforced here. Raises BadInput: a limit
            is negative or not finite.
        path: the file, made if missing. None: this process's memory.
        prices: by role, for clients that know none, such as the tuned model.
    """

    def __init__(
        self,
        limits: BudgetSection | None = None,
        path: str | Path | None = None,
        prices: Mapping[str, Price] | None = None,
    ) -> None:
        self.limits = limits or BudgetSection()
        if faults := check_budget(self.limits):
            raise BadInput("The budget cannot be used.", faults)
        self.path = None if path is None else str(Path(path).absolute())
        self.prices = prices or {}
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0

    @property
    def limited(self) -> bool:
        """Whether money, tokens or calls are limited."""
        return (self.limits.usd, self.limits.tokens, self.limits.calls) != (None, None, None)

    @contextlib.contextmanager
    def activate(self) -> Iterator[Spend]:
        """Count here the calls of this context and everything it starts."""
        with within(_current, self):
            yield self

    def spent(self, role: str | None = None) -> Spent:
        """The spend so far, of all processes, in total or of one role."""
        with self._transaction() as connection:
            return _spent(connection, role)

    def reached(self) -> str | None:
        """The first limit that a process of the run reached, or None."""
        with self._transaction() as connection:
            row = connection.execute("SELECT reason FROM reached").fetchone()
        return row[0] if row else None

    def forget_calls(self) -> None:
        """At the start of a run: drop all reservations, and the record of a reached limit."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM held")
            connection.execute("DELETE FROM reached")

    def close(self) -> None:
        """Close the file; the next use opens it again. A spend in memory is lost."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def reserve(
        self, role: str, model: str, worst: Spent, bounded: bool, wait: bool
    ) -> int | str | None:
        """Count a call and reserve `worst`, which bounds it if `bounded`. Returns the number of the
        reservation; the reached limit, as a text, if the call is not allowed; or None if it may
        `wait`, because it may fit once calls under way have ended."""
        limits, full = self.limits, False
        most_pico = None if limits.usd is None else _pico(limits.usd)
        with self._transaction() as connection:
            spent = _spent(connection)
            sums = "SELECT COALESCE(SUM(pico), 0), COALESCE(SUM(tokens), 0) FROM held"
            pico, tokens = connection.execute(sums).fetchone()
            for name, unit, most, used, wanted, others in (
                ("calls", 1, limits.calls, spent.calls, 1, 0),
                ("usd", PICO, most_pico, spent.pico, worst.pico, pico),
                ("tokens", 1, limits.tokens, spent.tokens, worst.tokens, tokens),
            ):
                if most is None:
                    continue
                over = used + wanted > most if bounded else used >= most
                crowded = others > 0 and used + others + wanted > most
                full = full or crowded
                if over or (crowded and not wait):
                    reason = f"budget.{name}: {used / unit:.6g} of {most / unit:.6g} are used"
                    reason += "" if used >= most else ", and the next call might exceed it"
                    first = "INSERT INTO reached SELECT ? WHERE NOT EXISTS (SELECT 1 FROM reached)"
                    connection.execute(first, (reason,))
                    return reason
            if full:
                # Drop reservations of processes that are gone.
                for (pid,) in connection.execute("SELECT DISTINCT pid FROM held").fetchall():
                    if not psutil.pid_exists(pid):
                        connection.execute("DELETE FROM held WHERE pid = ?", (pid,))
                return None
            _add(connection, role, model, Spent(calls=1))
            return connection.execute(
                "INSERT INTO held (pid, pico, tokens) VALUES (?, ?, ?)",
                (os.getpid(), worst.pico, worst.tokens),
            ).lastrowid

    def settle(self, number: int, role: str, model: str, used: Spent | None) -> None:
        """Replace a reservation by the reply's usage. None: no reply came."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM held WHERE id = ?", (number,))
            if used is not None:
                _add(connection, role, model, used)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._open() as connection:  # commits or rolls back
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        options: Any = {"isolation_level": None, "check_same_thread": False}
        connection = sqlite3.connect(self.path or ":memory:", _BUSY_SECONDS, **options)
        if self.path is not None:
            # Fails if another process sets it at the same time; the mode holds for all.
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(_SCHEMA)
        self._connection, self._pid = connection, os.getpid()
        return connection


@dataclass
class Call:
    """One call: reserved on entry, settled with its reply, noted in the trace at its end."""

    spend: Spend
    role: str
    model: str
    price: Price | None  # None: the role's price in `spend`, if any; else unknown
    prompt_tokens: Callable[[], int]  # an upper bound; called under a limit only
    max_tokens: int | None  # of the answer; None: unbounded
    usage: Usage | None = field(default=None, init=False)
    cost: float | None = field(default=0.0, init=False)  # None if unknown
    retries: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.price = self.spend.prices.get(self.role) if self.price is None else self.price
        self._worst, self._replied = Spent(), False
        self._number: int | None = None
        self._started: float | None = None
        self._within = contextlib.ExitStack()

    async def __aenter__(self) -> Call:
        """Raises BudgetReached: it may not start; BadInput: money is limited, the price unknown."""
        if self.spend.limited:
            await self._reserve()
        self._started = time.monotonic()
        self._within.enter_context(within(_in_call, True))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._within.close()
        if self._number is not None and not self._replied:
            self.spend.settle(self._number, self.role, self.model, None)

    async def _reserve(self) -> None:
        if self.spend.limits.usd is not None and self.price is None:
            fault = unpriced(self.role, self.model)
            raise BadInput("A budget of money needs the price of every model.", [fault])
        worst = Usage(self.prompt_tokens(), self.max_tokens or 0)
        self._worst = Spent(
            estimated_tokens=worst.prompt_tokens + worst.completion_tokens,
            pico=0 if self.price is None else _pico(self.price.cost(worst)),
        )
        of, pause = (self.role, self.model, self._worst, self.max_tokens is not None), 0.005
        # A call within another call would wait for that one, and so for itself.
        while (number := self.spend.reserve(*of, wait=not in_call())) is None:
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        if isinstance(number, str):
            raise BudgetReached(f"A limit was reached. {number}.")
        self._number = number

    def settle(self, usage: Usage | None) -> None:
        """Count the reply's usage; None: it reported none. Later calls do nothing."""
        if self._replied:
            return
        self._replied = True
        self.usage, self.cost = usage, self._cost_of(usage)
        if self._number is None:
            return
        pico = _pico(self.cost or 0.0)
        if usage is None and self.cost is None:
            pico = self._worst.pico
        used = Spent(replies=1, pico=pico, unpriced=int(self.cost is None))
        if usage is None:
            used = replace(used, estimated_tokens=self._worst.tokens, unreported=1)
        else:
            prompt, completion = usage.prompt_tokens, usage.completion_tokens
            used = replace(used, prompt_tokens=prompt, completion_tokens=completion)
        self.spend.settle(self._number, self.role, self.model, used)

    def _cost_of(self, usage: Usage | None) -> float | None:
        if self.price is None:
            return None
        if usage is None:  # known only if the price is zero
            return 0.0 if self.price.cost(Usage(1, 1)) == 0.0 else None
        return self.price.cost(usage)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the call in the trace at the end of the block, with the kind of its failure."""
        failure: str | None = None
        try:
            yield
        except BaseException as error:
            failure = "cancelled" if isinstance(error, asyncio.CancelledError) else "raised"
            failure = "budget_reached" if isinstance(error, BudgetReached) else failure
            failure = error.failure.value if isinstance(error, ModelError) else failure
            raise
        finally:
            if self._started is not None:
                self.seconds = time.monotonic() - self._started
                self._note(failure=failure)

    def answered_from_cache(self, usage: Usage | None) -> None:
        """Note in the trace an answer from the cache, with its original cost. Spends nothing."""
        self._started = time.monotonic()
        self.usage, self.cost = usage, self._cost_of(usage)
        self._note(from_cache=True)

    def _note(self, **ended: Any) -> None:
        told = {name: getattr(self, name) for name in ("seconds", "role", "model", "cost")}
        if self.usage is not None:
            told["prompt_tokens"] = self.usage.prompt_tokens
            told["completion_tokens"] = self.usage.completion_tokens
        note(ModelCall(started=self._started or 0.0, retries=self.retries, **told, **ended))


_current: ContextVar[Spend] = ContextVar("aflow_tune_spend", default=Spend())  # noqa: B039
_in_call: ContextVar[bool] = ContextVar("aflow_tune_in_call", default=False)


def current_spend() -> Spend:
    return _current.get()


def in_call() -> bool:
    """Whether this code runs within a call that is already counted."""
    return _in_call.get()


def unpriced(role: str, model: str) -> Fault:
    """The fault of a limit on money if this model's price is unknown."""
    fix = (
        f"models: {{{role}: {{prices: {{input: ..., output: ...}}}}}} in US dollars for a million "
        "tokens, 0 for a model of your own, or {listed: NAME}; or limit budget.tokens instead"
    )
    expected, found = f"what {model} costs, since budget.usd is set", "no price, given or listed"
    return Fault(f"models.{role}.prices", expected, found, fix)


def _pico(usd: float) -> int:
    return round(usd * PICO)


def _spent(connection: sqlite3.Connection, role: str | None = None) -> Spent:
    where, values = ("", ()) if role is None else (" WHERE role = ?", (role,))
    return Spent(*connection.execute(f"SELECT {_SUMS} FROM spent{where}", values).fetchone())


def _add(connection: sqlite3.Connection, role: str, model: str, amounts: Spent) -> None:
    names, marks = ", ".join(vars(amounts)), ", ".join("?" for _ in vars(amounts))
    sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in vars(amounts))
    connection.execute(
        f"INSERT INTO spent (role, model, {names}) VALUES (?, ?, {marks}) "
        f"ON CONFLICT (role, model) DO UPDATE SET {sums}",
        (role, model, *vars(amounts).values()),
    )
