"""Which checkpoints of a run to keep, and removal of the others.

`trainer.max_checkpoints_to_keep` keeps the newest (0: all), `checkpoints.keep_best` in addition the
best by held-out score. With Ray the trainer can be ahead of the evaluation, so a checkpoint whose
evaluation is pending is kept.

`aflow-tune runs clean` keeps what a resume, a longer run and `export --checkpoint best|last` need.
If a checkpoint to keep is damaged, it removes nothing: a resume would need an earlier one.
Never touched: runs that are running here or may be running on another machine, links, folders
without our state file, and checkpoints without our manifest, such as those of `engine: trinity`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from aflow_tune.engines.local.checkpoint import MANIFEST, CheckpointError, verify_checkpoint
from aflow_tune.errors import BadInput
from aflow_tune.report.evaluation import ranked, scores_of
from aflow_tune.report.metrics import read_metrics
from aflow_tune.report.quantities import finished_evaluations
from aflow_tune.runs.folder import (
    CHAIN_FILE,
    RUN_FILE,
    checkpoints,
    locked,
    read_stages,
    remove_checkpoint,
)
from aflow_tune.runs.listing import State, describe

_LEFT_OVER = re.compile(
    r"\.((?:damaged_)?global_step_\d+(?:_\d+)?|adapter|merged)\.(tmp|old|removed)-\d+"
)
_DAMAGED = re.compile(r"damaged_global_step_\d+(_\d+)?")


@dataclass(frozen=True)
class Doomed:
    """One folder to remove; `size` in bytes."""

    path: Path
    why: str
    size: int


@dataclass(frozen=True)
class Plan:
    """What to remove; `staying`: kept steps and why; `untouched`: why the run is skipped."""

    run: Path
    doomed: tuple[Doomed, ...] = ()
    staying: tuple[tuple[int, str], ...] = ()
    untouched: str | None = None
    keep_last: int = 1
    keep_best: int = 1

    @property
    def size(self) -> int:
        return sum(item.size for item in self.doomed)


def plan(run: Path, *, keep_last: int = 1, keep_best: int = 1) -> list[Plan]:
    """What to remove from a run, or from each stage of a chain. `keep_last`: newest checkpoints to
    keep, at least 1; `keep_best`: best ones by held-out score."""
    state = describe(run)
    if state.state in (State.RUNNING, State.ELSEWHERE, State.UNREADABLE):
        why = {State.RUNNING: "it is going on", State.UNREADABLE: "its state cannot be read"}
        return [Plan(run, untouched=why.get(state.state, state.error))]
    folders = [run]
    if (run / CHAIN_FILE).is_file():
        inner = [run / stage["name"] for stage in read_stages(run)]
        folders = [folder for folder in inner if (folder / RUN_FILE).is_file()]
    return [_plan(folder, keep_last, keep_best) for folder in folders]


def carry_out(plans: Sequence[Plan]) -> tuple[list[Doomed], list[str]]:
    """Remove what the plans name; returns what was removed, and a message for each run that failed.
    Each run is locked and planned again first: what has become needed stays."""
    gone: list[Doomed] = []
    problems: list[str] = []
    for item in (each for each in plans if each.doomed):
        try:
            with ExitStack() as stack:
                if (item.run.parent / CHAIN_FILE).is_file():
                    stack.enter_context(locked(item.run.parent))
                stack.enter_context(locked(item.run))
                again = _plan(item.run, item.keep_last, item.keep_best)
                still = {doomed.path for doomed in again.doomed}
                for doomed in item.doomed:
                    if doomed.path in still:
                        remove = shutil.rmtree if doomed.path.name[0] == "." else remove_checkpoint
                        remove(doomed.path)
                        gone.append(doomed)
        except (BadInput, OSError) as error:
            problems.append(f"{item.run}: {getattr(error, 'title', error)}")
    return gone, problems


def _plan(run: Path, keep_last: int, keep_best: int) -> Plan:
    saved = {
        point.step: point.path
        for point in checkpoints(run)
        if not point.path.is_symlink() and (point.path / MANIFEST).is_file()
    }
    staying = kept_in_run(run, list(saved), keep_last=max(1, keep_last), keep_best=keep_best)
    doomed = []

    def doom(path: Path, why: str) -> None:
        size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        doomed.append(Doomed(path, why, size))

    for step, path in saved.items():
        if step not in staying:
            doom(path, "neither newest nor best")
            continue
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            return Plan(run, untouched=f"a checkpoint that would stay is damaged ({error})")
    for folder in (run, run / "export"):
        if not folder.is_dir() or folder.is_symlink():
            continue
        for path in sorted(folder.iterdir()):
            if path.is_symlink() or not path.is_dir():
                continue
            left = _LEFT_OVER.fullmatch(path.name)
            # An `.old-` folder is the only copy until the new one is in place.
            if left and (left[2] != "old" or (folder / left[1]).exists()):
                doom(path, "left half-written by a kill")
            elif _DAMAGED.fullmatch(path.name):
                doom(path, "set aside as damaged")
    reasons = tuple(sorted(staying.items()))
    return Plan(run, tuple(doomed), reasons, keep_last=keep_last, keep_best=keep_best)


def kept_in_run(
    run_dir: Path,
    steps: Sequence[int],
    *,
    keep_last: int,
    keep_best: int,
    eval_interval: int | None = None,
) -> dict[int, str]:
    """The steps whose checkpoints to keep, with the reason. All, if the evaluations are unreadable.

    Args:
        keep_last: how many of the newest; 0: all.
        keep_best: how many of the best by held-out score, which may be among the newest.
        eval_interval: steps between evaluations of a running run, whose evaluation may be pending.
    """
    if keep_last <= 0:
        return dict.fromkeys(steps, "all are kept")
    reasons = dict.fromkeys(sorted(steps)[-keep_last:], "newest")
    if keep_best <= 0:
        return reasons
    try:
        scores = scores_of(run_dir)
        lines = read_metrics(run_dir) if eval_interval else []
    except (OSError, ValueError):
        return dict.fromkeys(steps, "its evaluations cannot be read")
    for step, _ in ranked(scores, steps)[:keep_best]:
        reasons[step] = f"{reasons[step]}, best" if step in reasons else "best"
    # Evaluations run in order of steps: a step before the last evaluated one has none pending.
    last = max((line.step for line in lines if finished_evaluations(line.metrics)), default=-1)
    for step in steps:
        if eval_interval and step > last and step % eval_interval == 0:
            reasons.setdefault(step, "waits for its evaluation")
    return reasons
