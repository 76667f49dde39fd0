"""What happens to a step's experiences before advantages are computed.

`RunFilter` is the first operator of the pipeline: it takes out the placeholders of failed
runs, says how healthy the groups are, puts the rest in a fixed order, and stops the run when
nothing is left to learn from.
"""

from __future__ import annotations

from collections import defaultdict

from trinity.buffer.operators.experience_operator import ExperienceOperator
from trinity.common.experience import Experience

from aflow_tune.engines.trinity.adapter import FAILURE_KEY, TRACE_KEY
from aflow_tune.engines.trinity.sampling import STEP_SIZE_KEY
from aflow_tune.errors import RunFailed


class RunFilter(ExperienceOperator):
    """Keeps the experiences of runs that succeeded, ordered by task, run and step.

    Args:
        max_failed_fraction: a step with a larger share of failed runs ends training.
    """

    def __init__(self, max_failed_fraction: float = 1.0) -> None:
        self.max_failed_fraction = max_failed_fraction

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        """The surviving experiences and the step's health.

        Metrics: `group/frac_mixed`, `group/frac_all_best`, `group/frac_all_worst` (shares of
        task groups whose runs differ in reward, all reached the step's highest reward, or did
        not differ below it), `group/failed_runs`.

        Raises:
            RunFailed: no run is left, or too many failed; with the first traceback.
        """
        failed = [exp for exp in exps if FAILURE_KEY in exp.info]
        kept = [exp for exp in exps if FAILURE_KEY not in exp.info]
        runs = {exp.eid.rid for exp in kept}
        fraction = len(failed) / max(1, len(failed) + len(runs))
        if not kept or fraction > self.max_failed_fraction:
            raise RunFailed(_explanation(failed, len(runs), self.max_failed_fraction))
        # Completion order differs from run to run of the same seed; training must not.
        kept.sort(key=lambda exp: (exp.eid.task, exp.eid.run, exp.eid.step))
        for exp in kept:
            exp.info[STEP_SIZE_KEY] = len(kept)
        return kept, {"group/failed_runs": float(len(failed)), **_group_health(kept)}


def _group_health(exps: list[Experience]) -> dict[str, float]:
    rewards: dict[str, dict[str, float]] = defaultdict(dict)
    for exp in exps:
        rewards[exp.eid.tid][exp.eid.rid] = float(exp.reward)
    groups = [list(group.values()) for group in rewards.values()]
    best = max(max(group) for group in groups)
    mixed = sum(max(group) > min(group) for group in groups)
    all_best = sum(min(group) == best for group in groups) if mixed < len(groups) else 0
    count = len(groups)
    return {
        "group/frac_mixed": mixed / count,
        "group/frac_all_best": all_best / count,
        "group/frac_all_worst": (count - mixed - all_best) / count,
    }


def _explanation(failed: list[Experience], succeeded: int, limit: float) -> str:
    if not failed:
        return "a step produced no experience at all"
    kinds: dict[str, int] = defaultdict(int)
    for exp in failed:
        kinds[exp.info[FAILURE_KEY]] += 1
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    total = len(failed) + succeeded
    reason = (
        "every run of a step failed"
        if not succeeded
        else f"more than {limit:.0%} of the runs of a step failed"
    )
    return (
        f"{reason} ({len(failed)} of {total}: {listed}); nothing can be learned from it. "
        f"The first:\n{failed[0].info[TRACE_KEY]}"
    )
