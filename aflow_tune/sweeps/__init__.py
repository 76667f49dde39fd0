"""`aflow-tune sweep`: trains the same configuration with different settings, one trial for each.

A sweep is a folder beside the runs, with Optuna's study and the run folders of its trials, so all
commands for runs work on them. Optuna draws the settings and decides what is pruned; this package
starts, stops, resumes and scores the trials. A run does not know that it belongs to a sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """The arguments of the command. `trials` None: all of a grid, else 20."""

    config: Path
    space: Sequence[str]
    overrides: Sequence[str] = ()
    trials: int | None = None
    sampler: str = "tpe"
    seed: int = 0
    seeds: Sequence[int] = ()
    prune: str = "none"
    objective: str = "best"
    parallel: int = 1
    timeout: float | None = None
