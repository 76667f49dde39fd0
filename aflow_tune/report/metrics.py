"""`metrics.jsonl`: all metrics of a run, one line for each log call.

    {"time": seconds since the epoch, "role": "explorer", "step": 3, "metrics": {...}}

Explorer and trainer append from different processes, each line in one write. A resumed run may
log a step again: the later line wins. The names are Trinity's; `quantities.py` selects those that
reports show. `LineTail` follows a growing file, as the panel does twice a second.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.files import write_whole

FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True)
class MetricsLine:
    """One line of the file. `time` is in seconds since the epoch."""

    time: float
    role: str
    step: int
    metrics: dict[str, float]


def scalar(value: Any) -> float | None:
    """A number, or a tensor or array with one element, as a float (NaN and infinity included); None
    for anything else, booleans included."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError):  # more than one element
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def append_metrics(run_dir: Path, role: str, step: int, metrics: Mapping[str, Any]) -> None:
    """Append one line. Values that are not numbers are left out, those that are not finite become
    null. Raises OSError: it was not written completely."""
    scalars = {str(name): scalar(value) for name, value in metrics.items()}
    numbers = {
        name: value if math.isfinite(value) else None
        for name, value in scalars.items()
        if value is not None
    }
    entry = {"time": time.time(), "role": role, "step": int(step), "metrics": numbers}
    line = json.dumps(entry).encode() + b"\n"
    descriptor = os.open(run_dir / FILE_NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        # A torn last line, of a killed writer, must not damage this one.
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(descriptor, line)
    finally:
        os.close(descriptor)
    if written < len(line):
        raise OSError(f"only {written} of {len(line)} bytes fitted into {run_dir / FILE_NAME}")


def read_metrics(run_dir: Path) -> list[MetricsLine]:
    """All complete lines in file order; values that were not finite are left out."""
    path = run_dir / FILE_NAME
    parsed = map(parse_line, path.read_bytes().split(b"\n") if path.exists() else ())
    return [line for line in parsed if line is not None]


def parse_line(text: bytes | str) -> MetricsLine | None:
    """One line; None if it is empty or damaged."""
    try:
        raw = json.loads(text)
        metrics = {
            str(name): float(value) for name, value in raw["metrics"].items() if value is not None
        }
        return MetricsLine(float(raw["time"]), str(raw["role"]), int(raw["step"]), metrics)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def series(lines: Sequence[MetricsLine], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric in order of steps; the last value of a step counts."""
    values = {line.step: line.metrics[name] for line in lines if name in line.metrics}
    return sorted(values.items())


def rewind_metrics(run_dir: Path, step: int) -> None:
    """Drop the lines of later steps, which will be repeated, and damaged lines. Atomic: a kill
    leaves the old file or the new one."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return
    kept = []
    for text in path.read_bytes().split(b"\n"):
        line = parse_line(text)
        if line is not None and line.step <= step:
            kept.append(text + b"\n")
    write_whole(path, b"".join(kept))


class LineTail:
    """Reads what was appended to `path` since the last `read`; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""

    def read(self) -> tuple[list[bytes], bool]:
        """The new complete lines without newlines, and whether the file was replaced.

        If it was, discard what earlier calls returned; the lines are those of the new file.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            anew = self._inode is not None
            self._inode, self._offset, self._rest = None, 0, b""
            return [], anew
        with file:
            status = os.fstat(file.fileno())
            anew = self._inode not in (None, status.st_ino) or status.st_size < self._offset
            if anew:
                self._offset, self._rest = 0, b""
            self._inode = status.st_ino
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [line for line in lines if line], anew
