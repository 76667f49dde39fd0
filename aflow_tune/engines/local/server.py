"""OpenAI's chat-completions API over a sampler, on loopback.

`GET /health`, `GET /v1/models`, `POST /v1/chat/completions`, in a thread with an event loop of its
own. A client that goes away cancels its request and frees the place in the batch. The wire format
is in `protocol.py`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from aflow_tune.engines.local.protocol import ChatRequest, chat_response, template_messages
from aflow_tune.engines.local.sampling import Completion, SamplingParams
from aflow_tune.errors import BadInput, RunFailed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from aflow_tune.engines.local.sampler import Sampler


MOST = 4096
"""Greedy answers that are kept; the one unused for longest goes first."""
Submit = Callable[[list[int], SamplingParams], Awaitable[list[Completion]]]


class GreedyAnswers:
    """`submit` of a frozen model that decodes a request which leaves nothing to chance only once: a
    frozen executor is asked the same thing by many rollouts of a group. For one event loop."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._answers: OrderedDict[Any, asyncio.Task[list[Completion]]] = OrderedDict()

    async def submit(self, prompt_ids: list[int], params: SamplingParams) -> list[Completion]:
        """As `Sampler.submit`. Errors are not remembered."""
        if params.temperature != 0:
            return await self._submit(prompt_ids, params)
        key = (tuple(prompt_ids), repr(params))
        answer = self._answers.get(key)
        if answer is None or (answer.done() and (answer.cancelled() or answer.exception())):
            answer = self._answers[key] = asyncio.ensure_future(self._submit(prompt_ids, params))
            if len(self._answers) > MOST:
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        return await asyncio.shield(answer)


log = logging.getLogger(__name__)


class SamplerServer:
    """Serves `sampler` under `model_name`.

    Args:
        tool_call_parser: only 'hermes'.
        api_key: when given, /v1 asks for it as a bearer token.
        frozen: the sampler's weights never change, so greedy answers are remembered.
    """

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
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.host = host
        self.api_key = api_key
        self._template_has_tools = "tools" in str(tokenizer.chat_template or "")
        self._server: uvicorn.Server | None = None

    def start(self) -> str:
        """Listen; returns e.g. 'http://127.0.0.1:51234'. RunFailed if the port cannot be bound."""
        config = uvicorn.Config(
            self._app(),
            host=self.host,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
            # Clients keep idle connections between rollouts; closing one while it is being
            # reused would fail that call.
            timeout_keep_alive=600,
        )
        listener = bound_socket(self.host, 0)
        url = f"http://{self.host}:{listener.getsockname()[1]}"
        server = uvicorn.Server(config)
        self._thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        self._thread.start()
        while not server.started:
            if not self._thread.is_alive():
                raise RunFailed(f"the server on {url} did not start")
            time.sleep(0.01)
        self._server = server
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
                return _error(401, "wrong or missing API key", "invalid_api_key")
            entry = {"id": self.model_name, "object": "model", "created": 0}
            entry |= {"owned_by": "aflow-tune", "max_model_len": self.sampler.max_model_len}
            return JSONResponse({"object": "list", "data": [entry]})

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            if not self._authorized(request):
                return _error(401, "wrong or missing API key", "invalid_api_key")
            try:
                return await self._chat(request)
            except (BadInput, ValidationError) as error:
                long = "max_model_len" in str(error)
                return _error(400, str(error), "context_length_exceeded" if long else None)
            except Exception as error:
                log.exception("a chat completion failed")
                return _error(500, str(error))

        return app

    def _authorized(self, request: Request) -> bool:
        given = request.headers.get("authorization", "")
        wanted = f"Bearer {self.api_key}"
        return self.api_key is None or hmac.compare_digest(given.encode(), wanted.encode())

    async def _chat(self, request: Request) -> Response:
        try:  # not by pydantic, which refuses half of a surrogate pair that a model can write
            body = json.loads(await request.body())
        except ValueError as error:
            raise BadInput(f"The body is not JSON: {error}") from error
        chat = ChatRequest.model_validate(body)
        chat.check()
        if chat.model not in (None, self.model_name):
            message = f"the model {chat.model!r} does not exist here; it is {self.model_name!r}"
            return _error(404, message, "model_not_found")
        prompt_ids = self._render(chat)
        room = max(self.sampler.max_model_len - len(prompt_ids), 1)
        params = chat.sampling_params(default_max_tokens=room)
        answer = asyncio.ensure_future(self._submit(prompt_ids, params))

        async def disconnected() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        gone = asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answer.done():
                answer.cancel()
        if not answer.done():
            return Response(status_code=499)  # nobody reads it
        drawn, vocabulary = answer.result(), self.sampler.vocabulary
        return JSONResponse(chat_response(chat, self.model_name, prompt_ids, drawn, vocabulary))

    def _render(self, chat: ChatRequest) -> list[int]:
        """The prompt's tokens, by the chat template. BadInput if it refuses the conversation."""
        tools = chat.offered_tools()
        messages = template_messages(chat.messages, tools, native=self._template_has_tools)
        options = {"add_generation_prompt": True, **(chat.chat_template_kwargs or {})}
        shown = tools if tools and self._template_has_tools else None
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=shown, tokenize=False, **options
            )
        except Exception as error:
            # Templates are programs: they raise jinja2 errors of many classes.
            raise BadInput(f"the chat template refused the messages: {error}") from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _error(status: int, message: str, code: str | None = None) -> Response:
    kinds = {401: "authentication_error", 500: "server_error"}
    kind = kinds.get(status, "invalid_request_error")
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status)


def bound_socket(host: str, port: int) -> socket.socket:
    """A bound socket that names its protocol; port 0 takes a free one. RunFailed if it cannot be.
    asyncio switches Nagle's algorithm off only for sockets that do; without it every answer on a
    kept-alive connection waits 40 ms for the client's acknowledgement."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise RunFailed(f"cannot listen on {host}:{port}: {error}") from error
    return listener
