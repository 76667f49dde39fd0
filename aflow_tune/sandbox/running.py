"""Run a program in the sandbox, from async or plain code, or exchange messages with one.

One thread per process, the engine, starts sandboxes and runs programs in them. A sandbox ends with
that thread (the kernel kills it) or when its socket closes. Each is used once; from the second
program on, some are kept ready of each kind that was used. A forked process starts its own engine.

Messages are JSON values, one per line, over a private socket; the program uses them through the
module `aflow_channel`. A line that is not JSON, is null, or exceeds the output limit ends the
program. The socket is read only while `receive` waits.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import json
import os
import posixpath
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from aflow_tune.errors import AflowTuneError, BadInput, Fault
from aflow_tune.sandbox.backends import (
    Detection,
    attack,
    check_machine,
    launch,
    unavailable,
    unsafe_warning,
)
from aflow_tune.sandbox.policy import meant, parts
from aflow_tune.sandbox.process import Job, Sandbox, ends
from aflow_tune.sandbox.types import BackendFailed, Execution, Level, Limits, SandboxUnavailable
from aflow_tune.trace import ProgramRun, note

T = TypeVar("T")

_Kind = tuple[Level, int, str, tuple[str, ...]]
"""Level, disk in MB, the preloaded module, the packages that programs may import."""


class Engine:
    """Starts and keeps sandboxes. Except `submit` and `close`, call methods on its own loop."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        self.pid, self._keep, self._served = os.getpid(), max(2, min(4, cores)), 0
        self._warned = False
        self._spare: defaultdict[_Kind, list[asyncio.Task[Sandbox]]] = defaultdict(list)
        self._loop = asyncio.new_event_loop()
        self._found: dict[str, Detection] = {}
        self._detecting = asyncio.Lock()
        self.running = asyncio.Semaphore(4 * cores)
        """Bounds how many programs of `run_program` run at once."""
        self._starting = asyncio.Semaphore(2 * cores)
        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name="aflow-tune-sandbox", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @contextlib.asynccontextmanager
    async def sandbox(self, policy: str, disk_mb: int, preload: str = "") -> AsyncIterator[Sandbox]:
        """A sandbox for the block, with the module `preload` loaded; leaving the block ends it.
        Raises SandboxUnavailable: no backend that the policy accepts can be built."""
        backend, packages = parts(policy)
        found = await self.detect(backend)
        if found.level is None:
            raise SandboxUnavailable(unavailable(backend, found))
        if found.level is Level.UNSAFE_SUBPROCESS and not self._warned:
            self._warned = True
            print(unsafe_warning(), file=sys.stderr, flush=True)
        # Preloaded code runs a graph, which imports no packages.
        sandbox = await self._take((found.level, disk_mb, preload, () if preload else packages))
        try:
            yield sandbox
        finally:
            # A cancelled caller may continue only when the process tree is dead.
            closing = asyncio.ensure_future(sandbox.close())
            while not closing.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(closing)

    async def detect(self, policy: str) -> Detection:
        async with self._detecting:
            if policy not in self._found:
                self._found[policy] = await self._detect(policy)
            return self._found[policy]

    async def _detect(self, policy: str) -> Detection:
        reasons: dict[str, str] = {}
        if sys.platform != "linux":
            return Detection(None, {policy: "needs Linux"})
        if policy == Level.UNSAFE_SUBPROCESS:
            return Detection(Level.UNSAFE_SUBPROCESS, {policy: "asked for; it confines nothing"})
        order = (Level.BUBBLEWRAP, Level.LANDLOCK) if policy == "auto" else (Level(policy),)
        for level in order:
            try:
                check_machine(level)
                sandbox = await self.start(level, Limits().disk_mb)
                try:
                    if level is Level.LANDLOCK:  # `ready` has checked bubblewrap
                        await attack(sandbox)
                finally:
                    await _discard(sandbox)
                reasons[level.value] = "a sandbox was started and seen to hold"
                return Detection(level, reasons)
            except (BackendFailed, OSError) as error:
                reasons[level.value] = str(error)
        return Detection(None, reasons)

    async def start(
        self, level: Level, disk_mb: int, preload: str = "", packages: tuple[str, ...] = ()
    ) -> Sandbox:
        """A new sandbox that is ready. Raises BackendFailed: it did not become ready."""
        async with self._starting:
            try:
                sandbox = Sandbox(level, launch(level, disk_mb, packages), preload)
            except OSError as error:
                raise BackendFailed(str(error)) from error
            try:
                await sandbox.ready()
            except BaseException:
                await asyncio.shield(sandbox.close())
                sandbox.channel.close()
                raise
            return sandbox

    async def _take(self, kind: _Kind) -> Sandbox:
        self._served += 1
        spare = self._spare[kind]
        found: Sandbox | None = None
        while spare and found is None:
            with contextlib.suppress(BackendFailed):
                found = await spare.pop(0)
                if not found.alive:
                    await _discard(found)
                    found = None
        if found is None:
            with _told(kind[0]):
                found = await self.start(*kind)
        if self._served > 1:
            missing = self._keep - len(spare)
            spare += [self._loop.create_task(self.start(*kind)) for _ in range(missing)]
        return found

    def close(self) -> None:
        """End the spare sandboxes, at process exit; those in use end with the process."""
        if self.pid != os.getpid():
            return

        async def shut() -> None:
            spare = [task for tasks in self._spare.values() for task in tasks]
            for sandbox in await asyncio.gather(*spare, return_exceptions=True):
                if isinstance(sandbox, Sandbox):
                    await _discard(sandbox)

        with contextlib.suppress(Exception):
            self.submit(shut()).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


async def _discard(sandbox: Sandbox) -> None:
    await sandbox.close()
    sandbox.channel.close()


_lock = threading.Lock()
_engine: Engine | None = None


def engine() -> Engine:
    global _engine
    with _lock:
        if _engine is None or _engine.pid != os.getpid():
            _engine = Engine()
            atexit.register(_engine.close)
        return _engine


def _forget() -> None:
    # A thread that does not exist in the child may have held the lock.
    global _lock, _engine
    _lock, _engine = threading.Lock(), None
    for end in list(ends):
        end.close()


os.register_at_fork(after_in_child=_forget)


async def run_program(
    source: str,
    *,
    stdin: str = "",
    limits: Limits = Limits(),  # noqa: B008
    policy: str = "auto",
    files: Mapping[str, str] = {},
) -> Execution:
    """Run a Python program as `main.py` in an empty working folder, by the interpreter that runs
    us, with the standard library and the packages of the policy. Cancelling the call kills it.

    `files`: texts in the working folder, by relative path. `policy`: a `Level`, or auto: what the
    run's configuration says, else the strongest backend that can be built, never unsafe_subprocess;
    packages follow: `auto+numpy`. Raises SandboxUnavailable: no such backend can be built, nothing
    was run; BadInput: the policy, a package, a limit or a file's name is invalid.
    """
    job, policy = checked_job(source, stdin, limits, files, channel=False), meant(policy)
    started = time.monotonic()
    execution = await elsewhere(lambda home: _run(home, job, policy))
    note_run(execution, started)
    return execution


def run_program_sync(source: str, **options: Any) -> Execution:
    """`run_program` for plain code. Inside an event loop it works too, and blocks the loop."""
    future = engine().submit(run_program(source, **options))
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def detect(policy: str = "auto") -> Detection:
    """The backend that this process uses, tested by starting a sandbox; cached."""
    home = engine()
    return home.submit(home.detect(parts(meant(policy))[0])).result()


async def _run(home: Engine, job: Job, policy: str) -> Execution:
    async with home.running, home.sandbox(policy, job.limits.disk_mb) as sandbox:
        try:
            with _told(sandbox.level):
                return await sandbox.run(job)
        finally:
            sandbox.channel.close()


@contextlib.contextmanager
def _told(level: Level) -> Iterator[None]:
    """Raise SandboxUnavailable for a sandbox that failed before the program started."""
    try:
        yield
    except BackendFailed as error:
        told = f"the {level.value} sandbox failed, so the program was not run: {error}"
        raise SandboxUnavailable(told) from error


async def elsewhere(work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
    """Await work on the engine's loop. Cancelling cancels the work and waits for its end."""
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
    level, outcome = execution.level.value, execution.ending.value
    told: Any = {"seconds": execution.seconds, "limits_hit": execution.limits_hit}
    note(ProgramRun(started=started, level=level, outcome=outcome, **told))


def checked_job(
    source: str, stdin: str, limits: Limits, files: Mapping[str, str], *, channel: bool
) -> Job:
    """The job. Raises BadInput with every invalid limit and file name."""
    faults = []
    for name, value in vars(limits).items():
        unset = name == "cpu_seconds" and value is None
        if not unset and not (isinstance(value, int | float) and 0 < value < 1 << 30):
            told = "a number above 0", repr(value), "give a positive number"
            faults.append(Fault(f"limits.{name}", *told))
    for name in files:
        plain = name and not name.startswith("/") and "\0" not in name and name != "main.py"
        if not plain or posixpath.normpath(name) != name or name.split("/")[0] in ("..", "."):
            told = "a relative path, not main.py", repr(name), "rename it"
            faults.append(Fault(f"files[{name!r}]", *told))
    size = sum(len(text) for text in (source, *files.values())) / (1 << 20)
    if not faults and size > limits.disk_mb:
        told = f"at most limits.disk_mb ({limits.disk_mb})", f"{size:.1f} MB", "shorten"
        faults.append(Fault("files", *told))
    if faults:
        raise BadInput("a program cannot be run like that", faults)
    return Job(source, stdin, limits, dict(files), channel)


class ProgramEnded(AflowTuneError, BrokenPipeError):
    """A message was sent to a program that has ended."""


class Channel:
    """The caller's end of the messages; `send` and `receive` may be awaited concurrently."""

    def __init__(self, sandbox: Sandbox, running: asyncio.Future[Execution], bound: int) -> None:
        self._sandbox, self._socket = sandbox, sandbox.channel
        self._running, self._bound = running, bound
        self._received = bytearray()
        self._seen = 0
        self._sending, self._receiving = asyncio.Lock(), asyncio.Lock()

    async def send(self, message: Any) -> None:
        """Send a JSON value other than null. Raises TypeError, ValueError: it is not one, or is too
        long; ProgramEnded: the program has ended."""
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
        """The program's next message, any JSON value but null; None once the program has ended."""
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
        """How the program ended. Raises RuntimeError: `receive` has not returned None yet."""
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
    """Run a program as `run_program` does, and exchange messages of at most `limits.output_kb`
    with it. Leaving the block kills it. `preload` names a module of this package that the program
    imports as `aflow_preloaded`; it is loaded before limits and confinement begin."""
    job, policy = checked_job(source, "", limits, files, channel=True), meant(policy)
    loop = asyncio.get_running_loop()
    taken: asyncio.Future[Sandbox] = loop.create_future()

    async def run(home: Engine) -> Execution:
        async with home.sandbox(policy, limits.disk_mb, preload) as sandbox:
            loop.call_soon_threadsafe(taken.set_result, sandbox)
            with _told(sandbox.level):
                return await sandbox.run(job)

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
