"""Finds the runs below a folder and reads each one's state, step, best score and cost.

It reads small files; evaluation records only if `run.json` has no up-to-date summary of them
(`summarise`). A run counts as running if its lock is held, whatever `run.json` says.
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
    """The state of a run, stage or chain as listed."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"  # recorded as running, but nobody holds its lock
    ELSEWHERE = "elsewhere"  # the same, but of another host: running there, or killed
    WAITING = "waiting"  # a stage that has not started
    UNREADABLE = "unreadable"


STATES = {state.value: state for state in State}


@dataclass(frozen=True)
class RunInfo:
    """One run, chain or stage as listed. `step`: the last trained; `saved`: the last with a
    checkpoint; `best`: step and mean score of the best complete evaluation; `about`: `usd` lacks
    calls without a known price. Times are seconds since the epoch."""

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
        """As JSON-serialisable data, with an absolute path."""
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
    """The run and chain folders at or below `roots`, each once, by root and then by name."""
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
    """The run or chain in `path`; its state is UNREADABLE if its files cannot be read."""
    try:
        if (path / CHAIN_FILE).is_file():
            return _chain(path)
        state = read_state(path)
        return RunInfo(path, State.UNREADABLE) if state is None else _run(path, state)
    except BadInput as error:
        why = f"{error.title} {error.faults[0].found}"
    except (OSError, ValueError, TypeError, AttributeError) as error:  # e.g. a malformed summary
        why = f"its state cannot be read: {error}"
    return RunInfo(path, State.UNREADABLE, error=why)


def summarise(run_dir: Path) -> dict[str, Any]:
    """The summary stored in `run.json`, so that listing need not read all records: `scores` by step
    and task set, `of` the signature of their files, `usd` and `about` as in `RunInfo`. Empty if the
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
    usd, about = _cost(path)  # all stages share one account
    error = None if now.state is State.FINISHED else now.error
    best = trained[-1] if trained else RunInfo(path, known)
    return replace(
        now,  # keeps its step, target and checkpoint
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
    """Number and total bytes of the evaluation files: changes when they do."""
    sizes = [file.stat().st_size for file in (run_dir / FOLDER).rglob("step_*.jsonl")]
    return [len(sizes), sum(sizes)]


def _last_step(run_dir: Path) -> tuple[int, float]:
    """The last trained step in the tail of the metrics file, and when the file was written."""
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
    """Spend in US dollars from the account, which only runs with a limit have, and whether it lacks
    calls without a known price."""
    uri = f"{(run_dir / ACCOUNT_FILE).absolute().as_uri()}?mode=ro"
    with contextlib.suppress(sqlite3.Error):  # no account, or not readable now
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=1.0)) as connection:
            asked = connection.execute("SELECT SUM(pico), SUM(unpriced) FROM spent")
            pico, unpriced = asked.fetchone()
        if pico is not None and (pico or not unpriced):
            return pico / PICO, bool(unpriced)
    return None, False


def _score_name(run_dir: Path) -> str:
    """`report.score` of the run's configuration, found by a regular expression."""
    text = ""
    with contextlib.suppress(OSError):
        text = (run_dir / "resolved.yaml").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^report:\n(?: .*\n)*?  score: *['\"]?([^'\"\n]+)", text, re.MULTILINE)
    return found[1].strip() if found else "reward"


def age(seconds_since_epoch: float) -> str:
    """How long ago a time was: `40 s`, `3 min`, `5 h`, `12 d`."""
    passed = max(0.0, time.time() - seconds_since_epoch)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= 2 * size:
            return f"{passed / size:.0f} {unit}"
    return f"{passed:.0f} s"
