"""What a low-rank adapter looks like, for those that hold none: PEFT takes seconds to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoraSpec:
    """What an adapter looks like.

    `target_modules`: 'all-linear' (every linear layer but the output head), one module name,
    a regular expression as PEFT takes it, or a tuple of module names.
    """

    rank: int
    alpha: float
    target_modules: str | tuple[str, ...] = "all-linear"

    @property
    def scaling(self) -> float:
        """The factor of B A in the merged weight."""
        return self.alpha / self.rank
