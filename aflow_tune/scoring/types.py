"""Types of the scoring package: a score, and the two rules that give one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rule = Literal["strict", "published"]
"""published: as AFlow's public code scores. strict: for training; resists reward hacking."""
RULES: tuple[Rule, ...] = ("strict", "published")


class CannotScore(ValueError):
    """The reference cannot be scored against: it has no number, no tests or no text."""


@dataclass(frozen=True)
class Score:
    """A value in [0, 1], or None for unscored, which says nothing about the answer. `reason` says
    why the value is not 1."""

    value: float | None
    reason: str = ""


RIGHT = Score(1.0)


def wrong(reason: str) -> Score:
    return Score(0.0, reason)
