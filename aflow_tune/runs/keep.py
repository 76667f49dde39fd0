"""Which checkpoints stay when there are more than a run is to keep.

`trainer.max_checkpoints_to_keep` counts the newest (0: all stay), `checkpoints.keep_best` the
best by held-out score on top of them. A checkpoint whose evaluation is still to come waits for
it: with Ray the trainer is a step ahead of the evaluation. The newest always stays, since a resume
begins from it; what a later stage of a chain begins from is `export/merged`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from aflow_tune.report.evaluation import Scores, ranked, scores_of
from aflow_tune.report.metrics import read_metrics
from aflow_tune.report.quantities import finished_evaluations


def kept(
    steps: Sequence[int],
    scores: Scores,
    *,
    keep_last: int,
    keep_best: int,
    awaiting: Collection[int] = (),
) -> dict[int, str]:
    """The steps whose checkpoints stay, each with the reason.

    Args:
        scores: of the run's whole evaluations so far.
        keep_last: how many of the newest; 0: all.
        keep_best: how many of the best by held-out score, which may be among the newest.
        awaiting: steps whose evaluation is still to come; they stay if any best one does.
    """
    if keep_last <= 0:
        return dict.fromkeys(steps, "all are kept")
    reasons = dict.fromkeys(sorted(steps)[-keep_last:], "newest")
    if keep_best > 0:
        for step, _ in ranked(scores, steps)[:keep_best]:
            reasons[step] = f"{reasons[step]}, best" if step in reasons else "best"
        for step in steps:
            if step in awaiting:
                reasons.setdefault(step, "waits for its evaluation")
    return reasons


def kept_in_run(
    run_dir: Path,
    steps: Sequence[int],
    *,
    keep_last: int,
    keep_best: int,
    eval_interval: int | None = None,
) -> dict[int, str]:
    """`kept`, by the records of a run folder. Records that cannot be read say nothing about what is
    best: then all stay.

    Args:
        eval_interval: of a run that goes on and evaluates every so many steps, some time after
            their weights were saved. None: nothing more is evaluated.
    """
    if keep_last <= 0 or keep_best <= 0:
        return kept(steps, {}, keep_last=keep_last, keep_best=0)
    try:
        scores = scores_of(run_dir)
        lines = read_metrics(run_dir) if eval_interval else []
    except (OSError, ValueError):
        return dict.fromkeys(steps, "its evaluations cannot be read")
    awaiting: set[int] = set()
    if eval_interval:
        # Evaluations come in the order of their steps: what they passed over has none to come.
        last = max((line.step for line in lines if finished_evaluations(line.metrics)), default=-1)
        awaiting = {step for step in steps if step > last and step % eval_interval == 0}
    return kept(steps, scores, keep_last=keep_last, keep_best=keep_best, awaiting=awaiting)
