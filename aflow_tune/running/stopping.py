"""Stops work in an event loop when the user asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def until_stopped(
    work: Coroutine[Any, Any, T], stop: Callable[[], bool], tell: Callable[[], None]
) -> T:
    """The result of `work`. Once `stop()` is true (asked every 0.2 s), calls `tell` and cancels
    `work`. Raises asyncio.CancelledError if that ended it, else what `work` raised."""
    task, told = asyncio.ensure_future(work), False
    while not task.done():
        await asyncio.wait([task], timeout=0.2)
        if not told and not task.done() and stop():
            told = True
            tell()
            task.cancel()
    return await task
