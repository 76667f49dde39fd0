"""`metrics.jsonl`: every number of a run, one line for each log call.

    {"time": seconds since the epoch, "role": "explorer", "step": 3, "metrics": {...}}

Explorer and trainer append from different processes, each line in one write. A resumed run
may log a step again: readers let the later line win.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True)
class MetricsLine:
    """One line of the file."""

    time: float
    role: str
    step: int
    metrics: dict[str, float]


def append_metrics(run_dir: Path, role: str, step: int, metrics: Mapping[str, Any]) -> None:
    """Append one line; what is not a number is left out, what is not finite becomes null."""
    numbers = {}
    for name, value in metrics.items():
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[name] = float(value) if math.isfinite(value) else None
    line = {"time": time.time(), "role": role, "step": int(step), "metrics": numbers}
    descriptor = os.open(run_dir / FILE_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(line) + "\n").encode())
    finally:
        os.close(descriptor)


def read_metrics(run_dir: Path) -> list[MetricsLine]:
    """All whole lines in the order written; numbers that were not finite are left out."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return []
    return [line for line in map(_parse, path.read_text(encoding="utf-8").splitlines()) if line]


def series(lines: list[MetricsLine], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric in the order of steps; the latest value of a step wins."""
    values = {line.step: line.metrics[name] for line in lines if name in line.metrics}
    return sorted(values.items())


def rewind_metrics(run_dir: Path, step: int) -> None:
    """Forget every line of a later step: those steps will be done again."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines():
        line = _parse(text)
        if line is not None and line.step <= step:
            kept.append(text + "\n")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.rename(path)


def _parse(text: str) -> MetricsLine | None:
    """A line, or None for one that a killed writer left torn."""
    try:
        raw = json.loads(text)
        metrics = {name: value for name, value in raw["metrics"].items() if value is not None}
        return MetricsLine(raw["time"], raw["role"], raw["step"], metrics)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
