"""The trajectories of PPO: the calls of a run joined in their order, and nothing but its steps.

A step is a token that the policy sampled; prompts and results of tools are none. Trinity's GAE
takes every row for a trajectory and every column for a step, masked or not. So it is given rows
that are: one a run, its steps side by side, zeros behind them, which change neither advantages nor
returns. The value of a run's next call is then what follows the last step of the call before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from trinity.algorithm.advantage_fn.gigpo_advantage import GiGPOAdvantageFn
from trinity.common.experience import Experience

from aflow_tune.engines.local.packed_model import Sample


class Trajectories:
    """Where the steps of the calls [B, R] stand in the trajectories of their runs [P, S].

    `runs`: the run of each call; a run's calls are in order. The choices of one call (n > 1) follow
    each other as calls do."""

    def __init__(self, runs: Sequence[Hashable], mask_BR: Tensor) -> None:
        self.shape = mask_BR.shape
        rows: dict[Hashable, list[int]] = {}
        for row, run in enumerate(runs):
            rows.setdefault(run, []).append(row)
        self.first = [of_run[0] for of_run in rows.values()]
        """A call of each run."""
        places = torch.arange(mask_BR.numel(), device=mask_BR.device).view_as(mask_BR)
        steps = [places[of_run][mask_BR[of_run]] for of_run in rows.values()]
        size = len(steps), max(1, *map(len, steps))
        self.mask_PS = torch.zeros(size, dtype=torch.bool, device=mask_BR.device)
        self._place_PS = torch.zeros(size, dtype=torch.long, device=mask_BR.device)
        # The step that each column belongs to: itself, else the one before it, else the first.
        self._step_BR = torch.full((mask_BR.numel(),), -1, device=mask_BR.device)
        for number, (of_run, found) in enumerate(zip(rows.values(), steps, strict=True)):
            self.mask_PS[number, : len(found)] = True
            self._place_PS[number, : len(found)] = found
            if len(found):
                own = (mask_BR[of_run].flatten().cumsum(0) - 1).clamp(min=0)
                self._step_BR[places[of_run].flatten()] = own + number * size[1]

    def join(self, columns_BR: Tensor) -> Tensor:
        """What stands at the steps, [P, S]; 0 behind them."""
        return columns_BR.flatten()[self._place_PS] * self.mask_PS

    def credit(self, rewards_BR: Tensor) -> Tensor:
        """Rewards by step, [P, S]: what stands between steps counts for the step before it."""
        known = self._step_BR >= 0
        found = rewards_BR.new_zeros(self.mask_PS.numel())
        found.index_add_(0, self._step_BR[known], rewards_BR.flatten()[known])
        return found.view_as(self.mask_PS)

    def split(self, steps_PS: Tensor) -> Tensor:
        """The reverse of `join`: [B, R], 0 where there is no step."""
        found = steps_PS.new_zeros(self.shape).flatten()
        found[self._place_PS[self.mask_PS]] = steps_PS[self.mask_PS]
        return found.view(self.shape)


def share_rewards(
    exps: Sequence[Experience], runs: Sequence[Hashable], samples: Sequence[Sample]
) -> None:
    """Set the rewards of the calls of each run, which Trinity puts on the last token of every one:
    as its GiGPO, each call's own if any has one, else the run's on its last call, once."""
    rule = GiGPOAdvantageFn()
    rows: dict[Hashable, list[int]] = {}
    for row, run in enumerate(runs):
        rows.setdefault(run, []).append(row)
    for of_run in rows.values():
        rewards = rule._step_rewards([exps[row] for row in of_run])
        for row, reward in zip(of_run, rewards, strict=True):
            scores_R = samples[row].extra.get("token_level_scores")
            if scores_R is not None and len(scores_R) and exps[row].token_level_reward is None:
                scores_R[-1] = reward
