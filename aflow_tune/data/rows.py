"""Reads the rows of data files, with the place of each row and of each fault.

The rows are those that Hugging Face `datasets` reads from the same file, unchanged, without
importing it. For checks, a long file is read up to a limit and the rest is only counted.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from aflow_tune.errors import Fault

ROW_LIMIT = 100_000
"""Rows of one table that are read for checks; columnar files stop at the end of a batch."""
_FAULT_LIMIT = 5

SUFFIXES = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv"}
SUFFIXES |= {".parquet": "parquet", ".arrow": "arrow", ".txt": "text"}


@dataclass
class Table:
    """The rows of one or more files that form one split."""

    source: str
    """The path as the user gave it."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """`file:line` (or `file row N`) of each row."""
    total: int = 0
    """Rows in the files, faulty ones included."""
    faults: list[Fault] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What was left out of `rows` and why, a line each."""

    @property
    def complete(self) -> bool:
        """Whether `rows` has every row of the files."""
        return len(self.rows) == self.total


def file_format(path: Path) -> str | None:
    """`json`, `csv`, `parquet`, `arrow`, `text`, or None if the suffix is not one of `SUFFIXES`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        inner = SUFFIXES.get(suffixes[-2]) if len(suffixes) > 1 else None
        return inner if inner in ("json", "csv") else None
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def read_table(source: str, files: list[Path], *, whole: bool = False) -> Table:
    """Read the files of one split, `whole` or up to `ROW_LIMIT` rows. Raises nothing for bad files:
    the first faults are in `Table.faults`."""
    table = Table(source)
    limit = math.inf if whole else ROW_LIMIT
    for file in files:
        try:
            kind = file_format(file)
            if kind in ("parquet", "arrow"):
                _read_columns(table, file, kind, limit)
            else:
                opened = gzip.open if file.suffix.lower() == ".gz" else open
                with opened(file, "rt", encoding="utf-8-sig", newline="") as stream:
                    _read_stream(table, file, kind, stream, limit)
        except UnicodeDecodeError as error:
            found = f"bytes that are not UTF-8 ({error.reason})"
            table.faults.append(Fault(str(file), "text in UTF-8", found, "save it as UTF-8"))
        except (OSError, EOFError, csv.Error) as error:
            cure = "check that the file is whole and readable"
            table.faults.append(Fault(str(file), "a readable file", str(error), cure))
    return table


def with_source(row: Mapping[str, Any], source: str, benchmark: str | None) -> dict[str, Any]:
    """A copy with its source and any benchmark; another `source` moves to `original_source`."""
    content = dict(row)
    if content.get("source") not in (None, source):
        content["original_source"] = content["source"]
    content["source"] = source
    if benchmark is not None:
        content["benchmark"] = benchmark
    return content


def _read_stream(table: Table, file: Path, kind: str | None, stream: IO[str], limit: float) -> None:
    """JSON, JSON lines, CSV and text: read up to the limit, then only count."""
    rows: Iterator[tuple[str, Any]]
    if kind == "json":
        first = next((line.strip() for line in stream if line.strip()), "")
        stream.seek(0)
        if first.startswith("["):
            try:
                items = json.loads(stream.read())
            except json.JSONDecodeError as error:
                place, found = f"{file}:{error.lineno}", f"{error.msg} at column {error.colno}"
                _fault(table, place, "a JSON list of objects", found)
                return
            rows = ((f"{file} row {number}", row) for number, row in enumerate(items))
        else:
            rows = ((f"{file}:{n}", line) for n, line in enumerate(stream, 1) if line.strip())
    elif kind == "csv":
        cells = csv.DictReader(stream, delimiter="\t" if ".tsv" in file.suffixes else ",")
        rows = ((f"{file}:{cells.line_num}", row) for row in cells)
    else:
        rows = ((f"{file}:{n}", {"text": line.rstrip("\r\n")}) for n, line in enumerate(stream, 1))
    for place, row in rows:
        table.total += 1
        if len(table.rows) >= limit:
            table.total += sum(1 for _ in rows)
            return
        if isinstance(row, str):
            try:
                row = json.loads(row)
            except json.JSONDecodeError as error:
                found = f"{error.msg} at column {error.colno}: {row.strip():.60}"
                _fault(table, place, "one whole JSON object in a line", found)
                continue
        if not isinstance(row, dict):
            expected = "one object a row, such as {'question': ..., 'answer': ...}"
            _fault(table, place, expected, f"a {type(row).__name__}: {row!s:.60}")
        elif None in row or (kind == "csv" and None in row.values()):
            _fault(table, place, "as many cells as the first line has", f"{row!s:.60}")
        else:
            table.rows.append(row)
            table.places.append(place)


def _read_columns(table: Table, file: Path, kind: str, limit: float) -> None:
    import pyarrow
    import pyarrow.parquet

    batches: Iterable[Any]
    try:
        if kind == "parquet":
            content = pyarrow.parquet.ParquetFile(file)
            batches, total = content.iter_batches(batch_size=1000), content.metadata.num_rows
        else:
            try:
                content = pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all()
            except pyarrow.ArrowInvalid:
                content = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()
            batches, total = content.to_batches(max_chunksize=1000), content.num_rows
        start = len(table.rows)
        for batch in batches:
            if len(table.rows) >= limit:
                break
            for row in batch.to_pylist():
                table.places.append(f"{file} row {len(table.rows) - start}")
                table.rows.append(row)
        table.total += total
    except pyarrow.ArrowException as error:
        _fault(table, str(file), f"a file of {kind}", str(error).splitlines()[0])


def _fault(table: Table, place: str, expected: str, found: str) -> None:
    if len(table.faults) < _FAULT_LIMIT:
        table.faults.append(Fault(place, expected, found, "correct or remove this row"))
