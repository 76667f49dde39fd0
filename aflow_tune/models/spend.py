"""What a run may spend and what it has spent: one SQLite file for all its processes.

Every `Call` of a model reserves its worst case before it starts and is settled with its reply, each
in one transaction, so any threads, processes and Ray workers of one machine may share a file; what
a killed process had reserved is dropped. What is guaranteed:

- calls: never more than the limit. Retries of a call are none.
- money and tokens, where a call has `max_tokens`: it starts only if what was spent, what is
  reserved and its own worst case stay within the limit together; one that would fit but for those
  under way waits for them. The worst case of a prompt is a token for each byte of its JSON and a
  margin for the chat template, images aside.
- money and tokens, without `max_tokens`: no call starts once the limit is spent. It can be exceeded
  by the answers then under way.
- A reply counts once, with the usage it reported, even if nothing else in it can be used; without
  one with its worst case. A call without a reply counts nothing unless it reported usage.

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

PICO = 10**12  # picodollars in a dollar: sums of whole ones do not depend on their order
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
    """What is wrong with the section `budget`."""
    faults = []
    for name in ("wall_seconds", "usd", "tokens", "calls"):
        value: Any = getattr(limits, name)
        if value is not None and not 0 <= value < float("inf"):
            fix = f"give `budget.{name}` a number from 0, or null for no limit"
            faults.append(Fault(f"budget.{name}", "a number from 0", str(value), fix))
    return faults


@dataclass(frozen=True)
class Spent:
    """Sums over all processes. `estimated_tokens`: of replies that told no usage."""

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
    """Limits, and the file that calls are held against. Survives a fork.

    Args:
        limits: the section `budget`, `wall_seconds` aside. BadInput: one is negative or not finite.
        path: the file, made where it is missing. None: this process's memory.
        prices: by role, for clients that know none, such as the model being tuned.
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
        """Whether there is a limit on money, tokens or calls."""
        return (self.limits.usd, self.limits.tokens, self.limits.calls) != (None, None, None)

    @contextlib.contextmanager
    def activate(self) -> Iterator[Spend]:
        """Count the calls of this context, and of everything it starts, here."""
        with within(_current, self):
            yield self

    def spent(self, role: str | None = None) -> Spent:
        """What was spent so far, by everybody or under one role."""
        with self._transaction() as connection:
            return _spent(connection, role)

    def reached(self) -> str | None:
        """The limit that some process of the run met first, or None."""
        with self._transaction() as connection:
            row = connection.execute("SELECT reason FROM reached").fetchone()
        return row[0] if row else None

    def forget_calls(self) -> None:
        """At the start of a run: drop every reservation, and that a limit was reached."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM held")
            connection.execute("DELETE FROM reached")

    def close(self) -> None:
        """Close the file; the next use opens it again. What is in memory is lost."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def reserve(
        self, role: str, model: str, worst: Spent, bounded: bool, wait: bool
    ) -> int | str | None:
        """Count a call and put `worst` aside, its worst case if it is `bounded`. Gives the number
        of the reservation; or the limit that does not allow the call; or None where it can `wait`
        and may fit when those under way have ended."""
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
                # Reservations of processes that are gone.
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
        """Replace a reservation by what the reply used. None: no reply came."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM held WHERE id = ?", (number,))
            if used is not None:
                _add(connection, role, model, used)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._open() as connection:  # which commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        options: Any = {"isolation_level": None, "check_same_thread": False}
        connection = sqlite3.connect(self.path or ":memory:", _BUSY_SECONDS, **options)
        if self.path is not None:
            # Busy where another process changes the mode of a new file, which then holds for all.
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(_SCHEMA)
        self._connection, self._pid = connection, os.getpid()
        return connection


@dataclass
class Call:
    """One call: reserved when it is entered, settled with its reply, noted when it is over."""

    spend: Spend
    role: str
    model: str
    price: Price | None  # None: that of the role, if it has one; else unknown
    prompt_tokens: Callable[[], int]  # the most that there may be; asked under a limit only
    max_tokens: int | None  # of the answer; None: there is no bound
    usage: Usage | None = field(default=None, init=False)
    cost: float | None = field(default=0.0, init=False)  # None where it is not known
    retries: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.price = self.spend.prices.get(self.role) if self.price is None else self.price
        self._worst, self._replied = Spent(), False
        self._number: int | None = None
        self._started: float | None = None
        self._within = contextlib.ExitStack()

    async def __aenter__(self) -> Call:
        """BudgetReached: it may not start. BadInput: money is limited and the price not known."""
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
        # One that is made inside of another would wait for itself.
        while (number := self.spend.reserve(*of, wait=not in_call())) is None:
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        if isinstance(number, str):
            raise BudgetReached(f"A limit was reached. {number}.")
        self._number = number

    def settle(self, usage: Usage | None) -> None:
        """Count what the reply used; None: it did not say. Only the first time counts."""
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
        if usage is None:  # known only where nothing costs anything
            return 0.0 if self.price.cost(Usage(1, 1)) == 0.0 else None
        return self.price.cost(usage)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the call in the trace at the end of the block, with a word for how it failed."""
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
        """Note a call that cost nothing, with what its answer had cost. Counts no call."""
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
    """Whether this code runs inside of a call that is counted already."""
    return _in_call.get()


def unpriced(role: str, model: str) -> Fault:
    """What is wrong with a limit on money where this model's price is not known."""
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
