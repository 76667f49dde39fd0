"""What happens to a step's experiences between its rollouts and the trainer.

`RunFilter`, the first operator of Trinity's pipeline, takes out failed rollouts and puts the rest
in a fixed order; `AnchorRate` measures GiGPO's states; `StepStamp`, the last one, counts for
`WholeStepSampleStrategy`, by which the trainer takes experiences from the buffer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from trinity.algorithm.sample_strategy.sample_strategy import DefaultSampleStrategy
from trinity.algorithm.sample_strategy.utils import representative_sample
from trinity.buffer.operators.experience_operator import ExperienceOperator
from trinity.common.experience import Experience

from aflow_tune.errors import BudgetReached, RunFailed
from aflow_tune.types import Failure

# Keys of `Experience.info`.
FAILURE_KEY = "aflow/failure"  # marks a placeholder; the value is a `Failure`'s
TRACE_KEY = "aflow/traceback"  # of a placeholder: why the rollout failed, in words
CALLER_KEY = "caller"
STATE_KEY = "env_state_hash"  # what Trinity's GiGPO groups steps by
STEP_REWARD_KEY = "step_reward"  # where Trinity's GiGPO reads rewards of single steps from
STEP_SIZE_KEY = "step_experiences"  # how many experiences of the same explorer step were kept

Processed = tuple[list[Experience], dict[str, float]]


class RunFilter(ExperienceOperator):
    """Keeps the experiences of rollouts that succeeded, ordered by task, rollout and step. The only
    one left of its group is taken out too, unless nothing else is left of the step: Trinity would
    take its raw reward for an advantage. More than `max_failed_fraction` failed end training."""

    def __init__(self, max_failed_fraction: float = 1.0) -> None:
        self.max_failed_fraction = max_failed_fraction
        self._lowest = float("inf")
        self._highest = float("-inf")

    def process(self, exps: list[Experience]) -> Processed:
        """The surviving experiences, `group/failed_runs`, `group/lone_runs` (taken out for want of
        a group), and the shares of task groups by their rewards: `group/frac_mixed` (they differ),
        `group/frac_all_best` and `group/frac_all_worst` (all alike, in the upper or lower half of
        the rewards seen in this training). Raises RunFailed: no rollout is left, or too many
        failed, with the first traceback; BudgetReached: this step is not trained."""
        failed = [exp for exp in exps if FAILURE_KEY in exp.info]
        kept = [exp for exp in exps if FAILURE_KEY not in exp.info]
        succeeded = len({exp.eid.rid for exp in kept})
        total = len(failed) + succeeded
        for exp in failed:
            if exp.info[FAILURE_KEY] == Failure.BUDGET_REACHED:
                raise BudgetReached(str(exp.info[TRACE_KEY]))
        if not exps:
            raise RunFailed("a step produced no experience at all")
        if not kept or len(failed) > self.max_failed_fraction * total:
            kinds = Counter(str(exp.info[FAILURE_KEY]) for exp in failed)
            listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            raise RunFailed(
                f"too many rollouts of a step failed ({len(failed)} of {total}: {listed}). "
                f"The first:\n{failed[0].info[TRACE_KEY]}"
            )
        rewards: dict[str, dict[str, float]] = defaultdict(dict)
        for exp in kept:
            rewards[exp.eid.tid][exp.eid.rid] = float(exp.reward or 0.0)
        thinned = {exp.eid.tid for exp in failed}
        lone = {tid for tid, group in rewards.items() if tid in thinned and len(group) == 1}
        if len(lone) == succeeded:  # rather Trinity's way with groups of one than no step at all
            lone = set()
        kept = [exp for exp in kept if exp.eid.tid not in lone]
        # The order of completion differs under the same seed; training must not.
        kept.sort(key=lambda exp: (exp.eid.task, exp.eid.run, exp.eid.step))
        metrics = {"group/failed_runs": float(len(failed)), "group/lone_runs": float(len(lone))}
        groups = [list(group.values()) for tid, group in rewards.items() if tid not in lone]
        self._lowest = min(self._lowest, *(min(group) for group in groups))
        self._highest = max(self._highest, *(max(group) for group in groups))
        # Before any two rewards differed there is no middle: zero and below count as worst.
        spread = self._highest > self._lowest
        middle = (self._lowest + self._highest) / 2 if spread else 0.0
        alike = [group[0] for group in groups if max(group) == min(group)]
        best = sum(reward > middle for reward in alike)
        metrics["group/frac_mixed"] = 1.0 - len(alike) / len(groups)
        metrics["group/frac_all_best"] = best / len(groups)
        metrics["group/frac_all_worst"] = (len(alike) - best) / len(groups)
        return kept, metrics


class AnchorRate(ExperienceOperator):
    """Logs how often GiGPO finds another rollout in the same anchor state (`STATE_KEY`): if nearly
    never, it quietly is plain GRPO. Trinity's own `gigpo/anchor_group_hit_ratio` also counts one
    rollout that meets a state twice."""

    def process(self, exps: list[Experience]) -> Processed:
        """The same experiences, and the shares of calls whose state another rollout met as well:
        `gigpo/anchor_hit_rate` of all, `gigpo/anchor_hit_rate_later` of those after the first of
        their rollout, which is left out if there are none."""
        if not exps:
            return exps, {}
        rollouts: dict[str, set[str]] = defaultdict(set)
        for exp in exps:
            if STATE_KEY in exp.info:
                rollouts[exp.info[STATE_KEY]].add(exp.eid.rid)
        hits = [len(rollouts.get(exp.info.get(STATE_KEY, ""), ())) > 1 for exp in exps]
        metrics = {"gigpo/anchor_hit_rate": sum(hits) / len(exps)}
        later = [hit for hit, exp in zip(hits, exps, strict=True) if exp.eid.step > 0]
        if later:
            metrics["gigpo/anchor_hit_rate_later"] = sum(later) / len(later)
        return exps, metrics


class StepStamp(ExperienceOperator):
    """Comes last: notes on each experience how many of its step are left to train on."""

    def process(self, exps: list[Experience]) -> Processed:
        """The same experiences, each with the step's size in its `info`. Raises RunFailed: the
        operators before it left nothing."""
        if not exps:
            raise RunFailed(
                "the operators or a `std_threshold` left nothing of a step to train on: see "
                "`data_processor.experience_pipeline.operators`, `algorithm.advantage_fn_args`"
            )
        for exp in exps:
            exp.info[STEP_SIZE_KEY] = len(exps)
        return exps, {}


class WholeStepSampleStrategy(DefaultSampleStrategy):
    """Every train step consumes exactly one explorer step: this reads one experience, then as many
    as its stamp says. Trinity's default counts experiences, whose number nobody knows before."""

    async def sample(
        self, step: int, **kwargs: Any
    ) -> tuple[list[Experience], dict[str, float], list[Any]]:
        """Read the next explorer step; StopAsyncIteration when the buffer is closed and empty."""
        metrics: dict[str, float] = {}
        experiences = await self.exp_buffer.read(batch_size=1)
        remaining = int(experiences[0].info[STEP_SIZE_KEY]) - 1
        if remaining > 0:
            experiences += await self.exp_buffer.read(batch_size=remaining)
        self.set_model_version_metric(experiences, metrics)
        return experiences, metrics, representative_sample(experiences)
