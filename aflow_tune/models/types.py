"""The vocabulary of model clients: what is asked, what comes back, how it can fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from aflow_tune.errors import AflowTuneError

Message = Mapping[str, Any]
"""A chat message as OpenAI's API takes it: `role` and `content`, perhaps `tool_calls`."""


class ModelFailure(StrEnum):
    """Why a call of a model gave no answer. The value is its word in traces and metrics."""

    RATE_LIMITED = "rate_limited"
    SERVER = "server_error"
    CONNECTION = "connection"
    TIMED_OUT = "timed_out"
    BAD_REPLY = "bad_reply"
    REFUSED = "refused"
    """The request itself was refused (a wrong key, model or argument): retrying is useless."""


class ModelError(AflowTuneError, RuntimeError):
    """A call failed after all its retries."""

    def __init__(self, failure: ModelFailure, message: str) -> None:
        super().__init__(failure, message)
        self.failure = failure
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} ({self.failure.value})"


@dataclass(frozen=True)
class Usage:
    """Tokens of one call. `cached_tokens` is the part of the prompt that the vendor reused."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Reply:
    """One answer. `usage` and `cost` (US dollars) are None where they are not known."""

    text: str
    model: str
    usage: Usage | None = None
    cost: float | None = None
    finish_reason: str = "stop"
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0
    from_cache: bool = False


class ModelClient(Protocol):
    """Whatever answers chat messages: the policy, a frozen executor, a judge, a script.

    `role` is 'policy', 'executor', 'judge' or a name of the user's: usage is counted by it.
    """

    role: str
    model: str

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        schema: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """One answer. `schema` is a JSON schema that the answer should follow; None for the
        arguments leaves them to the client's configuration.

        Raises:
            ModelError: no answer after all retries.
            BudgetReached: the run's budget does not allow the call.
        """
        ...
