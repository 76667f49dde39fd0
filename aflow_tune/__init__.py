"""aflow-tune: reinforcement learning for agent workflows.

`tune()` trains the model behind a workflow function; `aflow-tune CONFIG.yaml` does the same
from the shell. Names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aflow_tune.context import caller, record_metrics, state_key, step_reward
    from aflow_tune.contract.plugins import workflow
    from aflow_tune.errors import AflowTuneError, BadInput, ExitCode, RunFailed
    from aflow_tune.models.clients import client_for
    from aflow_tune.tuning import tune
    from aflow_tune.types import JudgeOutput, TuneResult, WorkflowOutput

_HOME = {
    "tune": "aflow_tune.tuning",
    "workflow": "aflow_tune.contract.plugins",
    "caller": "aflow_tune.context",
    "client_for": "aflow_tune.models.clients",
    "record_metrics": "aflow_tune.context",
    "step_reward": "aflow_tune.context",
    "state_key": "aflow_tune.context",
    "WorkflowOutput": "aflow_tune.types",
    "JudgeOutput": "aflow_tune.types",
    "TuneResult": "aflow_tune.types",
    "AflowTuneError": "aflow_tune.errors",
    "BadInput": "aflow_tune.errors",
    "RunFailed": "aflow_tune.errors",
    "ExitCode": "aflow_tune.errors",
}

__all__ = [
    "AflowTuneError",
    "BadInput",
    "ExitCode",
    "JudgeOutput",
    "RunFailed",
    "TuneResult",
    "WorkflowOutput",
    "caller",
    "client_for",
    "record_metrics",
    "state_key",
    "step_reward",
    "tune",
    "workflow",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'aflow_tune' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
