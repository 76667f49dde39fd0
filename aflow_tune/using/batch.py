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
from collections.abc import Callable, Sequence
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
    """One line of the file. `number` counts from 1, blank lines left out; `key` changes with what
    decides its result; `id` is what the row calls itself, handed through."""

    number: int
    problem: Problem
    key: str
    id: Any = None


@dataclass
class Tally:
    """What a batch came to: its rows, and those with an answer in at least one sample."""

    rows: int
    answered: int


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
        where, content = f"{file}:{number}", _object(line)
        if content is None:
            example = '{"problem": "What is 2 + 3?", "type": "math", "truth": "5"}'
            faults.append(Fault(where, "a JSON object", f"{line!r:.60}", example))
            continue
        if default_type is not None and "problem_type" not in content:
            content.setdefault("type", default_type)
        text = json.dumps([make, content], sort_keys=True, default=str)
        key = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
        try:
            problem = Problem.of(content, where)
            rows.append(Row(len(rows) + 1, problem, key, content.get("id")))
        except BadInput as error:
            faults += error.faults
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
    answered = {number for (number, _), got in done.items() if got}
    count, total = len(done), len(rows) * samples
    if done:
        say(f"{count} of {total} results are there from an earlier command")
    slots = asyncio.Semaphore(at_once)

    async def one(row: Row, sample: int) -> None:
        nonlocal count
        async with slots:
            line = await _entry(solver, row, sample)
        if line["answered"]:
            answered.add(row.number)
        if out is None:
            sys.stdout.write(as_line(line).decode())
            sys.stdout.flush()
        else:
            append_line(out, as_line(line))
        count += 1
        told = "answered" if line["answered"] else line.get("error") or "no answer"
        say(f"{count} of {total}: row {row.number}: {told}")

    try:
        async with asyncio.TaskGroup() as group:
            for row in rows:
                for sample in range(samples):
                    if (row.number, sample) not in done:
                        group.create_task(one(row, sample))
    except* AflowTuneError as errors:
        raise errors.exceptions[0] from None
    return Tally(len(rows), len(answered))


async def _entry(solver: Sampling, row: Row, sample: int) -> dict[str, Any]:
    """A result's line. What a row alone fails of is its `error`."""
    head = {"row": row.number, "sample": sample, "key": row.key}
    if row.id is not None:
        head["id"] = row.id
    try:
        solved = await solver.solve(row.problem, sample)
    except BudgetReached:
        raise
    except (AflowTuneError, TimeoutError) as error:
        told = "timed out" if isinstance(error, TimeoutError) else str(error)
        return {**head, "problem": row.problem.text, "answered": False, "error": told}
    return {**head, **solved.to_json()}


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
        entry = _object(line) or {}
        row, sample = entry.get("row"), entry.get("sample")
        if (
            not isinstance(row, int)
            or not isinstance(sample, int)
            or entry.get("key") != keys.get(row, "no such row")
        ):
            expected = "results of these problems by this model with these settings"
            cure = "name a new file, or remove this one"
            fault = Fault(f"{out}:{number}", expected, "something else", cure)
            raise BadInput("The results cannot be added to this file.", [fault])
        if "error" in entry:
            continue
        good.append(line + b"\n")
        if sample < samples:
            found[row, sample] = bool(entry.get("answered"))
    if len(good) < len(lines):
        write_whole(out, b"".join(good))
    return found


def _object(line: str | bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None where it is none."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
