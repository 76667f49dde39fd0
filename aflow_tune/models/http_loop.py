"""One event loop, in a thread of its own, for all HTTP traffic of this process.

Workflow runs each have a thread and an event loop of their own, while connections belong to the
loop that opened them. With one loop for all, runs share connections and the limits on
concurrency, and a client may be used from anywhere. The price is a hand-over between threads,
measured in `benchmarks/client_overhead.py`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner = 0


def http_loop() -> asyncio.AbstractEventLoop:
    """The loop; started with the first use, and again in a forked child."""
    global _loop, _owner
    with _lock:
        if _loop is None or _owner != os.getpid():
            _loop, _owner = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="model-clients", daemon=True).start()
        return _loop


async def in_http_loop(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Await `make()` in that loop, in a copy of the caller's context.

    Cancelling the caller cancels the coroutine there, which closes its connection.
    """
    loop = http_loop()
    if asyncio.get_running_loop() is loop:
        return await make()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), loop))
