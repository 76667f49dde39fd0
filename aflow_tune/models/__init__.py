"""Model clients: one interface over every endpoint, with retries, prices, budgets and a cache.

`make_client` makes a client from settings, `as_client` one from whatever a workflow was given;
`Ledger` counts and limits what they use. Names are loaded on first use: importing this room
imports no SDK.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aflow_tune.models.account import Account
    from aflow_tune.models.adapt import as_client
    from aflow_tune.models.budget import Budget
    from aflow_tune.models.cache import ResponseCache
    from aflow_tune.models.ledger import Ledger, current_ledger
    from aflow_tune.models.scripted import ScriptedModel
    from aflow_tune.models.settings import ModelSettings, make_client, make_clients
    from aflow_tune.models.types import ModelClient, ModelError, ModelFailure, Reply, Usage
    from aflow_tune.models.usage import Meter

_HOME = {
    "Account": "account",
    "Budget": "budget",
    "Ledger": "ledger",
    "Meter": "usage",
    "ModelClient": "types",
    "ModelError": "types",
    "ModelFailure": "types",
    "ModelSettings": "settings",
    "Reply": "types",
    "ResponseCache": "cache",
    "ScriptedModel": "scripted",
    "Usage": "types",
    "as_client": "adapt",
    "current_ledger": "ledger",
    "make_client": "settings",
    "make_clients": "settings",
}

__all__ = [
    "Account",
    "Budget",
    "Ledger",
    "Meter",
    "ModelClient",
    "ModelError",
    "ModelFailure",
    "ModelSettings",
    "Reply",
    "ResponseCache",
    "ScriptedModel",
    "Usage",
    "as_client",
    "current_ledger",
    "make_client",
    "make_clients",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'aflow_tune.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"aflow_tune.models.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
