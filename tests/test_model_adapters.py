"""Other people's models as clients: AgentScope's, the recording one among them, and AFlow's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agentscope.model import AnthropicChatModel, ChatModelBase, ChatResponse, OpenAIChatModel
from faulty_server import FaultyServer, Step, anthropic_reply, openai_reply
from scripted_server import ScriptedModel as ServerModel
from scripted_server import ScriptedRunner, ScriptedServer, make_task
from trinity.common.experience import Experience

from aflow_tune.context import caller
from aflow_tune.errors import BadInput
from aflow_tune.models import (
    ModelError,
    ModelFailure,
    Reply,
    ScriptedModel,
    Usage,
    as_client,
)
from aflow_tune.models.prices import FixedPrice
from aflow_tune.trace import ModelCall, Trace

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
KEY = "sk-agentscope-0123456789"


def openai_model(server: FaultyServer, **options: Any) -> OpenAIChatModel:
    return OpenAIChatModel(
        "m",
        api_key=KEY,
        client_kwargs={"base_url": server.openai_url, "max_retries": 0},
        **options,
    )


# The recording model that a tuned workflow gets


def test_calls_of_the_tuned_model_are_recorded_and_trained() -> None:
    seen: list[Any] = []

    async def workflow(task: dict[str, Any], model: Any) -> float:
        client = as_client(model)
        trace = Trace()
        with trace.activate(), caller("solver"):
            first = await client.complete(HELLO)
            await client.complete(HELLO, schema=SCHEMA)
            await client.complete(HELLO, temperature=0.1)
        seen.extend([client, first, trace.of(ModelCall)])
        return 1.0

    with ScriptedServer(lambda _: "ok") as server:
        runner = ScriptedRunner(ServerModel(server.url))
        status, experiences = asyncio.run(
            runner.run_task(make_task(workflow), batch_id="1", repeat_times=1, run_id_base=0)
        )
    assert status.ok, status
    client, first, events = seen
    assert (client.role, client.model, first.text) == ("policy", "scripted", "ok")
    # The prompt 'hello' is 5 tokens; the answer 'ok' and its end mark are 3.
    assert first.usage == Usage(5, 3)
    assert [event.caller for event in events] == ["solver"] * 3
    # Nothing was said about sampling: sampled as configured, so trained. The third was not.
    assert len(Experience.deserialize_many(experiences)) == 2
    assert server.requests[0]["temperature"] == 1.0
    assert server.requests[1]["response_format"]["json_schema"]["schema"] == SCHEMA
    assert server.requests[2]["temperature"] == 0.1


# Other AgentScope models


@pytest.mark.parametrize("stream", [False, True])
def test_agentscopes_openai_model(stream: bool) -> None:
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    parts: list[Any] = [
        {**chunk, "choices": [{"index": 0, "delta": {"content": "fi"}}]},
        {**chunk, "choices": [{"index": 0, "delta": {"content": "ne"}, "finish_reason": "stop"}]},
        {**chunk, "choices": [], "usage": openai_reply("")["usage"]},
    ]
    events = b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts)
    body = events + b"data: [DONE]\n\n"
    step = Step(body=body, headers={"content-type": "text/event-stream"}) if stream else Step()
    with FaultyServer([step]) as server:
        client = as_client(openai_model(server, stream=stream), "judge", FixedPrice(1.0, 10.0))
        reply = asyncio.run(client.complete(HELLO, stop=["END"], max_tokens=5, seed=1))
    assert (client.role, reply.text, reply.usage) == ("judge", "fine", Usage(100, 10))
    assert reply.cost == pytest.approx(0.0002)
    sent = server.requests[0].body
    assert (sent["stop"], sent["max_tokens"], sent["seed"]) == (["END"], 5, 1)
    assert "temperature" not in sent


def test_agentscopes_anthropic_model_gets_its_own_names_and_a_tool_for_the_schema() -> None:
    use = {"type": "tool_use", "id": "t", "name": "answer", "input": {"n": 2}}
    with FaultyServer([Step(body=anthropic_reply(None, (7, 3), use))]) as server:
        model = AnthropicChatModel(
            "m", api_key="k", stream=False, client_kwargs={"base_url": server.url}
        )
        client = as_client(model)
        reply = asyncio.run(client.complete(HELLO, stop=["END"], schema=SCHEMA, seed=1))
    assert (reply.text, reply.tool_calls, reply.usage) == ('{"n": 2}', (), Usage(7, 3))
    sent = server.requests[0].body
    assert (sent["stop_sequences"], "seed" in sent) == (["END"], False)
    assert sent["tool_choice"]["name"] == "answer"


@pytest.mark.parametrize(
    ("step", "failure"),
    [
        (Step(status=429), "RATE_LIMITED"),
        (Step(kind="cut"), "CONNECTION"),
        (Step(body=b"{"), "BAD_REPLY"),
        (Step(status=401, body={"error": {"message": f"{KEY} is wrong"}}), "REFUSED"),
    ],
)
def test_failures_of_an_agentscope_model_are_ours(step: Step, failure: str) -> None:
    async def call() -> None:
        with trace.activate():
            await client.complete(HELLO)

    trace = Trace()
    with FaultyServer([step]) as server:
        client = as_client(openai_model(server, stream=False))
        with pytest.raises(ModelError) as caught:
            asyncio.run(call())
    assert caught.value.failure is ModelFailure[failure]
    assert KEY not in str(caught.value)
    assert caught.value.__context__ is None
    assert [event.failure for event in trace.of(ModelCall)] == [ModelFailure[failure].value]


class OwnModel(ChatModelBase):
    """A class that AgentScope does not ship: nothing is known of its arguments."""

    def __init__(self, answer: Any) -> None:
        super().__init__("own", False)
        self.answer = answer

    async def __call__(self, messages: list[Any], **options: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_an_unknown_class_is_asked_plainly_and_its_arguments_are_not_guessed() -> None:
    blocks: Any = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}]
    client = as_client(OwnModel(ChatResponse(content=blocks)))
    reply = asyncio.run(client.complete(HELLO))
    assert (reply.text, reply.usage, reply.cost) == ("yes", None, None)
    with pytest.raises(BadInput, match="OwnModel: temperature"):
        asyncio.run(client.complete(HELLO, temperature=0.5))


# AFlow's llms


class AflowLlm:
    def __init__(self) -> None:
        self.prompts: list[str] = []

    async def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return "an answer"


def test_an_aflow_llm_gets_one_prompt() -> None:
    llm = AflowLlm()
    client = as_client(llm, "executor")
    reply = asyncio.run(client.complete(HELLO))
    asyncio.run(client.complete([{"role": "system", "content": "Be brief."}, *HELLO], seed=3))
    asyncio.run(client.complete(HELLO, schema=SCHEMA))
    assert (reply.text, reply.usage, reply.cost) == ("an answer", None, None)
    assert llm.prompts[:2] == ["hello", "system: Be brief.\n\nuser: hello"]
    assert json.dumps(SCHEMA) in llm.prompts[2]


@pytest.mark.parametrize("option", [{"temperature": 0.1}, {"max_tokens": 5}, {"tools": [TOOL]}])
def test_what_an_aflow_llm_cannot_do_is_refused_rather_than_dropped(option: Any) -> None:
    with pytest.raises(BadInput, match=next(iter(option))):
        asyncio.run(as_client(AflowLlm()).complete(HELLO, **option))


# as_client


@pytest.mark.parametrize("thing", [None, "gpt-4o", lambda prompt: "x", AflowLlm, object()])
def test_what_is_no_model_is_refused(thing: Any) -> None:
    with pytest.raises(BadInput, match="cannot be used as a model"):
        as_client(thing)


# The scripted model


def test_a_script_answers_in_order_or_by_function() -> None:
    async def later(messages: Any) -> str:
        await asyncio.sleep(0)
        return str(messages[-1]["content"]) + "!"

    async def ask(model: ScriptedModel, count: int) -> list[str]:
        return [(await model.complete(HELLO)).text for _ in range(count)]

    whole = Reply(text="b", model="x", usage=Usage(1, 2))
    assert asyncio.run(ask(ScriptedModel(["a", whole]), 2)) == ["a", "b"]
    assert asyncio.run(ask(ScriptedModel(lambda m: m[0]["content"]), 1)) == ["hello"]
    assert asyncio.run(ask(ScriptedModel(later), 1)) == ["hello!"]
    model = ScriptedModel(["a"])
    with pytest.raises(ModelError, match="has 1 replies, this is call 2"):
        asyncio.run(ask(model, 2))
    assert [question.messages for question in model.asked] == [HELLO, HELLO]
