"""The losses of DPO on both engines: a mean over pairs, whatever the micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn

KINDS = ("sigmoid", "hinge", "ipo")


class PairLoss(PolicyLossFn):
    """With m the log-ratio of policy to reference of the chosen answer minus the rejected one's:

    - sigmoid: -(1 - e) log s(beta m) - e log s(-beta m), e the `label_smoothing` (Rafailov et al.
      2023, equation 7; with e: Mitchell 2023, conservative DPO).
    - hinge: max(0, 1 - beta m) (Zhao et al. 2023, SLiC-HF).
    - ipo: (m - 1 / (2 beta))^2, the log-ratios means over an answer's tokens (Azar et al. 2023).

    `rpo_alpha`: that much of the chosen answer's negative log-likelihood, its mean over tokens, is
    added to each pair's loss, so that it does not sink with the rejected one's (Pang et al. 2024,
    equation 1). `reference_free`: the reference's terms are 0. Trinity's own sums log-probabilities
    over a whole micro-batch before it compares, which is another loss unless that is one pair.
    `pairs`: divides the sum over pairs in place of their number in the call, for verl, which adds
    micro-batches up.

    Raises ValueError: another `loss_type`, a beta of 0 or less, an `rpo_alpha` below 0, smoothing
    outside of 0 to 0.5 or with another loss than sigmoid.
    """

    def __init__(
        self,
        backend: str = "verl",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        loss_type: str = "sigmoid",
        reference_free: bool = False,
        rpo_alpha: float = 0.0,
        pairs: int | None = None,
    ) -> None:
        super().__init__(backend=backend)
        if loss_type not in KINDS:
            raise ValueError(f"loss_type: one of {', '.join(KINDS)}, not {loss_type!r}")
        if not beta > 0:
            raise ValueError(f"beta: above 0, not {beta}")
        if not rpo_alpha >= 0:
            raise ValueError(f"rpo_alpha: 0 or more, not {rpo_alpha}")
        if not 0 <= label_smoothing < 0.5 or (label_smoothing and loss_type != "sigmoid"):
            raise ValueError("label_smoothing: 0 to 0.5, with loss_type sigmoid")
        self.beta, self.label_smoothing = beta, label_smoothing
        self.loss_type, self.pairs, self.rpo_alpha = loss_type, pairs, rpo_alpha
        self.reference_free = reference_free
        if reference_free:
            self._select_keys: list[str] = [
                key for key in self._select_keys if key != "ref_logprob"
            ]

    def __call__(
        self,
        logprob: Tensor,
        action_mask: Tensor,
        ref_logprob: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        """Rows 2i and 2i + 1 are chosen and rejected of pair i; all shapes are [2P, R]."""
        mask = action_mask.bool()
        tokens = mask.sum(-1).clamp(min=1)
        ratios = logprob if ref_logprob is None else logprob - ref_logprob
        sums = torch.where(mask, ratios, 0.0).sum(-1)
        scored = sums / tokens if self.loss_type == "ipo" else sums
        margins_P = scored[::2] - scored[1::2]
        smooth = self.label_smoothing
        if self.loss_type == "hinge":
            losses_P = torch.relu(1 - self.beta * margins_P)
        elif self.loss_type == "ipo":
            losses_P = (margins_P - 1 / (2 * self.beta)) ** 2
        else:
            logits_P = self.beta * margins_P
            losses_P = -(1 - smooth) * logsigmoid(logits_P) - smooth * logsigmoid(-logits_P)
        if self.rpo_alpha:
            likely = torch.where(mask, logprob, 0.0).sum(-1) / tokens
            losses_P = losses_P - self.rpo_alpha * likely[::2]
        value = losses_P.sum() / (self.pairs or len(losses_P))
        rewards = self.beta * sums.detach()
        right = (rewards[::2] > rewards[1::2]).float()
        return value, {
            "chosen_reward": float(rewards[::2].mean()),
            "rejected_reward": float(rewards[1::2].mean()),
            "accuracy_mean": float(right.mean()),
            "dpo_loss": float(losses_P.detach().mean()),
        }

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"beta": 0.1, "label_smoothing": 0.0}
