"""Work of an event loop that ends early when somebody asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_POLL_SECONDS = 0.2
T = TypeVar("T")


async def until_stopped(
    work: Coroutine[Any, Any, T], stop: Callable[[], bool], tell: Callable[[], None]
) -> T:
    """The result of `work`, which is cancelled once `stop()` is true, after one call of `tell`.

    Raises:
        asyncio.CancelledError: it was cancelled, and had not ended by then.
    """
    task = asyncio.ensure_future(work)
    told = False
    while not task.done():
        await asyncio.wait([task], timeout=_POLL_SECONDS)
        if not told and not task.done() and stop():
            told = True
            tell()
            task.cancel()
    return await task
