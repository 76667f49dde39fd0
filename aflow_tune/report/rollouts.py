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

from aflow_tune.files import append_line, as_line

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
    """All runs by step. A step that was begun twice has the later attempt's runs; lines that are
    torn, as a writer that was killed leaves them, or damaged otherwise are passed over."""
    for _, path in sorted(_files(run_dir)):
        runs: dict[tuple[int, int], Rollout] = {}
        for line in path.read_bytes().split(b"\n"):
            rollout = _rollout(line)
            if rollout is not None:
                runs[rollout.task, rollout.run] = rollout
        yield from (runs[key] for key in sorted(runs))


def forget_rollouts(run_dir: Path, after: int) -> None:
    """Remove the files of the steps behind `after`, before they are done again."""
    for step, path in _files(run_dir):
        if step > after:
            path.unlink()


def _files(run_dir: Path) -> list[tuple[int, Path]]:
    """The files with their steps; what has no number for a name is not ours."""
    found = [
        (path.stem.removeprefix("step_"), path) for path in (run_dir / FOLDER).glob("step_*.jsonl")
    ]
    return [(int(number), path) for number, path in found if number.isdecimal()]


def _rollout(line: bytes) -> Rollout | None:
    try:
        rollout = Rollout(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    counted = all(type(n) is int for n in (rollout.step, rollout.task, rollout.run))
    return rollout if counted and isinstance(rollout.kept, dict) else None
