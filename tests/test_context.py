"""Callers, step rewards, state keys and metrics follow the run through tasks and threads."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Awaitable, Callable, Iterator
from contextvars import copy_context
from typing import Any

import pytest

from aflow_tune.context import (
    CallNote,
    RolloutContext,
    caller,
    current_caller,
    current_rollout,
    record_metrics,
    state_key,
    step_reward,
)


async def call() -> CallNote:
    """What the recording model does: notes the call, then waits for the answer."""
    run = current_rollout()
    assert run is not None
    note = run.note_call()
    await asyncio.sleep(0)
    return note


def play(workflow: Callable[[], Awaitable[Any]]) -> RolloutContext:
    context = RolloutContext()

    async def main() -> None:
        with context.activate():
            await workflow()

    asyncio.run(main())
    return context


def callers(context: RolloutContext) -> list[str]:
    return [note.caller for note in context.calls]


def test_callers_nest_and_end_with_their_block() -> None:
    async def workflow() -> None:
        await call()
        with caller("plan"):
            await call()
            with caller("search"):
                assert current_caller() == "plan/search"
                await call()
            await call()
        await call()

    context = play(workflow)
    assert callers(context) == ["workflow", "plan", "plan/search", "plan", "workflow"]
    assert [note.index for note in context.calls] == [0, 1, 2, 3, 4]


def test_blocks_of_generators_that_take_turns_end_with_the_outermost() -> None:
    def asking(name: str) -> Iterator[None]:
        with caller(name):
            yield

    async def workflow() -> None:
        for _ in zip(asking("a"), asking("b"), strict=True):
            await call()
        await call()

    assert callers(play(workflow))[-1] == "workflow"


def test_parallel_branches_do_not_mix() -> None:
    async def branch(name: str, reward: float) -> None:
        with caller(name):
            for _ in range(3):
                note = await call()
                await asyncio.sleep(0)
                assert note.caller == name
            step_reward(reward)

    async def workflow() -> None:
        await asyncio.gather(*(branch(f"agent{i}", i) for i in range(5)))

    context = play(workflow)
    rewarded = {n.caller: n.step_reward for n in context.calls if n.step_reward is not None}
    assert rewarded == {f"agent{i}": float(i) for i in range(5)}
    assert [n.index for n in context.calls if n.step_reward is not None] == list(range(10, 15))


def test_decorated_functions_open_a_block_for_each_call() -> None:
    @caller("plan")
    async def plan(depth: int) -> None:
        assert current_caller() == "/".join(["plan"] * (3 - depth))
        await call()
        if depth:
            await asyncio.gather(plan(depth - 1), plan(depth - 1))
        assert current_caller() == "/".join(["plan"] * (3 - depth))

    @caller("sync")
    def name() -> str:
        return current_caller()

    @state_key("fixed")
    async def keyed() -> CallNote:
        return await call()

    async def workflow() -> None:
        assert name() == "sync"
        assert current_caller() == "workflow"
        await plan(2)
        notes = await asyncio.gather(keyed(), keyed())
        assert [note.state_key for note in notes] == ["fixed", "fixed"]
        assert (await call()).state_key is None

    context = play(workflow)
    assert callers(context).count("plan/plan/plan") == 4
    assert plan.__name__ == "plan"
    assert asyncio.iscoroutinefunction(plan)


def test_a_run_that_was_given_up_ends_without_changing_another_one() -> None:
    """Its coroutines are closed by the garbage collector, in whatever context is current."""

    async def hangs(kept: list[Any]) -> None:
        with RolloutContext().activate(), caller("hangs"), state_key("hangs"):
            kept.append(asyncio.current_task())
            await asyncio.get_running_loop().create_future()

    async def workflow() -> None:
        with caller("alive"), state_key("alive"):
            tasks: list[Any] = []
            for _ in range(50):
                hanging = hangs(tasks)
                copy_context().run(hanging.send, None)
                tasks.append(hanging)
            tasks.append(tasks)  # a cycle, so that only the collector ends them
            del hanging, tasks
            gc.collect()
            note = await call()
            assert (note.caller, note.state_key) == ("alive", "alive")
        assert current_caller() == "workflow"

    assert len(play(workflow).calls) == 1


def test_step_reward_belongs_to_the_latest_call_also_of_tasks_started_here() -> None:
    async def workflow() -> None:
        await call()
        step_reward(1)
        step_reward(-1)
        await asyncio.wait_for(call(), timeout=60)  # a task of its own on Python 3.11
        step_reward(2)

        async def child() -> None:
            await call()
            step_reward(3)

        await asyncio.create_task(child())
        with caller("inner"):
            await call()
        step_reward(4)

    assert [note.step_reward for note in play(workflow).calls] == [-1.0, 2.0, 3.0, 4.0]


def test_threads_started_with_to_thread_belong_to_the_run() -> None:
    def work() -> None:
        run = current_rollout()
        assert run is not None
        run.note_call()
        step_reward(1)
        record_metrics(tool_calls=2)

    async def workflow() -> None:
        with caller("tool"):
            await asyncio.to_thread(work)

    context = play(workflow)
    assert context.calls == [CallNote(0, "tool", None, 1.0)]
    assert context.metrics == {"tool_calls": 2.0}


def test_state_keys_for_one_call_and_for_a_block() -> None:
    async def workflow() -> None:
        state_key("next")
        await call()
        await call()
        with state_key("block"):
            await call()
            state_key("inside")
            await call()
            await call()
        await call()
        state_key("pending")
        with state_key("block"):
            pass
        await call()

    keys = [note.state_key for note in play(workflow).calls]
    assert keys == ["next", None, "block", "inside", "block", None, "pending"]


@pytest.mark.parametrize("value", ["0.5", None, [1], math.nan, math.inf])
def test_what_is_no_number_is_refused(value: Any) -> None:
    async def workflow() -> None:
        with pytest.raises(RuntimeError, match="no model call"):
            step_reward(1)
        await call()
        with pytest.raises(ValueError, match="share must be a"):
            record_metrics(correct=1, share=value)
        with pytest.raises(ValueError, match="step_reward must be a"):
            step_reward(value)

    context = play(workflow)
    assert (context.metrics, context.calls[0].step_reward) == ({}, None)
    with pytest.raises(ValueError, match="share must be a"):  # outside of a rollout as well
        record_metrics(share=value)
