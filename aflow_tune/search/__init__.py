"""Search over workflows: tree search on a shared experience pool, with or without a policy.

`search(config_path)` does what `aflow-tune search` does. The classes below search with any function
that runs a workflow on a problem.
"""

from __future__ import annotations

import importlib
from typing import Any

from aflow_tune.search.optimizer import RLEnhancedOptimizer, SearchSettings, TaskSet
from aflow_tune.search.pool import SharedExperiencePool
from aflow_tune.search.state import Outcome, WorkflowState

__all__ = [
    "Outcome",
    "RLEnhancedOptimizer",
    "SearchSettings",
    "SharedExperiencePool",
    "TaskSet",
    "WorkflowState",
]


def __getattr__(name: str) -> Any:
    if name == "search":  # it brings the engines, which this room must not import
        return importlib.import_module("aflow_tune.tuning").search
    raise AttributeError(f"module 'aflow_tune.search' has no attribute {name!r}")
