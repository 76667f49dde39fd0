"""Clients of OpenAI's and Anthropic's APIs, over the vendors' SDKs.

The SDK authenticates, sends and retries: `retries` times, after the time that the server asks for
(`Retry-After`), else after `backoff` seconds, doubled each time, with jitter. Replies are parsed
here from their bytes: the SDKs accept any shape. Usage is settled before anything else can fail.
All HTTP of a process runs in one event loop in a thread; rollouts share connections and limits.

Not covered: streaming, images for Anthropic. Keys follow no redirect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import threading
import urllib.parse
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import httpx2

from aflow_tune.errors import BadInput
from aflow_tune.models.client import BaseClient
from aflow_tune.models.prices import price_of
from aflow_tune.models.redaction import short
from aflow_tune.models.settings import credentials
from aflow_tune.models.spend import Call
from aflow_tune.models.types import (
    ANSWER_TOOL,
    Ask,
    BadReply,
    Message,
    ModelError,
    ModelFailure,
    Reply,
    Usage,
    answer_tool,
    failure_of,
    model_error,
    read_blocks,
    response_format,
    text_of,
    tool_call,
)
from aflow_tune.sections import ModelSettings

T = TypeVar("T")

LONGEST_BACKOFF = 30.0  # seconds between attempts, unless the server asks for more
MOST_TOKENS = 10**9  # a larger count in a reply is ignored


@dataclass(frozen=True)
class Listing:
    """The models of an endpoint. `access`: granted, refused, unreachable, or unknown."""

    access: str
    models: frozenset[str] | None = None
    reason: str = ""


class HttpClient(BaseClient):
    """A `ModelClient` for OpenAI and compatible chat-completions APIs. Usage is counted under
    `settings.role`, else `role`. Raises BadInput: the settings are wrong, or the key is not in the
    environment."""

    address = "https://api.openai.com/v1"
    path = "/chat/completions"
    models_path = "/models"

    def __init__(self, settings: ModelSettings, role: str = "executor") -> None:
        role = settings.role or role
        self.settings = settings
        self._key, self._headers = credentials(settings, role)
        self._secrets = [self._key or "", *self._headers.values()]
        price = price_of(settings.provider, settings.base_url, str(settings.model), settings.prices)
        super().__init__(role, str(settings.model), price)
        self._sdk: Any = None
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __reduce__(self) -> Any:
        """Pickles settings and role only: unpickling reads the keys again and reconnects."""
        return type(self), (self.settings, self.role)

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        sdk, self._sdk = self._sdk, None
        if sdk is not None and self._loop is _http_loop():
            await _in_http_loop(sdk.close)

    async def list_models(self, seconds: float) -> Listing:
        """Ask once, for at most `seconds`: checks address and key free of charge."""

        async def ask() -> Listing:
            once: Any = {"cast_to": httpx2.Response, "options": {"max_retries": 0}}
            async with self._slot() as sdk:
                try:
                    async with asyncio.timeout(seconds):
                        response = await sdk.get(self.models_path, **once)
                    rows = json.loads(response.content)["data"]
                    return Listing("granted", frozenset(str(row["id"]) for row in rows))
                except Exception as error:
                    unread = ModelFailure.BAD_REPLY, "it offers no list of models"
                    kind, told = failure_of(error) or unread
                    status = getattr(error, "status_code", None)
                    access = "refused" if status in (401, 403) else "unknown"
                    if status is None and kind in (ModelFailure.CONNECTION, ModelFailure.TIMED_OUT):
                        access = "unreachable"
                    return Listing(access, reason=short(told, self._secrets))

        return await _in_http_loop(ask)

    def _with_defaults(self, ask: Ask) -> Ask:
        names = [n for n in ("temperature", "top_p", "max_tokens") if getattr(ask, n) is None]
        return replace(ask, **{name: getattr(self.settings, name) for name in names})

    def _endpoint(self) -> Mapping[str, Any]:
        base_url = (self.settings.base_url or self.address).rstrip("/")
        return {"provider": self.settings.provider, "base_url": base_url, "model": self.model}

    async def _answer(self, ask: Ask, call: Call) -> Reply:
        body = {name: value for name, value in self._body(ask).items() if value is not None}

        async def send() -> Reply:
            # The slot first: a call that waits for it reserves nothing of the budget.
            async with self._slot() as sdk, call:
                response, failure = None, None
                try:
                    response = await sdk.post(self.path, cast_to=httpx2.Response, body=body)
                except Exception as error:
                    response = getattr(error, "response", None)
                    call.retries = _retries(getattr(error, "request", None))
                    failure = self._error(error, call.retries)
                # Not in the handler: an SDK's exception holds the request, so do not chain it.
                return self._read(ask, response, failure, call)

        return await _in_http_loop(send)

    def _read(self, ask: Ask, response: Any, failure: ModelError | None, call: Call) -> Reply:
        """Settle a reply's usage, then parse it. Not async: it cannot be cancelled between."""
        content: Any = None
        if response is not None:
            with contextlib.suppress(ValueError, RecursionError, httpx2.StreamError):
                content = json.loads(response.content)
        told = content.get("usage") if isinstance(content, Mapping) else None
        usage = self._usage(told) if isinstance(told, Mapping) else None
        if usage is not None:
            call.settle(usage)
        if failure is not None:
            raise failure
        call.retries = _retries(response.request)
        try:
            reply = self._reply(ask, content)
            call.settle(usage)
            return reply
        except (BadReply, LookupError, TypeError, AttributeError) as error:
            said = response.text if content is None else repr(content)
            why = error if isinstance(error, BadReply) else "the reply cannot be read"
            # Cut well after the shown part: keys are hidden later; a cut key would not be.
            failure = self._error(BadReply(f"{why}: {said[:10_000]}"), call.retries)
        raise failure

    def _error(self, error: Exception, retries: int) -> ModelError:
        unsendable = f"{self.model}: the request could not be made ({type(error).__name__})"
        found = model_error(error, self.model, self._secrets, retries)
        return found or ModelError(ModelFailure.REFUSED, unsendable)

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[Any]:
        """The SDK's client, for one of at most `max_concurrency` requests."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the first call, in this process
            self._loop, self._sdk = loop, None
            self._slots = asyncio.Semaphore(self.settings.max_concurrency)
        assert self._slots is not None
        async with self._slots:
            if self._sdk is None:
                self._sdk = self._make_sdk(
                    api_key=self._key or "none",
                    base_url=self.settings.base_url or self.address,
                    max_retries=self.settings.retries,
                    timeout=None,  # `_TimedClient` bounds the whole attempt
                    default_headers=self._headers,
                    http_client=_http(self.settings.timeout),
                )
            yield self._sdk

    def _make_sdk(self, **options: Any) -> Any:
        """The SDK's client."""
        import openai

        return _patient(openai.AsyncOpenAI, self.settings.backoff)(**options)

    def _body(self, ask: Ask) -> dict[str, Any]:
        """The JSON of a request; None is left out. Raises BadInput: the API cannot express it."""
        # OpenAI's newer models refuse the old name; other servers may not know the new one.
        host = urllib.parse.urlsplit(self.settings.base_url or self.address).hostname or ""
        limit = "max_completion_tokens" if f".{host}".endswith(".openai.com") else "max_tokens"
        return {
            "model": self.model,
            "messages": [dict(message) for message in ask.messages],
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "seed": ask.seed,
            limit: ask.max_tokens,
            "stop": list(ask.stop) or None,
            "tools": [dict(tool) for tool in ask.tools] or None,
            "response_format": None if ask.schema is None else response_format(ask.schema),
        }

    def _reply(self, ask: Ask, content: Mapping[str, Any]) -> Reply:
        """The answer in a reply's JSON. Raises BadReply, or what reading malformed JSON raises."""
        choice = content["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        said = message.get("content")
        if said is None and isinstance(message.get("refusal"), str):
            said, reason = message["refusal"], "content_filter"
        calls = []
        for number, called in enumerate(message.get("tool_calls") or ()):
            function = called["function"]
            name, arguments = function["name"], function.get("arguments", "{}")
            if not (isinstance(name, str) and isinstance(arguments, str)):
                raise BadReply("a tool call has no name, or arguments that are no text")
            calls.append(tool_call(str(called.get("id") or f"call_{number}"), name, arguments))
        missing = said is None and not calls and reason not in ("length", "content_filter")
        if missing or not isinstance(said, str | list | None):
            raise BadReply("the reply has no content that is text")
        model = str(content.get("model") or self.model)
        return Reply(text_of(said), model, None, None, str(reason or "stop"), tuple(calls))

    def _usage(self, told: Mapping[str, Any]) -> Usage | None:
        """The `usage` of a reply; None if it cannot be read."""
        prompt, completion = _counts(told, "prompt_tokens", "completion_tokens")
        (cached,) = _counts(told.get("prompt_tokens_details"), "cached_tokens")
        known = prompt is not None and completion is not None
        return Usage(prompt, completion, cached or 0) if known else None  # type: ignore[arg-type]


class _TimedClient(httpx2.AsyncClient):
    """Bounds each request by `seconds`, from connecting to the last byte."""

    seconds = 0.0

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        try:
            async with asyncio.timeout(self.seconds):
                return await super().send(request, **options)
        except TimeoutError:
            raise httpx2.ReadTimeout("the attempt took too long", request=request) from None


def _http(seconds: float) -> httpx2.AsyncClient:
    try:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        client = _TimedClient(timeout=None, limits=limits)
        client.seconds = seconds
        return client
    except (OSError, ValueError, ImportError, httpx2.InvalidURL) as error:
        # The error's text is not shown: a proxy's address may hold a password.
        title, where = "No model behind an API can be asked.", "SSL_CERT_*, *_PROXY"
        expected = "certificates and proxies that work"
        fix = "unset or correct them; a SOCKS proxy needs: pip install 'httpx2[socks]'"
        raise BadInput.of(title, where, expected, type(error).__name__, fix) from None


def _patient(kind: type[Any], backoff: float) -> type[Any]:
    """An SDK's client class with our backoff for servers that do not say how long to wait."""

    class Patient(kind):
        def _calculate_retry_timeout(
            self, remaining_retries: int, options: Any, response_headers: Any = None
        ) -> float:
            told = remaining_retries, options, response_headers
            if {"retry-after", "retry-after-ms"} & set(response_headers or ()):
                return super()._calculate_retry_timeout(*told)
            number = options.get_max_retries(self.max_retries) - remaining_retries
            wait = min(backoff * 2.0 ** min(number, 60), LONGEST_BACKOFF)
            return wait * random.uniform(0.5, 1.0)

    return Patient


def _retries(request: httpx2.Request | None) -> int:
    """How many attempts the SDK made before this request."""
    return 0 if request is None else int(request.headers.get("x-stainless-retry-count", 0))


_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def _http_loop() -> asyncio.AbstractEventLoop:
    """The HTTP loop of this process; a forked child starts its own."""
    with _lock:
        if (loop := _loops.get(os.getpid())) is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="model-clients", daemon=True).start()
        return loop


async def _in_http_loop(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Await `make()` in the HTTP loop, in a copy of the caller's context. Cancelling the caller
    cancels it, which closes its connection."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), _http_loop()))


def _counts(told: Any, *names: str) -> list[int | None]:
    """Token counts from a reply; None for each that is missing or implausible."""
    values = [told.get(name) if isinstance(told, Mapping) else None for name in names]
    return [v if type(v) is int and 0 <= v <= MOST_TOKENS else None for v in values]


DEFAULT_MAX_TOKENS = 4096  # for Anthropic, if `max_tokens` is not given
_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""Anthropic's stop reasons as OpenAI's finish reasons."""


class AnthropicClient(HttpClient):
    """A `ModelClient` for Anthropic's messages API, which has no seed and requires `max_tokens`. A
    JSON schema becomes a tool that the model must call."""

    address = "https://api.anthropic.com"
    path = "/v1/messages"
    models_path = "/v1/models?limit=1000"

    def _make_sdk(self, **options: Any) -> Any:
        import anthropic

        # Addresses of compatible servers often include the version.
        options["base_url"] = options["base_url"].rstrip("/").removesuffix("/v1")
        kind = _patient(anthropic.AsyncAnthropic, self.settings.backoff)
        return kind(open_telemetry=False, **options)

    def _most_tokens(self, ask: Ask) -> int:
        return DEFAULT_MAX_TOKENS if ask.max_tokens is None else ask.max_tokens

    def _body(self, ask: Ask) -> dict[str, Any]:
        system = "\n\n".join(
            text_of(message.get("content"))
            for message in ask.messages
            if message["role"] in ("system", "developer")
        )
        tools = [_tool(tool) for tool in ask.tools]
        choice = None
        if ask.schema is not None:
            tools.append(_tool(answer_tool(ask.schema)))
            only = len(tools) == 1
            choice = {"type": "tool", "name": ANSWER_TOOL} if only else {"type": "any"}
        return {
            "model": self.model,
            "max_tokens": self._most_tokens(ask),
            "messages": _turns(ask.messages),
            "system": system or None,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "stop_sequences": list(ask.stop) or None,
            "tools": tools or None,
            "tool_choice": choice,
        }

    def _reply(self, ask: Ask, content: Mapping[str, Any]) -> Reply:
        told = str(content.get("stop_reason") or "stop")
        reason = _REASONS.get(told, told)
        if not content["content"] and reason not in ("stop", "length", "content_filter"):
            raise BadReply("the reply has no content")
        text, calls = read_blocks(content["content"], ask.schema)
        if reason == "tool_calls" and not calls:  # the tool was `answer_tool`
            reason = "stop"
        model = str(content.get("model") or self.model)
        return Reply(text, model, None, None, reason, calls)

    def _usage(self, told: Mapping[str, Any]) -> Usage | None:
        fresh, completion = _counts(told, "input_tokens", "output_tokens")
        if fresh is None or completion is None:
            return None
        names = ("cache_read_input_tokens", "cache_creation_input_tokens")
        cached, written = (count or 0 for count in _counts(told, *names))
        return Usage(fresh + cached + written, completion, cached)


def _turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """OpenAI's messages as Anthropic's, without system messages; neighbours of one role are joined.
    Raises BadInput: a role or a part of a message has no counterpart."""
    found: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if role in ("system", "developer"):
            continue
        if role not in ("user", "assistant", "tool"):
            raise _untranslatable(f"messages[{number}].role", repr(role), "user, assistant, tool")
        plain = content is None or isinstance(content, str)
        parts: Any = [{"type": "text", "text": content}] if plain else content
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in parts):
            raise _untranslatable(f"messages[{number}].content", f"{content!r:.80}", "text")
        if role == "tool":
            name, role = message.get("tool_call_id"), "user"
            told = text_of(content)
            blocks = [{"type": "tool_result", "tool_use_id": name, "content": told}]
        else:
            texts = [part["text"] for part in parts if part["text"]]
            blocks = [{"type": "text", "text": text} for text in texts]
            blocks += [_tool_use(call) for call in message.get("tool_calls") or ()]
        if not found or found[-1]["role"] != role:
            found.append({"role": role, "content": []})
        found[-1]["content"] += blocks
    return found


def _untranslatable(where: str, found: str, expected: str) -> BadInput:
    title = "Anthropic's API cannot be asked this."
    return BadInput.of(title, where, expected, found, "use an OpenAI-compatible endpoint")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    named = {"name": function["name"], "input_schema": dict(parameters)}
    if function.get("description"):
        named["description"] = function["description"]
    return named


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    told = function.get("arguments") or "{}"
    try:
        arguments = json.loads(told)
    except ValueError:
        arguments = told
    # The API takes only an object; a model may have written something else.
    given = arguments if isinstance(arguments, Mapping) else {"value": arguments}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
