"""Context of a run: attribution under gather, metrics, step rewards, state keys."""

from __future__ import annotations

import asyncio

import pytest

from aflow_tune.context import (
    RunContext,
    caller,
    current_caller,
    record_metrics,
    state_key,
    step_reward,
)


async def _operator(name: str, run: RunContext, reward: float) -> None:
    with caller(name):
        await asyncio.sleep(0)
        run.note_call()
        await asyncio.sleep(0)
        step_reward(reward)


def test_attribution_and_step_rewards_are_right_under_gather() -> None:
    run = RunContext()

    async def main() -> None:
        with run.activate():
            await asyncio.gather(*(_operator(name, run, i) for i, name in enumerate("abcdef")))

    asyncio.run(main())
    assert sorted((note.caller, note.step_reward) for note in run.calls) == [
        (name, float(i)) for i, name in enumerate("abcdef")
    ]
    assert [note.index for note in run.calls] == list(range(6))


def test_nested_callers_join_and_end() -> None:
    with caller("plan"):
        with caller("search"):
            assert current_caller() == "plan/search"
        assert current_caller() == "plan"
    assert current_caller() == "workflow"


def test_two_runs_never_see_each_other() -> None:
    runs = [RunContext(), RunContext()]

    async def one(index: int) -> None:
        with runs[index].activate():
            await asyncio.sleep(0)
            record_metrics(index=index)
            runs[index].note_call()

    async def main() -> None:
        await asyncio.gather(one(0), one(1))

    asyncio.run(main())
    assert [run.metrics for run in runs] == [{"index": 0.0}, {"index": 1.0}]
    assert [len(run.calls) for run in runs] == [1, 1]


def test_state_keys_hold_for_their_block() -> None:
    run = RunContext()
    with run.activate():
        with state_key("maze:3,4"):
            run.note_call()
        run.note_call()
    assert [note.state_key for note in run.calls] == ["maze:3,4", None]


def test_outside_of_a_run_nothing_happens_but_nonsense_is_refused() -> None:
    record_metrics(correct=1.0)
    step_reward(1.0)
    with pytest.raises(ValueError, match="finite"):
        record_metrics(correct=float("nan"))
    with pytest.raises(ValueError, match="finite"):
        step_reward(float("inf"))
