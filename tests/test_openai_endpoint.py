"""A rollout's model behind OpenAI's API: what clients get, and what is recorded of them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from scripted_server import CONFIGURED, Reply, ScriptedModel, ScriptedServer, record

from aflow_tune import BadInput, caller, openai_endpoint, state_key, step_reward
from aflow_tune.engines.trinity.rollout.recording import auxiliary_chat_models

TOOL: dict[str, Any] = {"name": "add", "description": "sums", "parameters": {"type": "object"}}


DEEP = b"[" * 700 + b"]" * 700
LOGPROBS: Any = "message.output_text.logprobs"


def client(endpoint: Any, **options: Any) -> openai.AsyncOpenAI:
    given = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "max_retries": 0}
    return openai.AsyncOpenAI(**{**given, **options})


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def last_text(request: dict[str, Any]) -> Reply:
    return Reply(str(request["messages"][-1]["content"]).upper())


def test_calls_of_a_client_are_recorded_and_sampled_as_configured() -> None:
    async def use(model: Any) -> Any:
        async with openai_endpoint(model) as endpoint, client(endpoint) as agent:
            given: Any = {"model": "gpt-9", "temperature": 0, "seed": 7, "store": False}
            ours = {"extra_headers": {"Authorization": "Bearer other"}, "timeout": 1e-9}
            return await agent.chat.completions.create(messages=ask("hi"), extra_body=ours, **given)

    with ScriptedServer(last_text) as server:
        answer, (call,) = record(server, use)
    assert answer.choices[0].message.content == "HI"
    assert answer.choices[0].logprobs is None
    assert not {"prompt_token_ids", "token_ids"} & answer.model_extra.keys()
    assert not call.off_policy
    assert call.experiences[0].response_text == "HI"
    (sent,) = server.requests
    assert sent["temperature"] == 1.0
    assert sent["seed"] != 7
    assert not {"store", "extra_headers", "timeout"} & sent.keys()


def test_an_auxiliary_model_is_asked_as_configured_and_not_recorded() -> None:
    async def main(url: str) -> str:
        wrapper = ScriptedModel(url, "judge")
        wrapper._generate_kwargs = {"temperature": 0.3}
        clients = [wrapper.get_openai_async_client()]
        models = auxiliary_chat_models([wrapper], clients, asyncio.get_running_loop())
        async with openai_endpoint(models["judge"]) as endpoint, client(endpoint) as agent:
            given: Any = {"model": "gpt-9", "temperature": 0}
            answer = await agent.chat.completions.create(messages=ask("hi"), **given)
        return str(answer.choices[0].message.content)

    with ScriptedServer(last_text) as server:
        assert asyncio.run(main(server.url)) == "HI"
    assert server.requests[0]["temperature"] == 0.3
    assert server.requests[0]["model"] == "scripted"


def test_sampling_of_the_client_is_answered_and_not_trained() -> None:
    async def use(model: Any) -> Any:
        async with openai_endpoint(model, sampling="client") as it, client(it) as agent:
            given: Any = {"model": "x", "temperature": 0, "logprobs": True}
            return await agent.chat.completions.create(messages=ask("hi"), **given)

    with ScriptedServer(last_text) as server:
        answer, (call,) = record(server, use)
    assert call.off_policy
    assert server.requests[0]["temperature"] == 0
    assert len(answer.choices[0].logprobs.content) == 3


@pytest.mark.parametrize("in_process", [False, True])
def test_a_stream_is_whole_and_recorded(in_process: bool) -> None:
    reply = Reply("two words", tool_calls=[("add", {"a": 1})], finish_reason="tool_calls")

    async def read(agent: openai.AsyncOpenAI) -> list[Any]:
        tools: Any = [{"type": "function", "function": TOOL}]
        given: Any = {"stream_options": {"include_usage": True}, "tools": tools, "model": "x"}
        stream = await agent.chat.completions.create(messages=ask("hi"), stream=True, **given)
        return [chunk async for chunk in stream]

    async def use(model: Any) -> list[Any]:
        if in_process:
            return await read(model.openai_client())
        async with openai_endpoint(model) as endpoint, client(endpoint) as agent:
            return await read(agent)

    with ScriptedServer(lambda request: reply) as server:
        chunks, (call,) = record(server, use)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "two words"
    (tool,) = [it for delta in deltas for it in delta.tool_calls or ()]
    assert (tool.index, tool.function.name, tool.function.arguments) == (0, "add", '{"a": 1}')
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "tool_calls"
    assert chunks[-1].usage.total_tokens > 0
    assert call.tools == [{"name": "add", "arguments": '{"a": 1}'}]


class City(BaseModel):
    name: str


def test_structured_output_and_responses() -> None:
    def answer(request: dict[str, Any]) -> Reply:
        text = request["messages"][-1]["content"]
        if "response_format" in request:
            return Reply('{"name": "Ulm"}')
        if text == "sum":
            return Reply("", tool_calls=[("add", {"a": 1})], finish_reason="tool_calls")
        return Reply(f"got {text}")

    tools: Any = [{"type": "function", **TOOL}]

    async def use(model: Any) -> None:
        async with openai_endpoint(model) as endpoint, client(endpoint) as agent:
            parsed = await agent.chat.completions.parse(
                model="x", messages=ask("where?"), response_format=City
            )
            assert parsed.choices[0].message.parsed == City(name="Ulm")
            city = await agent.responses.parse(model="x", input="where?", text_format=City)
            assert city.output_parsed == City(name="Ulm")

            given: Any = {"model": "x", "tools": tools, "instructions": "be brief"}
            first = await agent.responses.create(input="sum", **given)
            (call,) = first.output
            assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 1}')
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
            kept = await agent.responses.create(
                input=[result], previous_response_id=first.id, **given
            )
            assert kept.output_text == "got 3"
            whole: Any = [{"role": "user", "content": "sum"}, call.model_dump(), result]
            sent = await agent.responses.create(input=whole, **given)
            assert sent.output_text == "got 3"

    with ScriptedServer(answer) as server:
        _, calls = record(server, use)
    assert len(calls) == 5
    kept, sent = (request["messages"] for request in server.requests[-2:])
    for messages in (kept, sent):
        (call,) = messages[2]["tool_calls"]
        assert messages[3] == {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    assert [it["role"] for it in kept] == ["system", "user", "assistant", "tool"]
    assert [it["role"] for it in sent] == ["system", "user", "assistant", "tool"]


def test_items_of_an_answer_may_be_sent_by_reference_and_calls_one_by_one() -> None:
    """As agents of the Vercel AI SDK send them; ids that are not of the endpoint: below."""

    def answer(request: dict[str, Any]) -> Reply:
        if len(request["messages"]) > 1:
            return Reply("done")
        return Reply("two", tool_calls=[("add", {"a": 1}), ("add", {"a": 2})])

    async def use(model: Any) -> None:
        async with openai_endpoint(model) as endpoint, client(endpoint) as agent:
            one: Any = {"tools": [{"type": "function", **TOOL}], "parallel_tool_calls": False}
            first = await agent.responses.create(model="x", input="sum", **one)
            text, call = first.output
            assert first.parallel_tool_calls is False
            said: Any = [
                {"role": "user", "content": "sum"},
                {"type": "item_reference", "id": text.id},
                {"type": "item_reference", "id": call.id},
                {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
            ]
            allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "none"}]}
            second = await agent.responses.create(
                model="x", input=said, tool_choice=allowed, include=[LOGPROBS], **one
            )
            assert second.output_text == "done"
            assert second.output[0].content[0].logprobs
            most: Any = {"model": "x", "max_completion_tokens": 4096}
            await agent.chat.completions.create(messages=ask("long"), **most)
            assert (await agent.models.retrieve("gpt-9")).id == "gpt-9"

    with ScriptedServer(answer) as server:
        _, calls = record(server, use)
    _, second, long = server.requests
    message = second["messages"][1]
    assert message["content"] == "two"
    assert [it["function"]["arguments"] for it in message["tool_calls"]] == ['{"a": 1}']
    assert not second.get("tools")
    assert long["max_completion_tokens"] == CONFIGURED["max_tokens"]
    assert len(calls) == 3


def test_a_stream_of_the_responses_api() -> None:
    async def use(model: Any) -> tuple[list[Any], Any]:
        async with openai_endpoint(model) as endpoint, client(endpoint) as agent:
            stream = agent.responses.stream(model="x", input="hi")
            async with stream as opened:
                events = [event async for event in opened]
                return events, await opened.get_final_response()

    with ScriptedServer(last_text) as server:
        (events, final), calls = record(server, use)
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "HI"
    assert len(calls) == 1


def test_callers_states_and_rewards_from_outside() -> None:
    headers = {"X-Aflow-Caller": "critic", "X-Aflow-State-Key": "the door"}

    async def use(model: Any) -> None:
        with caller("plan"):
            async with openai_endpoint(model) as endpoint:
                pass_on = {"model": "x"}
                async with client(endpoint) as agent:
                    create = agent.chat.completions.create
                    await create(messages=ask("a"), **pass_on)
                    await create(messages=ask("b"), extra_headers=headers, **pass_on)
                async with httpx.AsyncClient() as http:
                    key = {"Authorization": f"Bearer {endpoint.api_key}"}
                    where = f"{endpoint.base_url}/step_reward"
                    told = await http.post(where, json={"reward": 0.5}, headers=key)
                    assert told.status_code == 200
                    wrong = await http.post(where, json={"reward": "much"}, headers=key)
                    assert wrong.status_code == 400
        # In this process, without a server: each call where it is made.
        agent = model.openai_client()
        with caller("act"), state_key("the hall"):
            await agent.chat.completions.create(messages=ask("c"), **pass_on)
            step_reward(0.25)

    with ScriptedServer(last_text) as server:
        _, calls = record(server, use)
    found = [(it.note.caller, it.note.state_key, it.note.step_reward) for it in calls]
    assert found == [
        ("plan", None, None),
        ("plan/critic", "the door", 0.5),
        ("act", "the hall", 0.25),
    ]


def test_the_client_of_this_process_keeps_its_time_limit() -> None:
    over = threading.Event()

    def answer(request: dict[str, Any]) -> Reply:
        over.wait()
        return Reply("late")

    async def use(model: Any) -> None:
        agent = model.openai_client(timeout=0.1, max_retries=0)
        try:
            with pytest.raises(openai.APITimeoutError):
                await agent.chat.completions.create(model="x", messages=ask("hi"))
        finally:
            over.set()

    with ScriptedServer(answer) as server:
        _, calls = record(server, use)
    assert not [call for call in calls if call.experiences]


PROGRAM = """
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "any", "messages": [{"role": "user", "content": "from afar"}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def test_another_process_even_one_that_blocks_the_rollout() -> None:
    async def use(model: Any) -> str:
        async with openai_endpoint(model) as endpoint:
            command = [sys.executable, "-c", PROGRAM]
            environment = {**os.environ, **endpoint.env}
            done = subprocess.run(command, env=environment, capture_output=True, check=True)
            return done.stdout.decode().strip()

    with ScriptedServer(last_text) as server:
        # As in a run: the rollout has a thread of its own, and the model's client another loop.
        async def in_thread(model: Any) -> Any:
            return await asyncio.to_thread(asyncio.run, use(model))

        said, calls = record(server, in_thread)
    assert said == "FROM AFAR"
    assert len(calls) == 1


def test_only_the_key_of_an_open_endpoint_opens_it() -> None:
    async def use(model: Any) -> None:
        async with openai_endpoint(model) as first, openai_endpoint(model) as second:
            assert "api_key" not in repr(first)
            assert first.api_key not in repr(first)
            wrong = client(first, api_key=second.api_key)
            with pytest.raises(openai.AuthenticationError):
                await wrong.chat.completions.create(model="x", messages=ask("hi"))
        with pytest.raises(openai.AuthenticationError):
            await client(first).chat.completions.create(model="x", messages=ask("hi"))

    with ScriptedServer(last_text) as server:
        _, calls = record(server, use)
    assert not calls
    assert not server.requests


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("chat/completions", b"{", 400),
        ("chat/completions", b"[" * 100_000, 400),
        ("chat/completions", b'{"messages": "hi"}', 400),
        ("chat/completions", b'{"messages": [1]}', 400),
        ("responses", b'{"input": "hi", "tools": [{"type": "web_search"}]}', 400),
        ("responses", b'{"input": [{"type": "item_reference", "id": "a"}]}', 400),
        ("responses", b'{"input": "hi", "tools": ["calc"]}', 400),
        ("responses", b'{"input": "hi", "tool_choice": {"type": "web_search"}}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": ' + DEEP + b"}]}", 400),
        ("step_reward", b'{"reward": 1}', 400),
        ("models", b"{}", 405),
        ("responses", b'{"input": "hi", "text": "json"}', 400),
        ("responses", b'{"input": "hi", "previous_response_id": "resp_none"}', 404),
        ("embeddings", b"{}", 404),
    ],
)
def test_what_cannot_be_answered_is_an_error_of_openai(path: str, body: bytes, status: int) -> None:
    async def use(model: Any) -> httpx.Response:
        async with openai_endpoint(model) as endpoint, httpx.AsyncClient() as http:
            key = {"Authorization": f"Bearer {endpoint.api_key}"}
            return await http.post(f"{endpoint.base_url}/{path}", content=body, headers=key)

    with ScriptedServer(last_text) as server:
        response, calls = record(server, use)
    assert response.status_code == status
    assert json.loads(response.content)["error"]["message"]
    assert not calls


def test_errors_of_the_model_are_passed_on_and_not_repeated() -> None:
    async def use(model: Any) -> None:
        async with openai_endpoint(model) as endpoint:
            agent = client(endpoint, max_retries=5)
            with pytest.raises(openai.BadRequestError, match="too long"):
                await agent.chat.completions.create(model="x", messages=ask("hi"))

    with ScriptedServer(lambda request: Reply("too long", status=400)) as server:
        record(server, use)
    assert len(server.requests) == 1


def test_what_waits_when_the_block_ends_is_cancelled() -> None:
    async def use(model: Any) -> None:
        async with openai_endpoint(model) as endpoint:
            agent = client(endpoint)
            create = agent.chat.completions.create(model="x", messages=ask("hi"))
            waiting = asyncio.create_task(create)
            while not server.requests:
                await asyncio.sleep(0.01)
        with pytest.raises(openai.APIStatusError):
            await waiting

    with ScriptedServer(lambda request: Reply("late", delay=30)) as server:
        _, calls = record(server, use)
    assert not calls


def test_a_request_that_began_before_the_end_of_the_block_is_refused_after_it() -> None:
    async def use(model: Any) -> bytes:
        body = json.dumps({"messages": ask("hi")}).encode()
        async with openai_endpoint(model) as endpoint:
            url = httpx.URL(endpoint.base_url)
            reader, writer = await asyncio.open_connection(url.host, url.port)
            head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.host}\r\n"
            head += f"Authorization: Bearer {endpoint.api_key}\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
            await writer.drain()
            await asyncio.sleep(0.3)
        writer.write(body[5:])
        answer = await reader.read()
        writer.close()
        return answer

    with ScriptedServer(last_text) as server:
        answer, calls = record(server, use)
    assert b" 503 " in answer.splitlines()[0] or b" 401 " in answer.splitlines()[0]
    assert not calls


def test_half_an_emoji_and_odd_options_of_a_stream_are_answered() -> None:
    def answer(request: dict[str, Any]) -> Reply:
        return Reply("", tool_calls=[("add", {"a": "\ud83d"})])

    async def use(model: Any) -> list[int]:
        async with openai_endpoint(model) as endpoint, httpx.AsyncClient() as http:
            key = {"Authorization": f"Bearer {endpoint.api_key}"}
            url = f"{endpoint.base_url}/chat/completions"
            bodies: list[Any] = [{}, {"stream": True, "stream_options": "x"}]
            asked = {"messages": ask("hi")}
            got = [await http.post(url, json={**asked, **more}, headers=key) for more in bodies]
            return [response.status_code for response in got]

    with ScriptedServer(answer) as server:
        statuses, calls = record(server, use)
    assert statuses == [200, 200]
    assert len(calls) == 2


def test_other_models_and_samplings_are_refused() -> None:
    async def main(model: Any, **options: Any) -> None:
        async with openai_endpoint(model, **options):
            pass

    with pytest.raises(BadInput, match="the model of a rollout"):
        asyncio.run(main(object()))
    with ScriptedServer(last_text) as server, pytest.raises(BadInput, match="'configured'"):
        record(server, lambda model: main(model, sampling="mine"))
