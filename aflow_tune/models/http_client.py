"""Requests to an API over a vendor's SDK: attempts, retries, time-outs, limits on concurrency.

The SDK builds the request, authenticates and sends it; its own retries are off. What came back
is read here from its bytes, because the SDKs accept replies of any shape. Every reply with a
usage in it is settled with the budget before anything else can fail.

All of it runs in the loop of `http_loop.py`. A slot of `max_concurrency` is kept over a call's
retries, and a server's advice to wait holds for all calls of the client, so that a limit on
rates is met by waiting rather than by using up retries. Where the process may not open so many
connections, fewer requests are under way at once.

Not covered: streaming. Keys follow no redirect. Proxies are those of the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import json
import os
import random
import resource
import ssl
import sys
import weakref
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import httpx2

from aflow_tune.errors import BadInput, Fault
from aflow_tune.models.ask import Ask
from aflow_tune.models.client import BaseClient
from aflow_tune.models.failures import BadReply, Problem, problem_of
from aflow_tune.models.http_loop import http_loop, in_http_loop
from aflow_tune.models.ledger import Attempt, Call
from aflow_tune.models.prices import price_of
from aflow_tune.models.redaction import masked, short
from aflow_tune.models.settings import credentials
from aflow_tune.models.types import ModelFailure, Reply, Usage
from aflow_tune.sections import ModelSettings

MOST_REPLY_BYTES = 32 << 20
"""A longer reply is given up as unreadable: no answer is as long, and memory is finite."""
CONNECTIONS_A_POOL = 16
"""The HTTP library looks at every connection of its pool for every request."""
LONGEST_BACKOFF = 30.0
"""Seconds between two attempts, unless the server asks for more."""
MOST_TOKENS = 10**9
"""A reply that claims to have used more is not believed: no model has such a context."""
_READ_BY_CLIENTS = ("SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_random = random.Random()


class HttpClient(BaseClient):
    """What both vendors' clients share.

    Args:
        settings: of `models:`, or made by hand.
        role: what its usage is counted under, unless the settings say.

    Raises:
        BadInput: the settings are wrong, or the key is not in the environment.
    """

    address = ""
    """The vendor's own address."""
    path = ""
    """Where requests go, below the address."""
    models_path = ""
    """Where the list of models is."""

    def __init__(self, settings: ModelSettings, role: str = "executor") -> None:
        role = settings.role or role
        self.settings = settings
        self._key, self._headers = credentials(settings, role)
        price = price_of(settings.provider, settings.base_url, str(settings.model), settings.prices)
        super().__init__(role, str(settings.model), price)
        self._sdks: dict[int, Any] = {}
        """The vendor's clients, each with a pool of its own, by their number."""
        self._slots: asyncio.Semaphore | None = None
        self._free: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._not_before = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Keys and connections stay behind: where this is unpickled, they are made anew."""
        return {"settings": self.settings, "role": self.role}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["settings"], state["role"])  # type: ignore[misc]

    async def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        sdks, self._sdks = list(self._sdks.values()), {}
        if self._loop is http_loop():
            for sdk in sdks:
                await in_http_loop(sdk.close)

    async def get(self, path: str, seconds: float) -> tuple[Any, int | None, Problem | None]:
        """Ask for what costs nothing, once: (JSON or None, status or None, what went wrong)."""

        async def attempt() -> tuple[Any, int | None, Problem | None]:
            async with self._slot() as sdk:
                try:
                    async with asyncio.timeout(seconds):
                        response = await sdk.get(path, cast_to=httpx2.Response)
                    return json.loads(response.content), response.status_code, None
                except Exception as error:
                    problem = problem_of(error, self._secrets()) or _unsendable(error)
                    return None, getattr(error, "status_code", None), problem

        return await in_http_loop(attempt)

    def _body(self, ask: Ask) -> dict[str, Any]:
        """The JSON of a request.

        Raises:
            BadInput: this API cannot be asked that.
        """
        raise NotImplementedError

    def _reply(self, ask: Ask, content: Mapping[str, Any]) -> Reply:
        """The answer in a reply's JSON.

        Raises:
            BadReply: it is not what the API promises.
        """
        raise NotImplementedError

    def _usage(self, content: Mapping[str, Any]) -> Usage | None:
        """The usage in a reply's JSON; None where it has none that can be read."""
        raise NotImplementedError

    def _make_sdk(self, **options: Any) -> Any:
        """The vendor's client."""
        raise NotImplementedError

    def _with_defaults(self, ask: Ask) -> Ask:
        configured = {
            name: getattr(self.settings, name)
            for name in ("temperature", "top_p", "max_tokens")
            if getattr(ask, name) is None
        }
        return replace(ask, **configured)

    def _endpoint(self) -> Mapping[str, Any]:
        base_url = self.settings.base_url or self.address
        return {
            "provider": self.settings.provider,
            "base_url": base_url.rstrip("/"),
            "model": self.model,
        }

    async def _answer(self, ask: Ask, call: Call) -> Reply:
        body = self._body(ask)
        return await in_http_loop(lambda: self._with_retries(ask, body, call))

    async def _with_retries(self, ask: Ask, body: dict[str, Any], call: Call) -> Reply:
        budget = call.ledger.budget
        prompt_tokens = 0 if budget is None else ask.most_prompt_tokens()
        number, problem = 0, None
        async with self._slot() as sdk:
            while True:
                pause = self._pause(number, problem)
                if budget is not None and (left := budget.seconds_left()) is not None:
                    pause = min(pause, left)
                if pause > 0:
                    await asyncio.sleep(pause)
                outcome = await self._attempt(sdk, ask, body, call, prompt_tokens)
                if isinstance(outcome, Reply):
                    return outcome
                number, problem = number + 1, outcome
                if not problem.retry or number > self.settings.retries:
                    raise problem.error(self.model, number)

    def _pause(self, number: int, problem: Problem | None) -> float:
        """Seconds before attempt `number`, counted from 0."""
        now = asyncio.get_running_loop().time()
        backoff = 0.0
        if problem is not None:
            doubled = min(self.settings.backoff * 2.0 ** (number - 1), LONGEST_BACKOFF)
            jitter = _random.uniform(0.5, 1.0) * doubled
            if problem.wait is None:
                backoff = jitter
            else:
                # Nobody comes earlier than asked, and not all come at once.
                self._not_before = max(self._not_before, now + problem.wait)
                backoff = problem.wait + _random.uniform(0.0, 0.1) * doubled
        return max(backoff, self._not_before - now)

    async def _attempt(
        self, sdk: Any, ask: Ask, body: dict[str, Any], call: Call, prompt_tokens: int
    ) -> Reply | Problem:
        budget = call.ledger.budget
        seconds = self.settings.timeout
        async with call.attempt(prompt_tokens, body_limit(body), seconds) as attempt:
            left = None if budget is None else budget.seconds_left()
            problem: Problem | None = None
            response: Any = None
            try:
                async with asyncio.timeout(seconds if left is None else min(seconds, left)):
                    response = await sdk.post(self.path, cast_to=httpx2.Response, body=body)
            except Exception as error:
                problem = problem_of(error, self._secrets()) or _unsendable(error)
                response = getattr(error, "response", None)
            cut_off = problem is not None and problem.failure is ModelFailure.TIMED_OUT
            if cut_off and budget is not None and budget.seconds_left() == 0.0:
                raise budget.out_of_time()
            return self._read(ask, response, problem, attempt)

    def _read(
        self, ask: Ask, response: Any, problem: Problem | None, attempt: Attempt
    ) -> Reply | Problem:
        """Settle what a reply used, then make sense of it. Nothing here gives up control."""
        content: Any = None
        if response is not None:
            with contextlib.suppress(ValueError, RecursionError, httpx2.StreamError):
                content = json.loads(response.content)
        usage = self._usage(content) if isinstance(content, Mapping) else None
        if problem is not None:
            if usage is not None:
                attempt.settle(usage)
            return problem
        try:
            if not isinstance(content, Mapping):
                raise BadReply(f"the reply is no JSON object: {response.text[:200]!r}")
            reply = self._reply(ask, content)
        except BadReply as error:
            if usage is not None:
                attempt.settle(usage)
            found = problem_of(error, self._secrets())
            assert found is not None
            return found
        attempt.settle(usage)
        return reply

    def _secrets(self) -> list[str]:
        return [self._key or "", *self._headers.values()]

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[Any]:
        """One of `max_concurrency` places, and the vendor's client that serves it."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the first call, in this process
            self._loop, self._sdks, self._not_before = loop, {}, 0.0
            places = min(self.settings.max_concurrency, _open_files() // 2)
            self._slots = asyncio.Semaphore(places)
            self._free = list(range(places))
        assert self._slots is not None
        async with self._slots:
            # The lowest free number, so that few callers share few pools.
            number = heapq.heappop(self._free)
            try:
                yield self._sdk(number // CONNECTIONS_A_POOL)
            finally:
                heapq.heappush(self._free, number)

    def _sdk(self, number: int) -> Any:
        if number in self._sdks:
            return self._sdks[number]
        try:
            http = httpx2.AsyncClient(
                verify=_ssl_context(),
                timeout=None,  # the time-out of an attempt covers all of it
                limits=httpx2.Limits(max_connections=CONNECTIONS_A_POOL),
                event_hooks={"response": [_bound_reply]},
            )
        except (OSError, ValueError, ImportError, httpx2.InvalidURL) as error:
            # No address was asked: proxies and certificates are those of the environment.
            raise _unusable_environment(error) from None
        sdk = self._make_sdk(
            api_key=self._key or "none",
            base_url=self.settings.base_url or self.address,
            max_retries=0,
            timeout=None,
            # A compressed reply could be a thousand times as long as its bytes.
            default_headers={"Accept-Encoding": "identity", **self._headers},
            http_client=http,
        )
        self._sdks[number] = sdk
        weakref.finalize(self, _close_later, asyncio.get_running_loop(), sdk).atexit = False
        return sdk


def _unusable_environment(error: Exception) -> BadInput:
    """Certificates or proxies of the environment that no client can be made with."""
    names = [
        name for name in _READ_BY_CLIENTS for name in (name, name.lower()) if name in os.environ
    ]
    named = ", ".join(names) or "the environment"
    found = f"{type(error).__name__}: {short(masked('', str(error)))}"
    cure = f"unset {' '.join(names)}, or correct them" if names else "correct what is named there"
    if isinstance(error, ImportError):
        cure = f"python -m pip install 'httpx2[socks]', or {cure}"
    fault = Fault(named, "certificates and proxies that can be used", found, cure)
    return BadInput("No model behind an API can be asked.", [fault])


def _open_files() -> int:
    """How many files, connections among them, this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """One for all pools: reading the certificates takes some 20 ms."""
    return httpx2.create_ssl_context()


def body_limit(body: Mapping[str, Any]) -> int | None:
    """The most tokens that a request allows for its answer."""
    limit = body.get("max_tokens", body.get("max_completion_tokens"))
    return None if limit is None else int(limit)


def count_of(value: Any) -> int | None:
    """A count of tokens from a reply; None where it is none, or no number that can be true."""
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


def _unsendable(error: Exception) -> Problem:
    """The SDK refused to make the request, or it was never meant to be sent."""
    text = f"the request could not be made ({type(error).__name__})"
    return Problem(ModelFailure.REFUSED, text, retry=False)


def _close_later(loop: asyncio.AbstractEventLoop, sdk: Any) -> None:
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(sdk.close(), loop)


async def _bound_reply(response: httpx2.Response) -> None:
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _BoundedStream(response.stream)


class _BoundedStream(httpx2.AsyncByteStream):
    """The bytes of a reply, which fail when they are too many."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        count = 0
        async for chunk in self._stream:
            count += len(chunk)
            if count > MOST_REPLY_BYTES:
                raise BadReply(f"the reply is longer than {MOST_REPLY_BYTES >> 20} MB")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
