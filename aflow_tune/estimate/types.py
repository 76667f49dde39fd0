"""The vocabulary of an estimate: parts, needs, and numbers that say how well they are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

GIB = 2**30
"""Bytes. GPU memory is counted in GiB by every vendor's tool, whatever it calls them."""


class Known(StrEnum):
    """How well a number is known."""

    MEASURED = "measured"
    """Taken from an earlier run of the same configuration, or from a calibration just now."""
    GIVEN = "given"
    """Said by the user."""
    COUNTED = "counted"
    """Follows from the settings and the data alone."""
    BOUND = "upper bound"
    """The settings allow no more; the run may stay far below."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Number:
    """A quantity with its standing. `value` None only if unknown; `how` says where it is from,
    or how to make it known."""

    value: float | None
    known: Known
    how: str = ""


@dataclass(frozen=True)
class Part:
    """One item of a memory bill, in bytes. `allowance`: set from measurements, no formula."""

    name: str
    size: float
    note: str = ""
    allowance: bool = False


@dataclass(frozen=True)
class Need:
    """What one role takes on each of `count` equal places.

    `place` is 'GPU' or 'memory' (of the machine). `limit` is what the place offers, in bytes;
    None if that is not known. `share` of it may be used. `refusal` says why a role cannot work
    even where the sum fits.
    """

    role: str
    place: str
    parts: tuple[Part, ...]
    count: int = 1
    limit: float | None = None
    share: float = 1.0
    refusal: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> float:
        """Bytes on each place."""
        return sum(part.size for part in self.parts)

    @property
    def fits(self) -> bool | None:
        """None where the memory at hand is not known."""
        if self.refusal is not None:
            return False
        return None if self.limit is None else self.size <= self.limit * self.share


@dataclass(frozen=True)
class Change:
    """A change of the settings that makes everything fit, checked by estimating again."""

    settings: tuple[tuple[str, object], ...]
    saved: float
    """Bytes less on the place that was fullest."""
    size: float
    """Bytes on that place afterwards."""
    cost: str = ""
    """What is lost by it, in words."""


@dataclass
class Estimate:
    """One run, or one stage of a chain."""

    name: str
    engine: str
    model: str
    needs: list[Need]
    quantities: dict[str, Number] = field(default_factory=dict)
    """Tokens, seconds and US dollars of a step, by name."""
    notes: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    """Alternatives, the smallest change first; any one of them is enough."""

    @property
    def fits(self) -> bool | None:
        """False if anything does not fit; None if that cannot be told of something.

        The memory of machines that nobody described is not asked for where GPUs decide.
        """
        on_gpus = any(need.place == "GPU" for need in self.needs)
        found = [
            need.fits
            for need in self.needs
            if not (on_gpus and need.place != "GPU" and need.limit is None)
        ]
        if False in found:
            return False
        return None if None in found or not found else True

    @property
    def worst(self) -> Need | None:
        """The need that goes furthest beyond its place."""
        bounded = [need for need in self.needs if need.limit]
        return max(bounded, key=lambda need: need.size / (need.limit or 1), default=None)
