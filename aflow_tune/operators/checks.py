"""Checks of what operators are built with.

A graph that a model wrote may choose these values, so each has a bound.
"""

from __future__ import annotations

from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.sandbox.types import Limits


def number_faults(where: str, value: Any, least: int, most: int) -> list[Fault]:
    """What is wrong with a number that must be whole and within bounds."""
    if type(value) is int and least <= value <= most:
        return []
    expected = f"a whole number from {least} to {most}"
    return [Fault(where, expected, f"{value!r:.80}", f"give {expected}")]


def whole_number(where: str, value: Any, least: int, most: int) -> None:
    """Raises `BadInput` for anything else."""
    faults = number_faults(where, value, least, most)
    if faults:
        raise BadInput("An operator cannot be built.", faults)


def checked_limits(limits: Limits | None, caller: str) -> Limits:
    """The limits, or the sandbox's own where there are none.

    Raises:
        BadInput: they are something else.
    """
    if limits is None or isinstance(limits, Limits):
        return limits or Limits()
    cure = "pass aflow_tune.sandbox.Limits(...)"
    fault = Fault(f"{caller}: limits", "limits of the sandbox", f"{limits!r:.80}", cure)
    raise BadInput("An operator cannot be built.", [fault])
