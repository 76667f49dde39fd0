"""Asking an endpoint which models it offers: proves address and key, and costs nothing.

`GET /models` of OpenAI's protocol and `GET /v1/models` of Anthropic's need the same key as a
call does and use no tokens. Not every compatible server has it; then nothing is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from aflow_tune.models.http_client import HttpClient
from aflow_tune.models.types import ModelFailure

_REFUSED = (401, 403)
_NO_LIST = (404, 405, 501)


class Access(StrEnum):
    """What came of asking."""

    GRANTED = "granted"
    REFUSED = "refused"
    """The key, or that there is none, was refused."""
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"
    """The server answered something that says nothing about the key."""


@dataclass(frozen=True)
class Listing:
    """`models` is None where no list came; `reason` never holds a key."""

    access: Access
    models: frozenset[str] | None = None
    reason: str = ""


async def list_models(client: HttpClient, seconds: float) -> Listing:
    """Ask once, for at most `seconds`."""
    content, status, problem = await client.get(client.models_path, seconds)
    if problem is not None and status is None:
        failed = (ModelFailure.CONNECTION, ModelFailure.TIMED_OUT)
        access = Access.UNREACHABLE if problem.failure in failed else Access.UNKNOWN
        return Listing(access, reason=problem.message)
    if status in _REFUSED:
        return Listing(Access.REFUSED, reason=problem.message if problem else "")
    if problem is not None:
        reason = "it offers no list of models" if status in _NO_LIST else problem.message
        return Listing(Access.UNKNOWN, reason=reason)
    models = _names(content)
    if models is None:
        return Listing(Access.UNKNOWN, reason="its list of models cannot be read")
    return Listing(Access.GRANTED, models)


def _names(content: Any) -> frozenset[str] | None:
    rows = content.get("data") if isinstance(content, Mapping) else None
    if not isinstance(rows, list):
        return None
    names = [row.get("id") for row in rows if isinstance(row, Mapping)]
    return frozenset(name for name in names if isinstance(name, str))
