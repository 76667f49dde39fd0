"""Model clients: one interface over every endpoint, with retries, prices, a budget and a cache.

`make_client` makes a client from settings, `as_client` one from whatever a workflow was given;
`Spend` counts and limits what they use. Names are loaded on first use: importing this room
imports no SDK.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aflow_tune.models.adapters import as_client as as_client
    from aflow_tune.models.cache import ResponseCache as ResponseCache
    from aflow_tune.models.client import ScriptedModel as ScriptedModel
    from aflow_tune.models.clients import make_client as make_client
    from aflow_tune.models.settings import ModelSettings as ModelSettings
    from aflow_tune.models.spend import Spend as Spend
    from aflow_tune.models.spend import current_spend as current_spend
    from aflow_tune.models.types import ModelClient as ModelClient
    from aflow_tune.models.types import ModelError as ModelError
    from aflow_tune.models.types import ModelFailure as ModelFailure
    from aflow_tune.models.types import Reply as Reply
    from aflow_tune.models.types import Usage as Usage

_HOME = {
    "ModelClient": "types",
    "ModelError": "types",
    "ModelFailure": "types",
    "ModelSettings": "settings",
    "Reply": "types",
    "ResponseCache": "cache",
    "ScriptedModel": "client",
    "Spend": "spend",
    "Usage": "types",
    "as_client": "adapters",
    "current_spend": "spend",
    "make_client": "clients",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'aflow_tune.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"aflow_tune.models.{_HOME[name]}"), name)
