"""What a run has spent, in one place for all its processes: an SQLite file, or memory.

Every change is one transaction, so any number of processes and threads of one machine may
share a file. Money is kept in whole picodollars: sums do not depend on their order. Beside
what was spent stands what is held: the worst that the attempts under way may cost. A hold
whose process died is dropped.

What may be spent is decided by `budget.py`. Not covered: processes on several machines (SQLite
does not lock reliably over network file systems), and a power failure, which may lose the
last few calls.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.models.types import Usage

PICO = 10**12
"""Picodollars in a dollar."""
_BUSY_SECONDS = 60.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS spent (
    role TEXT, model TEXT, calls INTEGER DEFAULT 0, replies INTEGER DEFAULT 0,
    prompt_tokens INTEGER DEFAULT 0, completion_tokens INTEGER DEFAULT 0,
    estimated_tokens INTEGER DEFAULT 0, pico INTEGER DEFAULT 0,
    unpriced INTEGER DEFAULT 0, unreported INTEGER DEFAULT 0, PRIMARY KEY (role, model)
);
CREATE TABLE IF NOT EXISTS held (
    id INTEGER PRIMARY KEY, pid INTEGER, pico INTEGER, tokens INTEGER, expires REAL
);
CREATE TABLE IF NOT EXISTS reached (reason TEXT);
"""


@dataclass(frozen=True)
class Spent:
    """Sums over all processes. `estimated_tokens` stand for replies that told no usage."""

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
        """US dollars, over the replies whose price is known."""
        return self.pico / PICO

    @property
    def tokens(self) -> int:
        """What counts against a limit on tokens."""
        return self.prompt_tokens + self.completion_tokens + self.estimated_tokens


@dataclass(frozen=True)
class Hold:
    """The worst that one attempt may cost, put aside until its reply is there."""

    number: int
    pico: int
    tokens: int


_FIELDS = tuple(Spent.__dataclass_fields__)
_SUMS = ", ".join(f"COALESCE(SUM({name}), 0)" for name in _FIELDS)


class Account:
    """Opens (and makes) the account at `path`; None keeps it in this process's memory.

    May be used from any thread, travels to other processes by its path, and survives a fork.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else str(Path(path).absolute())
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        if self.path is None:
            raise TypeError("an account in memory cannot travel: give it a file")
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]

    def count_call(self, role: str, model: str, limit: int | None) -> bool:
        """Count one call, unless `limit` calls were counted already: then False."""
        with self._transaction() as connection:
            if limit is not None and _spent(connection).calls >= limit:
                return False
            _add(connection, role, model, calls=1)
            return True

    def uncount_call(self, role: str, model: str) -> None:
        """Take a counted call back: it never asked anything."""
        with self._transaction() as connection:
            _add(connection, role, model, calls=-1)

    def hold(
        self,
        pico: int,
        tokens: int,
        *,
        bounded: bool,
        most_pico: int | None,
        most_tokens: int | None,
        seconds: float,
    ) -> Hold | str | None:
        """Put aside what an attempt may cost.

        Args:
            bounded: `pico` and `tokens` are the worst case; else they are a part of it.
            most_pico, most_tokens: the limits. None: no limit.
            seconds: after so many the hold is dropped, should nobody settle it.

        Returns:
            The hold; 'money' or 'tokens' if that does not allow the attempt; None if it would
            not fit now but may fit when attempts under way have ended.
        """
        with self._transaction() as connection:
            spent = _spent(connection)
            asked = [("money", spent.pico, pico, most_pico)]
            asked.append(("tokens", spent.tokens, tokens, most_tokens))
            for name, used, wanted, most in asked:
                if most is not None and (used + wanted > most if bounded else used >= most):
                    return name
            held = connection.execute(
                "SELECT COALESCE(SUM(pico), 0), COALESCE(SUM(tokens), 0) FROM held"
            ).fetchone()
            for (_, used, wanted, most), waiting in zip(asked, held, strict=True):
                if most is None or not waiting:
                    continue
                if used + waiting + wanted > most:
                    _drop_abandoned(connection)
                    return None
            number = connection.execute(
                "INSERT INTO held (pid, pico, tokens, expires) VALUES (?, ?, ?, ?)",
                (os.getpid(), pico, tokens, time.time() + seconds),
            ).lastrowid
            assert number is not None
            return Hold(number, pico, tokens)

    def settle(
        self, hold: Hold, role: str, model: str, usage: Usage | None, pico: int | None
    ) -> None:
        """Replace a hold by what the reply used. Without usage the hold itself counts."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM held WHERE id = ?", (hold.number,))
            if usage is None:
                _add(
                    connection,
                    role,
                    model,
                    replies=1,
                    unreported=1,
                    estimated_tokens=hold.tokens,
                    pico=hold.pico if pico is None else pico,
                    unpriced=int(pico is None),
                )
                return
            _add(
                connection,
                role,
                model,
                replies=1,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                pico=pico or 0,
                unpriced=int(pico is None),
            )

    def release(self, hold: Hold) -> None:
        """Give a hold back: no reply came."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM held WHERE id = ?", (hold.number,))

    def release_all(self) -> None:
        """Drop every hold. For the start of a run, when no process of it is at work."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM held")
            connection.execute("DELETE FROM reached")

    def spent(self) -> Spent:
        """What was spent so far."""
        with self._transaction() as connection:
            return _spent(connection)

    def by_role(self) -> dict[str, Spent]:
        """What was spent so far, for each role."""
        with self._transaction() as connection:
            rows = connection.execute(f"SELECT role, {_SUMS} FROM spent GROUP BY role").fetchall()
        return {row[0]: Spent(*row[1:]) for row in rows}

    def under_way(self) -> tuple[int, int, int]:
        """Attempts under way, and the picodollars and tokens that they may cost at worst."""
        with self._transaction() as connection:
            sums = "COUNT(*), COALESCE(SUM(pico), 0), COALESCE(SUM(tokens), 0)"
            calls, pico, tokens = connection.execute(f"SELECT {sums} FROM held").fetchone()
            return int(calls), int(pico), int(tokens)

    def mark_reached(self, reason: str) -> None:
        """Note for all processes that a limit was reached; the first reason stays."""
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO reached SELECT ? WHERE NOT EXISTS (SELECT 1 FROM reached)", (reason,)
            )

    def reached(self) -> str | None:
        """The limit that was reached first, or None."""
        with self._transaction() as connection:
            row = connection.execute("SELECT reason FROM reached").fetchone()
        return row[0] if row else None

    def close(self) -> None:
        """Close the file; the next use opens it again. What is in memory is lost."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        connection = sqlite3.connect(
            self.path or ":memory:",
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        if self.path is not None:
            _write_ahead(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(_SCHEMA)
        self._connection, self._pid = connection, os.getpid()
        return connection


def _write_ahead(connection: sqlite3.Connection) -> None:
    """SQLite does not wait by itself while another process changes the mode of a new file."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _spent(connection: sqlite3.Connection) -> Spent:
    return Spent(*connection.execute(f"SELECT {_SUMS} FROM spent").fetchone())


def _add(connection: sqlite3.Connection, role: str, model: str, **amounts: int) -> None:
    names = ", ".join(amounts)
    marks = ", ".join("?" for _ in amounts)
    sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in amounts)
    connection.execute(
        f"INSERT INTO spent (role, model, {names}) VALUES (?, ?, {marks}) "
        f"ON CONFLICT (role, model) DO UPDATE SET {sums}",
        (role, model, *amounts.values()),
    )


def _drop_abandoned(connection: sqlite3.Connection) -> None:
    """Drop the holds of processes that are gone, and those that nobody settled in time."""
    connection.execute("DELETE FROM held WHERE expires < ?", (time.time(),))
    for (pid,) in connection.execute("SELECT DISTINCT pid FROM held").fetchall():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            connection.execute("DELETE FROM held WHERE pid = ?", (pid,))
        except PermissionError:
            continue
