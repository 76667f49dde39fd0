"""Where a run's books lie, and what happens when a limit of its budget is reached.

A step in which the budget ended is not trained, and an evaluation is not counted: some of the
runs failed for want of money, which says nothing about the policy. The state before is saved;
with a higher limit the same command does the step again.
"""

from __future__ import annotations

from pathlib import Path

from aflow_tune.engines.trinity.config import AflowConfig
from aflow_tune.errors import BudgetReached
from aflow_tune.models.books import Books

ACCOUNT_FILE = "account.sqlite"
"""In the run folder: what the run has spent so far."""


def books_of(config: AflowConfig) -> Books:
    """The books of a prepared configuration's run."""
    account = str(Path(config.checkpoint_job_dir) / ACCOUNT_FILE)
    return Books(account, config.budget, config.models)


def stop_at_limit(config: AflowConfig) -> None:
    """Raises BudgetReached if some process of the run met a limit."""
    reason = books_of(config).reached()
    if reason is not None:
        raise BudgetReached(reason)
