"""Which step of a run scored best on held-out tasks, by the run's own evaluations.

The score is what `report.score` names, as the records have it. Several task sets count the same
each; an evaluation that was cut off does not count. The command line's `best`, the checkpoints
that a run keeps and the list of runs all go by this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from aflow_tune.report.evaluation import load_evaluations
from aflow_tune.report.statistics import mean

Scores = Mapping[int, Mapping[str, float]]
"""Mean score by step and task set."""


def scores_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """The mean score of every whole evaluation of a run, by step and task set.

    Raises:
        ValueError: a record file is damaged; file and line are named.
    """
    scores: dict[int, dict[str, float]] = {}
    for name, evaluations in load_evaluations(run_dir).items():
        for step, evaluation in evaluations.items():
            interval = evaluation.interval()
            if evaluation.whole and interval is not None:
                scores.setdefault(step, {})[name] = interval.mean
    return scores


def ranked(scores: Scores, steps: Iterable[int]) -> list[tuple[int, float]]:
    """Those of `steps` that were evaluated on the most task sets, with their mean over these.

    The best first, the earliest of equals before later ones.
    """
    wanted = set(steps)
    of_steps = {step: list(of.values()) for step, of in scores.items() if step in wanted and of}
    most = max(map(len, of_steps.values()), default=0)
    means = [(step, mean(values)) for step, values in of_steps.items() if len(values) == most]
    return sorted(means, key=lambda pair: (-pair[1], pair[0]))


def best_step(run_dir: Path, steps: Iterable[int]) -> int | None:
    """Of `steps` the one whose evaluation in the run scored best; None if none was evaluated."""
    found = ranked(scores_of(run_dir), steps)
    return found[0][0] if found else None
