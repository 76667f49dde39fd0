"""What happens to a step's experiences before advantages are computed.

`RunFilter` is the first operator of the pipeline: it takes out the placeholders of failed
runs, says how healthy the groups are, puts the rest in a fixed order, and stops the run when
nothing is left to learn from. `StepStamp` is the last one.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from trinity.buffer.operators.experience_operator import ExperienceOperator
from trinity.common.experience import Experience

from aflow_tune.engines.trinity.info_keys import FAILURE_KEY, STEP_SIZE_KEY, TRACE_KEY
from aflow_tune.errors import BudgetReached, RunFailed
from aflow_tune.types import Failure


class StepStamp(ExperienceOperator):
    """Comes last: notes on each experience how many of its step are left to train on."""

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        """The same experiences, each with the step's size in its `info`.

        Raises:
            RunFailed: the operators before it left nothing.
        """
        if not exps:
            raise RunFailed(
                "the experience pipeline left nothing of a step to train on: look at "
                "`data_processor.experience_pipeline.operators` and at a `std_threshold` in "
                "`algorithm.advantage_fn_args`"
            )
        for exp in exps:
            exp.info[STEP_SIZE_KEY] = len(exps)
        return exps, {}


class RunFilter(ExperienceOperator):
    """Keeps the experiences of runs that succeeded, ordered by task, run and step.

    A run whose whole group failed but for itself is taken out too: without a second run there
    is no baseline, and Trinity's group advantages would take its raw reward for one. Only where
    nothing else is left of the step does it stay.

    Args:
        max_failed_fraction: a step with a larger share of failed runs ends training.
    """

    def __init__(self, max_failed_fraction: float = 1.0) -> None:
        if not 0.0 <= max_failed_fraction <= 1.0:
            raise ValueError(
                f"rollout.max_failed_fraction is a share from 0 to 1, not {max_failed_fraction}"
            )
        self.max_failed_fraction = max_failed_fraction
        self._lowest = float("inf")
        self._highest = float("-inf")

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        """The surviving experiences and the step's health.

        Metrics: `group/failed_runs`, `group/lone_runs` (taken out for want of a group), and
        the shares of task groups by the rewards of their runs: `group/frac_mixed` (they
        differ), `group/frac_all_best` and `group/frac_all_worst` (all alike, in the upper or
        lower half of the rewards seen in this training).

        Raises:
            RunFailed: no run is left, or too many failed; with the first traceback.
            BudgetReached: the budget ended in this step, which is then not trained.
        """
        failed = [exp for exp in exps if FAILURE_KEY in exp.info]
        kept = [exp for exp in exps if FAILURE_KEY not in exp.info]
        succeeded = len({exp.eid.rid for exp in kept})
        total = len(failed) + succeeded
        for exp in failed:
            if exp.info[FAILURE_KEY] == Failure.BUDGET_REACHED:
                raise BudgetReached(str(exp.info[TRACE_KEY]))
        if not kept or len(failed) > self.max_failed_fraction * total:
            raise RunFailed(_explanation(failed, total, self.max_failed_fraction))
        lone = _lone_runs(failed, kept)
        if len(lone) == succeeded:  # rather Trinity's way with groups of one than no step at all
            lone = set()
        kept = [exp for exp in kept if exp.eid.rid not in lone]
        # Completion order differs from run to run of the same seed; training must not.
        kept.sort(key=lambda exp: (exp.eid.task, exp.eid.run, exp.eid.step))
        metrics = {
            "group/failed_runs": float(len(failed)),
            "group/lone_runs": float(len(lone)),
            **self._group_health(kept),
        }
        return kept, metrics

    def _group_health(self, exps: list[Experience]) -> dict[str, float]:
        runs: dict[str, dict[str, float]] = defaultdict(dict)
        for exp in exps:
            runs[exp.eid.tid][exp.eid.rid] = float(exp.reward or 0.0)
        groups = [list(group.values()) for group in runs.values()]
        self._lowest = min(self._lowest, *(min(group) for group in groups))
        self._highest = max(self._highest, *(max(group) for group in groups))
        # Before any two rewards differed there is no middle: zero and below count as worst.
        spread = self._highest > self._lowest
        middle = (self._lowest + self._highest) / 2 if spread else 0.0
        alike = [group[0] for group in groups if max(group) == min(group)]
        best = sum(reward > middle for reward in alike)
        return {
            "group/frac_mixed": 1.0 - len(alike) / len(groups),
            "group/frac_all_best": best / len(groups),
            "group/frac_all_worst": (len(alike) - best) / len(groups),
        }


def _lone_runs(failed: list[Experience], kept: list[Experience]) -> set[str]:
    """Runs that succeeded alone in a group in which others failed."""
    thinned = {exp.eid.tid for exp in failed}
    runs: dict[str, set[str]] = defaultdict(set)
    for exp in kept:
        runs[exp.eid.tid].add(exp.eid.rid)
    return {
        rid for tid, group in runs.items() if tid in thinned and len(group) == 1 for rid in group
    }


def _explanation(failed: list[Experience], total: int, limit: float) -> str:
    """Which runs failed how, and the first reason in full."""
    if not failed:
        return "a step produced no experience at all"
    kinds = Counter(str(exp.info[FAILURE_KEY]) for exp in failed)
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    if len(failed) == total:
        reason = "every run of a step failed"
    else:
        reason = f"more than {limit:.0%} of the runs of a step failed"
    return f"{reason} ({len(failed)} of {total}: {listed}). The first:\n{failed[0].info[TRACE_KEY]}"
