"""Problem in, workflow and answer out, over HTTP: `POST /solve`, and a small page for people.

The server is thin. Who may talk to it is `guard.py`'s matter, solving is `inferring.py`'s. What
is decided here is how much may be asked for: how large a request is, how many are worked on at
once (one more is told 429, nothing waits in line), and how long one may take. A client that goes
away cancels its run.

What a client is told of a failure is a sentence of ours: no path, no address and no key is in
it. The details stand in the server's own log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import signal
import socket
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from aflow_tune.engines.local.server import bound_socket
from aflow_tune.errors import AflowTuneError, BadInput, BudgetReached, RunFailed
from aflow_tune.models.types import ModelError, ModelFailure
from aflow_tune.sandbox.types import SandboxUnavailable
from aflow_tune.using.guard import Guard, own_hosts
from aflow_tune.using.solved import Problem, Solved

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 512 * 1024
BODY_SECONDS = 15.0
"""A request has to be there whole within this time."""
CLIENT_CLOSED = 499
MAX_CONNECTIONS = 128
_SOCKET = re.compile(r"Connect call failed \([^()]{0,200}\)")
"""How asyncio says which address it did not reach."""
_REFUSED = {
    404: "there is nothing here; POST /solve takes a problem, GET / is the page",
    405: "not with this method; POST /solve takes a problem, GET / is the page",
}
"""What is said, in place of the framework's words, where nothing of ours is."""
_KINDS = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}


class Solver(Protocol):
    """Whatever solves problems, many at once."""

    async def solve(self, problem: Problem) -> Solved:
        """What became of one problem."""
        ...


@dataclass(frozen=True)
class Bounds:
    """What clients may ask for."""

    at_once: int = 4
    """Problems that are worked on at the same time."""
    seconds: float = 300.0
    """For one problem, the policy's writing and all fallbacks included."""


class SolveServer:
    """Serves a solver. `run` returns when it was stopped.

    Args:
        title: what the policy is called.
        private: texts that are in no answer, with what stands there instead.
    """

    def __init__(
        self,
        solver: Solver,
        title: str,
        *,
        host: str = "127.0.0.1",
        port: int = 8080,
        bounds: Bounds = Bounds(),
        token: str | None = None,
        private: Mapping[str, str] | None = None,
    ) -> None:
        self.solver, self.title, self.bounds, self.token = solver, title, bounds, token
        self.private = dict(private or {})
        self.host, self.port = host, port
        self._working: set[asyncio.Task[Solved]] = set()
        self._listener: socket.socket | None = None
        self._server: uvicorn.Server | None = None

    def listen(self) -> str:
        """Take the port (0: a free one); returns the address to open.

        Raises:
            RunFailed: it cannot be bound.
        """
        try:
            listener = bound_socket(self.host, self.port)
        except RunFailed as error:
            raise RunFailed(f"{error}. do: name another port; --port 0 takes a free one") from None
        try:
            listener.listen(MAX_CONNECTIONS)
        except OSError as error:
            listener.close()
            raise RunFailed(f"cannot listen on {self.host}:{self.port}: {error}") from error
        self._listener = listener
        self.port = listener.getsockname()[1]
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self.port}/"

    async def run(self, *, signals: bool = True) -> None:
        """Serve until `stop`, and with `signals` until Ctrl-C or SIGTERM."""
        if self._listener is None:
            self.listen()
        assert self._listener is not None
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
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in numbers if signals else ():
            loop.add_signal_handler(number, self.stop)
        try:
            await self._server.serve([self._listener])
        finally:
            for number in numbers if signals else ():
                loop.remove_signal_handler(number)
            self._listener.close()

    def stop(self) -> None:
        """Take no more requests and end those under way."""
        if self._server is not None:
            self._server.should_exit = True
        for task in self._working:
            task.cancel()

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

        @app.exception_handler(HTTPException)
        async def refused(_: Request, error: HTTPException) -> Response:
            return _error(_REFUSED.get(error.status_code, str(error.detail)), error.status_code)

        @app.get("/")
        async def page() -> Response:
            return _file("page.html")

        @app.get("/page.css")
        async def style() -> Response:
            return _file("page.css")

        @app.get("/page.js")
        async def script() -> Response:
            return _file("page.js")

        @app.get("/health")
        async def health() -> Response:
            working = len(self._working)
            return _json({"status": "ok", "working": working, "at_once": self.bounds.at_once}, 200)

        @app.get("/about")
        async def about() -> Response:
            return _json({"title": self.title, "seconds": self.bounds.seconds}, 200)

        @app.post("/solve")
        async def solve(request: Request) -> Response:
            return await self._solve(request)

        return app

    async def _solve(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return _error("send JSON: content-type: application/json", 415)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(request)
        except TimeoutError:
            return _error("the request took too long to arrive", 408)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        if body is None:
            return _error(f"a request may have {MAX_BODY_BYTES // 1024} KiB", 413)
        try:
            problem = Problem.of(_read(body), "request")
        except BadInput as error:
            faults = [
                {"where": fault.where, "expected": fault.expected, "found": fault.found}
                for fault in error.faults
            ]
            return _json({"error": error.title, "faults": faults}, 400)
        if len(self._working) >= self.bounds.at_once:
            return _error(
                f"{self.bounds.at_once} problems are being worked on, which is all that this "
                "server does at once; try again later",
                429,
                {"retry-after": "5"},
            )
        return await self._worked(request, problem)

    async def _worked(self, request: Request, problem: Problem) -> Response:
        task = asyncio.create_task(self._bounded(self.solver.solve(problem)))
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
            return _error("the server is being stopped", 503)
        error = task.exception()
        if error is not None:
            return _told(error)
        content = task.result().to_json()
        return _json({**_without(self.private, content), "problem": problem.text}, 200)

    async def _bounded(self, work: Coroutine[Any, Any, Solved]) -> Solved:
        async with asyncio.timeout(self.bounds.seconds):
            return await work


class _Server(uvicorn.Server):
    """uvicorn's, which leaves signals to us: it would raise them again after it has ended."""

    def capture_signals(self) -> Any:
        import contextlib

        return contextlib.nullcontext()


def _told(error: BaseException) -> Response:
    """What a client may know of a failure."""
    if isinstance(error, TimeoutError):
        return _error("no answer within the time that one problem may take", 504)
    if isinstance(error, ModelError):
        hint = "; the problem may be too long" if error.failure is ModelFailure.REFUSED else ""
        return _error(f"a model could not be asked: {error.failure.value}{hint}", 502)
    if isinstance(error, BudgetReached):
        return _error("the budget of this server is used up", 503)
    if isinstance(error, SandboxUnavailable):
        return _error("no sandbox can be built here, so no workflow can be run", 503)
    known = isinstance(error, AflowTuneError)
    log.error("a problem could not be solved: %s", error, exc_info=None if known else error)
    return _error("the problem could not be worked on; the server's log says why", 500)


async def _body(request: Request) -> bytes | None:
    """The body; None where it is too large, of which the rest is not read."""
    told = request.headers.get("content-length", "0")
    if not told.isdigit() or int(told) > MAX_BODY_BYTES:
        return None
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


def _read(body: bytes) -> dict[str, Any]:
    from aflow_tune.errors import Fault

    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        example = '{"problem": "What is 2 + 3?", "type": "math"}'
        fault = Fault("request", "a JSON object", "something else", example)
        raise BadInput("This request cannot be read.", [fault])
    return content


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _file(name: str) -> Response:
    text = resources.files("aflow_tune.using").joinpath(name).read_text("utf-8")
    return Response(text, media_type=_KINDS[name])


def _error(reason: str, status: int, headers: dict[str, str] | None = None) -> Response:
    return _json({"error": reason}, status, headers)


def _json(content: Any, status: int, headers: dict[str, str] | None = None) -> Response:
    # Half of a surrogate pair, which a model can write, is sent as JSON's escape of it.
    text = json.dumps(_finite(content), ensure_ascii=True, allow_nan=False)
    return Response(text, status, headers, media_type="application/json")


def _without(private: Mapping[str, str], value: Any) -> Any:
    """The value with other texts in the places of private ones."""
    if isinstance(value, str):
        for text, instead in private.items():
            value = value.replace(text, instead)
        return _SOCKET.sub("the connection failed", value)
    if isinstance(value, dict):
        return {key: _without(private, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(private, item) for item in value]
    return value


def _finite(value: Any) -> Any:
    """The value without numbers that JSON has no form for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
