"""Checks of the data before a run: readable rows, fields that the workflow reads, leaks."""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aflow_tune.data.fields import FieldRead
from aflow_tune.data.leaks import NEAR, fingerprint, leaks_between
from aflow_tune.data.rows import Table
from aflow_tune.errors import Fault

FIRST_ROWS = 100
"""Rows of each table or source that are searched for the workflow's fields."""
_EXAMPLES = 3

NEAR_CHARACTERS = 8_000_000
"""Above this many characters in all tables, near-duplicates are not searched: it takes seconds."""


@dataclass
class Findings:
    """What the checks found: faults end the command, warnings do not."""

    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Append the findings of another check."""
        self.faults += other.faults
        self.warnings += other.warnings


def check_rows(table: Table) -> Findings:
    """Faults: unreadable rows, no rows, a column of mixed types. Warning: rows were not read."""
    if table.faults:
        return Findings(list(table.faults))
    if not table.rows:
        fix = "write the tasks into the file"
        return Findings([Fault(table.source, "at least one row", "no rows", fix)])
    found = Findings()
    if table.left_out:
        more = f" (and {len(table.left_out) - 3} more)" if len(table.left_out) > 3 else ""
        found.warnings.append(f"left out: {'; '.join(table.left_out[:3])}{more}")
    if not table.complete:
        looked = f"{len(table.rows):,} of {table.total:,} rows"
        found.warnings.append(f"{table.source}: looked at {looked} only")
    kinds: dict[tuple[str | None, str], tuple[str, str]] = {}
    several = len(sources(table)) > 1
    for row, place in zip(table.rows, table.places, strict=True):
        source = source_of(row) if several else None
        for column, value in row.items():
            if value is None:
                continue
            kind = _kind(value)
            first = kinds.setdefault((source, column), (kind, place))
            if first[0] != kind and len(found.faults) < _EXAMPLES:
                expected = f"`{column}`: {first[0]}, as in {first[1]}"
                fix = "give a column one type; the loader refuses mixed ones"
                found.faults.append(Fault(place, expected, f"{kind}: {value!s:.80}", fix))
    return found


def check_fields(reads: Sequence[FieldRead], *tables: Table) -> Findings:
    """Fields that the workflow reads but the first rows lack. A warning if only some tables or
    sources never have it, or if the read is tolerant and no similar field exists; else a fault."""
    found = Findings()
    parts = [part for table in tables for part in _by_source(table)]
    first: dict[str, FieldRead] = {}
    for read in reads:
        first.setdefault(read.name, read)
    for name, read in first.items():
        without = [part for part in parts if not any(name in row for row in part.rows)]
        pairs = [pair for part in parts for pair in zip(part.rows, part.places, strict=True)]
        lacking = [(row, place) for row, place in pairs if name not in row]
        columns = dict.fromkeys(column for row, _ in lacking for column in row)
        close = difflib.get_close_matches(name, columns, n=1, cutoff=0.7) if without else []
        names = ", ".join(part.source for part in without or parts)
        if without and (len(without) < len(parts) or (read.tolerant and not close)):
            found.warnings.append(f"{read.where}: no row of {names} has the field {name!r}")
        elif without or (lacking and not read.tolerant):
            told = f"{', '.join(map(repr, lacking[0][0]))} in {lacking[0][1]}"
            fix = f"add {name!r} to the data, or read a field that is there"
            fix = f"task[{close[0]!r}]" if close else fix
            expected = f"a field {name!r} in every row of {names}"
            found.faults.append(Fault(read.where, expected, told, fix))
    return found


def _by_source(table: Table) -> list[Table]:
    """The first `FIRST_ROWS` rows of a table, or of each source if it has several."""
    several = len(sources(table)) > 1
    parts: dict[str, Table] = {}
    for row, place in zip(table.rows, table.places, strict=True):
        name = f"{table.source} ({source_of(row)})" if several else table.source
        part = parts.setdefault(name, Table(name))
        if len(part.rows) < FIRST_ROWS:
            part.rows.append(row)
            part.places.append(place)
    return list(parts.values())


def check_overlap(training: Sequence[Table], held_out: Sequence[Table]) -> Findings:
    """Faults: held-out items whose input is also in the training data. Warnings: near-duplicates of
    training items, and repeated held-out items."""
    found = Findings()
    rows = [row for table in (*training, *held_out) for row in table.rows]
    lengths = itertools.accumulate(sum(len(str(value)) for value in row.values()) for row in rows)
    near = all(length <= NEAR_CHARACTERS for length in lengths)
    if not near and training and held_out:
        found.warnings.append(
            "the data is too large to be looked through for near-duplicates here: run "
            "`aflow-tune data check TRAIN TEST`"
        )
    for table, leaks in leaks_between(training, held_out, near=near):
        for exact, sign in ((True, "="), (False, "~")):
            pairs = [
                f"{table.places[leak.held_out]} {sign} {place}"
                for leak, place in leaks
                if leak.exact is exact
            ]
            told = f"{len(pairs)} of {len(table.rows)}: {'; '.join(pairs[:_EXAMPLES])}"
            if pairs and exact:
                expected = "held-out items that do not occur in the training data"
                fix = "remove them from one of the two files: a score on trained items says nothing"
                found.faults.append(Fault(table.source, expected, told, fix))
            elif pairs:
                text = f"held-out items with a similarity of {NEAR} or more to a training item"
                found.warnings.append(f"{table.source}: {text}: {told}")
        repeated = len(table.rows) - len({fingerprint(row) for row in table.rows})
        if repeated:
            found.warnings.append(
                f"{table.source}: {repeated} of {len(table.rows)} held-out items repeat another "
                "one, which makes the interval of the score too narrow"
            )
    return found


def source_of(row: Mapping[str, Any]) -> str | None:
    """The source of a row that `aflow-tune data prepare` wrote, else None. Such a row also has a
    `benchmark`; other data may use a column `source` for something else."""
    source = row.get("source")
    return source if isinstance(source, str) and isinstance(row.get("benchmark"), str) else None


def sources(table: Table) -> Counter[str | None]:
    """How many rows come from each source."""
    return Counter(source_of(row) for row in table.rows)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    for kind, name in ((str, "text"), ((int, float), "a number"), (list, "a list")):
        if isinstance(value, kind):
            return name
    return "an object"
