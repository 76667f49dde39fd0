"""Types shared by all packages: what workflows and judges return, and what a run returns.

Importing this module imports neither torch nor Trinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class WorkflowOutput:
    """What a workflow function of AgentScope's newer form returns, with the fields of its
    `WorkflowOutput`. `reward` may stay None when a judge function scores `response`."""

    reward: float | None = None
    response: Any = None
    metrics: Mapping[str, float] | None = None


@dataclass(kw_only=True)
class JudgeOutput:
    """What a judge function returns. Same fields as `agentscope.tuner.JudgeOutput`."""

    reward: float
    metrics: Mapping[str, float] | None = None


class Failure(StrEnum):
    """Why a rollout failed, and is not trained on. The value names the metric `failure/VALUE`."""

    RAISED = "raised"
    RETURNED_NONE = "returned_none"
    NOT_FINITE = "not_finite"
    NOT_A_NUMBER = "not_a_number"
    NO_CALL = "no_call"
    TIMED_OUT = "timed_out"
    BLOCKED_LOOP = "blocked_loop"
    BUDGET_REACHED = "budget_reached"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: `path` is its complete folder, written atomically."""

    step: int
    path: Path


@dataclass(frozen=True)
class TuneResult:
    """What `tune()` returns once the trainer has reached its target step."""

    run_dir: Path
    steps_done: int
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoints: tuple[Checkpoint, ...] = ()
    report: Path | None = None
