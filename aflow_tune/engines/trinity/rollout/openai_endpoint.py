"""The model of a rollout behind OpenAI's API: for agents of any framework, process or language.

    async with openai_endpoint(model) as endpoint:
        agent = AnyAgent(base_url=endpoint.base_url, api_key=endpoint.api_key)

Chat completions and the Responses API; a stream is answered as one, after the model has answered
whole, since streams carry no token ids. Calls are recorded as those of `model` itself, and belong
to the `caller` in whose block the endpoint was opened. A client elsewhere may say more by headers:
`X-Aflow-Caller`, `X-Aflow-State-Key`; `POST {base_url}/step_reward {"reward": 0.5}` is
`step_reward(0.5)` for the endpoint's last call.

The process has one server, on loopback, or on the node's address if the Ray cluster has several.
Each endpoint has a path and a key of its own, both random, which end with its block.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import hmac
import inspect
import json
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import httpx
import ray
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from aflow_tune.cluster.ray_for_run import spans_nodes
from aflow_tune.context import caller, open_scope, state_key, step_reward
from aflow_tune.engines.local.server import (
    CLIENT_CLOSED,
    bounded_body,
    error_response,
    serve_in_thread,
    unless_disconnected,
)
from aflow_tune.engines.trinity.rollout import responses_api
from aflow_tune.engines.trinity.rollout.recording import RolloutOver
from aflow_tune.errors import AflowTuneError, BadInput, BudgetReached

if TYPE_CHECKING:
    import openai

log = logging.getLogger(__name__)

Sampling = Literal["configured", "client"]
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_KEPT = 256
"""Responses, and items of them, of an endpoint that a client can refer to by their ids."""
_OF_OPENAI = {
    *("model", "stream", "stream_options", "store", "metadata", "user", "service_tier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "moderation"),
    *("safety_identifier", "verbosity", "reasoning_effort", "parallel_tool_calls"),
    *("extra_headers", "extra_query", "extra_body", "timeout"),
}
"""What concerns OpenAI's service, or the client that asks the model, and not the answer of a model
of one's own."""


@dataclass(frozen=True)
class Endpoint:
    """Where a client asks the rollout's model, and its key."""

    base_url: str
    api_key: str = field(repr=False)

    @property
    def env(self) -> dict[str, str]:
        """For a process to be started: the variables that OpenAI's clients read."""
        urls = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), self.base_url)
        return {**urls, "OPENAI_API_KEY": self.api_key}


@asynccontextmanager
async def openai_endpoint(
    model: Any, *, sampling: Sampling = "configured"
) -> AsyncIterator[Endpoint]:
    """Serve the model that a workflow got, for the block.

    `sampling`: by default temperature, top_p, seed and the like are those of the configuration,
    whatever the client sends, since only such calls can be trained. "client": as the client says;
    calls that differ are answered and not trained. Raises BadInput: not a model of a rollout, or
    another `sampling`. RunFailed: the server cannot listen."""
    context = contextvars.copy_context()
    context.run(open_scope)
    entry = _Entry(model, sampling, context)
    server = await asyncio.to_thread(_server)
    place, key = secrets.token_urlsafe(12), secrets.token_urlsafe(32)
    server.open[place] = key, entry
    try:
        yield Endpoint(f"{server.url}/{place}/v1", key)
    finally:
        del server.open[place]
        entry.cancel()


def openai_client(
    model: Any, *, sampling: Sampling = "configured", **options: Any
) -> openai.AsyncOpenAI:
    """OpenAI's client over the model that a workflow got, in this process and without a server:
    each call belongs to the `caller` block and takes the state key where it is made. `options`: for
    `openai.AsyncOpenAI`. Raises BadInput as `openai_endpoint`."""
    import openai

    entry = _Entry(model, sampling)
    http_client = httpx.AsyncClient(transport=_InProcess(_app(lambda place, key: entry)))
    given = {"base_url": "http://in-process/-/v1", "api_key": "EMPTY", "http_client": http_client}
    return openai.AsyncOpenAI(**{"timeout": None, **given, **options})


class _InProcess(httpx.ASGITransport):
    """httpx's own has no time limits."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        seconds = request.extensions.get("timeout", {}).get("read")
        try:
            async with asyncio.timeout(seconds):
                return await super().handle_async_request(request)
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no answer within {seconds:g} s", request=request) from error


class _Entry:
    """An open endpoint. `context`: of its block; None: each request's own."""

    def __init__(
        self, model: Any, sampling: Sampling, context: contextvars.Context | None = None
    ) -> None:
        title, client = "This model cannot be served.", getattr(model, "client", None)
        if client is None or not hasattr(client, "sampling_names"):  # `recording.AnyLoopClient`
            expected, fix = "the model of a rollout", "pass `model` as your workflow gets it"
            raise BadInput.of(title, "model", expected, type(model).__name__, fix)
        if sampling not in ("configured", "client"):
            expected, fix = "'configured' or 'client'", "use one of them"
            raise BadInput.of(title, "sampling", expected, repr(sampling), fix)
        self.context, self._create = context, client.chat.completions.create
        self._configured = {**model.generate_kwargs, "model": client.model_path}
        self._left_out = _OF_OPENAI | set(client.sampling_names if sampling == "configured" else ())
        # The configured limit is the most that a client may ask for: a longer answer has no room.
        self._most = model.generate_kwargs.get("max_tokens") if sampling == "configured" else None
        self.tasks: set[asyncio.Task[Any]] = set()
        self.closed = False
        self.kept: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
        """Messages up to each response, for the client to continue."""
        self.items: OrderedDict[str, dict[str, Any]] = OrderedDict()
        """Items of responses, which a client may send by reference."""

    async def run(self, request: Request, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """`work()` in the endpoint's context with what the request's headers add. None: the client
        hung up. Raises RolloutOver: the endpoint's block ended."""
        context = contextvars.copy_context() if self.context is None else self.context.copy()
        for header, block in (("x-aflow-caller", caller), ("x-aflow-state-key", state_key)):
            if name := request.headers.get(header):
                context.run(block(name).__enter__)
        task = asyncio.get_running_loop().create_task(work(), context=context)
        self.tasks.add(task)
        if self.closed:  # since the key was read
            task.cancel()
        try:
            return await unless_disconnected(request, task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise RolloutOver() from None
        finally:
            self.tasks.discard(task)

    def cancel(self) -> None:
        """End what clients still wait for, in the server's loop."""
        self.closed = True
        for task in list(self.tasks):
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A chat completion as OpenAI answers it."""
        given = {n: v for n, v in body.items() if n not in self._left_out and v is not None}
        given["messages"] = [_message(it) for it in _listed(body, "messages")]
        more = {name: given.pop(name) for name in list(given) if name not in _parameters()}
        given["extra_body"] = {**(self._configured.get("extra_body") or {}), **more} or None
        for name in ("max_tokens", "max_completion_tokens"):
            if self._most is not None and isinstance(given.get(name), int):
                given[name] = min(given[name], self._most)
        answered = await self._create(**{**self._configured, **given})
        response: dict[str, Any] = answered.model_dump()
        for private in ("prompt_token_ids", "prompt_logprobs", "kv_transfer_params"):
            response.pop(private, None)
        for choice in response["choices"]:
            choice.pop("token_ids", None)
            if not body.get("logprobs"):
                choice["logprobs"] = None
            if body.get("parallel_tool_calls") is False and choice["message"].get("tool_calls"):
                del choice["message"]["tool_calls"][1:]
        return response

    async def respond(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The same by the Responses API."""
        before: list[dict[str, Any]] = []
        if previous := body.get("previous_response_id"):
            if previous not in self.kept:
                raise _Refused(404, f"no response {previous!r} of this endpoint")
            before = self.kept[previous]
        if isinstance(body.get("input"), list):
            body = {**body, "input": [self._referred(item) for item in body["input"]]}
        asked = responses_api.as_chat(body, before)
        answered = await self.ask(asked)
        response = responses_api.as_response(body, answered)
        told = asked["messages"][bool(body.get("instructions")) :]  # those are of one request
        message = answered["choices"][0]["message"]
        said = {name: value for name, value in message.items() if value is not None}
        self.kept[response["id"]] = [*told, said]
        self.items.update((item["id"], item) for item in response["output"])
        for store in (self.kept, self.items):
            while len(store) > MAX_KEPT:
                store.popitem(last=False)
        return response

    def _referred(self, item: Any) -> Any:
        """The item that `item` refers to, if it was this endpoint's; else `item` itself."""
        if isinstance(item, Mapping) and item.get("type") == "item_reference":
            return self.items.get(str(item.get("id")), item)
        return item


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _Refused(400, f"a message is an object with a role, not {message!r:.80}")
    # OpenAI's newer name; chat templates know the older one.
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _listed(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list) or not value:
        raise _Refused(400, f"{name}: a list that is not empty is needed, not {value!r:.80}")
    return value


@functools.cache
def _parameters() -> frozenset[str]:
    """What `create` of OpenAI's client takes by name; other fields go into `extra_body`."""
    from openai.resources.chat.completions import AsyncCompletions

    return frozenset(inspect.signature(AsyncCompletions.create).parameters)


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _app(entry_of: Callable[[str, str], _Entry | None]) -> FastAPI:
    """`entry_of`: the endpoint with this path and key, None without one."""
    app = FastAPI(openapi_url=None)

    def route(
        path: str, answer: Callable[[_Entry, dict[str, Any]], Coroutine[Any, Any, Any]], events: Any
    ) -> None:
        @app.post("/{place}/v1/" + path)
        async def handle(place: str, request: Request) -> Response:
            entry = entry_of(place, _key(request))
            if entry is None:
                return _error(401, "no endpoint that is open, or not its key")
            try:
                body = await _body(request)
                done = await entry.run(request, functools.partial(answer, entry, body))
                if done is None:
                    return Response(status_code=CLIENT_CLOSED)
                if events is not None and body.get("stream"):
                    sent = "".join(_sent(events(body, done)))
                    return Response(sent, media_type="text/event-stream")
                return Response(json.dumps(done), media_type="application/json")
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED)
            except Exception as error:
                return _failed(error)

    async def reward(entry: _Entry, body: dict[str, Any]) -> dict[str, Any]:
        try:
            step_reward(body.get("reward"))  # type: ignore[arg-type]
        except RuntimeError as error:
            raise _Refused(400, str(error)) from error
        return {"ok": True}

    route("chat/completions", _Entry.ask, _chunks)
    route("responses", _Entry.respond, lambda body, done: responses_api.events(done))
    route("step_reward", reward, None)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def unknown(request: Request, error: Any) -> Response:
        told = "chat/completions, responses, step_reward (POST) and models (GET)"
        asked = f"{request.method} {request.url.path.partition('/v1/')[2]}"
        return _error(error.status_code, f"this endpoint has {told}, not {asked}")

    @app.get("/{place}/v1/models")
    @app.get("/{place}/v1/models/{name:path}")
    async def models(place: str, request: Request, name: str | None = None) -> Response:
        if entry_of(place, _key(request)) is None:
            return _error(401, "no endpoint that is open, or not its key")
        entry = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "aflow-tune"}
        return JSONResponse(entry if name else {"object": "list", "data": [entry]})

    return app


def _key(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


async def _body(request: Request) -> dict[str, Any]:
    raw = await bounded_body(request, MAX_BODY_BYTES)
    if raw is None:
        raise _Refused(413, f"a request has at most {MAX_BODY_BYTES} bytes")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _Refused(400, "the body is a JSON object")
    return body


def _failed(error: Exception) -> Response:
    """The answer to a request that raised; what the server behind said is passed on."""
    import openai

    if isinstance(error, _Refused):
        return _error(error.status, str(error))
    if isinstance(error, openai.APIStatusError):
        body = error.body if isinstance(error.body, dict) else {}
        told = str(body.get("message") or error.message)
        return _error(error.status_code, told, body.get("code"))
    if isinstance(error, BudgetReached):
        return _error(429, str(error))
    if isinstance(error, RolloutOver):
        return _error(503, str(error))
    if isinstance(error, (AflowTuneError, ValueError, TypeError, RecursionError)):
        return _error(400, str(error))
    log.warning("a call to an endpoint failed: %s", type(error).__name__, exc_info=error)
    return _error(500, f"{type(error).__name__}: {error}")


def _error(status: int, message: str, code: str | None = None) -> Response:
    # Repeated, it would be another call of the rollout; the server behind was asked again already.
    return error_response(status, message, code, headers={"x-should-retry": "false"})


def _sent(events: Iterable[dict[str, Any] | str]) -> Iterator[str]:
    """Server-sent events; those of the Responses API have a name."""
    for event in events:
        if isinstance(event, str):
            yield f"data: {event}\n\n"
        else:
            name = f"event: {event['type']}\n" if "type" in event else ""
            yield f"{name}data: {json.dumps(event)}\n\n"


def _chunks(body: Mapping[str, Any], done: Mapping[str, Any]) -> Iterator[dict[str, Any] | str]:
    """A chat completion as the chunks of a stream."""
    head = {name: done[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    for choice in done["choices"]:
        message = {name: it for name, it in choice["message"].items() if it is not None}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        first = {"index": choice["index"], "delta": message, "finish_reason": None}
        first["logprobs"] = choice["logprobs"]
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield {**head, "choices": [first]}
        yield {**head, "choices": [last]}
    options = body.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        yield {**head, "choices": [], "usage": done["usage"]}
    yield "[DONE]"


class _Server:
    """The process's server. Its thread ends with the process."""

    def __init__(self) -> None:
        self.open: dict[str, tuple[str, _Entry]] = {}
        several = ray.is_initialized() and spans_nodes()
        host = ray.util.get_node_ip_address() if several else "127.0.0.1"
        _, _, self.url = serve_in_thread(_app(self._entry), host)

    def _entry(self, place: str, key: str) -> _Entry | None:
        wanted, entry = self.open.get(place, ("", None))
        return entry if entry and hmac.compare_digest(key.encode(), wanted.encode()) else None


_lock = threading.Lock()
_servers: list[_Server] = []


def _server() -> _Server:
    with _lock:
        if not _servers:
            _servers.append(_Server())
        return _servers[0]
