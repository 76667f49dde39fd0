"""The vocabulary of the scoring room: a score, and the two rules that give one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rule = Literal["strict", "published"]
"""published: as the field's public code scores. strict: what training uses; resists hacking."""
RULES: tuple[Rule, ...] = ("strict", "published")


class CannotScore(ValueError):
    """The reference cannot score anything: no number in it, no tests, no text."""


@dataclass(frozen=True)
class Score:
    """A value in [0, 1], or None for 'unscored': nothing is known about the answer then. `reason`
    says why the value is not 1."""

    value: float | None
    reason: str = ""


RIGHT = Score(1.0)


def wrong(reason: str) -> Score:
    return Score(0.0, reason)
