"""Run one program in the sandbox, from async code or from plain code; or talk with one.

The engine does the work on its own thread; here its result comes back to the caller's loop or
thread, and into the caller's trace.

A conversation is JSON values, one a line, over a private socket, for the program the module
`aflow_channel` (`_channel_inside.py`). Nothing it says is trusted: a line that is no JSON, null, or
longer than the program's output limit ends it, and nothing is read ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import posixpath
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from aflow_tune.errors import AflowTuneError, BadInput, Fault
from aflow_tune.sandbox.backends import Detection
from aflow_tune.sandbox.engine import Engine, engine
from aflow_tune.sandbox.policy import meant, parts
from aflow_tune.sandbox.process import BackendFailed, Job, Sandbox
from aflow_tune.sandbox.types import Execution, Limits, SandboxUnavailable
from aflow_tune.trace import ProgramRun, note

T = TypeVar("T")


async def run_program(
    source: str,
    *,
    stdin: str = "",
    limits: Limits = Limits(),  # noqa: B008
    policy: str = "auto",
    files: Mapping[str, str] = {},
) -> Execution:
    """Run a Python program in the strongest sandbox that the policy allows.

    The program is `main.py` in an empty working folder, run by the interpreter that runs us,
    with the standard library and no package but those of the policy. A cancelled call kills it
    first.

    Args:
        files: texts that lie in the working folder, by relative path.
        policy: one of `Level`, or auto: what the run's configuration says, else the strongest
            backend that can be built. unsafe_subprocess is only taken if asked for. Packages that
            the program may import follow after plus signs: `auto+numpy`.

    Raises:
        SandboxUnavailable: no such backend can be built; the program was not run.
        BadInput: the policy, a limit or a file's name makes no sense.
    """
    job, policy = checked_job(source, stdin, limits, files, channel=False), meant(policy)
    started = time.monotonic()
    execution = await elsewhere(lambda home: _run(home, job, policy))
    note_run(execution, started)
    return execution


def run_program_sync(
    source: str,
    *,
    stdin: str = "",
    limits: Limits = Limits(),  # noqa: B008
    policy: str = "auto",
    files: Mapping[str, str] = {},
) -> Execution:
    """`run_program` for code without an event loop; it may also be called inside one."""
    job, policy = checked_job(source, stdin, limits, files, channel=False), meant(policy)
    started = time.monotonic()
    home = engine()
    future = home.submit(_run(home, job, policy))
    try:
        execution = future.result()
    except BaseException:
        future.cancel()
        raise
    note_run(execution, started)
    return execution


def detect(policy: str = "auto") -> Detection:
    """The backend that this process uses, proved by starting a sandbox; remembered."""
    home, policy = engine(), meant(policy)
    return home.submit(home.detect(parts(policy)[0])).result()


async def _run(home: Engine, job: Job, policy: str) -> Execution:
    async with home.running, home.sandbox(policy, job.limits.disk_mb) as sandbox:
        try:
            return await run_in(sandbox, job)
        finally:
            sandbox.channel.close()


async def run_in(sandbox: Sandbox, job: Job) -> Execution:
    """Run a job. SandboxUnavailable: the sandbox failed before the program started."""
    try:
        return await sandbox.run(job)
    except BackendFailed as error:
        raise SandboxUnavailable(
            f"the {sandbox.level.value} sandbox failed, so the program was not run: {error}"
        ) from error


async def elsewhere(work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
    """Await work of the engine's loop. A cancelled caller goes on when the work has ended."""
    home, loop, ended = engine(), asyncio.get_running_loop(), asyncio.Event()

    async def tracked() -> T:
        try:
            return await work(home)
        finally:
            with contextlib.suppress(RuntimeError):  # the caller did not wait: its loop is closed
                loop.call_soon_threadsafe(ended.set)

    future = home.submit(tracked())
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 15)
        raise


def note_run(execution: Execution, started: float) -> None:
    """Put a run into the current trace."""
    note(
        ProgramRun(
            started=started,
            seconds=execution.seconds,
            level=execution.level.value,
            outcome=execution.ending.value,
            limits_hit=execution.limits_hit,
        )
    )


def checked_job(
    source: str, stdin: str, limits: Limits, files: Mapping[str, str], *, channel: bool
) -> Job:
    """A job whose limits and names make sense. BadInput: all that does not."""
    faults = []
    for name, value in vars(limits).items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        unset = name == "cpu_seconds" and value is None
        if not unset and not (number and 0 < value < 1 << 30):
            where, fix = f"limits.{name}", "give a positive number"
            faults.append(Fault(where, "a number above 0", repr(value), fix))
    for name in files:
        plain = name and not name.startswith("/") and "\0" not in name and name != "main.py"
        if not plain or posixpath.normpath(name) != name or name.split("/")[0] in ("..", "."):
            where, fix = f"files[{name!r}]", "rename it"
            faults.append(Fault(where, "a relative path, not main.py", repr(name), fix))
    size = sum(len(text) for text in (source, *files.values())) / (1 << 20)
    if not faults and size > limits.disk_mb:
        most = f"at most limits.disk_mb ({limits.disk_mb})"
        faults.append(Fault("files", most, f"{size:.1f} MB", "shorten"))
    if faults:
        raise BadInput("a program cannot be run like that", faults)
    return Job(source, stdin, limits, dict(files), channel)


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
            await asyncio.wait([self._running])
            return None
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        return await self._give_up("") if message is None else message

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
                return await self._give_up("output_kb")
            piece = b""
            with contextlib.suppress(ConnectionResetError):
                piece = await loop.sock_recv(self._socket, 1 << 16)
            if not piece:
                return None
            self._received += piece
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._seen = 0
        return await self._give_up("output_kb") if len(line) > self._bound else line

    async def _give_up(self, limit: str) -> Any:
        self._received.clear()

        async def stop(_: Engine) -> None:
            self._sandbox.stop(limit)

        await elsewhere(stop)
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
            alone. It is ours: nothing is confined from files yet while it loads.

    Raises:
        SandboxUnavailable, BadInput: as `run_program`.
    """
    job, policy = checked_job(source, "", limits, files, channel=True), meant(policy)
    loop = asyncio.get_running_loop()
    taken: asyncio.Future[Sandbox] = loop.create_future()

    async def run(home: Engine) -> Execution:
        async with home.sandbox(policy, limits.disk_mb, preload) as sandbox:
            loop.call_soon_threadsafe(taken.set_result, sandbox)
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
