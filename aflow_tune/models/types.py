"""Types of the model clients: requests, replies, and failures.

Messages, tools and tool calls have OpenAI's form everywhere; clients of other APIs translate them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from aflow_tune.errors import AflowTuneError, BadInput
from aflow_tune.models.redaction import short

Message = Mapping[str, Any]  # in OpenAI's form: `role`, `content`, perhaps `tool_calls`


class ModelFailure(StrEnum):
    """Why a model call failed. The value is what traces and metrics hold."""

    RATE_LIMITED = "rate_limited"
    SERVER = "server_error"
    CONNECTION = "connection"
    TIMED_OUT = "timed_out"
    BAD_REPLY = "bad_reply"
    REFUSED = "refused"
    """The request itself was refused (a wrong key, model or argument): a retry would fail too."""


class ModelError(AflowTuneError, RuntimeError):
    """A call failed, after all its retries if they could help."""

    def __init__(self, failure: ModelFailure, message: str) -> None:
        super().__init__(failure, message)
        self.failure, self.message = failure, message

    def __str__(self) -> str:
        return f"{self.message} ({self.failure.value})"


@dataclass(frozen=True)
class Usage:
    """Tokens of one call. `cached_tokens` of the prompt were in the vendor's cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Reply:
    """One answer. `usage` and `cost` (US dollars) are None if unknown."""

    text: str
    model: str
    usage: Usage | None = None
    cost: float | None = None
    finish_reason: str = "stop"
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0
    from_cache: bool = False


class ModelClient(Protocol):
    """A chat model. Usage is counted under `role`: 'policy', 'executor', 'judge', or a name of the
    user's."""

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
        """One answer. `schema`: a JSON schema that the answer should follow. For arguments that
        are None the client's configuration holds. Raises ModelError: the call failed;
        BudgetReached: the run's budget does not allow the call."""
        ...


_TEMPLATE_TOKENS, _MESSAGE_TOKENS, _TOOL_PROMPT_TOKENS = 64, 16, 1024
"""Tokens that a chat template may add: to a conversation, to each message, for tools."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The arguments of `ModelClient.complete`, with a client's configuration filled in."""

    messages: Sequence[Message]
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    seed: int | None = None
    schema: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()

    def check(self) -> None:
        """Raises BadInput: `messages` is not a list of messages, or `stop` is a text."""
        wrong: list[tuple[str, Any]] = []
        if not self.messages or isinstance(self.messages, str | Mapping):
            wrong = [("messages", self.messages)]
        elif isinstance(self.stop, str):
            wrong = [("stop", self.stop)]
        else:
            for number, message in enumerate(self.messages):
                if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                    wrong.append((f"messages[{number}]", message))
        for where, found in wrong[:1]:
            title, expected = (
                "The model cannot be asked this.",
                "a list of messages with a role; of texts",
            )
            fix = "pass [{'role': 'user', 'content': TEXT}]"
            raise BadInput.of(title, where, expected, f"{found!r:.80}", fix)

    def most_prompt_tokens(self) -> int:
        """An upper bound, images aside: a token is at least one byte of the request's JSON."""
        parts = [list(map(dict, self.messages)), self.schema, list(map(dict, self.tools))]
        text = json.dumps(parts, ensure_ascii=False, default=str)
        extra = _TOOL_PROMPT_TOKENS if self.tools or self.schema else 0
        extra += _TEMPLATE_TOKENS + _MESSAGE_TOKENS * len(self.messages)
        return len(text.encode(errors="replace")) + extra

    def identity(self) -> str:
        """A canonical JSON text of the request, for cache keys."""
        content = {**vars(self), "stop": list(self.stop)}
        content["messages"] = [dict(message) for message in self.messages]
        content["tools"] = [dict(tool) for tool in self.tools]
        return json.dumps(content, sort_keys=True, ensure_ascii=True, default=repr)


def tool_call(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


def text_of(content: Any) -> str:
    """The text of a message's content, which is None, a text, or a list of parts: those of OpenAI's
    messages, or the blocks of an AgentScope message or answer."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [
        part.get("text") if isinstance(part, Mapping) else getattr(part, "text", None)
        for part in content
    ]
    return "".join(text for text in texts if isinstance(text, str))


ANSWER_TOOL = "answer"
"""The tool that replaces a JSON schema for APIs without them."""


def answer_tool(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A tool whose arguments follow `schema`, as the field `value` unless it is an object's."""
    if schema.get("type") != "object":
        schema = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
    told = "Give your answer by calling this tool, once."
    function = {"name": ANSWER_TOOL, "description": told, "parameters": dict(schema)}
    return {"type": "function", "function": function}


def read_blocks(
    blocks: Sequence[Any], schema: Mapping[str, Any] | None
) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """Text and tool calls of an answer in Anthropic's or AgentScope's blocks, which are dicts; the
    arguments of `answer_tool` become the text. Raises TypeError, KeyError, AttributeError,
    JSONDecodeError: malformed blocks."""
    texts: list[str] = []
    calls: list[Mapping[str, Any]] = []
    for block in blocks:
        if block["type"] == "text":
            texts.append(block["text"] or "")
        elif block["type"] in ("tool_use", "tool_call"):
            given = block.get("input") or {}
            if schema is not None and block["name"] == ANSWER_TOOL:
                given = json.loads(given) if isinstance(given, str) else given
                wrapped = schema.get("type") != "object" and isinstance(given, Mapping)
                given = given.get("value") if wrapped else given
                return json.dumps(given, ensure_ascii=False), ()
            told = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            identifier = str(block.get("id") or f"call_{len(calls)}")
            calls.append(tool_call(identifier, str(block["name"]), told))
    return "".join(texts), tuple(calls)


def response_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's `response_format` for a JSON schema, strict if the schema allows that."""
    named = {"name": "answer", "schema": dict(schema), "strict": _can_be_strict(schema)}
    return {"type": "json_schema", "json_schema": named}


def _can_be_strict(schema: Any) -> bool:
    """Whether every object lists all its properties as required and allows no others."""
    if isinstance(schema, list):
        return all(map(_can_be_strict, schema))
    if not isinstance(schema, Mapping):
        return True
    properties = schema.get("properties")
    if schema.get("type") == "object" or isinstance(properties, Mapping):
        closed = schema.get("additionalProperties") is False
        if not closed or set(schema.get("required") or ()) != set(properties or ()):
            return False
    return all(map(_can_be_strict, schema.values()))


# Exceptions of both SDKs are recognised by name and attributes, to import neither here.

_TRANSPORT = {"httpx", "httpx2", "httpcore", "httpcore2", "aiohttp", "h11", "anyio"}
_BY_STATUS = {
    **{408: ModelFailure.TIMED_OUT, 429: ModelFailure.RATE_LIMITED},
    **dict.fromkeys((409, 425), ModelFailure.SERVER),
}


class BadReply(Exception):
    """The reply does not follow the API. The text says what is wrong with it."""


def model_error(
    error: BaseException, model: str, secrets: Iterable[str] = (), retries: int = 0
) -> ModelError | None:
    """An exception of a request as a `ModelError`; None if it is not a failed request."""
    found = failure_of(error)
    if found is None:
        return None
    tries = f" after {retries + 1} attempts" if retries else ""
    return ModelError(found[0], short(f"{model} gave no answer{tries}: {found[1]}", secrets))


def failure_of(error: BaseException) -> tuple[ModelFailure, str] | None:
    """The kind of a failed request, and what happened; None for other exceptions. May hold keys."""
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
    """The failure by HTTP status; a body in OpenAI's or Anthropic's form gives its message."""
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
