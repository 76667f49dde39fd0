"""What a run may spend: its limits, the file that counts, and the prices that they need.

A step or an evaluation in which the budget ended does not count: some of its episodes failed for
want of money. The state before is saved; with a higher limit the same command goes on from it.
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
    """What the run of a prepared configuration may spend."""
    account = str(Path(config.account_folder) / ACCOUNT_FILE)
    return RunSpend(account, config.budget, config.models)


def stop_at_limit(config: AflowConfig) -> None:
    """Raises BudgetReached if some process of the run met a limit."""
    reason = spend_of(config).reached()
    if reason is not None:
        raise BudgetReached(reason)


def check_spend(config: AflowConfig, *, tuned: bool = True) -> Iterable[Fault]:
    """What is wrong with the models and the limits, missing keys and prices included. `tuned`:
    whether the model being tuned is asked; `check_served` checks one in its place."""
    faults = [*check_models(config.models), *check_budget(config.budget)]
    if config.budget.usd is not None and not faults:
        policy = {POLICY: ModelSettings()} if tuned else {}
        faults += _unpriced({**policy, **config.models}.items())
        # Calls of auxiliary models that run written workflows are counted, their price unknown.
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
    """Hold models that are asked in place of the tuned one against a limit on money.

    Raises BadInput: the price of one is not known."""
    if config.budget.usd is not None and (faults := _unpriced((POLICY, one) for one in served)):
        raise BadInput("A budget of money needs the price of every model.", faults)
    for model in served:
        say_prices(config, {POLICY: model})


def say_prices(config: AflowConfig, models: Mapping[str, ModelSettings]) -> None:
    """Warn of every price that was taken by a model's name, for an address unknown to the list."""
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
