"""`SharedExperiencePool`: every workflow, edit and trial of all searches, in one SQLite file.

One transaction a finished trial: a kill costs only the trials under way. The handle pickles as its
path, and threads and processes of one machine may share the file; workers on other machines send
their results to the process that opened it, as SQLite does not lock over network file systems.

Trials belong to a workflow, a problem and an executor (a hash of everything that decides a score),
not to a search: a later search finds those that it would repeat. Edges belong to a search, whose
tree they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput
from aflow_tune.search.state import Outcome, WorkflowState
from aflow_tune.search.values import learned_value

VERSION = 1
_BUSY_SECONDS = 60.0
_WHAT_IT_IS = "SELECT user_version, (SELECT COUNT(*) FROM sqlite_master) FROM pragma_user_version"
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS workflow (
    taskset TEXT, key TEXT, structure TEXT, content TEXT, PRIMARY KEY (taskset, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS trial (
    taskset TEXT, executor TEXT, workflow TEXT, problem TEXT, search TEXT,
    score REAL, ending TEXT, reason TEXT, calls INTEGER, tokens INTEGER, usd REAL, seconds REAL,
    answer TEXT, PRIMARY KEY (taskset, executor, workflow, problem)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS edge (
    search TEXT, taskset TEXT, number INTEGER, round INTEGER, parent TEXT, child TEXT,
    proposer TEXT, kind TEXT, what TEXT, refusal TEXT, gain REAL, shared INTEGER,
    anchor TEXT, record TEXT, PRIMARY KEY (search, taskset, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS meta (
    search TEXT, name TEXT, value TEXT, PRIMARY KEY (search, name)
) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
COMMIT;
"""


@dataclass(frozen=True)
class Trial:
    """One workflow run on one problem. `score`: in [0, 1], None if it is not scored, which is
    never 0: `reason` says why. `ending`: scored, failed (the workflow gave no answer: score 0), or
    unscored (something else failed, such as a server)."""

    score: float | None
    ending: str = "scored"
    reason: str = ""
    calls: int = 0
    tokens: int = 0
    usd: float | None = 0.0
    seconds: float = 0.0
    answer: str = ""


@dataclass(frozen=True)
class SearchEdge:
    """One proposal: `child` of `parent` (keys; None for a proposal that no graph came of), or why
    it was refused. `gain`: the child's estimated score less its parent's, None before its race
    ended; `shared`: on how many problems. `record`: the policy's call, for training."""

    number: int
    round: int
    parent: str
    child: str | None
    proposer: str
    kind: str
    what: str
    refusal: str = ""
    gain: float | None = None
    shared: int = 0
    anchor: str = ""
    record: Mapping[str, Any] | None = None


_EDGE = tuple(SearchEdge.__dataclass_fields__)
_TRIAL = tuple(Trial.__dataclass_fields__)


@dataclass
class SharedExperiencePool:
    """The pool in the file at `path`, which is made if it is not there.

    Raises:
        BadInput: on first use, if the file is something else or of a newer version.
    """

    path: Path
    _local: threading.local = field(default_factory=threading.local, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.path = Path(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.path, self._local = state["path"], threading.local()

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """This thread's connection, within one transaction."""
        process, connection = getattr(self._local, "connection", (None, None))
        if connection is None or process != os.getpid():  # a forked process must not share one
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = self._connected()
            self._local.connection = os.getpid(), connection
        with connection:
            yield connection

    def _connected(self) -> sqlite3.Connection:
        connection = None
        try:
            connection, since = sqlite3.connect(self.path, timeout=_BUSY_SECONDS), time.monotonic()
            while not self._is_ready(connection):
                if time.monotonic() > since + _BUSY_SECONDS:
                    raise sqlite3.OperationalError("it stays locked")
                time.sleep(0.01)
            connection.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.DatabaseError as error:
            if connection is not None:
                connection.close()
            raise BadInput.of(
                f"The pool at {self.path} cannot be used.",
                str(self.path),
                f"a pool of version {VERSION}, or no file",
                str(error),
                "name another file under search.pool, or move this one away",
            ) from error
        return connection

    @staticmethod
    def _is_ready(connection: sqlite3.Connection) -> bool:
        """Make the tables if the file is empty; False if another process does so just now."""
        version, tables = connection.execute(_WHAT_IT_IS).fetchone()
        if version == VERSION:
            return True
        if version or tables:
            found = f"a pool of version {version}" if version else "another database"
            raise sqlite3.DatabaseError(found)
        try:
            connection.executescript(f"PRAGMA journal_mode = WAL; {_SCHEMA}")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            return False  # to turn to WAL, SQLite does not wait
        return True

    # Workflows and trials

    def add_workflow(self, state: WorkflowState) -> None:
        """Keep a workflow; one that is there already stays as it is."""
        held = json.dumps(state.with_outcome(None).to_json())
        with self._open() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO workflow VALUES (?, ?, ?, ?)",
                (state.taskset, state.key, state.structure, held),
            )

    def workflow(self, taskset: str, key: str) -> WorkflowState:
        """The workflow of this key. Raises KeyError: there is none."""
        with self._open() as connection:
            sought = "SELECT content FROM workflow WHERE taskset = ? AND key = ?"
            row = connection.execute(sought, (taskset, key)).fetchone()
        if row is None:
            raise KeyError(key)
        return WorkflowState.from_json(json.loads(row[0]))

    def add_trial(
        self,
        taskset: str,
        executor: str,
        workflow: str,
        problem: str,
        trial: Trial,
        search: str = "",
    ) -> None:
        """Keep a finished trial. One that is scored is never replaced."""
        with self._open() as connection:
            connection.execute(
                f"INSERT INTO trial VALUES ({', '.join('?' * 13)}) ON CONFLICT DO UPDATE SET "
                "search = excluded.search, score = excluded.score, ending = excluded.ending, "
                "reason = excluded.reason, calls = excluded.calls, tokens = excluded.tokens, "
                "usd = excluded.usd, seconds = excluded.seconds, answer = excluded.answer "
                "WHERE trial.score IS NULL",
                (taskset, executor, workflow, problem, search, *map(_kept, vars(trial).values())),
            )

    def trials(
        self, taskset: str, executor: str, workflow: str | None = None
    ) -> dict[tuple[str, str], tuple[str, Trial]]:
        """By (workflow, problem): the search that paid for it, and the trial."""
        sought = f"SELECT workflow, problem, search, {', '.join(_TRIAL)} FROM trial "
        sought += "WHERE taskset = ? AND executor = ?"
        values = [taskset, executor]
        if workflow is not None:
            sought, values = f"{sought} AND workflow = ?", [*values, workflow]
        with self._open() as connection:
            rows = connection.execute(sought, values).fetchall()
        return {(row[0], row[1]): (row[2], Trial(*row[3:])) for row in rows}

    def best(
        self, taskset: str, executor: str, most: int = 3, least: int = 1
    ) -> list[WorkflowState]:
        """The workflows with the best mean scores over at least `least` trials, best first."""
        sought = (
            "SELECT workflow, AVG(score), COUNT(score), SUM(score IS NULL), SUM(tokens), "
            "SUM(usd), SUM(usd IS NULL) FROM trial WHERE taskset = ? AND executor = ? "
            "GROUP BY workflow HAVING COUNT(score) >= ? ORDER BY 2 DESC, 3 DESC, 1 LIMIT ?"
        )
        with self._open() as connection:
            rows = connection.execute(sought, (taskset, executor, least, most)).fetchall()
        found = []
        for key, score, scored, failed, tokens, usd, unpriced in rows:
            outcome = Outcome(score, scored, failed, tokens, None if unpriced else usd)
            found.append(self.workflow(taskset, key).with_outcome(outcome))
        return found

    # Edges

    def add_edges(self, search: str, taskset: str, edges: Sequence[SearchEdge]) -> None:
        """Keep edges of a search's tree, or what has become of them."""
        rows = []
        for edge in edges:
            held = {**vars(edge), "record": edge.record and json.dumps(edge.record)}
            rows.append((search, taskset, *(_kept(held[name]) for name in _EDGE)))
        marks = ", ".join("?" * (len(_EDGE) + 2))
        names = f"search, taskset, {', '.join(_EDGE)}"
        with self._open() as connection:
            connection.executemany(f"INSERT OR REPLACE INTO edge ({names}) VALUES ({marks})", rows)

    def edges(self, search: str | None = None, taskset: str | None = None) -> list[SearchEdge]:
        """The edges of a search (None: of all), of a task set, in their order."""
        sought = f"SELECT {', '.join(_EDGE)} FROM edge"
        given = {"search": search, "taskset": taskset}
        kept = {name: value for name, value in given.items() if value is not None}
        sought += " WHERE " * bool(kept) + " AND ".join(f"{name} = ?" for name in kept)
        with self._open() as connection:
            rows = connection.execute(
                f"{sought} ORDER BY search, taskset, number", [*kept.values()]
            )
            held = [dict(zip(_EDGE, row, strict=True)) for row in rows.fetchall()]
        for entry in held:
            entry["record"] = json.loads(entry["record"]) if entry["record"] else None
        return [SearchEdge(**entry) for entry in held]

    def gains(self) -> dict[str, list[float]]:
        """By anchor, the gains of all edits that were raced, of every search."""
        found: dict[str, list[float]] = {}
        with self._open() as connection:
            sought = "SELECT anchor, gain FROM edge WHERE gain IS NOT NULL ORDER BY search, number"
            for anchor, gain in connection.execute(sought):
                found.setdefault(anchor, []).append(gain)
        return found

    def values(self) -> dict[str, float]:
        """The learned value of each anchor (`values.learned_value`)."""
        return {anchor: learned_value(gains) for anchor, gains in self.gains().items()}

    # What a search remembers

    def note(self, search: str, name: str, value: Any) -> None:
        """Keep a JSON value under a name."""
        with self._open() as connection:
            row = search, name, json.dumps(value)
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", row)

    def noted(self, search: str, name: str) -> Any:
        """What `note` kept; None if nothing."""
        with self._open() as connection:
            sought = "SELECT value FROM meta WHERE search = ? AND name = ?"
            row = connection.execute(sought, (search, name)).fetchone()
        return None if row is None else json.loads(row[0])

    def describe(self) -> dict[str, int]:
        """How many searches, task sets, workflows, edges and trials it holds."""
        counts = {
            "searches": "SELECT COUNT(DISTINCT search) FROM edge",
            "tasksets": "SELECT COUNT(DISTINCT taskset) FROM workflow",
            "workflows": "SELECT COUNT(*) FROM workflow",
            "edges": "SELECT COUNT(*) FROM edge",
            "trials": "SELECT COUNT(*) FROM trial",
        }
        with self._open() as connection:
            return {name: connection.execute(text).fetchone()[0] for name, text in counts.items()}


def _kept(value: Any) -> Any:
    """A value as the pool keeps it: of a text, what is no character is replaced."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
