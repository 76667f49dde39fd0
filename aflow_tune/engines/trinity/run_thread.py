"""A thread and an event loop of its own for each run of a workflow.

User code may block: `time.sleep`, a slow library call, an endless loop. In the runner's event
loop that would stop every other run and the time-outs themselves. Here it stops only its own
thread; the runner waits for it with a limit, and gives it up when the limit has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""How long a run may take to answer after its time is up, before it counts as blocked."""


class TimedOut(Exception):
    """The run exceeded its time while its event loop was alive."""


class Blocked(Exception):
    """The run exceeded its time and its event loop does not answer."""


class RunThread(Generic[T]):
    """Runs one coroutine in a new thread: `await RunThread(make).result(seconds)`.

    `make` is called in the thread, inside its event loop and a copy of the current context.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self._caller_loop = asyncio.get_running_loop()
        self._done: asyncio.Future[T] = self._caller_loop.create_future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._main,), name="workflow-run", daemon=True
        )
        self._thread.start()

    async def result(self, seconds: float) -> T:
        """The coroutine's result, or what it raised.

        Raises:
            TimedOut: it took longer than `seconds`; it was cancelled.
            Blocked: it took longer and cannot be cancelled; its thread is abandoned.
        """
        finished, _ = await asyncio.wait([self._done], timeout=seconds)
        if finished:
            return self._done.result()
        answered = self._caller_loop.create_future()
        self._cancel(answered)
        await asyncio.wait([answered, self._done], timeout=GRACE_SECONDS)
        if not answered.done() and not self._done.done():
            self._interrupt()
            raise Blocked(f"no answer from its event loop after {seconds:g} s")
        await asyncio.wait([self._done], timeout=GRACE_SECONDS)
        if self._done.done():
            self._done.exception()  # the cancellation; marks it as seen
        raise TimedOut(f"not finished after {seconds:g} s")

    def _main(self) -> None:
        try:
            self._finish(asyncio.run(self._body()), None)
        except BaseException as error:
            self._finish(None, error)

    async def _body(self) -> T:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(self._make())
        return await self._task

    def _finish(self, value: T | None, error: BaseException | None) -> None:
        def deliver() -> None:
            if self._done.cancelled():
                return
            if error is None:
                self._done.set_result(value)  # type: ignore[arg-type]
            elif isinstance(error, Exception):
                self._done.set_exception(error)
            else:
                # A future must not carry SystemExit, KeyboardInterrupt or a cancellation
                # that user code raised: they would end the runner.
                self._done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

        with contextlib.suppress(RuntimeError):  # the runner's loop may be gone by now
            self._caller_loop.call_soon_threadsafe(deliver)

    def _cancel(self, answered: asyncio.Future[None]) -> None:
        def answer() -> None:
            if not answered.done():
                answered.set_result(None)

        def cancel() -> None:
            with contextlib.suppress(RuntimeError):
                self._caller_loop.call_soon_threadsafe(answer)
            if self._task is not None:
                self._task.cancel()

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(cancel)

    def _interrupt(self) -> None:
        """Raise SystemExit in the blocked thread; ends endless loops written in Python."""
        if self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(SystemExit)
            )
