"""Solves problems over HTTP: `POST /solve` returns workflow and answer; `/` is a web page for it.

The size of a request, the number of problems at once (one more gets 429) and the time for each are
bounded. When a client disconnects, its work is cancelled. Error responses contain no path, address
or key; the server's log has the details.

`Guard` decides who may ask. Any web page open on this machine can send requests to 127.0.0.1, and
with a name of its own that resolves there (DNS rebinding) they count as same-origin. So a request
needs our address as its `Host`, must not come from another origin, and `POST /solve` takes JSON
only, which a foreign page cannot send without a CORS preflight. Off loopback a token is required
instead of the name. Not covered: encryption (use a proxy), and other users of the same machine, who
share its loopback: set a token there too.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import math
import os
import re
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aflow_tune.engines.local.server import CLIENT_CLOSED, bound_socket, bounded_body
from aflow_tune.errors import AflowTuneError, BadInput, RunFailed
from aflow_tune.models.types import ModelError, ModelFailure
from aflow_tune.sandbox.types import SandboxUnavailable
from aflow_tune.using.solved import Problem, Solved

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 512 * 1024
BODY_SECONDS = 15.0
"""Time within which a whole request has to arrive."""
MAX_CONNECTIONS = 128
MIN_TOKEN_CHARS = 16

_PAGE = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_OPEN_PATHS = (*_PAGE, "/health")
"""Paths without a token: the page, which asks for it, and the health check."""
_SOCKET = re.compile(r"Connect call failed \([^()]{0,200}\)")
"""asyncio's message for a failed connection, which contains the address."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class SolveServer:
    """Serves a solver. Call `listen`, then await `run`, which returns once stopped.

    `solver` has `async def solve(problem: Problem) -> Solved`. At most `at_once` problems are
    solved at the same time, for at most `seconds` each. `private` maps texts that results must not
    contain to their replacements.
    """

    def __init__(
        self,
        solver: Any,
        title: str,
        *,
        host: str = "127.0.0.1",
        port: int = 8080,
        at_once: int = 4,
        seconds: float = 300.0,
        token: str | None = None,
        private: Mapping[str, str] | None = None,
    ) -> None:
        self.solver, self.title, self.token = solver, title, token
        self.at_once, self.seconds = at_once, seconds
        self.private = dict(private or {})
        self.host, self.port = host, port
        self._working: set[asyncio.Task[Solved]] = set()
        self._listener: socket.socket | None = None
        self._server: uvicorn.Server | None = None

    def listen(self) -> str:
        """Bind the port (0: a free one); returns the URL. Raises RunFailed: it cannot be bound."""
        try:
            self._listener = bound_socket(self.host, self.port)
            self._listener.listen(MAX_CONNECTIONS)
        except (RunFailed, OSError) as error:
            raise RunFailed(f"{error}. do: name another port; --port 0 takes a free one") from None
        self.port = self._listener.getsockname()[1]
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self.port}/"

    async def run(self, *, signals: bool = True) -> None:
        """Serve until `stop`, or with `signals` until Ctrl-C or SIGTERM."""
        assert self._listener is not None, "listen first"
        config = uvicorn.Config(
            Guard(self._app(), own_hosts(self.host, self.port), self.token),
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=3,
        )
        self._server = _Server(config)
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM) if signals else ()
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            await self._server.serve([self._listener])
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
            self._listener.close()

    def stop(self) -> None:
        """Take no more requests, and cancel those under way."""
        if self._server is not None:
            self._server.should_exit = True
        for task in self._working:
            task.cancel()

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

        @app.exception_handler(HTTPException)
        async def refused(_: Request, error: HTTPException) -> Response:
            hint = "POST /solve takes a problem, GET / the page"
            return _error(error.status_code, f"{error.detail}; {hint}")

        async def page(request: Request) -> Response:
            name, kind = _PAGE[request.url.path]
            text = resources.files("aflow_tune.using").joinpath(name).read_text("utf-8")
            return Response(text, media_type=kind)

        for path in _PAGE:
            app.get(path)(page)

        @app.get("/health")
        async def health() -> Response:
            working = len(self._working)
            return _json(200, {"status": "ok", "working": working, "at_once": self.at_once})

        @app.get("/about")
        async def about() -> Response:
            return _json(200, {"title": self.title, "seconds": self.seconds})

        app.post("/solve")(self._solve)
        return app

    async def _solve(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return _error(415, "send JSON: content-type: application/json")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await bounded_body(request, MAX_BODY_BYTES)
        except TimeoutError:
            return _error(408, "the request took too long to arrive")
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        if body is None:
            return _error(413, f"a request may have {MAX_BODY_BYTES // 1024} KiB")
        try:
            problem = Problem.of(_read(body), "request")
        except BadInput as error:
            names = ("where", "expected", "found")
            faults = [{name: getattr(fault, name) for name in names} for fault in error.faults]
            return _json(400, {"error": error.title, "faults": faults})
        if len(self._working) >= self.at_once:
            told = f"{self.at_once} problems are being worked on, the most at once; try again later"
            return _error(429, told, {"retry-after": "5"})

        task: asyncio.Task[Solved] = asyncio.create_task(
            asyncio.wait_for(self.solver.solve(problem), self.seconds)
        )
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
        if not task.done():
            await asyncio.gather(task, return_exceptions=True)
            return Response(status_code=CLIENT_CLOSED)
        if task.cancelled():
            return _error(503, "the server is being stopped")
        if (error_met := task.exception()) is not None:
            return _told(error_met)
        return _json(200, {**_sendable(self.private, task.result()), "problem": problem.text})


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which raise the signal again at the end."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


@dataclass(frozen=True)
class Guard:
    """An ASGI application that passes only allowed requests to `app`. `hosts` are the allowed
    values of `Host`; None allows all and needs a `token`."""

    app: ASGIApp
    hosts: frozenset[str] | None
    token: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 401 or 403."""
        if scope["type"] != "http":
            return  # no websockets, no lifespan events

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                ours = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *ours]}
            await send(message)

        refused = self._refused(scope)
        if refused is None:
            await self.app(scope, receive, with_headers)
        else:
            response = _error(*refused, {"connection": "close"})
            await response(scope, receive, with_headers)

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason for refusing a request; None if it is allowed."""
        of_name: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            of_name.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        named = of_name.get("host", [])
        host = named[0].strip().lower() if len(named) == 1 else ""
        if not host or (self.hosts is not None and host not in self.hosts):
            return 403, "this server answers to its own address only"
        foreign = any(urlsplit(o).netloc.lower() != host for o in of_name.get("origin", []))
        sites = of_name.get("sec-fetch-site", [])
        if foreign or any(site not in ("same-origin", "none") for site in sites):
            return 403, "requests of other web pages are not answered"
        if self.token is not None and scope["path"] not in _OPEN_PATHS:
            given = of_name.get("authorization", [""])[0]
            if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                return 401, "the token is missing or wrong"
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def own_hosts(host: str, port: int) -> frozenset[str] | None:
    """The allowed values of `Host` for a server on `host`; None (any) off loopback."""
    if not is_loopback(host):
        return None
    own = f"[{host}]" if ":" in host else host
    names = {own.lower(), "127.0.0.1", "localhost", "[::1]"}
    with_port = {f"{name}:{port}" for name in names}
    return frozenset(with_port | names if port == 80 else with_port)


def token_for(host: str, variable: str | None) -> str | None:
    """The token in the named environment variable; None on loopback without a name. Raises
    BadInput: no variable is named off loopback, or it holds no usable token."""
    if variable is None and is_loopback(host):
        return None
    if variable is None:
        raise BadInput.of(
            "The server would be open to everybody who reaches this machine.",
            f"--host {host}",
            "loopback, or a token that callers have to know",
            "another address without --token-env",
            "leave --host out, or put a token into a variable and name it: --token-env MY_TOKEN",
        )
    token = os.environ.get(variable, "")
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise BadInput.of(
            "The server's token cannot be used.",
            f"--token-env {variable}",
            f"{MIN_TOKEN_CHARS} or more plain characters in that variable",
            "not set" if not token else f"{len(token)} characters",
            f"export {variable}=$(openssl rand -hex 24)",
        )
    return token


def _told(error: BaseException) -> Response:
    """The response for a failure, without private details."""
    if isinstance(error, TimeoutError):
        return _error(504, "no answer within the time that one problem may take")
    if isinstance(error, ModelError):
        hint = "; the problem may be too long" if error.failure is ModelFailure.REFUSED else ""
        return _error(502, f"a model could not be asked: {error.failure.value}{hint}")
    if isinstance(error, SandboxUnavailable):
        return _error(503, "no sandbox can be built here, so no workflow can be run")
    known = isinstance(error, AflowTuneError)
    log.error("a problem could not be solved: %s", error, exc_info=None if known else error)
    return _error(500, "the problem could not be worked on; the server's log says why")


def _read(body: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(body)
        if isinstance(content, dict):
            return content
    example = '{"problem": "What is 2 + 3?", "type": "math"}'
    title, expected = "This request cannot be read.", "a JSON object"
    raise BadInput.of(title, "request", expected, "something else", example)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    return _json(status, {"error": reason}, headers)


def _json(status: int, content: Any, headers: dict[str, str] | None = None) -> Response:
    # ASCII: a lone surrogate, which a model can write, is sent as a JSON escape.
    text = json.dumps(content)
    return Response(text, status, headers, media_type="application/json")


def _sendable(private: Mapping[str, str], value: Any) -> Any:
    """The value with private texts replaced, and null for numbers that are not finite, which JSON
    cannot express."""
    if isinstance(value, str):
        for text, instead in private.items():
            value = value.replace(text, instead)
        return _SOCKET.sub("the connection failed", value)
    if isinstance(value, dict):
        return {key: _sendable(private, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_sendable(private, item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
