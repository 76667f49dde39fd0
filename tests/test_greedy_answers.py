"""A frozen model is asked once for what leaves nothing to chance."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import tiny_sampler

from aflow_tune.engines.local.sampler import Completion, Sampler, SamplingParams
from aflow_tune.engines.local.server import GreedyAnswers
from aflow_tune.errors import BadInput

PROMPT = [5, 6, 7]


def greedy(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def sampler(tiny_model_dir: Path) -> Iterator[Sampler]:
    with tiny_sampler(tiny_model_dir, max_model_len=4000) as sampler:
        yield sampler


def drawn(sampler: Sampler) -> float:
    return sampler.stats()["generated_tokens"]


def test_the_same_request_is_decoded_once(sampler: Sampler) -> None:
    async def ask() -> None:
        answers, before = GreedyAnswers(sampler.submit), drawn(sampler)
        together = await asyncio.gather(*(answers.submit(PROMPT, greedy()) for _ in range(5)))
        later = await answers.submit(list(PROMPT), greedy())
        assert drawn(sampler) - before == 8
        assert [one[0].token_ids for one in together] == [later[0].token_ids] * 5
        assert later == await sampler.submit(PROMPT, greedy())
        # One who leaves does not take the answer from the others.
        leaving, staying = (
            asyncio.ensure_future(answers.submit(PROMPT, greedy(200))) for _ in range(2)
        )
        await asyncio.sleep(0)
        leaving.cancel()
        assert len((await staying)[0].token_ids) == 200
        with pytest.raises(asyncio.CancelledError):
            await leaving

    asyncio.run(ask())


def test_an_error_reaches_all_who_wait_and_is_not_remembered() -> None:
    asked = 0

    async def fail_once(prompt: list[int], params: SamplingParams) -> list[Completion]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if asked == 1:
            raise BadInput("no")
        return [Completion([1], [0.0], "a", "stop")]

    async def ask() -> None:
        answers = GreedyAnswers(fail_once)
        waiting = (answers.submit(PROMPT, greedy()) for _ in range(3))
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in errors] == [BadInput] * 3
        assert (await answers.submit(PROMPT, greedy()))[0].text == "a"

    asyncio.run(ask())
    assert asked == 2
