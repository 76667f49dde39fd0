"""Operators on a step's experiences between the rollouts and the trainer.

`RunFilter`, the first operator of Trinity's pipeline, removes failed rollouts and sorts the rest;
`AnchorRate` measures GiGPO's anchor states; `StepStamp`, the last one, stores the step's size for
`WholeStepSampleStrategy`, with which the trainer reads experiences from the buffer.
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
TRACE_KEY = "aflow/traceback"  # of a placeholder: why the rollout failed, as text
CALLER_KEY = "caller"
STATE_KEY = "env_state_hash"  # what Trinity's GiGPO groups steps by
STEP_REWARD_KEY = "step_reward"  # where Trinity's GiGPO reads rewards of single steps from
STEP_SIZE_KEY = "step_experiences"  # how many experiences of the same explorer step were kept

Processed = tuple[list[Experience], dict[str, float]]


class RunFilter(ExperienceOperator):
    """Keeps the experiences of successful rollouts, sorted by task, rollout and step. Also removes
    the only survivor of a group, unless the step has no others: Trinity would use its raw reward as
    the advantage. If more than `max_failed_fraction` of the rollouts failed, training ends."""

    def __init__(self, max_failed_fraction: float = 1.0) -> None:
        self.max_failed_fraction = max_failed_fraction
        self._lowest = float("inf")
        self._highest = float("-inf")

    def process(self, exps: list[Experience]) -> Processed:
        """The kept experiences; counts `group/failed_runs` and `group/lone_runs` (only survivors,
        removed); and shares of groups by rewards: `group/frac_mixed` (they differ),
        `group/frac_all_best` and `group/frac_all_worst` (all equal, in the upper or lower half of
        the rewards that this process has seen). Raises RunFailed: no rollout is left, or too many
        failed, with the first traceback; BudgetReached: the budget ended during the step."""
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
        if len(lone) == succeeded:  # better train on groups of one than lose the step
            lone = set()
        kept = [exp for exp in kept if exp.eid.tid not in lone]
        # Rollouts complete in varying order under the same seed; training must not depend on it.
        kept.sort(key=lambda exp: (exp.eid.task, exp.eid.run, exp.eid.step))
        metrics = {"group/failed_runs": float(len(failed)), "group/lone_runs": float(len(lone))}
        groups = [list(group.values()) for tid, group in rewards.items() if tid not in lone]
        self._lowest = min(self._lowest, *(min(group) for group in groups))
        self._highest = max(self._highest, *(max(group) for group in groups))
        # As long as all rewards were equal there is no middle: zero and below count as worst.
        spread = self._highest > self._lowest
        middle = (self._lowest + self._highest) / 2 if spread else 0.0
        alike = [group[0] for group in groups if max(group) == min(group)]
        best = sum(reward > middle for reward in alike)
        if any(len(group) > 1 for group in groups):  # else, as with PPO, nothing is compared
            metrics["group/frac_mixed"] = 1.0 - len(alike) / len(groups)
            metrics["group/frac_all_best"] = best / len(groups)
            metrics["group/frac_all_worst"] = (len(alike) - best) / len(groups)
        return kept, metrics


class AnchorRate(ExperienceOperator):
    """Logs how often GiGPO finds another rollout in the same anchor state (`STATE_KEY`): if almost
    never, GiGPO reduces to GRPO. Trinity's own `gigpo/anchor_group_hit_ratio` also counts a rollout
    that visits a state twice."""

    def process(self, exps: list[Experience]) -> Processed:
        """The same experiences, and the share of calls whose state another rollout visited, too:
        `gigpo/anchor_hit_rate` over all calls, `gigpo/anchor_hit_rate_later` over all but the first
        of each rollout, absent if there are none."""
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
    """The last operator: stores in each experience how many of its step are trained on."""

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
    """Every train step consumes exactly one explorer step: it reads one experience, then as many as
    its stamp says. Trinity's default reads a fixed number, but workflows make varying numbers."""

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
