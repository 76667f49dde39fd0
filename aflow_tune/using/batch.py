"""Many problems from a file: each line one, some at once, every result one line of JSON.

With an output file the same command goes on where it was stopped: a result says which row and
which sample it belongs to, and of what it was made (`key`: the row, the weights, the settings).
Results of another make are refused, not mixed with new ones. Rows that met an error are asked
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
from typing import Any

from aflow_tune.errors import AflowTuneError, BadInput, Fault
from aflow_tune.files import append_line, as_line, drop_torn_line, write_whole
from aflow_tune.using.inferring import Inferer
from aflow_tune.using.solved import Problem

_MAX_FAULTS = 20


@dataclass(frozen=True)
class Row:
    """One line of the file. `number` counts from 1, blank lines left out; `key` changes with what
    decides its result; `id` is what the row calls itself, handed through."""

    number: int
    problem: Problem
    key: str
    id: Any = None


def read_rows(file: Path, make: str, default_type: str | None = None) -> list[Row]:
    """The problems of a JSONL file.

    Args:
        make: of what results are made, beside the row itself.
        default_type: of rows that do not say their type.

    Raises:
        BadInput: with the faulty rows and their lines.
    """
    title = "These problems cannot be asked."
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cure, expected = "name a JSONL file in UTF-8", "a file with a problem a line"
        raise BadInput.of(title, f"--batch {file}", expected, str(error), cure) from None
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
        raise BadInput(title, faults[:_MAX_FAULTS])
    return rows


async def run_batch(
    solver: Inferer,
    rows: Sequence[Row],
    *,
    samples: int,
    at_once: int,
    out: Path | None,
    say: Callable[[str], None],
) -> int:
    """Solve every row `samples` times; results go to `out`, or to standard output. Returns how many
    rows have an answer in at least one sample.

    Raises:
        BadInput: `out` holds other results.
    """
    done = _kept(out, rows, samples) if out is not None else {}
    answered = {number for (number, _), got in done.items() if got}
    count, total = len(done), len(rows) * samples
    if done:
        say(f"{count} of {total} results are there from an earlier command")
    slots = asyncio.Semaphore(at_once)

    async def one(row: Row, sample: int) -> None:
        nonlocal count
        line: dict[str, Any] = {"row": row.number, "sample": sample, "key": row.key}
        if row.id is not None:
            line["id"] = row.id
        async with slots:
            try:
                line |= await solver.solve(row.problem, sample)
            except (AflowTuneError, TimeoutError) as error:
                why = "timed out" if isinstance(error, TimeoutError) else str(error)
                line |= {"problem": row.problem.text, "answered": False, "error": why}
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

    wanted = [(row, sample) for row in rows for sample in range(samples)]
    left = [(row, sample) for row, sample in wanted if (row.number, sample) not in done]
    await asyncio.gather(*(one(row, sample) for row, sample in left))
    return len(answered)


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
        ours = isinstance(row, int) and isinstance(sample, int)
        if not ours or entry.get("key") != keys.get(row, "no such row"):
            raise BadInput.of(
                "The results cannot be added to this file.",
                f"{out}:{number}",
                "results of these problems by this model with these settings",
                "something else",
                "name a new file, or remove this one",
            )
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
