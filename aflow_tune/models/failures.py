"""What a failed request means: a word, and a message without keys.

The exceptions of OpenAI's and Anthropic's SDKs, and of AgentScope's models over them, are
recognised by their shape, so that this module imports no SDK.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable

from aflow_tune.models.redaction import short
from aflow_tune.models.types import ModelError, ModelFailure

_TRANSPORT = {"httpx", "httpx2", "httpcore", "httpcore2", "aiohttp", "h11", "anyio"}
_BY_STATUS = {
    408: ModelFailure.TIMED_OUT,
    409: ModelFailure.SERVER,
    425: ModelFailure.SERVER,
    429: ModelFailure.RATE_LIMITED,
}


class BadReply(Exception):
    """A reply came that is not what the API promises. The text says what is wrong with it."""


def model_error(
    error: BaseException, model: str, secrets: Iterable[str] = (), retries: int = 0
) -> ModelError | None:
    """An exception of a request as ours; None: it is no failure of a request."""
    found = failure_of(error)
    if found is None:
        return None
    tries = f" after {retries + 1} attempts" if retries else ""
    return ModelError(found[0], short(f"{model} gave no answer{tries}: {found[1]}", secrets))


def failure_of(error: BaseException) -> tuple[ModelFailure, str] | None:
    """The word for an exception of a request, and what happened. The text may hold keys."""
    status, response = getattr(error, "status_code", None), getattr(error, "response", None)
    if isinstance(status, int) and response is not None:
        return _by_status(status, getattr(response, "content", b""))
    chain = [error]  # the exception and its causes
    while (inner := chain[-1].__cause__ or chain[-1].__context__) and inner not in chain:
        chain.append(inner)
    for cause in chain:
        if isinstance(cause, BadReply):
            return ModelFailure.BAD_REPLY, str(cause)
    if isinstance(error, json.JSONDecodeError):
        return ModelFailure.BAD_REPLY, f"the reply is no JSON: {error}"
    names = {kind.__name__ for kind in type(error).__mro__}
    homes = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    if isinstance(error, TimeoutError) or names & {"APITimeoutError", "TimeoutException"}:
        return ModelFailure.TIMED_OUT, "the request timed out"
    if "APIResponseValidationError" in names:
        return ModelFailure.BAD_REPLY, str(error)
    if isinstance(error, ConnectionError) or "APIConnectionError" in names or homes & _TRANSPORT:
        root = f"{type(chain[-1]).__name__}: {chain[-1]}"
        return ModelFailure.CONNECTION, f"the connection failed ({root})"
    return None


def _by_status(status: int, body: bytes) -> tuple[ModelFailure, str]:
    """By the status and an error's body in OpenAI's and Anthropic's form, or any other."""
    reason, code = body.decode(errors="replace"), None
    with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError, AttributeError):
        told = json.loads(body)["error"]
        reason, code = str(told["message"]), told.get("code")
    if 300 <= status < 400:
        reason = "it redirects elsewhere; keys follow no redirect"
    failure = _BY_STATUS.get(status, ModelFailure.SERVER if status >= 500 else None)
    if failure is None or code == "insufficient_quota":
        failure = ModelFailure.REFUSED
    return failure, f"HTTP {status}: {reason or 'no reason given'}"
