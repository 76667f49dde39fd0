"""A thread and an event loop of its own for each rollout.

User code may block: `time.sleep`, a slow library call, an endless loop. Here that stops only its
own thread, and the runner waits for it with a limit. A thread inside a C function cannot be ended:
it is abandoned as a daemon, and told to stop as soon as it executes Python code again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""How long a rollout may take to answer after its time is up, before it counts as blocked."""
MAX_BLOCKING_CALLS = 32
"""Calls of `asyncio.to_thread` that one rollout works on at once; further ones wait."""


class TimedOut(Exception):
    """The rollout exceeded its time while its event loop was alive; `stack` is where it was."""

    def __init__(self, message: str, stack: traceback.StackSummary) -> None:
        super().__init__(message)
        self.stack = stack


class Blocked(TimedOut):
    """The rollout exceeded its time and its event loop does not answer."""


class Escaped(Exception):
    """Holds what a rollout raised that is no `Exception`, such as SystemExit or a cancellation:
    raised as itself it would end the runner."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


class RolloutThread(Generic[T]):
    """Runs one coroutine in a new thread: `await RolloutThread(make).result(seconds)`.

    `make` is called in the thread, inside its event loop and a copy of the current context.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        async def body() -> T:
            return await make()

        self._runner_loop = asyncio.get_running_loop()
        self._done: asyncio.Future[T] = self._runner_loop.create_future()
        self._given_up = False
        self._executor = _DaemonExecutor()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(self._executor)
        self._task = self._loop.create_task(body())
        self._thread = threading.Thread(target=self._main, name="rollout", daemon=True)
        self._thread.start()

    async def result(self, seconds: float) -> T:
        """The coroutine's result, or the `Exception` that it raised.

        Raises:
            TimedOut: it took longer than `seconds`; it was cancelled.
            Blocked: it took longer and cannot be cancelled; its thread is abandoned.
            Escaped: it raised something that is no `Exception`.
        """
        try:
            finished, _ = await asyncio.wait([self._done], timeout=seconds)
            if finished:
                return self._done.result()
            answered: asyncio.Future[None] = self._runner_loop.create_future()

            def cancel() -> None:
                _call(self._runner_loop, answered.cancel)
                self._task.cancel()

            _call(self._loop, cancel)
            waiting: list[asyncio.Future[Any]] = [answered, self._done]
            await asyncio.wait(waiting, timeout=GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not (answered.done() or self._done.done()):
                # A frame must not be kept: it keeps every local variable of the rollout alive.
                stack = traceback.extract_stack(sys._current_frames().get(self._thread.ident or 0))
                raise Blocked(f"its event loop does not answer after {seconds:g} s", stack)
            await asyncio.wait([self._done], timeout=GRACE_SECONDS)
            error = self._done.exception() if self._done.done() else None
            cause = error.error if isinstance(error, Escaped) else error
            stack = traceback.extract_tb(cause.__traceback__ if cause else None)
            raise TimedOut(f"not finished after {seconds:g} s", stack)
        except (asyncio.CancelledError, TimedOut):
            self._abandon()
            raise

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._finish(self._loop.run_until_complete(self._task), None)
        except BaseException as error:
            self._finish(None, error)
        finally:
            try:
                with contextlib.suppress(RuntimeError):  # `_abandon` may stop the loop meanwhile
                    left = asyncio.all_tasks(self._loop)
                    for task in left:
                        task.cancel()
                    if left:
                        waited = asyncio.wait(left, timeout=GRACE_SECONDS)
                        for task in self._loop.run_until_complete(waited)[0]:
                            if not task.cancelled():
                                task.exception()  # seen: nobody else will look
                    self._loop.run_until_complete(self._loop.shutdown_asyncgens())
                asyncio.set_event_loop(None)
            finally:
                self._loop.close()

    def _finish(self, value: T | None, error: BaseException | None) -> None:
        """Tell the runner; what the rollout left behind is cleaned up after that."""

        def deliver() -> None:
            if self._given_up or self._done.done():
                return
            if error is None:
                self._done.set_result(value)  # type: ignore[arg-type]
            else:
                self._done.set_exception(error if isinstance(error, Exception) else Escaped(error))

        _call(self._runner_loop, deliver)

    def _abandon(self) -> None:
        """Stop waiting; end the thread if anything can."""
        self._given_up = True
        _call(self._loop, self._loop.stop)
        for thread in [*self._executor.running, self._thread]:
            if thread.is_alive():
                number, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    """In `loop`'s thread, unless the loop is closed: it has finished then."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


class _DaemonExecutor(ThreadPoolExecutor):
    """What `asyncio.to_thread` uses in a rollout: a daemon thread for each call. The threads of the
    standard executor are joined when the process ends: one that hangs would keep it alive."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)  # never used: `submit` below starts the threads
        self._slots = threading.Semaphore(MAX_BLOCKING_CALLS)
        self.running: set[threading.Thread] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            with self._slots:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)
                finally:
                    self.running.discard(thread)

        thread = threading.Thread(target=work, name="rollout", daemon=True)
        self.running.add(thread)
        thread.start()
        return future
