"""What a run may spend: its limits, the file with its account, and the prices that these need.

A step or evaluation during which a limit is reached is discarded: some of its rollouts failed for
that reason. The state before it is saved; with a higher limit the same command resumes from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from aflow_tune.config.settings import AflowConfig
from aflow_tune.errors import BadInput, BudgetReached, Fault
from aflow_tune.models.clients import RunSpend
from aflow_tune.models.prices import price_of, stands_in
from aflow_tune.models.settings import check_models
from aflow_tune.models.spend import check_budget, unpriced
from aflow_tune.runs.folder import ACCOUNT_FILE
from aflow_tune.sections import ModelSettings
from aflow_tune.trace import POLICY


def spend_of(config: AflowConfig) -> RunSpend:
    """The account and limits of the run of a prepared configuration."""
    account = str(Path(config.account_folder) / ACCOUNT_FILE)
    return RunSpend(account, config.budget, config.models)


def stop_at_limit(config: AflowConfig) -> None:
    """Raise BudgetReached if any process of the run has reached a limit."""
    reason = spend_of(config).reached()
    if reason is not None:
        raise BudgetReached(reason)


def check_spend(config: AflowConfig, *, tuned: bool = True) -> Iterable[Fault]:
    """Faults of the models and the limits, missing keys and prices included; adds warnings.
    `tuned`: whether the model being tuned is called; `check_served` checks models in its place."""
    faults = [*check_models(config.models), *check_budget(config.budget)]
    if config.budget.usd is not None and not faults:
        policy = {POLICY: ModelSettings()} if tuned else {}
        faults += _unpriced({**policy, **config.models}.items())
        # Auxiliary models that run written workflows are counted too; they have no price.
        used = {config.writer.executor, *config.writer.models.values()}
        fix = "limit budget.tokens instead, or serve it and give it base_url and prices in `models`"
        for model in config.explorer.auxiliary_models:
            if model.name in used:
                expected = f"what {model.name} costs, since budget.usd is set"
                faults.append(Fault("budget.usd", expected, "an auxiliary model, no price", fix))
    say_prices(config, config.models)
    for fault in faults:
        yield replace(fault, where=config.positions.where(fault.where))


def check_served(config: AflowConfig, served: Sequence[ModelSettings]) -> None:
    """Check models that are called instead of the tuned one against `budget.usd`; adds warnings.

    Raises BadInput: there is such a limit, and the price of a model is unknown."""
    if config.budget.usd is not None and (faults := _unpriced((POLICY, one) for one in served)):
        raise BadInput("A budget of money needs the price of every model.", faults)
    for model in served:
        say_prices(config, {POLICY: model})


def say_prices(config: AflowConfig, models: Mapping[str, ModelSettings]) -> None:
    """Warn of each price that was found by model name, as the list does not know the address."""
    for role, model in models.items():
        if (price := stands_in(model)) is not None:
            warning = (
                f"models.{role}: {model.model} at {model.base_url} is counted at the listed price "
                f"of {price}; models.{role}.prices wins over it"
            )
            if warning not in config.warnings:
                config.warnings.append(warning)


def _unpriced(models: Iterable[tuple[str, ModelSettings]]) -> list[Fault]:
    return [
        unpriced(role, model.model or "the model being tuned")
        for role, model in models
        if price_of(model.provider, model.base_url, model.model or "", model.prices) is None
    ]
