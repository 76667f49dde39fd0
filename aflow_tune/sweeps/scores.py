"""What a run has come to, for a sweep: its held-out score by step, with interval and cost.

The score is the run's own: the mean of `report.score` in its evaluation records, as
`report/evaluation.py` ranks it. The evaluation before the first training step does not count,
unless it is the only one: it would be the same for most trials. Of a chain the last stage counts
that was evaluated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aflow_tune.report.evaluation import load_evaluations, ranked, scores_of
from aflow_tune.report.metrics import FILE_NAME, read_metrics
from aflow_tune.report.quantities import finished_evaluations
from aflow_tune.report.statistics import Interval, mean, mean_interval
from aflow_tune.runs.folder import CHAIN_FILE, read_stages
from aflow_tune.runs.listing import describe


@dataclass(frozen=True)
class Outcome:
    """The score of a run, or of a trial over its runs.

    `interval` of one run is over held-out tasks, and None where there are several task sets; over
    several runs it is Student's t over the runs' scores. `step` is None over several runs.
    """

    score: float
    step: int | None
    interval: Interval | None


def outcome(run: Path, objective: str) -> Outcome | None:
    """The best or the last score of a run that has ended; None if it has none.

    Raises:
        ValueError: a record file is damaged; file and line are named.
    """
    for folder in _scored_folders(run):
        found = _by_step(folder, None)
        if not found:
            continue
        if objective == "last":
            step = max(found)
        else:  # the earliest of equals
            step = min(found, key=lambda each: (-found[each], each))
        return Outcome(found[step], step, _interval(folder, step))
    return None


def together(outcomes: list[Outcome]) -> Outcome:
    """The outcome of a trial from those of its runs, one for each seed."""
    if len(outcomes) == 1:
        return outcomes[0]
    scores = [each.score for each in outcomes]
    return Outcome(mean(scores), None, mean_interval(scores))


def reports(run: Path) -> dict[int, float]:
    """The score at every step after the first whose evaluation is finished, while a run goes on.

    Empty where the records cannot be read now.
    """
    try:
        finished: dict[str, set[int]] = defaultdict(set)
        for line in read_metrics(run):
            for name in finished_evaluations(line.metrics):
                finished[name].add(line.step)
        found = _by_step(run, finished)
    except (OSError, ValueError):
        return {}
    return {step: score for step, score in found.items() if step > 0}


def signature(run: Path) -> tuple[int, int]:
    """Changes when a run has logged more, so that its records need not be read each time."""
    try:
        status = (run / FILE_NAME).stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def cost(runs: Iterable[Path]) -> tuple[float | None, bool]:
    """US dollars of runs together, and whether that is only about right; None: not known."""
    infos = [describe(run) for run in runs]
    known = [info.usd for info in infos if info.usd is not None]
    if not known:
        return None, False
    return sum(known), len(known) < len(infos) or any(info.about for info in infos)


def _scored_folders(run: Path) -> list[Path]:
    """The run folders whose scores count, the one that counts first in front."""
    if not (run / CHAIN_FILE).is_file():
        return [run]
    return [run / stage["name"] for stage in reversed(read_stages(run))]


def _by_step(run: Path, finished: dict[str, set[int]] | None) -> dict[int, float]:
    """Mean score by step, of the steps that were evaluated on most task sets.

    Args:
        finished: task set to steps whose evaluation is known to be finished; None: whatever
            the records take as whole, which a first evaluation under way is too.
    """
    scores = scores_of(run)
    if finished is not None:
        scores = {
            step: kept
            for step, of in scores.items()
            if (kept := {n: v for n, v in of.items() if step in finished.get(n, ())})
        }
    learned = [step for step in scores if step > 0] or list(scores)
    return dict(sorted(ranked(scores, learned)))


def _interval(run: Path, step: int) -> Interval | None:
    evaluations = [steps[step] for steps in load_evaluations(run).values() if step in steps]
    return evaluations[0].interval() if len(evaluations) == 1 else None
