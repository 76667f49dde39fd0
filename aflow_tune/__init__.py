"""aflow-tune: reinforcement learning for agent workflows.

`tune()` trains the model behind a workflow function; `aflow-tune CONFIG.yaml` does the same
from the shell. Names are loaded on first use, so that importing the package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aflow_tune.context import caller, record_metrics, state_key, step_reward
    from aflow_tune.contract.plugins import workflow
    from aflow_tune.engines.trinity.rollout.openai_endpoint import openai_endpoint
    from aflow_tune.errors import AflowTuneError, BadInput, ExitCode, RunFailed
    from aflow_tune.models.chat_model import TrinityChatModel
    from aflow_tune.models.clients import client_for
    from aflow_tune.models.types import text_of
    from aflow_tune.tuning import tune
    from aflow_tune.types import JudgeOutput, TuneResult, WorkflowOutput

_HOME = {
    "context": ("caller", "record_metrics", "state_key", "step_reward"),
    "contract.plugins": ("workflow",),
    "engines.trinity.rollout.openai_endpoint": ("openai_endpoint",),
    "errors": ("AflowTuneError", "BadInput", "ExitCode", "RunFailed"),
    "models.chat_model": ("TrinityChatModel",),
    "models.clients": ("client_for",),
    "models.types": ("text_of",),
    "tuning": ("tune",),
    "types": ("JudgeOutput", "TuneResult", "WorkflowOutput"),
}

__all__ = [
    "AflowTuneError",
    "BadInput",
    "ExitCode",
    "JudgeOutput",
    "RunFailed",
    "TrinityChatModel",
    "TuneResult",
    "WorkflowOutput",
    "caller",
    "client_for",
    "openai_endpoint",
    "record_metrics",
    "state_key",
    "step_reward",
    "text_of",
    "tune",
    "workflow",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"aflow_tune.{module}"), name)
    raise AttributeError(f"module 'aflow_tune' has no attribute {name!r}")
