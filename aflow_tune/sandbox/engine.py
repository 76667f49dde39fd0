"""One thread a process that starts sandboxes, keeps a few ready and runs programs in them.

The thread has an event loop of its own, so a workflow that computes for seconds on its loop
delays no limit. It lives as long as the process: the kernel ends a sandbox with the thread that
started it, and one that is not reached by that ends when its socket closes.

Each sandbox is used once. From the second program on, some are kept ready in advance, of each
kind that was wanted; when none was wanted for a while they end. A process that was forked starts
an engine of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from aflow_tune.sandbox.backends import (
    Detection,
    attack,
    check_machine,
    launch,
    unavailable,
    unsafe_warning,
)
from aflow_tune.sandbox.policy import parts
from aflow_tune.sandbox.process import BackendFailed, Sandbox, ends
from aflow_tune.sandbox.types import Level, Limits, SandboxUnavailable

T = TypeVar("T")

IDLE_SECONDS = 20.0
REFILL_SECONDS = 0.03
"""After one with a module was taken, until another is started; at once where none is left."""
_Kind = tuple[Level, int, str, tuple[str, ...]]
"""A level, how much disk its sandboxes have in MB, the module that they load in advance, and the
packages that their programs may import."""


class Engine:
    """Every public method is for the engine's own loop, except `submit` and `close`."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        self.pid = os.getpid()
        self._waiting: defaultdict[_Kind, list[Sandbox]] = defaultdict(list)
        self._coming: defaultdict[_Kind, set[asyncio.Task[None]]] = defaultdict(set)
        self._keep = max(2, min(4, cores))
        self._served = 0
        self._closing = False
        self._idle: asyncio.TimerHandle | None = None
        self._loop = asyncio.new_event_loop()
        self._found: dict[str, Detection] = {}
        self._detecting = asyncio.Lock()
        self._warned = False
        self.running = asyncio.Semaphore(4 * cores)
        """Programs that run at once; held by `run_program`, not by channels."""
        self._starting = asyncio.Semaphore(2 * cores)
        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name="aflow-tune-sandbox", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run on the engine's loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @contextlib.asynccontextmanager
    async def sandbox(self, policy: str, disk_mb: int, preload: str = "") -> AsyncIterator[Sandbox]:
        """A sandbox of its own for the block; it is gone when the block is left.

        Args:
            preload: a module of ours that it has loaded before it gets its program; '' for none.

        Raises:
            SandboxUnavailable: no backend that the policy accepts can be built.
        """
        backend, packages = parts(policy)
        found = await self.detect(backend)
        if found.level is None:
            raise SandboxUnavailable(unavailable(backend, found))
        if found.level is Level.UNSAFE_SUBPROCESS and not self._warned:
            self._warned = True
            print(unsafe_warning(), file=sys.stderr, flush=True)
        # Code that is loaded in advance is a graph's, which imports nothing of the kind.
        sandbox = await self._take((found.level, disk_mb, preload, () if preload else packages))
        try:
            yield sandbox
        finally:
            # A cancelled caller may go on only when the tree is dead.
            closing = asyncio.ensure_future(sandbox.close())
            while not closing.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(closing)

    async def detect(self, policy: str) -> Detection:
        """The backend for a policy, proved by starting a sandbox; remembered."""
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
                await self._prove(level)
            except (BackendFailed, OSError) as error:
                reasons[level.value] = str(error)
            else:
                reasons[level.value] = "a sandbox was started and seen to hold"
                return Detection(level, reasons)
        return Detection(None, reasons)

    async def _prove(self, level: Level) -> None:
        sandbox = await self.start(level, Limits().disk_mb)
        if level is Level.BUBBLEWRAP:  # `ready` has looked at it; a program may have it
            self._waiting[level, Limits().disk_mb, "", ()].append(sandbox)
            self._rest_later()
            return
        try:
            await attack(sandbox)
        finally:
            await _discard(sandbox)

    async def start(
        self, level: Level, disk_mb: int, preload: str = "", packages: tuple[str, ...] = ()
    ) -> Sandbox:
        """A new sandbox that is ready. BackendFailed: it did not become so."""
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
        waiting, found = self._waiting[kind], None
        while waiting and (found is None or not found.alive):
            if found is not None:
                await _discard(found)
            found = waiting.pop()
        if found is None or not found.alive:
            try:
                found = await self.start(*kind)
            except BackendFailed as error:
                raise SandboxUnavailable(
                    f"the {kind[0].value} sandbox could not be started, so the program was not "
                    f"run: {error}"
                ) from error
        if self._served > 1 and waiting and kind[2]:
            # Starting one takes a core for long, which this one's program may want.
            self._loop.call_later(REFILL_SECONDS, self._refill, kind)
        elif self._served > 1:
            self._refill(kind)
        return found

    def _refill(self, kind: _Kind) -> None:
        if self._closing:
            return
        self._rest_later()
        coming = self._coming[kind]
        for _ in range(self._keep - len(self._waiting[kind]) - len(coming)):
            task = self._loop.create_task(self._add(kind))
            coming.add(task)
            task.add_done_callback(coming.discard)

    async def _add(self, kind: _Kind) -> None:
        # Who needs one will start one, and say what is wrong.
        with contextlib.suppress(BackendFailed):
            sandbox = await self.start(*kind)
            if self._closing:
                await _discard(sandbox)
            else:
                self._waiting[kind].append(sandbox)

    def _rest_later(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = self._loop.call_later(IDLE_SECONDS, self._rest)

    def _rest(self) -> None:
        """Nothing ran for a while: end those that wait."""
        for waiting in self._waiting.values():
            while waiting:
                self._loop.create_task(_discard(waiting.pop()))

    async def _shut(self) -> None:
        self._closing = True
        coming = [task for tasks in self._coming.values() for task in tasks]
        await asyncio.gather(*coming, return_exceptions=True)
        left = [sandbox for waiting in self._waiting.values() for sandbox in waiting]
        await asyncio.gather(*(_discard(sandbox) for sandbox in left))

    def close(self) -> None:
        """End what waits. At the end of the process; what runs ends with it."""
        if self.pid != os.getpid():
            return
        with contextlib.suppress(Exception):
            self.submit(self._shut()).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


async def _discard(sandbox: Sandbox) -> None:
    await sandbox.close()
    sandbox.channel.close()


_lock = threading.Lock()
_engine: Engine | None = None


def engine() -> Engine:
    """This process's engine."""
    global _engine
    with _lock:
        if _engine is None or _engine.pid != os.getpid():
            _engine = Engine()
            atexit.register(_engine.close)
        return _engine


def _forget() -> None:
    # The lock may have been held by a thread that does not exist in the child.
    global _lock, _engine
    _lock, _engine = threading.Lock(), None
    for end in list(ends):
        end.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
