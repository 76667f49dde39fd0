"""A conversation with a running program: JSON values, one a line, over a private socket.

The program finds its end as the module `aflow_channel` (`_channel_inside.py`). Here nothing it
says is trusted: a line that is no JSON, null, or longer than the program's output limit ends it,
and nothing is read ahead, so a program that talks more than is listened to has to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aflow_tune.errors import AflowTuneError
from aflow_tune.sandbox.engine import Engine
from aflow_tune.sandbox.policy import meant
from aflow_tune.sandbox.process import Sandbox
from aflow_tune.sandbox.running import checked_job, elsewhere, note_run, run_in
from aflow_tune.sandbox.types import Execution, Limits


class ProgramEnded(AflowTuneError, BrokenPipeError):
    """A message was sent to a program that has ended; `receive` and `execution` say how."""


class Channel:
    """Our end. One for each program; `send` and `receive` may be awaited at the same time."""

    def __init__(self, sandbox: Sandbox, running: asyncio.Future[Execution], bound: int) -> None:
        self._sandbox = sandbox
        self._socket = sandbox.channel
        self._running = running
        self._bound = bound
        self._received = bytearray()
        self._seen = 0
        self._sending, self._receiving = asyncio.Lock(), asyncio.Lock()

    async def send(self, message: Any) -> None:
        """Send a JSON value other than null; waits while the program does not read.

        Raises:
            TypeError, ValueError: it is not one, or is longer than the output limit.
            ProgramEnded: nobody is there to read it.
        """
        if message is None:
            raise ValueError("None is no message: it means that there will be none")
        line = json.dumps(message).encode() + b"\n"
        if len(line) > self._bound:
            raise ValueError(f"a message of {len(line)} bytes; at most {self._bound} are sent")
        async with self._sending:
            try:
                await asyncio.get_running_loop().sock_sendall(self._socket, line)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ProgramEnded("the program has ended") from error

    async def receive(self) -> Any:
        """The program's next message, of any JSON type; None when there will be no more."""
        async with self._receiving:
            line = await self._line()
        if line is None:
            await self._wait()
            return None
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if message is None:
            await self._give_up("")
        return message

    def execution(self) -> Execution:
        """How the program ended. RuntimeError: `receive` has not returned None yet."""
        if not self._running.done() or self._running.cancelled():
            raise RuntimeError("the program has not ended; receive() returns None when it has")
        return self._running.result()

    async def _line(self) -> bytes | None:
        loop = asyncio.get_running_loop()
        while (end := self._received.find(b"\n", self._seen)) < 0:
            self._seen = len(self._received)
            if self._seen > self._bound:
                await self._give_up("output_kb")
                return None
            try:
                piece = await loop.sock_recv(self._socket, 1 << 16)
            except ConnectionResetError:
                piece = b""
            if not piece:
                return None
            self._received += piece
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._seen = 0
        if len(line) > self._bound:
            await self._give_up("output_kb")
            return None
        return line

    async def _give_up(self, limit: str) -> None:
        self._received.clear()

        async def stop(_: Engine) -> None:
            self._sandbox.stop(limit)

        await elsewhere(stop)
        await self._wait()

    async def _wait(self) -> None:
        await asyncio.wait([self._running])


@contextlib.asynccontextmanager
async def open_channel(
    source: str,
    *,
    files: Mapping[str, str] = {},
    limits: Limits = Limits(),  # noqa: B008
    policy: str = "auto",
    preload: str = "",
) -> AsyncIterator[Channel]:
    """Run a program as `run_program` does, and talk with it. Leaving the block kills it.

    A message is at most `limits.output_kb` long.

    Args:
        preload: the dotted name of a module that the program finds as `aflow_preloaded`, loaded
            before the program arrives and before its limits begin, with the standard library
            alone. It is ours: the inner wall does not stand yet while it loads.

    Raises:
        SandboxUnavailable, BadInput: as `run_program`.
    """
    job, policy = checked_job(source, "", limits, files, channel=True), meant(policy)
    loop = asyncio.get_running_loop()
    taken: asyncio.Future[Sandbox] = loop.create_future()

    async def run(home: Engine) -> Execution:
        async with home.sandbox(policy, limits.disk_mb, preload) as sandbox:
            loop.call_soon_threadsafe(_tell, taken, sandbox)
            return await run_in(sandbox, job)

    started = time.monotonic()
    running = asyncio.ensure_future(elsewhere(run))
    try:
        either: set[asyncio.Future[Any]] = {taken, running}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not taken.done():
            await running  # which failed before there was a sandbox
        channel = Channel(taken.result(), running, limits.output_kb << 10)
        yield channel
        if running.done():
            running.result()
    finally:
        running.cancel()
        await asyncio.wait([running])
        if taken.done():
            taken.result().channel.close()
        if not running.cancelled() and running.exception() is None:
            note_run(running.result(), started)


def _tell(future: asyncio.Future[Sandbox], sandbox: Sandbox) -> None:
    if not future.done():
        future.set_result(sandbox)
