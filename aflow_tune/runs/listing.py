"""Runs found below a folder, and what each has come to: state, step, best score, cost.

Everything is read from small files: `run.json`, `chain.json`, the end of `metrics.jsonl`. No
weights are opened, and evaluation records only where the run has not summed them up itself,
which it does when it ends (`summarise`). Nothing is written, and nothing waits for a lock.

A folder without a state file of ours is not a run, whatever its name. Whether a run is going on
is decided by its lock alone: a process that was killed holds none, whatever `run.json` says.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput
from aflow_tune.models.spend import PICO
from aflow_tune.report.evaluation import FOLDER, ranked, scores_of
from aflow_tune.report.metrics import FILE_NAME, parse_line
from aflow_tune.report.quantities import is_training
from aflow_tune.runs.folder import (
    ACCOUNT_FILE,
    CHAIN_FILE,
    RUN_FILE,
    RunState,
    checkpoints,
    is_locked,
    read_stages,
    read_state,
)

MOST_DEPTH = 4
"""Folders below a root in which a run may lie: project, group, name, and one more."""
_TAIL_BYTES = 1 << 17
_COST = b'"rollout/cost/'


class State(StrEnum):
    """What is known of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"
    """It was going on, and nobody holds its lock any more."""
    ELSEWHERE = "elsewhere"
    """Going on or killed: it was started on another machine, whose lock may not be seen here."""
    WAITING = "waiting"
    """A stage whose turn has not come."""
    UNREADABLE = "unreadable"


STATES = {state.value: state for state in State}


@dataclass(frozen=True)
class RunInfo:
    """One run, chain or stage, as it is listed.

    `step` is the last one that was trained, `saved` the last with a checkpoint, `best` the step
    and mean of the best whole evaluation. `usd` is None where no cost is known, `about` is True
    where it is only about right. Times are seconds since the epoch.
    """

    path: Path
    state: State
    mode: str = ""
    step: int = 0
    target: int = 0
    saved: int | None = None
    best: tuple[int, float] | None = None
    score: str = "reward"
    usd: float | None = None
    about: bool = False
    started: float = 0.0
    changed: float = 0.0
    error: str | None = None
    command: dict[str, Any] | None = None
    host: str = ""
    stages: tuple[RunInfo, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """As plain data; the path is absolute."""
        return {
            "path": str(self.path.resolve()),
            "state": self.state.value,
            "mode": self.mode,
            "step": self.step,
            "target": self.target,
            "saved_step": self.saved,
            "best_step": self.best and self.best[0],
            "best_score": self.best and self.best[1],
            "score": self.score,
            "usd": self.usd,
            "usd_is_approximate": self.about,
            "started": self.started or None,
            "changed": self.changed or None,
            "error": self.error,
            "host": self.host,
            "command": self.command,
            "stages": [stage.to_json() for stage in self.stages],
        }


def find_runs(roots: Iterable[Path]) -> Iterator[Path]:
    """The run folders and chains at or below `roots`, each once, in the order of their names."""
    seen: set[Path] = set()
    for root in roots:
        for path in _below(root, MOST_DEPTH):
            real = path.resolve()
            if real not in seen:
                seen.add(real)
                yield path


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        if (folder / RUN_FILE).is_file() or (folder / CHAIN_FILE).is_file():
            yield folder
            return
        if depth == 0:
            return
        with os.scandir(folder) as entries:
            inner = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:  # such as a folder of another user
        return
    for name in inner:
        if not name.startswith("."):
            yield from _below(folder / name, depth - 1)


def describe(path: Path) -> RunInfo:
    """What the run or chain in `path` has come to; its state says where that cannot be read."""
    try:
        if (path / CHAIN_FILE).is_file():
            return _chain(path)
        state = read_state(path)
        if state is not None:
            return _run(path, state)
        return RunInfo(path, State.UNREADABLE, error="it went away")
    except BadInput as error:
        return RunInfo(path, State.UNREADABLE, error=f"{error.title} {error.faults[0].found}")
    except OSError as error:
        return RunInfo(path, State.UNREADABLE, error=f"{error.strerror}: {error.filename}")
    except (ValueError, TypeError, AttributeError) as error:  # a summary that is none of ours
        return RunInfo(path, State.UNREADABLE, error=f"its state is not in our form: {error}")


def summarise(run_dir: Path, repeat_times: int | None) -> dict[str, Any]:
    """What is kept in `run.json` so that a list need not read all records again.

    `scores` by step and task set, `of` what they were read from, `usd` and `about` as in
    `RunInfo`. Empty where the records cannot be read.

    Args:
        repeat_times: `algorithm.repeat_times`: runs of each task in a training step.
    """
    try:
        usd, about = _cost(run_dir, repeat_times)
        return {
            "of": _signature(run_dir),
            "scores": {str(step): of for step, of in scores_of(run_dir).items()},
            "usd": usd,
            "about": about,
        }
    except (OSError, ValueError):
        return {}


def _run(path: Path, state: RunState) -> RunInfo:
    saved = checkpoints(path)
    known = _state(state.status, path, state.host)
    summary = state.summary
    ended = known in (State.FINISHED, State.FAILED, State.INTERRUPTED)
    if not ended or summary.get("of") != _signature(path):
        summary = summarise(path, state.fingerprint.get("algorithm.repeat_times"))
    usd = summary.get("usd")
    scores = {int(step): dict(of) for step, of in summary.get("scores", {}).items()}
    best = ranked(scores, scores)
    trained, changed = (state.step, state.ended) if ended and state.ended else _last_step(path)
    return RunInfo(
        path,
        known,
        mode=str(state.fingerprint.get("mode", "")),
        step=max(trained, state.step),
        target=state.target,
        saved=saved[-1].step if saved else None,
        best=best[0] if best else None,
        score=_score_name(path),
        usd=None if usd is None else float(usd),
        about=bool(summary.get("about")),
        started=state.started,
        changed=max(changed, state.started),
        error=_error(known, state),
        command=state.command,
        host=state.host,
    )


def _state(status: str, folder: Path, host: str) -> State:
    if is_locked(folder):
        return State.RUNNING
    if status != State.RUNNING:
        return STATES.get(status, State.UNREADABLE)
    return State.KILLED if host in ("", socket.gethostname()) else State.ELSEWHERE


def _error(known: State, state: RunState) -> str | None:
    if known is State.KILLED:
        return "its process is gone, and had no time to say why"
    if known is State.ELSEWHERE:
        return f"started on {state.host}: going on there, or killed"
    return state.error if known in (State.FAILED, State.INTERRUPTED) else None


def _chain(path: Path) -> RunInfo:
    entries = read_stages(path)
    content = json.loads((path / CHAIN_FILE).read_text(encoding="utf-8"))
    host = str(content.get("host") or "")
    stages = tuple(_stage(path, entry, host) for entry in entries)
    now = next((s for s in stages if s.state is not State.FINISHED), stages[-1] if stages else None)
    if is_locked(path):
        state = State.RUNNING
    elif now is None or now.state is not State.WAITING:
        state = now.state if now is not None else State.UNREADABLE
    else:  # between two stages: stopped, or going on where its lock cannot be seen
        state = State.INTERRUPTED if host in ("", socket.gethostname()) else State.ELSEWHERE
    trained = [stage for stage in stages if stage.best is not None]
    usd, about = _cost(path, None)  # the books of a chain are one for all stages
    known = [stage.usd for stage in stages if stage.usd is not None]
    if usd is None and known:
        usd, about = sum(known), True
    error = now.error if now is not None and now.state is not State.FINISHED else None
    return RunInfo(
        path,
        state,
        mode=f"{len(stages)} stages",
        step=now.step if now is not None else 0,
        target=now.target if now is not None else 0,
        saved=now.saved if now is not None else None,
        best=trained[-1].best if trained else None,
        score=trained[-1].score if trained else "reward",
        usd=usd,
        about=about,
        started=min((stage.started for stage in stages if stage.started), default=0.0),
        changed=max((stage.changed for stage in stages), default=0.0),
        error=f"stage {now.path.name}: {error}" if now is not None and error else None,
        command=content.get("command"),
        host=host,
        stages=stages,
    )


def _stage(chain: Path, entry: dict[str, Any], host: str) -> RunInfo:
    path = chain / entry["name"]
    state = read_state(path)
    if state is None:
        return RunInfo(path, State.WAITING, mode=str(entry.get("mode", "")), host=host)
    return _run(path, state)


def _signature(run_dir: Path) -> list[int]:
    """Changes when evaluations are added, cut off or made again: how many files, and bytes."""
    sizes = [file.stat().st_size for file in (run_dir / FOLDER).rglob("step_*.jsonl")]
    return [len(sizes), sum(sizes)]


def _last_step(run_dir: Path) -> tuple[int, float]:
    """The last step that was trained, by the end of the metrics, and when that was written."""
    try:
        with (run_dir / FILE_NAME).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = [parse_line(text) for text in file.read().split(b"\n")]
            changed = os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0, 0.0
    steps = [line.step for line in lines if line is not None and is_training(line)]
    return max(steps, default=0), changed


def _cost(run_dir: Path, repeat_times: int | None) -> tuple[float | None, bool]:
    """US dollars, and whether they are only about right.

    The books know them exactly; they are kept where the run has a limit. Else the metrics of its
    training steps say it: mean cost of a run by role x tasks x `repeat_times`. Evaluations are not
    in that, and a failed run counts as the mean of the others.
    """
    spent = _booked(run_dir / ACCOUNT_FILE)
    if spent is not None:
        return spent
    try:
        with (run_dir / FILE_NAME).open("rb") as file:
            costly = [text for text in file if _COST in text]
    except OSError:
        return None, False
    lines = {line.step: line.metrics for text in costly if (line := parse_line(text)) is not None}
    total = 0.0
    for metrics in lines.values():
        runs = metrics.get("rollout/finished_task_count", 0.0) * (repeat_times or 1)
        means = [
            value
            for name, value in metrics.items()
            if name.startswith("rollout/cost/") and name.endswith("/mean")
        ]
        total += runs * sum(means)
    return (total, True) if lines else (None, False)


def _booked(path: Path) -> tuple[float, bool] | None:
    """What the books say; None where there are none, or they cannot be read now."""
    if not path.is_file():
        return None
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)
        try:
            row = connection.execute("SELECT SUM(pico), SUM(unpriced) FROM spent").fetchone()
        finally:
            connection.close()
    except sqlite3.Error:
        return None
    pico, unpriced = row
    if pico is None or (not pico and unpriced):
        return None
    return pico / PICO, bool(unpriced)


def _score_name(run_dir: Path) -> str:
    """`report.score` of the run's configuration, by a glance at its file."""
    section = False
    try:
        with (run_dir / "resolved.yaml").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("report:"):
                    section = True
                elif section and line.startswith("  score:"):
                    return line.partition(":")[2].strip().strip("'\"") or "reward"
                elif section and not line.startswith(" "):
                    break
    except OSError:
        pass
    return "reward"


def age(seconds_since_epoch: float) -> str:
    """How long ago, in the largest unit that fits: `40 s`, `3 min`, `5 h`, `12 d`."""
    passed = max(0.0, time.time() - seconds_since_epoch)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= 2 * size:
            return f"{passed / size:.0f} {unit}"
    return f"{passed:.0f} s"
