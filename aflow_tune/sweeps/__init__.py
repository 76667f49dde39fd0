"""Sweeps: the same configuration tried with other settings, one run folder a trial.

A sweep is a folder beside the runs, with Optuna's study and a run folder for each trial, so that
whatever works on runs works on trials. Optuna draws the settings and decides what is pruned; what
a trial is, how it is started, stopped, resumed and scored is ours. A run knows nothing of sweeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line. `trials` None: all of a grid, else 20."""

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
