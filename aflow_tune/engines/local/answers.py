"""Answers of a frozen model to requests that leave nothing to chance, each computed once.

A frozen executor is asked the same thing by many runs of a group: their graphs differ, the
problem and most instructions do not. While one such request is being decoded the others wait
for its answer; later ones get it from memory. The weights must never change.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aflow_tune.engines.local.sampling import Completion, SamplingParams

MOST = 4096
"""Answers that are kept; the one unused for longest goes first."""

Submit = Callable[[list[int], SamplingParams], Awaitable[list[Completion]]]
_Key = tuple[tuple[int, ...], str]


@dataclass
class _Entry:
    answer: asyncio.Task[list[Completion]]
    waiting: int = 0


class GreedyAnswers:
    """`submit` with a memory. To be used from one event loop."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()

    async def submit(self, prompt_ids: list[int], params: SamplingParams) -> list[Completion]:
        """Complete one prompt; raises what `Sampler.submit` raises. Errors are not remembered.

        The decoding goes on as long as anybody waits for it.
        """
        if params.temperature != 0:
            return await self._submit(prompt_ids, params)
        key = (tuple(prompt_ids), repr(params))
        entry = self._entries.get(key)
        if entry is None:
            task = asyncio.ensure_future(self._submit(prompt_ids, params))
            entry = self._entries[key] = _Entry(task)
            while len(self._entries) > MOST:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        entry.waiting += 1
        try:
            return await asyncio.shield(entry.answer)
        except BaseException:
            if self._entries.get(key) is entry and (entry.waiting == 1 or entry.answer.done()):
                del self._entries[key]
            raise
        finally:
            entry.waiting -= 1
            if not entry.waiting and not entry.answer.done():
                entry.answer.cancel()
