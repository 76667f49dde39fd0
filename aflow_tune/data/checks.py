"""Checks of the data itself: readable rows, fields that the workflow reads, leaks.

Takes tables that were read (`rows.py`) and fields that a function reads (`fields.py`); where
the files are is decided by the caller. A leak is an item of a held-out task set whose input
also stands in the training data: fields that name, answer or describe an item do not make it
another one.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from aflow_tune.data.fields import FieldRead
from aflow_tune.data.rows import Table
from aflow_tune.errors import Fault

FIRST_ROWS = 100
"""Rows in which the workflow's fields are looked for."""
_EXAMPLES = 3

# Words of column names. Names and marks of an item never make it another one; what answers or
# describes it does not either, where another column asks (without one, as in number games, a
# "target" may well be what is asked).
_MARKS = {"id", "ids", "idx", "index", "uid", "uuid", "guid", "hash", "seed", "split"}
_ASKS = {"question", "problem", "prompt", "query", "instruction", "input", "text", "messages"}
_ANSWERS = {
    *("answer", "answers", "solution", "solutions", "label", "labels", "target", "targets"),
    *("output", "outputs", "response", "completion", "rationale", "reasoning", "explanation"),
    *("metadata", "meta", "difficulty", "level", "score", "reward", "timestamp", "date"),
    *("truth", "gold", "source"),
}


@dataclass
class Findings:
    """What was found: faults end the command, warnings do not."""

    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Take over what another check found."""
        self.faults += other.faults
        self.warnings += other.warnings


def check_rows(table: Table) -> Findings:
    """Unreadable rows, no rows, rows of different kinds."""
    found = Findings(faults=list(table.faults))
    if table.faults:
        return found
    if not table.rows:
        found.faults.append(
            Fault(table.source, "at least one row", "no rows", "write the tasks into the file")
        )
        return found
    if not table.complete:
        found.warnings.append(
            f"{table.source}: looked at {len(table.rows):,} of {table.total:,} rows only"
        )
    kinds: dict[str, tuple[str, str]] = {}
    for row, place in zip(table.rows, table.places, strict=True):
        for column, value in row.items():
            kind = _kind(value)
            if kind is None:
                continue
            first = kinds.setdefault(column, (kind, place))
            if first[0] != kind and len(found.faults) < _EXAMPLES:
                found.faults.append(
                    Fault(
                        place,
                        f"`{column}`: {first[0]}, as in {first[1]}",
                        f"{kind}: {_short(value)}",
                        "give a column one type; the loader refuses mixed ones",
                    )
                )
    found.warnings += _uneven_columns(table)
    return found


def check_fields(reads: Sequence[FieldRead], table: Table) -> Findings:
    """Fields that the workflow reads but the first rows do not have."""
    found = Findings()
    rows, places = table.rows[:FIRST_ROWS], table.places[:FIRST_ROWS]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    reported: set[str] = set()
    for read in reads:
        lacking = [place for row, place in zip(rows, places, strict=True) if read.name not in row]
        if not lacking or read.name in reported:
            continue
        close = difflib.get_close_matches(read.name, columns, n=1, cutoff=0.7)
        if read.tolerant and not (close and read.name not in columns):
            if read.name not in columns:
                reported.add(read.name)
                found.warnings.append(
                    f"{read.where}: no row of {table.source} has the field {read.name!r}"
                )
            continue
        reported.add(read.name)
        found.faults.append(
            Fault(
                read.where,
                f"a field {read.name!r} in every row of {table.source}",
                f"{', '.join(map(repr, columns))} in {lacking[0]}"
                if read.name not in columns
                else f"no such field in {lacking[0]} ({len(lacking)} of the first {len(rows)})",
                f"task[{close[0]!r}]"
                if close and read.name not in columns
                else f"add {read.name!r} to the data, or read a field that is there",
            )
        )
    return found


def check_overlap(training: Sequence[Table], held_out: Sequence[Table]) -> Findings:
    """Held-out items whose input stands in the training data, and repeated held-out items."""
    found = Findings()
    trained: dict[bytes, str] = {}
    for table in training:
        for row, place in zip(table.rows, table.places, strict=True):
            trained.setdefault(_fingerprint(row), place)
    for table in held_out:
        keys = [_fingerprint(row) for row in table.rows]
        leaks = [number for number, key in enumerate(keys) if key in trained]
        if leaks:
            pairs = [f"{table.places[n]} = {trained[keys[n]]}" for n in leaks[:_EXAMPLES]]
            more = f" and {len(leaks) - len(pairs)} more" if len(leaks) > len(pairs) else ""
            found.faults.append(
                Fault(
                    table.source,
                    "held-out items that do not occur in the training data",
                    f"{len(leaks)} of {len(keys)} items are in both: {'; '.join(pairs)}{more} "
                    f"({_short(table.rows[leaks[0]])})",
                    "remove them from one of the two files: a score on trained items says nothing",
                )
            )
        repeated = sum(count - 1 for count in Counter(keys).values())
        if repeated:
            found.warnings.append(
                f"{table.source}: {repeated} of {len(keys)} held-out items repeat another one, "
                "which makes the interval of the score too narrow"
            )
    return found


def _uneven_columns(table: Table) -> Iterable[str]:
    counts = Counter(column for row in table.rows for column in row)
    rare = {column: count for column, count in counts.items() if count < len(table.rows)}
    if rare:
        names = ", ".join(f"{name!r} ({count})" for name, count in list(rare.items())[:_EXAMPLES])
        yield f"{table.source}: not every one of its {len(table.rows)} rows has {names}"


def _fingerprint(row: dict[str, Any]) -> bytes:
    text = "\x1f".join(f"{name}={row[name]}" for name in _inputs(tuple(row)))
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    text = " ".join(text.casefold().split())
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@lru_cache(maxsize=256)
def _inputs(columns: tuple[str, ...]) -> list[str]:
    """The columns that make an item what it is, sorted."""
    words = {name: set(re.split(r"[^a-z]+", name.lower())) for name in columns}
    kept = [name for name in columns if not words[name] & _MARKS]
    if any(words[name] & _ASKS for name in kept):
        kept = [name for name in kept if not words[name] & _ANSWERS]
    return sorted(kept or columns)


def _kind(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    return "a list" if isinstance(value, list) else "an object"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
