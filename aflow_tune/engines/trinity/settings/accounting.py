"""Where a run's books lie, what may stand in them, and what happens when its budget is reached.

A step in which the budget ended is not trained, and an evaluation is not counted: some of the
runs failed for want of money, which says nothing about the policy. The state before is saved;
with a higher limit the same command does the step again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from aflow_tune.config import ModelSettings
from aflow_tune.engines.trinity.settings.config import AflowConfig
from aflow_tune.errors import BudgetReached, Fault
from aflow_tune.models.books import Books
from aflow_tune.models.budget import check_budget, unpriced
from aflow_tune.models.prices import price_of
from aflow_tune.models.settings import check_models
from aflow_tune.runs.folder import ACCOUNT_FILE
from aflow_tune.trace import POLICY


def books_of(config: AflowConfig) -> Books:
    """The books of a prepared configuration's run."""
    account = str(Path(config.account_folder) / ACCOUNT_FILE)
    return Books(account, config.budget, config.models)


def stop_at_limit(config: AflowConfig) -> None:
    """Raises BudgetReached if some process of the run met a limit."""
    reason = books_of(config).reached()
    if reason is not None:
        raise BudgetReached(reason)


def check_books(config: AflowConfig) -> Iterable[Fault]:
    """What is wrong with the models and the limits, keys and prices that are missing included."""
    faults = [*check_models(config.models), *check_budget(config.budget)]
    if config.budget.usd is not None and not faults:
        for role, model in {POLICY: ModelSettings(), **config.models}.items():
            name = model.model or "the model being tuned"
            if price_of(model.provider, model.base_url, model.model or "", model.prices) is None:
                faults.append(unpriced(role, name))
    for fault in faults:
        yield replace(fault, where=config.positions.where(fault.where))
