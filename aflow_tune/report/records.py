"""One line for each run of a held-out task: what the evaluation is computed from.

The adapter appends them while a run evaluates, several processes at once, each line in one
write. The report reads them. Layout: `<run folder>/evaluations/<task set>/step_<n>.jsonl`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class EvalRecord:
    """How one run on one held-out item went.

    `score` is None where nothing could be scored; `failure` then says why. `item` is the
    row of the data set. `transcript` lists the calls: caller, messages, response, tokens.
    """

    step: int
    taskset: str
    item: int
    run: int
    score: float | None
    reward: float | None
    failure: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    transcript: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def record_path(eval_dir: Path, taskset: str, step: int) -> Path:
    """The file that holds the evaluation of `taskset` with the weights of `step`."""
    return eval_dir / taskset / f"step_{step}.jsonl"


def append_record(eval_dir: Path, record: EvalRecord) -> None:
    """Append one line in one write, so that concurrent writers never mix."""
    path = record_path(eval_dir, record.taskset, record.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(record), ensure_ascii=False, default=str) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_records(path: Path) -> list[EvalRecord]:
    """All whole lines of a file; a torn last line, left by a killed writer, is passed over."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(EvalRecord(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return records
