"""DPO on verl, pair by pair.

Trinity's DPO loss sums the log-probabilities of a whole micro-batch before it compares chosen and
rejected: margins of 2 and -1 with beta 0.1 give 0.644397, where the mean over the pairs is 0.671268
(Rafailov et al. 2023, equation 7). And verl cuts batches where it likes, also through a pair. Here
every pair keeps a loss of its own, and stays whole (`keep_pairs`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trinity.algorithm.policy_loss_fn.dpo_loss import DPOLossFn


class PairLoss(DPOLossFn):
    """Trinity's DPO loss of each pair, summed and divided by `pairs`.

    Args:
        pairs: of the whole mini-batch of one worker. verl adds the gradients of micro-batches up,
            so the sum of their losses must be the mean over all pairs. None: those of the call.
    """

    def __init__(
        self,
        backend: str = "verl",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        pairs: int | None = None,
    ) -> None:
        super().__init__(backend, beta, label_smoothing)
        self.pairs = pairs

    def __call__(
        self, logprob: Tensor, ref_logprob: Tensor, action_mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, dict[str, float]]:
        """Rows 2i and 2i + 1 are chosen and rejected of pair i; all shapes are [2P, R]."""
        results = [
            super(PairLoss, self).__call__(logprob[at], ref_logprob[at], action_mask[at])
            for at in (slice(i, i + 2) for i in range(0, len(logprob), 2))
        ]
        losses, metrics = zip(*results, strict=True)
        total = torch.stack(losses).sum() / (self.pairs or len(losses))
        means = {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}
        return total, means


def keep_pairs(engine: Any, pairs: int) -> None:
    """Let Trinity's `VERLTrainer` train on whole pairs, `pairs` of them a step.

    Before `engine.prepare()`, which hands the loss to the workers.
    """
    algorithm = engine.algorithm_config
    if algorithm.policy_loss_fn == "dpo":
        algorithm.policy_loss_fn = f"{PairLoss.__module__}.{PairLoss.__qualname__}"
        algorithm.policy_loss_fn_args["pairs"] = pairs // engine._get_dp_size()
    engine.config.actor.ppo_mini_batch_size = 2 * pairs  # verl counts sequences
    update = engine._update_actor

    def update_pairs(batch: Any, metrics: dict[str, Any]) -> Any:
        batch.meta_info["force_group_size"] = 2
        return update(batch, metrics)

    engine._update_actor = update_pairs
