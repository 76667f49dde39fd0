"""Checks of the data itself: readable rows, fields that the workflow reads, leaks.

Takes tables that were read (`rows.py`) and fields that a function reads (`fields.py`); where
the files are is decided by the caller, and what makes two items the same by `leaks.py`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aflow_tune.data.fields import FieldRead
from aflow_tune.data.leaks import NEAR, Leaks, fingerprint, leaks_between
from aflow_tune.data.rows import Table
from aflow_tune.errors import Fault

FIRST_ROWS = 100
"""Rows in which the workflow's fields are looked for."""
_EXAMPLES = 3

NEAR_ROWS = 20_000
NEAR_CHARACTERS = 8_000_000
"""Data sets with more rows or more text are not looked through for near-duplicates, which would
take more than a second or two: `aflow-tune data check` does it."""


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
    kinds: dict[tuple[str | None, str], tuple[str, str]] = {}
    several = len(sources(table)) > 1
    for row, place in zip(table.rows, table.places, strict=True):
        source = source_of(row) if several else None
        for column, value in row.items():
            kind = _kind(value)
            if kind is None:
                continue
            first = kinds.setdefault((source, column), (kind, place))
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


def check_fields(reads: Sequence[FieldRead], *tables: Table) -> Findings:
    """Fields that the workflow reads but the first rows do not have.

    Where there are several tables, or rows of several sources, a function may read a field of
    one of them only: what another one never has is a warning.
    """
    parts = [part for table in tables for part in _by_source(table)]
    found = Findings()
    reported: set[str] = set()
    for read in reads:
        if read.name in reported:
            continue
        without = [part for part in parts if not any(read.name in row for row in part.rows)]
        if 0 < len(without) < len(parts):
            names = ", ".join(part.source for part in without)
            reported.add(read.name)
            found.warnings.append(
                f"{read.where}: no row of {names} has the field {read.name!r}, others have it"
            )
        for part in parts if len(without) == len(parts) else [p for p in parts if p not in without]:
            if read.name not in reported:
                _check_field(read, part, found, reported)
    return found


def _check_field(read: FieldRead, table: Table, found: Findings, reported: set[str]) -> None:
    rows, places = table.rows, table.places
    columns = table.columns
    lacking = [place for row, place in zip(rows, places, strict=True) if read.name not in row]
    if not lacking:
        return
    close = difflib.get_close_matches(read.name, columns, n=1, cutoff=0.7)
    if read.tolerant and not (close and read.name not in columns):
        if read.name not in columns:
            reported.add(read.name)
            found.warnings.append(
                f"{read.where}: no row of {table.source} has the field {read.name!r}"
            )
        return
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


def _by_source(table: Table) -> list[Table]:
    """The first rows of a table; of a table of several sources, the first rows of each."""
    several = len(sources(table)) > 1
    parts: dict[str, Table] = {}
    for row, place in zip(table.rows, table.places, strict=True):
        name = f"{table.source} ({source_of(row)})" if several else table.source
        part = parts.setdefault(name, Table(name))
        if len(part.rows) < FIRST_ROWS:
            part.rows.append(row)
            part.places.append(place)
        elif not several:
            break
    return list(parts.values())


def check_overlap(training: Sequence[Table], held_out: Sequence[Table]) -> Findings:
    """Held-out items whose input stands in the training data, and repeated held-out items.

    Equal ones are a fault; near-duplicates and repeated ones are warnings.
    """
    found = Findings()
    near = _is_small([*training, *held_out])
    if not near and training and held_out:
        found.warnings.append(
            "the data is too large to be looked through for near-duplicates here: run "
            "`aflow-tune data check TRAIN TEST`"
        )
    for leaks in leaks_between(training, held_out, near=near):
        table = leaks.held_out
        exact = _described(leaks, exact=True)
        if exact:
            count, examples = exact
            found.faults.append(
                Fault(
                    table.source,
                    "held-out items that do not occur in the training data",
                    f"{count} of {len(table.rows)} items are in both: {examples}",
                    "remove them from one of the two files: a score on trained items says nothing",
                )
            )
        close = _described(leaks, exact=False)
        if close:
            count, examples = close
            found.warnings.append(
                f"{table.source}: {count} of {len(table.rows)} held-out items are nearly the same "
                f"as one of the training data (similarity {NEAR} or more): {examples}"
            )
        keys = Counter(fingerprint(row) for row in table.rows)
        repeated = sum(count - 1 for count in keys.values())
        if repeated:
            found.warnings.append(
                f"{table.source}: {repeated} of {len(table.rows)} held-out items repeat another "
                "one, which makes the interval of the score too narrow"
            )
    return found


def _is_small(tables: Sequence[Table]) -> bool:
    if sum(len(table.rows) for table in tables) > NEAR_ROWS:
        return False
    left = NEAR_CHARACTERS
    for table in tables:
        for row in table.rows:
            left -= sum(len(str(value)) for value in row.values())
            if left < 0:
                return False
    return True


def _described(leaks: Leaks, *, exact: bool) -> tuple[int, str] | None:
    """How many leaks of one kind there are, and the first of them with both places."""
    chosen = [
        (leak, place)
        for leak, place in zip(leaks.found, leaks.places, strict=True)
        if leak.exact == exact
    ]
    if not chosen:
        return None
    sign = "=" if exact else "~"
    table = leaks.held_out
    pairs = [f"{table.places[leak.held_out]} {sign} {at}" for leak, at in chosen[:_EXAMPLES]]
    more = f" and {len(chosen) - len(pairs)} more" if len(chosen) > len(pairs) else ""
    first = _short(table.rows[chosen[0][0].held_out])
    return len(chosen), f"{'; '.join(pairs)}{more} ({first})"


def source_of(row: Mapping[str, Any]) -> str | None:
    """The source of a row in the form that `aflow-tune data prepare` writes: with a benchmark.

    Other data may have a column of that name for something else, such as an address.
    """
    source = row.get("source")
    return source if isinstance(source, str) and isinstance(row.get("benchmark"), str) else None


def sources(table: Table) -> Counter[str | None]:
    """How many rows come from each source; rows of different sources may have other columns."""
    return Counter(source_of(row) for row in table.rows)


def _uneven_columns(table: Table) -> Iterable[str]:
    if len(sources(table)) > 1:
        return
    counts = Counter(column for row in table.rows for column in row)
    rare = {column: count for column, count in counts.items() if count < len(table.rows)}
    if rare:
        names = ", ".join(f"{name!r} ({count})" for name, count in list(rare.items())[:_EXAMPLES])
        yield f"{table.source}: not every one of its {len(table.rows)} rows has {names}"


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
