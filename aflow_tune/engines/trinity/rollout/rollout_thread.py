"""A thread and an event loop of its own for each rollout.

User code may block: `time.sleep`, a slow library call, an endless loop. In the runner's event
loop that would stop every other rollout and the time-outs themselves. Here it stops only its own
thread; the runner waits for it with a limit and gives it up when the limit has passed.

What this cannot do: end a thread that is inside a C function. Such a thread is abandoned. It
is a daemon, so it does not keep the process alive, and it is told to stop as soon as it
executes Python code again.
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
    """The rollout exceeded its time while its event loop was alive; `error` is its cancellation."""

    def __init__(self, seconds: float, error: BaseException | None) -> None:
        super().__init__(f"not finished after {seconds:g} s")
        self.error = error


class Blocked(Exception):
    """The rollout exceeded its time and its event loop does not answer; `stack` is where it is."""

    def __init__(self, seconds: float, stack: traceback.StackSummary) -> None:
        super().__init__(f"its event loop does not answer after {seconds:g} s")
        self.stack = stack


class Escaped(Exception):
    """What a rollout raised that is no `Exception`, such as SystemExit or a cancellation.

    It travels in here because it would end the runner if it were raised as itself.
    """

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
        self._thread = _Thread(self._main)
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
        except asyncio.CancelledError:
            self._abandon()
            raise
        if finished:
            return self._done.result()
        answered: asyncio.Future[None] = self._runner_loop.create_future()
        self._cancel(answered)
        waiting: list[asyncio.Future[Any]] = [answered, self._done]
        await asyncio.wait(waiting, timeout=GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done() and not self._done.done():
            stack = self._stack()
            self._abandon()
            raise Blocked(seconds, stack)
        await asyncio.wait([self._done], timeout=GRACE_SECONDS)
        error = self._done.exception() if self._done.done() else None
        self._abandon()
        raise TimedOut(seconds, error.error if isinstance(error, Escaped) else error)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._finish(self._loop.run_until_complete(self._task), None)
        except BaseException as error:
            self._finish(None, error)
        finally:
            self._close_loop()

    def _finish(self, value: T | None, error: BaseException | None) -> None:
        """Tell the runner; what the rollout left behind is cleaned up after that."""

        def deliver() -> None:
            if self._given_up or self._done.done():
                return
            if error is None:
                self._done.set_result(value)  # type: ignore[arg-type]
            else:
                self._done.set_exception(error if isinstance(error, Exception) else Escaped(error))

        with contextlib.suppress(RuntimeError):  # the runner's loop may be closed by now
            self._runner_loop.call_soon_threadsafe(deliver)

    def _cancel(self, answered: asyncio.Future[None]) -> None:
        def answer() -> None:
            if not answered.done():
                answered.set_result(None)

        def cancel() -> None:
            with contextlib.suppress(RuntimeError):
                self._runner_loop.call_soon_threadsafe(answer)
            self._task.cancel()

        with contextlib.suppress(RuntimeError):  # its loop is closed: it has just finished
            self._loop.call_soon_threadsafe(cancel)

    def _abandon(self) -> None:
        """Stop waiting; end the thread if anything can."""
        self._given_up = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._executor.interrupt()
        self._thread.interrupt()

    def _close_loop(self) -> None:
        try:
            with contextlib.suppress(RuntimeError):  # `_abandon` may stop the loop meanwhile
                self._end_tasks()
            asyncio.set_event_loop(None)
        finally:
            try:
                self._thread.settle()  # an interruption inside `close` would leave it half closed
            finally:
                self._loop.close()

    def _end_tasks(self) -> None:
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            done, _ = self._loop.run_until_complete(asyncio.wait(left, timeout=GRACE_SECONDS))
            for task in done:
                if not task.cancelled():
                    task.exception()  # seen: the rollout is over, nobody else will look
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    def _stack(self) -> traceback.StackSummary:
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame else traceback.StackSummary()
        del frame  # a frame keeps alive every local variable of the rollout
        return stack


class _Thread(threading.Thread):
    """A daemon thread that can be told to stop while it executes Python code."""

    def __init__(self, target: Callable[[], None]) -> None:
        super().__init__(target=target, name="rollout", daemon=True)
        self._over = False
        self._guard = threading.Lock()

    def run(self) -> None:
        try:
            super().run()
        except SystemExit:  # from `interrupt`
            pass
        finally:
            self.settle()

    def settle(self) -> None:
        """Called in the thread: `interrupt` does nothing from here on."""
        with self._guard:
            self._over = True

    def interrupt(self) -> None:
        """Raise SystemExit in it. Called once; the guard keeps a reused thread id out of it."""
        with self._guard:
            if self.ident is not None and not self._over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self.ident), ctypes.py_object(SystemExit)
                )


class _DaemonExecutor(ThreadPoolExecutor):
    """What `asyncio.to_thread` uses in a rollout, with daemon threads.

    The threads of the standard executor are joined when the process ends: one call that hangs
    would keep a finished training alive. A thread for each call instead, as many at a time as
    `MAX_BLOCKING_CALLS`.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1)  # never used: `submit` below starts the threads
        self._slots = threading.Semaphore(MAX_BLOCKING_CALLS)
        self._running: set[_Thread] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            with self._slots:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                finally:
                    self._running.discard(thread)

        thread = _Thread(work)
        self._running.add(thread)
        thread.start()
        return future

    def interrupt(self) -> None:
        """Tell the calls that still run to stop."""
        for thread in list(self._running):
            thread.interrupt()
