"""Ends work in an event loop when the user asks for it, or a budget is used up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aflow_tune.config.accounting import spend_of
from aflow_tune.errors import BudgetReached, Interrupted

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

_SLACK_SECONDS = 1.0  # `Run.execute` starts its deadline of `budget.wall_seconds` a little earlier

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


def run_within_limits(
    config: AflowConfig,
    work: Coroutine[Any, Any, T],
    stop: Callable[[], bool],
    phase: Callable[[str], None],
    kept: str,
    folder: Path | str,
) -> T:
    """The result of `work` in an event loop, ended when `stop()` says so or `budget` is used up.
    Raises Interrupted or BudgetReached then, saying what is `kept` in `folder`."""
    seconds = config.budget.wall_seconds
    deadline = float("inf") if seconds is None else time.monotonic() + seconds
    rest = f"{kept[0].upper()}{kept[1:]} in {folder}. The same command goes on from there."
    limited = until_stopped(
        work,
        lambda: stop() or time.monotonic() > deadline,
        lambda: phase(f"stopping: {kept}"),
    )
    try:
        return asyncio.run(limited)
    except BudgetReached as error:
        raise BudgetReached(f"{error} {rest}") from None
    except asyncio.CancelledError:
        reason = spend_of(config).reached()
        if reason is None and time.monotonic() > deadline - _SLACK_SECONDS:
            reason = f"budget.wall_seconds ({seconds:g}) reached"
        if reason is None:
            raise Interrupted(f"stopped. {rest}") from None
        raise BudgetReached(f"{reason}. {rest}") from None
