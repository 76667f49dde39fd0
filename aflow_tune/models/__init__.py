"""Model clients: one interface over every endpoint, with retries, prices, a budget and a cache.

`make_client` makes a client from settings, `as_client` one from whatever a workflow was given;
`Spend` counts and limits what they use. Names are loaded on first use: importing this room
imports no SDK.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aflow_tune.models.adapters import as_client
    from aflow_tune.models.cache import ResponseCache
    from aflow_tune.models.client import ScriptedModel
    from aflow_tune.models.clients import make_client
    from aflow_tune.models.spend import Spend, current_spend
    from aflow_tune.models.types import ModelClient, ModelError, ModelFailure, Reply, Usage
    from aflow_tune.sections import ModelSettings

__all__ = ["ModelClient", "ModelError", "ModelFailure", "ModelSettings", "Reply", "ResponseCache"]
__all__ += ["ScriptedModel", "Spend", "Usage", "as_client", "current_spend", "make_client"]

_HOME = {
    "adapters": ("as_client",),
    "cache": ("ResponseCache",),
    "client": ("ScriptedModel",),
    "clients": ("make_client",),
    "settings": ("ModelSettings",),
    "spend": ("Spend", "current_spend"),
    "types": ("ModelClient", "ModelError", "ModelFailure", "Reply", "Usage"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"aflow_tune.models.{module}"), name)
    raise AttributeError(f"module 'aflow_tune.models' has no attribute {name!r}")
