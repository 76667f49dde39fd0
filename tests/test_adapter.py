"""The adapter in Trinity's own run loop against a scripted server over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from agentscope.message import Msg
from agentscope.model import OpenAIChatModel
from agentscopes import only_first
from pydantic import BaseModel
from scripted_server import Reply, ScriptedModel, ScriptedRunner, ScriptedServer, make_task
from trinity.common.experience import Experience
from trinity.explorer.workflow_runner import Status
from trinity.utils.metrics import aggregate_eval_metrics, calculate_task_level_metrics

from aflow_tune import (
    JudgeOutput,
    TrinityChatModel,
    WorkflowOutput,
    caller,
    record_metrics,
    step_reward,
    text_of,
)
from aflow_tune.engines.trinity.rollout import adapter
from aflow_tune.engines.trinity.rollout.operators import FAILURE_KEY, TRACE_KEY
from aflow_tune.report.records import EvalRecord, read_records

ASK = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    """Answers 'four' to everything but the empty list of messages, which it refuses."""

    def answer(request: dict[str, Any]) -> Reply:
        return Reply("four") if request["messages"] else Reply("no messages", status=400)

    with ScriptedServer(answer) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def _warm(server: ScriptedServer) -> None:
    """What a process does once, so that short time-outs measure the workflow."""
    run(server, returning(1.0))


@pytest.fixture(autouse=True)
def _forget_requests(server: ScriptedServer) -> None:
    server.requests.clear()


def run(
    server: ScriptedServer,
    workflow: Any,
    repeat_times: int = 1,
    mode: str = "asynchronous",
    auxiliary: list[Any] | None = None,
    **task: Any,
) -> tuple[Status, list[Experience]]:
    """Run one task through Trinity's runner; its status and the experiences it would send."""
    runner = ScriptedRunner(ScriptedModel(server.url), auxiliary, mode)
    status, payload = asyncio.run(
        runner.run_task(make_task(workflow, **task), "1", repeat_times=repeat_times)
    )
    assert status.ok, status.message
    return status, Experience.deserialize_many(payload) if payload else []


def returning(value: Any) -> Callable[..., Any]:
    """A workflow that makes one call and returns `value`."""

    async def workflow(task: dict, model: TrinityChatModel) -> float:
        await model(ASK)
        return value

    return workflow


def raising(error: BaseException) -> Callable[..., Any]:
    """A workflow that raises `error`."""

    async def workflow(task: dict, model: TrinityChatModel) -> float:
        raise error

    return workflow


async def no_call(task: dict, model: TrinityChatModel) -> float:
    return 1.0


async def swallows_a_failed_call(task: dict, model: TrinityChatModel) -> float:
    with contextlib.suppress(openai.BadRequestError):
        await model([])
    return 1.0


async def hangs(task: dict, model: TrinityChatModel) -> float:
    await model(ASK)
    await asyncio.sleep(60)
    return 1.0


async def loops_for_ever(task: dict, model: TrinityChatModel) -> float:
    while True:
        pass


BAD_METRIC = WorkflowOutput(reward=1.0, metrics={"speed": float("nan")})
FAILURES = {
    "raises": (raising(LookupError("no such planet")), "raised", "no such planet"),
    "exits": (raising(SystemExit(3)), "raised", "SystemExit: 3"),
    "cancels itself": (raising(asyncio.CancelledError()), "raised", "CancelledError"),
    "returns None": (returning(None), "returned_none", "the workflow"),
    "returns NaN": (returning(float("nan")), "not_finite", "nan"),
    "returns infinity": (returning(np.float32("-inf")), "not_finite", "-inf"),
    "returns a huge integer": (returning(10**400), "not_finite", "inf"),
    "returns text": (returning("0.5"), "not_a_number", "str: '0.5'"),
    "returns two numbers": (returning(np.zeros(2)), "not_a_number", "ndarray"),
    "returns no reward": (returning(WorkflowOutput(response="x")), "returned_none", "None"),
    "returns a bad metric": (returning(BAD_METRIC), "raised", "metric 'speed'"),
    "calls no model": (no_call, "no_call", "no call"),
    "has no answered call": (swallows_a_failed_call, "no_call", "no call"),
}


NUMBERS = [True, 3, np.float64(0.5), np.bool_(False), torch.tensor(0.25), np.array([2.0])]
NUMBERS.append(Decimal("0.5"))


def one_after_the_other(*workflows: Callable[..., Any]) -> Callable[..., Any]:
    """A workflow whose rollouts are these."""
    parts = iter(workflows)

    async def workflow(task: dict, model: TrinityChatModel) -> float:
        return await next(parts)(task=task, model=model)

    return workflow


def test_failures_cost_only_their_own_run_and_have_their_names(server: ScriptedServer) -> None:
    broken = [workflow for workflow, _, _ in FAILURES.values()]
    workflow = one_after_the_other(*broken, *map(returning, NUMBERS))
    count = len(FAILURES) + len(NUMBERS)
    status, exps = run(server, workflow, repeat_times=count, mode="sequential")
    assert status.completed_runs == len(exps) == count
    exps.sort(key=lambda exp: exp.eid.run)
    for (name, (_, kind, detail)), exp in zip(FAILURES.items(), exps, strict=False):
        assert exp.info[FAILURE_KEY] == kind, name
        assert detail in exp.info[TRACE_KEY], name
        assert not exp.action_mask.any()
        assert exp.metrics == {f"failure/{kind}:sum": 1.0}
    assert [exp.reward for exp in exps[len(FAILURES) :]] == [1.0, 3.0, 0.5, 0.0, 0.25, 2.0, 0.5]


def test_runs_that_hang_do_not_hold_up_the_others(server: ScriptedServer) -> None:
    """The others get their answers meanwhile; the thread in an endless loop ends."""
    finished: list[float] = []
    parts = one_after_the_other(loops_for_ever, hangs, returning(1.0), returning(1.0))

    async def workflow(task: dict, model: TrinityChatModel) -> float:
        finished.append(await parts(task=task, model=model))
        return finished[-1]

    before = threading.active_count()
    _, exps = run(server, workflow, repeat_times=4, run_timeout=8.0)
    assert finished == [1.0, 1.0]  # held up, their time would have run out with that of the first
    told = {it.info[FAILURE_KEY]: it.info[TRACE_KEY] for it in exps if FAILURE_KEY in it.info}
    assert "in loops_for_ever" in told["blocked_loop"]
    assert "asyncio.sleep(60)" in told["timed_out"]
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_a_rollout_whose_agent_answers_the_cancellation_says_where_it_was(
    server: ScriptedServer,
) -> None:
    async def waits_for_its_tool() -> None:
        await asyncio.sleep(60)

    async def workflow(task: dict, model: TrinityChatModel) -> float:
        try:
            await waits_for_its_tool()
        except asyncio.CancelledError:  # as agents of AgentScope do
            return 1.0
        return 0.0

    _, (exp,) = run(server, workflow, repeat_times=1, run_timeout=1.0)
    assert exp.info[FAILURE_KEY] == "timed_out"
    assert "in waits_for_its_tool" in exp.info[TRACE_KEY]


def test_every_step_carries_reward_caller_and_state_and_the_last_one_metrics(
    server: ScriptedServer,
) -> None:
    async def workflow(task: dict, model: TrinityChatModel) -> float:
        assert task == {"question": "2 + 2?", "answer": "4"}
        assert isinstance(model, TrinityChatModel)
        with caller("solve"):
            await model(ASK)
            with caller("check"):
                answer = await model(ASK)
        assert text_of(answer.content) == "four"
        record_metrics(right=1)
        return 0.5

    status, exps = run(server, workflow, repeat_times=2)
    exps.sort(key=lambda exp: (exp.eid.run, exp.eid.step))
    assert [(exp.eid.run, exp.eid.step) for exp in exps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [exp.info["caller"] for exp in exps] == ["solve", "solve/check"] * 2
    states = [exp.info["env_state_hash"] for exp in exps]
    assert states[:2] == states[2:]
    assert states[0] != states[1]
    assert [exp.reward for exp in exps] == [0.5] * 4
    assert exps[0].metrics == {}
    assert exps[1].metrics == {
        "right": 1.0,
        "reward": 0.5,
        "calls": 2.0,
        "untrained_calls": 0.0,
        "response_tokens": 10.0,  # twice 'four' and the end mark
        "response_truncated": 0.0,
    }
    assert exps[1].tokens.tolist() == [*b"2 + 2?", *b"four", 256]
    assert exps[1].prompt_length == 6
    assert torch.allclose(exps[1].logprobs, torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.5]))
    assert status.metrics[0]["right"] == 1.0
    assert all("step_reward" not in exp.info for exp in exps)


def test_step_rewards_stay_and_the_last_step_gets_the_returned_one(server: ScriptedServer) -> None:
    async def workflow(task: dict, model: TrinityChatModel) -> float:
        for given in (0.125, None, None):
            await model(ASK)
            if given is not None:
                step_reward(given)
        return 1.0

    _, exps = run(server, workflow)
    assert [exp.info.get("step_reward") for exp in exps] == [0.125, None, 1.0]
    assert [exp.reward for exp in exps] == [1.0, 1.0, 1.0]


def test_a_call_sampled_otherwise_is_answered_but_not_trained(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_said", set())

    async def workflow(task: dict, model: TrinityChatModel) -> float:
        await model(ASK, temperature=0)
        await model(ASK, top_p=0.5)
        with caller("same"):
            await model(ASK, temperature=1)
        return 1.0

    _, exps = run(server, workflow)
    assert [request["temperature"] for request in server.requests] == [0, 1.0, 1]
    assert [(exp.info["caller"], exp.eid.step) for exp in exps] == [("same", 0)]
    assert (exps[0].metrics["calls"], exps[0].metrics["untrained_calls"]) == (3.0, 2.0)

    async def greedy(task: dict, model: TrinityChatModel) -> float:
        await model(ASK, temperature=0)
        return 1.0

    _, exps = run(server, greedy)
    assert exps[0].info[FAILURE_KEY] == "no_call"
    assert "temperature" in exps[0].info[TRACE_KEY]
    status, _ = run(server, greedy, is_eval=True, batch_id="0/held_out")
    assert status.metrics[0]["reward"] == 1.0


def _seeds(server: ScriptedServer, **task: Any) -> list[int]:
    async def workflow(task: dict, model: TrinityChatModel) -> float:
        await asyncio.gather(*(model(ASK) for _ in range(2)))
        await model(ASK, seed=5)
        return 1.0

    server.requests.clear()
    run(server, workflow, repeat_times=2, mode="sequential", **task)
    return [request["seed"] for request in server.requests]


def test_seeds_differ_between_calls_and_runs_and_repeat_with_the_task(
    server: ScriptedServer,
) -> None:
    first = _seeds(server)
    assert first[2] == first[5] == 5  # the user's own
    assert len({*first[:2], *first[3:5]}) == 4
    assert sorted(_seeds(server)) == sorted(first)
    assert not {*_seeds(server, seed=8)} & {*first[:2]}
    assert not {*_seeds(server, batch_id=2)} & {*first[:2]}
    before = _seeds(server, is_eval=True, batch_id="0/held_out")
    after = _seeds(server, is_eval=True, batch_id="9/held_out")
    assert sorted(before) == sorted(after)  # before and after share their random numbers


def test_a_judge_scores_the_response_and_auxiliary_models_have_names(
    server: ScriptedServer,
) -> None:
    seen: dict[str, Any] = {}

    async def workflow(
        task: dict, model: OpenAIChatModel, auxiliary_models: dict, system_prompt: str, logger: Any
    ) -> WorkflowOutput:
        await model(ASK)
        seen.update(system_prompt=system_prompt, logger=logger, names=[*auxiliary_models])
        return WorkflowOutput(response="4", metrics={"length": 1})

    async def judge(task: dict, response: str, auxiliary_models: dict) -> JudgeOutput:
        verdict = await auxiliary_models["referee"](ASK)
        said = text_of(verdict.content)
        return JudgeOutput(reward=float(response == task["answer"]), metrics={"said": len(said)})

    with ScriptedServer(lambda request: "certainly") as other:
        referee = ScriptedModel(other.url, name="referee")
        _, exps = run(
            server, workflow, auxiliary=[referee], judge_func=judge, system_prompt="Be brief."
        )
        assert len(other.requests) == 1
        assert referee.history == []
    assert len(exps) == 1  # what the judge asks is not the policy's
    assert exps[0].reward == 1.0
    assert exps[0].metrics["length"] == 1.0
    assert exps[0].metrics["said"] == len("certainly")
    assert seen["system_prompt"] == "Be brief."
    assert seen["names"] == ["referee"]
    assert hasattr(seen["logger"], "info")


def _evaluate(
    server: ScriptedServer, directory: Path, workflow: Any, **task: Any
) -> tuple[Status, list[EvalRecord]]:
    status, exps = run(
        server,
        workflow,
        is_eval=True,
        batch_id="2/held_out",
        eval_dir=str(directory),
        **{"score": "right", "transcripts": 4, **task},
    )
    assert exps == []
    path = directory / "held_out" / "step_2.jsonl"
    return status, read_records(path) if path.exists() else []


def test_an_evaluation_leaves_one_record_a_run_and_its_metrics_reach_the_curves(
    server: ScriptedServer, tmp_path: Path
) -> None:
    async def workflow(task: dict, model: TrinityChatModel) -> float:
        await model(ASK)
        record_metrics(right=1)
        return 0.5

    status, (record,) = _evaluate(server, tmp_path, workflow)
    assert (record.step, record.taskset, record.item, record.run) == (2, "held_out", 3, 0)
    assert (record.score, record.reward, record.failure) == (1.0, 0.5, None)
    assert record.metrics == {"right": 1.0}
    assert [(it["messages"], it["response"]) for it in record.transcript] == [(ASK, "four")]
    task_metrics = calculate_task_level_metrics(status.metrics, is_eval=True)
    curves = aggregate_eval_metrics([task_metrics], prefix="eval/held_out")
    assert curves["eval/held_out/reward/mean@1"] == 0.5
    assert curves["eval/held_out/right/mean@1"] == 1.0
    _, records = _evaluate(server, tmp_path / "few", workflow, transcripts=3)
    assert records[0].transcript == []  # item 3 is not among the first three


class Answer(BaseModel):
    """What AgentScope's example asks its agent for."""

    result: str


async def react(task: dict, model: TrinityChatModel) -> float:
    """The workflow of AgentScope 1's documentation, with a shorter reward."""
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter

    agent = ReActAgent(
        name="react_agent",
        sys_prompt="You solve math problems.",
        model=model,
        enable_meta_tool=True,
        formatter=OpenAIChatFormatter(),
    )
    agent.set_console_output_enabled(False)
    response = await agent.reply(
        msg=Msg("user", task["question"], role="user"), structured_model=Answer
    )
    return float(response.metadata["result"] == task["answer"])


@only_first
def test_agentscopes_react_agent_runs_and_each_of_its_calls_is_a_step() -> None:
    def answer(request: dict[str, Any]) -> Reply:
        assert "generate_response" in [tool["function"]["name"] for tool in request["tools"]]
        if request.get("tool_choice") == "none":
            return Reply("It is four.")
        if any(message["role"] == "tool" for message in request["messages"]):
            return Reply("", tool_calls=[("generate_response", {"result": "4"})])
        return Reply("Let me see.", tool_calls=[("reset_equipped_tools", {})])

    with ScriptedServer(answer) as scripted:
        _, exps = run(scripted, react, repeat_times=3)
    assert [exp.reward for exp in exps] == [1.0] * 9, exps[0].info
    found = sorted((exp.eid.run, exp.eid.step) for exp in exps)
    assert found == [(run, step) for run in range(3) for step in range(3)]
    # The ids that AgentScope draws for its calls do not split the states.
    assert len({(exp.eid.step, exp.info["env_state_hash"]) for exp in exps}) == 3
