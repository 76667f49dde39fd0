"""What workflows kept about their training runs: one line a run, one file a step.

Layout: `<run folder>/rollouts/step_<n>.jsonl`. Only runs whose workflow kept something
(`aflow_tune.context.keep`) have a line. Evaluations keep theirs in their own records
(`records.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aflow_tune.report.records import append_line, as_line

FOLDER = "rollouts"


@dataclass(frozen=True)
class Rollout:
    """One training run of a workflow. `task` counts the tasks of the step, `run` the group's
    runs; `reward` is None where the run failed, and `failure` then says how."""

    step: int
    task: int
    run: int
    reward: float | None
    failure: str | None = None
    kept: dict[str, Any] = field(default_factory=dict)


def rollout_path(run_dir: Path, step: int) -> Path:
    """The file with the runs of training step `step`."""
    return run_dir / FOLDER / f"step_{step}.jsonl"


def append_rollout(run_dir: Path, rollout: Rollout) -> None:
    """Append one line.

    Raises:
        OSError: it could not be written whole.
    """
    append_line(rollout_path(run_dir, rollout.step), as_line(asdict(rollout)))


def read_rollouts(run_dir: Path) -> Iterator[Rollout]:
    """All runs by step. A step that was begun twice has the later attempt's runs; torn lines,
    left by a writer that was killed, are passed over."""
    files = (run_dir / FOLDER).glob("step_*.jsonl")
    for path in sorted(files, key=lambda path: int(path.stem.removeprefix("step_"))):
        runs: dict[tuple[int, int], Rollout] = {}
        for line in path.read_bytes().split(b"\n"):
            try:
                rollout = Rollout(**json.loads(line))
            except (ValueError, TypeError):
                continue
            runs[rollout.task, rollout.run] = rollout
        yield from (runs[key] for key in sorted(runs))


def forget_rollouts(run_dir: Path, after: int) -> None:
    """Remove the files of the steps behind `after`, before they are done again."""
    for path in (run_dir / FOLDER).glob("step_*.jsonl"):
        if int(path.stem.removeprefix("step_")) > after:
            path.unlink()
