"""Whatever a workflow was given as its model, as a client."""

from __future__ import annotations

import inspect
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.models.aflow_llm import AflowLlmClient
from aflow_tune.models.agentscope_client import AgentScopeClient, is_agentscope_model
from aflow_tune.models.prices import Price
from aflow_tune.models.types import ModelClient


def as_client(model: Any, role: str = "policy", price: Price | None = None) -> ModelClient:
    """A client over `model`.

    Args:
        model: a client of ours or another object with its interface (returned as it is: it has
            a role of its own), an AgentScope chat model such as the one that a tuned workflow
            gets, or an AFlow-style llm, `await llm(prompt) -> str`.
        role: what the calls are counted under.
        price: None: the price of the role, if the run's ledger has one; else unknown.

    Raises:
        BadInput: it is none of these.
    """
    if inspect.iscoroutinefunction(getattr(model, "complete", None)) and hasattr(model, "role"):
        client: ModelClient = model
        return client
    if is_agentscope_model(model):
        return AgentScopeClient(model, role, price)
    if _is_async_callable(model):
        return AflowLlmClient(model, role, price)
    raise BadInput(
        "This cannot be used as a model.",
        [
            Fault(
                "model",
                "a client of aflow_tune.models, an AgentScope chat model, or an async llm(prompt)",
                f"{type(model).__module__}.{type(model).__qualname__}",
                "pass `make_client(ModelSettings(model=...))`, or the model your workflow gets",
            )
        ],
    )


def _is_async_callable(model: Any) -> bool:
    if isinstance(model, type) or not callable(model):
        return False
    call = model if inspect.isroutine(model) else type(model).__call__
    return inspect.iscoroutinefunction(call)
