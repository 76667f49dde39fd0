"""OpenAI's chat-completions API over a sampler, by default on loopback.

`GET /health`, `GET /v1/models`, `POST /v1/chat/completions`, in a thread with its own event loop.
If a client disconnects, its row in the batch is freed. Parameters in `_NEUTRAL` that would have an
effect are refused by name; other unknown fields are ignored. Tool calls are text in the Hermes
format; for a chat template without tools the same text is put into the messages.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from aflow_tune.engines.local.chat import Renderer, parse_calls
from aflow_tune.engines.local.sampler import JSON_STYLE, Completion, SamplingParams, Vocabulary
from aflow_tune.errors import BadInput, Fault, RunFailed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from aflow_tune.engines.local.sampler import Sampler

log = logging.getLogger(__name__)
T = TypeVar("T")
CLIENT_CLOSED = 499
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("repetition_penalty", "best_of"), (1,)),
    **dict.fromkeys(("stream", "echo", "prompt_logprobs"), (False,)),
    **dict.fromkeys(("audio", "web_search_options", "prediction"), ()),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
}
"""Unsupported fields, accepted only with these values, which have no effect, or null."""

Message = dict[str, Any]


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    parameters: dict[str, Any] | None = None


class NamedToolChoice(BaseModel):
    function: Function


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: Function


def _as_sent(tool: Message) -> Message:
    """A checked tool, its keys in the order in which they came: the model reads them so."""
    Tool.model_validate(tool)
    return tool


class ChatRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: list[Message] = Field(min_length=1)
    tools: list[Annotated[Message, AfterValidator(_as_sent)]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    ignore_eos: bool = False

    def offered_tools(self) -> list[Message]:
        """The tools shown to the model; none with tool_choice 'none'."""
        if self.tool_choice == "none":
            return []
        return list(self.tools or [])

    def forced_tools(self) -> list[Message]:
        """The tools of which the model must call one; empty if it may choose."""
        if isinstance(self.tool_choice, NamedToolChoice):
            name = self.tool_choice.function.name
            return [tool for tool in self.offered_tools() if tool["function"]["name"] == name]
        return self.offered_tools() if self.tool_choice == "required" else []

    def check(self) -> None:
        """Raises BadInput with a fault for everything that this engine does not support."""
        faults = [
            Fault(name, "left out", repr(value), f"remove {name}: the local engine lacks it")
            for name, value in (self.model_extra or {}).items()
            if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]
        ]
        for number, message in enumerate(self.messages):
            if not isinstance(message.get("role"), str):
                faults.append(Fault(f"messages[{number}]", "a role", repr(message), "add role"))
        if self.tool_choice not in (None, "none", "auto") and not self.forced_tools():
            expected = f"one of {[tool['function']['name'] for tool in self.tools or []]}"
            found, fix = repr(self.tool_choice), "send and name tools"
            faults.append(Fault("tool_choice", expected, found, fix))
        if self.top_logprobs and not self.logprobs:
            faults.append(Fault("top_logprobs", "logprobs: true", "false", "set logprobs"))
        form = self.response_format
        none: dict[str, Any] = {"schema": None}
        if (
            form is not None
            and form.type == "json_schema"
            and (form.json_schema or none).get("schema", {}) is None
        ):
            faults.append(Fault("response_format", "json_schema.schema", "none", "send the schema"))
        if faults:
            raise BadInput("The request cannot be served", faults)

    def sampling_params(self, default_max_tokens: int) -> SamplingParams:
        """The request as sampling parameters; call `check` first."""
        schema: dict[str, Any] | None = None
        grammar = None
        if forced := self.forced_tools():
            grammar = forced_call_grammar(forced)
        elif self.response_format is not None and self.response_format.type != "text":
            wanted = self.response_format.json_schema
            schema = {"type": "object"} if wanted is None else wanted.get("schema", {})
        limits = (self.max_completion_tokens, self.max_tokens, default_max_tokens)
        names = ("n", "temperature", "top_p", "seed", "top_logprobs", "ignore_eos")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(
            max_tokens=next(limit for limit in limits if limit is not None),
            top_k=max(self.top_k or 0, 0),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            json_schema=schema,
            grammar=grammar,
            **given,
        )


def chat_response(
    request: ChatRequest,
    model: str,
    prompt_ids: list[int],
    completions: Sequence[Completion],
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    """The body of the response. `return_token_ids` adds the tokens of prompt and choices."""
    read, drawn = len(prompt_ids), sum(len(completion.token_ids) for completion in completions)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            _choice(request, index, completion, prompt_ids, vocabulary)
            for index, completion in enumerate(completions)
        ],
        "usage": {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn},
        **({"prompt_token_ids": prompt_ids} if request.return_token_ids else {}),
    }


def _choice(
    request: ChatRequest,
    index: int,
    completion: Completion,
    prompt_ids: list[int],
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    text: str | None = completion.text
    calls: list[Message] = []
    if tools := request.offered_tools():
        names = [tool["function"]["name"] for tool in tools]
        salt = f"{prompt_ids}{completion.token_ids}{index}"
        text, calls = parse_calls(completion.text, names, salt=salt)
    reason = completion.finish_reason
    message: Message = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message["tool_calls"] = calls
        # OpenAI reports 'stop' when the caller itself named the function.
        reason = "stop" if isinstance(request.tool_choice, NamedToolChoice) else "tool_calls"
    choice = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}

    def scored(token: int, logprob: float) -> dict[str, Any]:
        shown = vocabulary.token_text(token)
        return {"token": shown, "logprob": logprob, "bytes": list(shown.encode())}

    if request.logprobs:
        tops = completion.top_logprobs or [{} for _ in completion.token_ids]
        content = [
            {**scored(token, logprob), "top_logprobs": [scored(*it) for it in top.items()]}
            for token, logprob, top in zip(
                completion.token_ids, completion.logprobs, tops, strict=True
            )
        ]
        choice["logprobs"] = {"content": content, "refusal": None}
    if request.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def forced_call_grammar(tools: Sequence[Message]) -> str:
    """A Lark grammar (llguidance's dialect) for exactly one call of one of `tools`."""
    names, schemas = [f"call_{number}" for number in range(len(tools))], []
    for tool in tools:
        function = tool["function"]
        arguments = dict(function.get("parameters") or {"type": "object", "properties": {}})
        # Move definitions to the root, where references point to.
        named = [key for key in ("$defs", "definitions") if key in arguments]
        schema = {key: arguments.pop(key) for key in named}
        # Forbid arguments that the schema does not name: a weak model would invent them endlessly.
        if not {"allOf", "anyOf", "oneOf", "$ref"} & arguments.keys():
            arguments.setdefault("additionalProperties", False)
        schema |= {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "x-guidance": JSON_STYLE,
        }
        schemas.append(f"%json {json.dumps(schema)}")
    start = f'start: "<tool_call>\\n" ({" | ".join(names)}) "\\n</tool_call>"'
    return "\n".join([start, *(f"{n}: {schema}" for n, schema in zip(names, schemas, strict=True))])


MOST = 4096  # greedy responses kept; the least recently used is dropped
Submit = Callable[[list[int], SamplingParams], Awaitable[list[Completion]]]


class GreedyAnswers:
    """A cache around `submit` of a frozen model for greedy requests, whatever their seeds: many
    rollouts of a group ask a frozen executor the same thing. For one event loop."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._answers: OrderedDict[Any, asyncio.Task[list[Completion]]] = OrderedDict()

    async def submit(self, prompt_ids: list[int], params: SamplingParams) -> list[Completion]:
        """As `Sampler.submit`. Errors are not cached."""
        if params.temperature != 0:
            return await self._submit(prompt_ids, params)
        key = (tuple(prompt_ids), repr(replace(params, seed=None)))
        answer = self._answers.get(key)
        if answer is None or (answer.done() and (answer.cancelled() or answer.exception())):
            answer = self._answers[key] = asyncio.ensure_future(self._submit(prompt_ids, params))
            if len(self._answers) > MOST:
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        return await asyncio.shield(answer)


class SamplerServer:
    """Serves `sampler` as `model_name`. `api_key`: if given, /v1 requires it as a bearer token;
    `frozen`: the weights never change, so greedy responses are cached."""

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        model_name: str,
        host: str = "127.0.0.1",
        tool_call_parser: str = "hermes",
        api_key: str | None = None,
        frozen: bool = False,
    ) -> None:
        if tool_call_parser != "hermes":
            where, fix = "explorer.rollout_model.tool_call_parser", "tool_call_parser: hermes"
            title = "The tool-call parser is unknown"
            raise BadInput.of(title, where, "hermes", tool_call_parser, fix)
        self.sampler = sampler
        self._submit = GreedyAnswers(sampler.submit).submit if frozen else sampler.submit
        self._renderer = Renderer(tokenizer)
        self.model_name = model_name
        self.host = host
        self.api_key = api_key
        self._server: uvicorn.Server | None = None

    def start(self) -> str:
        """Start serving; returns e.g. 'http://127.0.0.1:51234'. RunFailed: it cannot listen."""
        self._server, self._thread, url = serve_in_thread(self._app(), self.host)
        return url

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join()
            self._server = None

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)

        @app.get("/health")
        async def health() -> Response:
            return Response()

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            if not self._authorized(request):
                return error_response(401, "wrong or missing API key", "invalid_api_key")
            entry = {"id": self.model_name, "object": "model", "created": 0}
            entry |= {"owned_by": "aflow-tune", "max_model_len": self.sampler.max_model_len}
            return JSONResponse({"object": "list", "data": [entry]})

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            if not self._authorized(request):
                return error_response(401, "wrong or missing API key", "invalid_api_key")
            try:
                return await self._chat(request)
            except (BadInput, ValidationError, json.JSONDecodeError, UnicodeDecodeError) as error:
                told, code = str(error), None
                if "max_model_len" in told:  # in the words by which agents know it
                    most = self.sampler.max_model_len
                    told = f"This model's maximum context length is {most} tokens. {told}"
                    code = "context_length_exceeded"
                return error_response(400, told, code)
            except Exception as error:
                log.exception("a chat completion failed")
                return error_response(500, str(error))

        return app

    def _authorized(self, request: Request) -> bool:
        given = request.headers.get("authorization", "")
        wanted = f"Bearer {self.api_key}"
        return self.api_key is None or hmac.compare_digest(given.encode(), wanted.encode())

    async def _chat(self, request: Request) -> Response:
        # Not parsed by pydantic: it refuses lone surrogates, which a model can write.
        chat = ChatRequest.model_validate(json.loads(await request.body()))
        chat.check()
        if chat.model not in (None, self.model_name):
            message = f"the model {chat.model!r} does not exist here; it is {self.model_name!r}"
            return error_response(404, message, "model_not_found")
        prompt_ids = self._render(chat)
        room = max(self.sampler.max_model_len - len(prompt_ids), 1)
        params = chat.sampling_params(default_max_tokens=room)
        answer = asyncio.ensure_future(self._submit(prompt_ids, params))
        drawn, vocabulary = await unless_disconnected(request, answer), self.sampler.vocabulary
        if drawn is None:
            return Response(status_code=CLIENT_CLOSED)
        return JSONResponse(chat_response(chat, self.model_name, prompt_ids, drawn, vocabulary))

    def _render(self, chat: ChatRequest) -> list[int]:
        options = chat.chat_template_kwargs or {}
        return self._renderer.prompt(chat.messages, chat.offered_tools(), **options)


async def unless_disconnected(request: Request, answer: asyncio.Future[T]) -> T | None:
    """The result of `answer`; None if the client hangs up first, and then `answer` is cancelled."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(disconnected())
    both: set[asyncio.Future[Any]] = {answer, gone}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not answer.done():
            answer.cancel()
    return answer.result() if answer.done() else None


async def bounded_body(request: Request, most: int) -> bytes | None:
    """The body; None if it has more than `most` bytes, then the rest is not read."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            return None
    return bytes(body)


def serve_in_thread(app: FastAPI, host: str) -> tuple[uvicorn.Server, threading.Thread, str]:
    """Serve on a free port of `host`, in a thread that ends with the process; the last is the
    address. Raises RunFailed: it cannot listen."""
    config = uvicorn.Config(
        app,
        host=host,
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=600,  # closing a connection that is being reused would fail a call
    )
    listener = bound_socket(host, 0)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}"
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RunFailed(f"the server on {url} did not start")
        time.sleep(0.01)
    return server, thread, url


def error_response(
    status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    """An error in OpenAI's form."""
    kinds = {401: "authentication_error", 500: "server_error"}
    kind = kinds.get(status, "invalid_request_error")
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers)


def bound_socket(host: str, port: int) -> socket.socket:
    """A bound TCP socket; port 0 takes a free one. Raises RunFailed: it cannot be bound. The
    protocol is explicit because asyncio disables Nagle's algorithm only then; otherwise every
    response on a kept-alive connection waits 40 ms."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise RunFailed(f"cannot listen on {host}:{port}: {error}") from error
    return listener
