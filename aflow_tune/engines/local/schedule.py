"""The learning rate as a function of the number of updates already made.

    warm-up   (i + 1) / warmup_steps                          for i < warmup_steps
    constant  1
    linear    floor + (1 - floor) (1 - p)                     p = (i - warmup) / (total - warmup)
    cosine    floor + (1 - floor) (1 + cos(pi p)) / 2

i counts from 0, so the first update of a warm-up already moves the weights, and the first
update after it has the full rate. `floor` is Trinity's `min_lr_ratio`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule. `total_steps` is needed by 'linear' and 'cosine' only.

    Raises ValueError for an unknown kind, a missing or too small total, or a floor outside
    [0, 1].
    """

    kind: str = "constant"
    peak: float = 1e-6
    warmup_steps: int = 0
    total_steps: int | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"lr_scheduler_type is one of {', '.join(KINDS)}, not {self.kind!r}")
        if not 0.0 <= self.floor <= 1.0:
            raise ValueError(f"min_lr_ratio lies in [0, 1], not {self.floor}")
        if self.warmup_steps < 0:
            raise ValueError(f"lr_warmup_steps is at least 0, not {self.warmup_steps}")
        if self.kind != "constant" and not self.total_steps:
            raise ValueError(f"a {self.kind} schedule needs the total number of steps")

    def factor(self, updates_done: int) -> float:
        """The share of the peak rate for the update after `updates_done` others."""
        if updates_done < self.warmup_steps:
            return (updates_done + 1) / self.warmup_steps
        if self.kind == "constant" or self.total_steps is None:
            return 1.0
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (updates_done - self.warmup_steps) / span)
        if self.kind == "linear":
            shape = 1.0 - progress
        else:
            shape = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (1.0 - self.floor) * shape

    def rate(self, updates_done: int) -> float:
        """The learning rate for the update after `updates_done` others."""
        return self.peak * self.factor(updates_done)
