"""Rows of a data file, with the line of every fault.

Reads what Hugging Face `datasets` reads from the same file (JSON, JSON lines, CSV, Parquet,
Arrow, text, and gzip of the first three) without importing it, and leaves every row as it is:
rows may differ in their columns. For checking, a long file is read up to a row limit and a
deadline, and the rest is only counted.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from aflow_tune.errors import Fault

ROW_LIMIT = 200_000
"""Rows that are read of one file for checking."""
SECONDS = 0.6
"""Seconds that are spent on reading the files of one table for checking."""
_FAULT_LIMIT = 5

ORIGINAL_SOURCE = "original_source"
"""Where a row's own `source` goes if it says something else than where we take the row from."""

SUFFIXES = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}


@dataclass
class Table:
    """What was read of one or more files that form one split."""

    source: str
    """The path as the user gave it."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """`file:line` (or `file row N`) of each row."""
    total: int = 0
    """Rows in the files; equal to `len(rows)` if all were read."""
    faults: list[Fault] = field(default_factory=list)
    row_limit: int = ROW_LIMIT
    """Rows that are read of the files."""

    @property
    def complete(self) -> bool:
        """Whether every row was looked at."""
        return len(self.rows) == self.total

    @property
    def columns(self) -> list[str]:
        """The columns of the rows read, in order of appearance."""
        seen: dict[str, None] = {}
        for row in self.rows:
            seen.update(dict.fromkeys(row))
        return list(seen)


def file_format(path: Path) -> str | None:
    """`json`, `csv`, `parquet`, `arrow`, `text`, or None for a file that is no data."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        inner = SUFFIXES.get(suffixes[-2]) if len(suffixes) > 1 else None
        return inner if inner in ("json", "csv") else None
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def read_table(source: str, files: list[Path], *, whole: bool = False) -> Table:
    """Read the files of one split. What is wrong with them is in the table's faults.

    Args:
        whole: read every row, however long it takes.
    """
    table = Table(source, row_limit=sys.maxsize if whole else ROW_LIMIT)
    deadline = math.inf if whole else time.monotonic() + SECONDS
    for file in files:
        try:
            _READERS[file_format(file) or "text"](table, file, deadline)
        except UnicodeDecodeError as error:
            found = f"bytes that are not UTF-8 ({error.reason})"
            table.faults.append(Fault(str(file), "text in UTF-8", found, "save it as UTF-8"))
        except (OSError, EOFError, csv.Error) as error:
            cure = "check that the file is whole and readable"
            table.faults.append(Fault(str(file), "a readable file", str(error), cure))
    return table


def with_source(row: Mapping[str, Any], source: str, benchmark: str | None) -> dict[str, Any]:
    """The row with the name of its source and, where it is known, of its benchmark."""
    content = dict(row)
    if content.get("source") not in (None, source):
        content[ORIGINAL_SOURCE] = content["source"]
    content["source"] = source
    if benchmark is not None:
        content["benchmark"] = benchmark
    return content


def _add(table: Table, row: Any, place: str) -> None:
    table.total += 1
    if isinstance(row, dict):
        table.rows.append(row)
        table.places.append(place)
        return
    found = f"a {type(row).__name__}: {_short(row)}"
    _fault(table, place, "one object a row, such as {'question': ..., 'answer': ...}", found)


def _full(table: Table, deadline: float) -> bool:
    if len(table.rows) >= table.row_limit:
        return True
    return len(table.rows) % 1000 == 999 and time.monotonic() > deadline


def _fault(table: Table, place: str, expected: str, found: str) -> None:
    if len(table.faults) < _FAULT_LIMIT:
        table.faults.append(Fault(place, expected, found, "correct or remove this row"))


def _open(file: Path) -> IO[str]:
    if file.suffix.lower() == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig")
    return file.open(encoding="utf-8-sig", newline="")


def _read_json(table: Table, file: Path, deadline: float) -> None:
    with _open(file) as stream:
        if _first_character(stream) == "[":
            _read_json_array(table, file, stream.read())
            return
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            if _full(table, deadline):
                table.total += 1 + sum(1 for rest in stream if rest.strip())
                return
            place = f"{file}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                table.total += 1
                found = f"{error.msg} at column {error.colno}: {_short(line.strip())}"
                _fault(table, place, "one whole JSON object in a line", found)
                continue
            _add(table, row, place)


def _first_character(stream: IO[str]) -> str:
    for line in stream:
        if line.strip():
            stream.seek(0)
            return line.strip()[0]
    stream.seek(0)
    return ""


def _read_json_array(table: Table, file: Path, text: str) -> None:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        found = f"{error.msg} at column {error.colno}"
        _fault(table, f"{file}:{error.lineno}", "a JSON list of objects", found)
        return
    for number, row in enumerate(rows):
        _add(table, row, f"{file} row {number}")


def _read_csv(table: Table, file: Path, deadline: float) -> None:
    delimiter = "\t" if ".tsv" in file.suffixes else ","
    with _open(file) as stream:
        reader = csv.DictReader(stream, delimiter=delimiter)
        for row in reader:
            if _full(table, deadline):
                table.total += 1 + sum(1 for _ in reader)
                return
            place = f"{file}:{reader.line_num}"
            wanted = len(reader.fieldnames or ())
            if None in row or None in row.values():
                cells = sum(value is not None for key, value in row.items() if key is not None)
                cells += len(row.get(None, ()))
                table.total += 1
                _fault(table, place, f"{wanted} cells, as in the first line", f"{cells} cells")
                continue
            _add(table, row, place)


def _read_text(table: Table, file: Path, deadline: float) -> None:
    with _open(file) as stream:
        for number, line in enumerate(stream, 1):
            if _full(table, deadline):
                table.total += 1 + sum(1 for _ in stream)
                return
            _add(table, {"text": line.rstrip("\r\n")}, f"{file}:{number}")


def _read_parquet(table: Table, file: Path, deadline: float) -> None:
    import pyarrow
    import pyarrow.parquet

    try:
        content = pyarrow.parquet.ParquetFile(file)
        batches = content.iter_batches(batch_size=1000)
        _read_batches(table, file, batches, content.metadata.num_rows, deadline)
    except pyarrow.ArrowException as error:
        _fault(table, str(file), "a Parquet file", str(error).splitlines()[0])


def _read_arrow(table: Table, file: Path, deadline: float) -> None:
    import pyarrow

    try:
        try:
            content = pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all()
        except pyarrow.ArrowInvalid:
            content = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()
        batches = iter(content.to_batches(max_chunksize=1000))
        _read_batches(table, file, batches, content.num_rows, deadline)
    except pyarrow.ArrowException as error:
        _fault(table, str(file), "an Arrow file", str(error).splitlines()[0])


def _read_batches(
    table: Table, file: Path, batches: Iterator[Any], rows: int, deadline: float
) -> None:
    start = len(table.rows)
    for batch in batches:
        if len(table.rows) >= table.row_limit or time.monotonic() > deadline:
            break
        for row in batch.to_pylist():
            table.places.append(f"{file} row {len(table.rows) - start}")
            table.rows.append(row)
    table.total += rows


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


_READERS = {
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "text": _read_text,
}
