"""Recording: which call is whose, what is sent, what becomes of the answer."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from agentscopes import only_first
from pydantic import BaseModel
from scripted_server import CONFIGURED, Reply, ScriptedModel, ScriptedServer, record

from aflow_tune import TrinityChatModel, caller, text_of
from aflow_tune.context import RolloutContext
from aflow_tune.engines.trinity.rollout.recording import (
    RolloutRecorder,
    recording_client,
    state_hash,
)


def ask(text: str) -> list[dict[str, Any]]:
    """One user message."""
    return [{"role": "user", "content": text}]


def echo(request: dict[str, Any]) -> Reply:
    """Answers with the question, the later the larger its number."""
    text = request["messages"][-1]["content"]
    return Reply(text, delay=0.002 * (int(text.split()[-1]) % 7) if text[-1].isdigit() else 0)


def test_concurrent_calls_keep_their_caller_and_the_order_in_which_they_started() -> None:
    numbers = list(range(40))
    random.Random(0).shuffle(numbers)

    async def one(model: TrinityChatModel, number: int) -> str:
        with caller(f"agent {number}"):
            first = await model(ask(f"first {number}"))
            task = asyncio.create_task(model(ask(f"second {number}")))  # takes the context along
            second = await task
        return text_of(first.content) + text_of(second.content)

    async def use(model: TrinityChatModel) -> list[str]:
        return await asyncio.gather(*(one(model, number) for number in numbers))

    with ScriptedServer(echo) as server:
        answers, calls = record(server, use)
    assert answers == [f"first {n}second {n}" for n in numbers]
    assert [call.note.index for call in calls] == list(range(80))
    texts = [call.messages[0]["content"] for call in calls]
    for call, text in zip(calls, texts, strict=True):
        assert call.note.caller == f"agent {text.split()[-1]}"
        (experience,) = call.experiences
        assert experience.response_text == text
        assert experience.tokens.tolist() == [*text.encode(), *text.encode(), 256]
    assert [text for text in texts if "first" in text] == [f"first {n}" for n in numbers]


def test_seeds_follow_what_is_asked_and_not_who_comes_first() -> None:
    def seeds(delays: dict[str, float]) -> dict[str, int]:
        async def chain(model: TrinityChatModel, name: str) -> None:
            await model(ask(name))
            await model(ask(f"{name}, again"))

        async def use(model: TrinityChatModel) -> None:
            await asyncio.gather(chain(model, "a"), chain(model, "b"))

        with ScriptedServer(
            lambda request: Reply("x", delay=delays.get(request["messages"][0]["content"], 0))
        ) as server:
            record(server, use)
            return {r["messages"][0]["content"]: r["seed"] for r in server.requests}

    slow_a, slow_b = seeds({"a": 0.1}), seeds({"b": 0.1})
    assert slow_a == slow_b
    assert len(set(slow_a.values())) == 4


class City(BaseModel):
    """A structured answer."""

    name: str
    people: int


@only_first
def test_structured_output_is_recorded_and_falls_back_to_a_tool_call() -> None:
    def answer(request: dict[str, Any]) -> Reply:
        if "response_format" in request:
            fits = "fits" in request["messages"][0]["content"]
            return Reply('{"name": "Ulm", "people": 1}' if fits else '{"city": 1}')
        name = request["tools"][0]["function"]["name"]
        return Reply("", tool_calls=[(name, {"name": "Ulm", "people": 1})])

    async def use(model: TrinityChatModel) -> list[Any]:
        asked = ("what fits", "what does not")
        return [(await model(ask(it), structured_model=City)).metadata for it in asked]

    with ScriptedServer(answer) as server:
        found, calls = record(server, use)
        form = server.requests[0]["response_format"]
    assert found == [{"name": "Ulm", "people": 1}] * 2
    assert form["type"] == "json_schema"
    assert set(form["json_schema"]["schema"]["properties"]) == {"name", "people"}
    assert len(calls) == 3  # the answer that did not fit was sampled too
    assert not any(call.off_policy for call in calls)


def test_what_the_user_passes_wins_but_logprobs_stay() -> None:
    given = {"max_completion_tokens": 5, "stop": ["x"], "logprobs": False}

    async def use(model: TrinityChatModel) -> None:
        await model(ask("hello"), **given, extra_body={"min_tokens": 2})
        with pytest.raises(ValueError, match="cannot stream"):
            await model.client.chat.completions.create(messages=ask("hello"), stream=True)

    with ScriptedServer(echo) as server:
        _, (call,) = record(server, use, extra_body={"top_k": 20})
        (request,) = server.requests
    assert "max_tokens" not in request
    expected = {**given, "logprobs": True, "top_k": 20, "min_tokens": 2}
    assert {name: request[name] for name in expected} == expected
    assert not call.off_policy


REPRODUCED = [{"temperature": 1}, {"presence_penalty": 0.0}, {"logit_bias": {}}]
REPRODUCED += [{"extra_body": {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}}]
OTHERWISE = [{"temperature": 0.7}, {"temperature": 0}, {"top_p": 0.9}, {"frequency_penalty": 0.5}]
OTHERWISE += [{"logit_bias": {"50": -100}}, {"extra_body": {"top_k": 1}}]
OTHERWISE += [{"extra_body": {"repetition_penalty": 1.1}}]


def test_calls_that_the_trainer_cannot_reproduce_are_marked() -> None:
    async def use(model: TrinityChatModel) -> None:
        for arguments in [*REPRODUCED, *OTHERWISE]:
            await model(ask("hello"), **arguments)

    with ScriptedServer(echo) as server:
        _, calls = record(server, use)
    assert [call.off_policy for call in calls] == [False] * 4 + [True] * 7


def test_a_run_that_is_over_records_nothing_more() -> None:
    async def main(server: ScriptedServer) -> None:
        context = RolloutContext()
        source = await recording_client(ScriptedModel(server.url))
        recorder = RolloutRecorder(source, context, "1/0", None, CONFIGURED)
        model = recorder.chat_model()
        under_way = asyncio.create_task(model(ask("slow 6")))
        await model(ask("fast 0"))
        assert [call.messages for call in recorder.close()] == [ask("fast 0")]
        with pytest.raises(asyncio.CancelledError):
            await under_way
        with pytest.raises(RuntimeError, match="over"):
            await model(ask("late 0"))

    def answer(request: dict[str, Any]) -> Reply:
        return Reply("x", delay=10 if "slow" in request["messages"][0]["content"] else 0)

    with ScriptedServer(answer) as server:
        asyncio.run(main(server))


def test_the_state_is_task_caller_and_normalised_input() -> None:
    def messages(question: str, number: str, result: str) -> list[dict[str, Any]]:
        call = {"id": number, "function": {"name": "f"}}
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": number, "content": result},
        ]

    asked = messages("a  question\n", "call_1", "\uff11")
    state = state_hash("1/0", "solve", asked)
    assert state == state_hash("1/0", "solve", messages(" a question", "call_2", "1"))
    others = [("1/1", "solve", asked), ("1/0", "check", asked), ("1/0", "solve", asked[:2])]
    others.append(("1/0", "solve", messages("A question", "call_1", "1")))
    for told in (
        "<current-time>2026-07-0{}T12:00:00</current-time> now",
        "The current time is 2026-11-28T01:16:1{} (UTC).",
        "**Created At**: 2026-11-28 01:16:25.98{}",
        "- Finished At: 2026-11-28 01:16:25.98{}",
        'File "/tmp/tmpx77yeqq{0}/tmp_PPcK9t{0}.py", line 1',
        "offloaded to /work/sessions/0123456789abcdef0123456789abcde{}/result.txt",
    ):
        first, again = told.format(1), told.format(2)
        assert state_hash("1/0", "solve", first) == state_hash("1/0", "solve", again), told
        others.append(("1/0", "solve", first))
    assert state not in {state_hash(*other) for other in others}
