"""Many problems from a file: each line one, some at once, every result one line of JSON.

With an output file the same command goes on where it was stopped: a result says which row and
which sample it belongs to, and of what it was made (`key`: the row, the weights, the settings).
Results of another make are not mixed with new ones but refused. Rows that met an error are asked
again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aflow_tune.errors import AflowTuneError, BadInput, BudgetReached, Fault
from aflow_tune.files import append_line, as_line, drop_torn_line, write_whole
from aflow_tune.using.solved import Problem, Solved

_MAX_FAULTS = 20


class Sampling(Protocol):
    """A solver that knows which sample of a problem is asked for."""

    async def solve(self, problem: Problem, sample: int = 0) -> Solved:
        """What became of one problem."""
        ...


@dataclass(frozen=True)
class Row:
    """One line of the file. `key` changes with what decides its result."""

    number: int
    """From 1, blank lines not counted."""
    problem: Problem
    key: str
    id: Any = None
    """What the row calls itself, handed through."""


@dataclass
class Tally:
    """What a batch came to."""

    rows: int = 0
    answered: int = 0
    """Rows with an answer in at least one sample."""
    earlier: int = 0
    """Results that were there already."""


def read_rows(file: Path, make: str, default_type: str | None = None) -> list[Row]:
    """The problems of a JSONL file.

    Args:
        make: of what results are made, beside the row itself.
        default_type: of rows that do not say their type.

    Raises:
        BadInput: with the faulty rows and their lines.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cure = "name a JSONL file in UTF-8"
        fault = Fault(f"--batch {file}", "a file with a problem a line", str(error), cure)
        raise BadInput("The problems cannot be read.", [fault]) from None
    rows: list[Row] = []
    faults: list[Fault] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            example = '{"problem": "What is 2 + 3?", "type": "math", "truth": "5"}'
            faults.append(Fault(where, "a JSON object", f"{line!r:.60}", example))
            continue
        if default_type is not None and "problem_type" not in content:
            content.setdefault("type", default_type)
        try:
            problem = Problem.of(content, where)
        except BadInput as error:
            faults += error.faults
            continue
        rows.append(Row(len(rows) + 1, problem, _key(content, make), content.get("id")))
    if not rows and not faults:
        faults.append(Fault(str(file), "at least one problem", "none", "add a line"))
    if faults:
        raise BadInput("These problems cannot be asked.", faults[:_MAX_FAULTS])
    return rows


async def run_batch(
    solver: Sampling,
    rows: Sequence[Row],
    *,
    samples: int,
    at_once: int,
    out: Path | None,
    say: Callable[[str], None],
) -> Tally:
    """Solve every row `samples` times; results go to `out`, or to standard output.

    Raises:
        BadInput: `out` holds other results.
        BudgetReached: a limit was reached; what was solved before is kept.
    """
    done = _kept(out, rows, samples) if out is not None else {}
    tally = Tally(len(rows), earlier=len(done))
    answered = {number for (number, _), got in done.items() if got}
    if done:
        say(f"{len(done)} of {len(rows) * samples} results are there from an earlier command")
    slots = asyncio.Semaphore(at_once)
    count = len(done)

    async def one(row: Row, sample: int) -> None:
        nonlocal count
        async with slots:
            line, got = await _entry(solver, row, sample)
        if got:
            answered.add(row.number)
        if out is None:
            sys.stdout.write(as_line(line).decode())
            sys.stdout.flush()
        else:
            append_line(out, as_line(line))
        count += 1
        told = "answered" if got else line.get("error") or "no answer"
        say(f"{count} of {len(rows) * samples}: row {row.number}: {told}")

    try:
        async with asyncio.TaskGroup() as group:
            for row in rows:
                for sample in range(samples):
                    if (row.number, sample) not in done:
                        group.create_task(one(row, sample))
    except* AflowTuneError as errors:
        raise errors.exceptions[0] from None
    tally.answered = len(answered)
    return tally


async def _entry(solver: Sampling, row: Row, sample: int) -> tuple[dict[str, Any], bool]:
    """A result's line, and whether there is an answer. What a row alone fails of is its error."""
    head = {"row": row.number, "sample": sample, "key": row.key}
    if row.id is not None:
        head["id"] = row.id
    try:
        solved = await solver.solve(row.problem, sample)
    except BudgetReached:
        raise
    except (AflowTuneError, TimeoutError) as error:
        told = "timed out" if isinstance(error, TimeoutError) else str(error)
        return {**head, "problem": row.problem.text, "answered": False, "error": told}, False
    return {**head, **solved.to_json()}, solved.answered


def _kept(out: Path, rows: Sequence[Row], samples: int) -> dict[tuple[int, int], bool]:
    """Results of an earlier command: whether there is an answer, by row and sample. Lines of
    rows that met an error are taken out of the file.

    Raises:
        BadInput: the file holds something else.
    """
    if not out.exists():
        return {}
    drop_torn_line(out)
    keys = {row.number: row.key for row in rows}
    found: dict[tuple[int, int], bool] = {}
    good: list[bytes] = []
    lines = [line for line in out.read_bytes().split(b"\n") if line.strip()]
    for number, line in enumerate(lines, 1):
        entry = _object(line)
        row, sample = entry.get("row"), entry.get("sample")
        if (
            not isinstance(row, int)
            or not isinstance(sample, int)
            or entry.get("key") != keys.get(row, "no such row")
        ):
            fault = Fault(
                f"{out}:{number}",
                "results of these problems by this model with these settings",
                "something else",
                "name a new file, or remove this one",
            )
            raise BadInput("The results cannot be added to this file.", [fault])
        if "error" in entry:
            continue
        good.append(line + b"\n")
        if sample < samples:
            found[row, sample] = bool(entry.get("answered"))
    if len(good) < len(lines):
        write_whole(out, b"".join(good))
    return found


def _object(line: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _key(content: Mapping[str, Any], make: str) -> str:
    text = json.dumps([make, content], sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
