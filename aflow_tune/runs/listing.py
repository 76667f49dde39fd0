"""Runs found below a folder, and what each has come to: state, step, best score, cost.

Everything is read from small files; records of evaluations only where the run has not summed them
up itself when it ended (`summarise`). Whether a run is going on is decided by its lock alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
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

MOST_DEPTH = 4  # below a root: project, group, name, and one more
_TAIL_BYTES = 1 << 17


class State(StrEnum):
    """What is known of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"  # it was going on, and nobody holds its lock any more
    ELSEWHERE = "elsewhere"  # going on or killed, on another machine
    WAITING = "waiting"  # a stage whose turn has not come
    UNREADABLE = "unreadable"


STATES = {state.value: state for state in State}


@dataclass(frozen=True)
class RunInfo:
    """One run, chain or stage, as it is listed. `step`: the last that was trained; `saved`: the
    last with a checkpoint; `best`: step and mean of the best whole evaluation; `about`: whether
    calls without a price are missing in `usd`. Times are seconds since the epoch."""

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
        plain = ("mode", "step", "target", "score", "usd", "error", "host", "command")
        return {name: getattr(self, name) for name in plain} | {
            "path": str(self.path.resolve()),
            "state": self.state.value,
            "saved_step": self.saved,
            "best_step": self.best and self.best[0],
            "best_score": self.best and self.best[1],
            "usd_is_approximate": self.about,
            "started": self.started or None,
            "changed": self.changed or None,
            "stages": [stage.to_json() for stage in self.stages],
        }


def find_runs(roots: Iterable[Path]) -> Iterator[Path]:
    """The run folders and chains at or below `roots`, each once, in the order of their names."""
    found = {path.resolve(): path for root in roots for path in _below(root, MOST_DEPTH)}
    yield from found.values()


def _below(folder: Path, depth: int) -> Iterator[Path]:
    inner: list[str] = []
    with contextlib.suppress(OSError):  # such as a folder of another user
        if (folder / RUN_FILE).is_file() or (folder / CHAIN_FILE).is_file():
            yield folder
        elif depth:
            with os.scandir(folder) as entries:
                inner = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    for name in inner:
        if not name.startswith("."):
            yield from _below(folder / name, depth - 1)


def describe(path: Path) -> RunInfo:
    """What the run or chain in `path` has come to; its state says where that cannot be read."""
    try:
        if (path / CHAIN_FILE).is_file():
            return _chain(path)
        state = read_state(path)
        return RunInfo(path, State.UNREADABLE) if state is None else _run(path, state)
    except BadInput as error:
        why = f"{error.title} {error.faults[0].found}"
    except (OSError, ValueError, TypeError, AttributeError) as error:  # a summary that is not ours
        why = f"its state cannot be read: {error}"
    return RunInfo(path, State.UNREADABLE, error=why)


def summarise(run_dir: Path) -> dict[str, Any]:
    """What is kept in `run.json` so that a list need not read all records again: `scores` by step
    and task set, `of` what they were read from, `usd` and `about` as in `RunInfo`; empty where the
    records cannot be read."""
    try:
        usd, about = _cost(run_dir)
        scores = {str(step): of for step, of in scores_of(run_dir).items()}
        return {"of": _signature(run_dir), "scores": scores, "usd": usd, "about": about}
    except (OSError, ValueError):
        return {}


def _run(path: Path, state: RunState) -> RunInfo:
    known, summary, saved = State.RUNNING, state.summary, checkpoints(path)
    if not is_locked(path):
        known = STATES.get(state.status, State.UNREADABLE)
        known = _unlocked(state.host) if known is State.RUNNING else known
    ended, error = known in (State.FINISHED, State.FAILED, State.INTERRUPTED), None
    if known is State.KILLED:
        error = "its process is gone, and had no time to say why"
    elif known is State.ELSEWHERE:
        error = f"started on {state.host}: going on there, or killed"
    elif ended:
        error = state.error
    if not ended or summary.get("of") != _signature(path):
        summary = summarise(path)
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
        error=error,
        command=state.command,
        host=state.host,
    )


def _unlocked(host: str) -> State:
    return State.KILLED if host in ("", socket.gethostname()) else State.ELSEWHERE


def _chain(path: Path) -> RunInfo:
    content = json.loads((path / CHAIN_FILE).read_text(encoding="utf-8"))
    host = str(content.get("host") or "")
    stages = []
    for entry in read_stages(path):
        inner = path / entry["name"]
        stage = RunInfo(inner, State.WAITING, mode=str(entry.get("mode", "")), host=host)
        state = read_state(inner)
        stages.append(stage if state is None else _run(inner, state))
    now = next((s for s in stages if s.state is not State.FINISHED), stages[-1] if stages else None)
    now = now or RunInfo(path, State.UNREADABLE)
    known = State.RUNNING if is_locked(path) else now.state
    if known is State.WAITING:  # between two stages
        known = _unlocked(host)
        known = State.INTERRUPTED if known is State.KILLED else known
    trained = [stage for stage in stages if stage.best is not None]
    usd, about = _cost(path)  # one file counts what all stages spend
    error = None if now.state is State.FINISHED else now.error
    best = trained[-1] if trained else RunInfo(path, known)
    return replace(
        now,  # with its step, target and checkpoint
        path=path,
        state=known,
        mode=f"{len(stages)} stages",
        best=best.best,
        score=best.score,
        usd=usd,
        about=about,
        started=min((stage.started for stage in stages if stage.started), default=0.0),
        changed=max((stage.changed for stage in stages), default=0.0),
        error=f"stage {now.path.name}: {error}" if error else None,
        command=content.get("command"),
        host=host,
        stages=tuple(stages),
    )


def _signature(run_dir: Path) -> list[int]:
    """Of evaluations: how many files, and bytes."""
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


def _cost(run_dir: Path) -> tuple[float | None, bool]:
    """US dollars by the account, which is kept where a run has a limit, and whether calls without a
    known price are missing."""
    uri = f"{(run_dir / ACCOUNT_FILE).absolute().as_uri()}?mode=ro"
    with contextlib.suppress(sqlite3.Error):  # there is none, or it cannot be read now
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=1.0)) as connection:
            asked = connection.execute("SELECT SUM(pico), SUM(unpriced) FROM spent")
            pico, unpriced = asked.fetchone()
        if pico is not None and (pico or not unpriced):
            return pico / PICO, bool(unpriced)
    return None, False


def _score_name(run_dir: Path) -> str:
    """`report.score` of the run's configuration, by a glance at its file."""
    text = ""
    with contextlib.suppress(OSError):
        text = (run_dir / "resolved.yaml").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^report:\n(?: .*\n)*?  score: *['\"]?([^'\"\n]+)", text, re.MULTILINE)
    return found[1].strip() if found else "reward"


def age(seconds_since_epoch: float) -> str:
    """How long ago: `40 s`, `3 min`, `5 h`, `12 d`."""
    passed = max(0.0, time.time() - seconds_since_epoch)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= 2 * size:
            return f"{passed / size:.0f} {unit}"
    return f"{passed:.0f} s"
