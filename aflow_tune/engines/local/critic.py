"""The critic of PPO on one machine: a linear value head on the policy's last hidden states.

V(s) = w h + b, where h is the state from which a token was sampled. The hidden states are detached:
the value loss never moves the policy, whose trust region (the clipped ratio) does not bound it, and
needs no weight against the policy's loss. So they are computed once a step, and any number of
passes over them costs a product of a matrix and a vector. What V is fitted to is the caller's part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CriticSettings:
    """How the head is fitted. `passes`: updates on each batch; `clip_range`: how far a value may
    move in one step before its loss is flat; `grad_clip`: as of the policy, 0 for none."""

    passes: int = 16
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip_range: float = 0.5
    grad_clip: float = 1.0


class ValueHead:
    """The head, fp32 and 0 at first, with its AdamW. M: steps, H: the model's hidden size."""

    def __init__(self, hidden_size: int, settings: CriticSettings, device: torch.device) -> None:
        self.settings = settings
        self._params = {
            name: torch.zeros(size, device=device, requires_grad=True)
            for name, size in (("weight", hidden_size), ("bias", 1))
        }
        self.optimizer = torch.optim.AdamW(
            self._params.values(),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )

    def __call__(self, hidden_MH: Tensor) -> Tensor:
        """The values [M] of fp32 hidden states."""
        return hidden_MH @ self._params["weight"] + self._params["bias"]

    def fit(self, hidden_MH: Tensor, returns_M: Tensor, old_M: Tensor) -> dict[str, float]:
        """Make `passes` updates towards `returns_M`; the metrics are those of the last. The loss
        is PPO's, 1/2 mean max((V - R)^2, (V' - R)^2), V' within `clip_range` of the values `old_M`
        from before (verl's `compute_value_loss`). A gradient that is not finite changes nothing."""
        settings, params = self.settings, list(self._params.values())
        metrics: dict[str, float] = {}
        for _ in range(settings.passes):
            values_M = self(hidden_MH)
            bounds = old_M - settings.clip_range, old_M + settings.clip_range
            errors_M = (values_M - returns_M) ** 2
            clipped_M = (values_M.clamp(*bounds) - returns_M) ** 2
            loss = 0.5 * torch.maximum(errors_M, clipped_M).mean()
            self.optimizer.zero_grad()
            loss.backward()
            most = settings.grad_clip or math.inf
            norm = float(torch.nn.utils.clip_grad_norm_(params, most))
            if math.isfinite(norm):
                self.optimizer.step()
            metrics = {
                "critic/vf_loss": float(loss.detach()),
                "critic/vf_clipfrac": float((clipped_M > errors_M).float().mean()),
                "critic/grad_norm": norm,
                "critic/lr": settings.lr,
            }
        return metrics

    def state(self) -> dict[str, Tensor]:
        """Parameters and moments by name, to be saved."""
        found = {name: param.detach() for name, param in self._params.items()}
        for name, param in self._params.items():
            for key, value in self.optimizer.state.get(param, {}).items():
                found[f"{key}/{name}"] = value
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned. Raises KeyError: a parameter is missing."""
        with torch.no_grad():
            for name, param in self._params.items():
                param.copy_(state[name])
        self.optimizer.state.clear()
        for key, value in state.items():
            kind, slash, name = key.partition("/")
            if slash:
                param = self._params[name]
                device = torch.device("cpu") if kind == "step" else param.device
                self.optimizer.state[param][kind] = value.to(device)


def explained_variance(values_M: Tensor, returns_M: Tensor) -> float | None:
    """1 - Var(R - V) / Var(R): 1 for exact values, 0 for a constant, below 0 for worse. None where
    all returns are equal, and there is nothing to explain."""
    whole = float(returns_M.var(correction=0))
    return 1.0 - float((returns_M - values_M).var(correction=0)) / whole if whole > 0 else None
