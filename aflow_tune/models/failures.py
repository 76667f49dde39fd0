"""What a failure of a request means: its word, whether it may pass, how long to wait for that.

Retried are time-outs, cut connections, replies that cannot be read, and the statuses 408, 409,
425, 429 and 5xx; everything else was refused for good. A server's own advice wins: `retry-after`
(seconds or a date), `retry-after-ms`, `x-should-retry`. The exceptions of OpenAI's and
Anthropic's SDKs, and of AgentScope's models over them, are recognised by their shape, so that
this module imports no SDK.
"""

from __future__ import annotations

import email.utils
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aflow_tune.models.redaction import short
from aflow_tune.models.types import ModelError, ModelFailure

LONGEST_ADVICE = 600.0
"""Seconds. A server that asks for a longer wait gets no retry; its advice is in the message."""
_TRANSPORT = ("httpx", "httpx2", "httpcore", "httpcore2", "aiohttp", "h11", "anyio")
_RETRIED = {
    408: ModelFailure.TIMED_OUT,
    409: ModelFailure.SERVER,
    425: ModelFailure.SERVER,
    429: ModelFailure.RATE_LIMITED,
}


class BadReply(Exception):
    """A reply came that is not what the API promises. The text says what is wrong with it."""


@dataclass(frozen=True)
class Problem:
    """Why one attempt failed. `wait` is the server's advice in seconds, None without one."""

    failure: ModelFailure
    message: str
    retry: bool
    wait: float | None = None

    def error(self, model: str, attempts: int) -> ModelError:
        """The error of a call that ends with this problem."""
        tries = "" if attempts <= 1 else f" after {attempts} attempts"
        return ModelError(self.failure, f"{model} gave no answer{tries}: {self.message}")


def problem_of(error: BaseException, secrets: Iterable[str] = ()) -> Problem | None:
    """What an exception of a request means; None: it is no failure of a request."""
    secrets = tuple(secrets)
    if isinstance(error, BadReply):
        return Problem(ModelFailure.BAD_REPLY, short(str(error), secrets), retry=True)
    status = getattr(error, "status_code", None)
    response = getattr(error, "response", None)
    if isinstance(status, int) and response is not None:
        body = getattr(response, "content", b"")
        return status_problem(status, getattr(response, "headers", {}), body, secrets)
    if isinstance(error, json.JSONDecodeError):
        text = f"the reply is no JSON: {error}"
        return Problem(ModelFailure.BAD_REPLY, short(text, secrets), retry=True)
    causes = _causes(error)
    if any(isinstance(cause, BadReply) for cause in causes):
        text = next(str(cause) for cause in causes if isinstance(cause, BadReply))
        return Problem(ModelFailure.BAD_REPLY, short(text, secrets), retry=True)
    names = {kind.__name__ for kind in type(error).__mro__}
    homes = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    if isinstance(error, TimeoutError) or names & {"APITimeoutError", "TimeoutException"}:
        return Problem(ModelFailure.TIMED_OUT, "the request timed out", retry=True)
    if "APIResponseValidationError" in names:
        return Problem(ModelFailure.BAD_REPLY, short(str(error), secrets), retry=True)
    connection = isinstance(error, ConnectionError) or "APIConnectionError" in names
    if connection or homes & set(_TRANSPORT):
        root = causes[-1]
        text = f"the connection failed ({type(root).__name__}: {root})"
        return Problem(ModelFailure.CONNECTION, short(text, secrets), retry=True)
    return None


def status_problem(
    status: int, headers: Mapping[str, str], body: bytes, secrets: Iterable[str] = ()
) -> Problem:
    """What a reply with an error status means."""
    message = f"HTTP {status}: {_told(body) or 'no reason given'}"
    failure = _RETRIED.get(status)
    if failure is None and status >= 500:
        failure = ModelFailure.SERVER
    if failure is None or _code(body) == "insufficient_quota":
        if 300 <= status < 400:
            message = f"HTTP {status}: it redirects elsewhere; keys follow no redirect"
        return Problem(ModelFailure.REFUSED, short(message, secrets), retry=False)
    wait = advised_wait(headers)
    retry = headers.get("x-should-retry") != "false"
    if wait is not None and wait > LONGEST_ADVICE:
        message += f" (the server asks to wait {wait:.0f} s)"
        retry = False
    return Problem(failure, short(message, secrets), retry, wait)


def advised_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait, from now; None where it gives no advice.

    `retry-after-ms` is the vendors' own header; `retry-after` is RFC 9110, section 10.2.3.
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    try:
        date = email.utils.parsedate_to_datetime(headers.get("retry-after", ""))
    except ValueError:
        return None
    return max(date.timestamp() - time.time(), 0.0)


def _told(body: bytes) -> str:
    """The reason in an error's body: OpenAI's and Anthropic's form, or the text itself."""
    try:
        content: Any = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")
    error = content.get("error", content) if isinstance(content, Mapping) else content
    if isinstance(error, Mapping) and isinstance(error.get("message"), str):
        return str(error["message"])
    return json.dumps(error)


def _code(body: bytes) -> Any:
    try:
        return json.loads(body)["error"]["code"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _causes(error: BaseException) -> list[BaseException]:
    chain = [error]
    while len(chain) < 10:
        inner = chain[-1].__cause__ or chain[-1].__context__
        if inner is None or inner in chain:
            break
        chain.append(inner)
    return chain
