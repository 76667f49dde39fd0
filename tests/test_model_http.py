"""Both vendors' clients against a server that fails in every way; other models as clients."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
from agentscope.model import AnthropicChatModel, OpenAIChatModel
from agentscopes import SECOND, only_second
from faulty_server import USAGE, FaultyServer, Step, anthropic_reply, openai_reply

from aflow_tune.errors import BadInput
from aflow_tune.models import (
    ModelError,
    ModelFailure,
    Reply,
    ScriptedModel,
    Spend,
    Usage,
    as_client,
    make_client,
)
from aflow_tune.models.http_client import HttpClient
from aflow_tune.models.prices import FixedPrice
from aflow_tune.models.types import Ask, text_of
from aflow_tune.sections import BudgetSection, ModelSettings, PriceSettings
from aflow_tune.trace import ModelCall, Trace

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
}
PRICES = PriceSettings(input=1.0, output=10.0)
"""A good reply costs 100 * 1e-6 + 10 * 10e-6 = 0.0002 dollars."""


Make = Callable[..., HttpClient]


@pytest.fixture(params=["openai", "anthropic"])
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(provider: str) -> Make:
    def build(server: FaultyServer, **given: Any) -> HttpClient:
        given = {"backoff": 0.01, "timeout": 60.0, "prices": PRICES, **given}
        return make_client(ModelSettings(provider, "m-1", server.openai_url, **given), "judge")

    return build


def ask(client: HttpClient, messages: Any = HELLO, **options: Any) -> Any:
    """One answer, with the event of the call and what was spent."""
    spend, trace = Spend(BudgetSection(calls=10)), Trace()

    async def call() -> Any:
        with spend.activate(), trace.activate():
            return await client.complete(messages, **options)

    try:
        outcome: Any = asyncio.run(call())
    except ModelError as error:
        outcome = error
    (event,) = trace.of(ModelCall)
    return outcome, event, spend.spent()


PASSING = {
    "429 with retry-after in seconds": Step(status=429, headers={"retry-after": "0.05"}),
    "500 that is no JSON": Step(status=500, body=b"<html>oops</html>"),
    "500 with deep JSON": Step(status=500, body=b"[" * 200_000),
    "cut before the head": Step(kind="cut"),
    "cut in the body": Step(kind="cut_body"),
}


@pytest.mark.parametrize("step", PASSING.values(), ids=PASSING)
def test_what_may_pass_is_asked_again(make: Make, step: Step) -> None:
    with FaultyServer([step]) as server:
        reply, event, spent = ask(make(server))
    assert (reply.text, reply.model, reply.finish_reason) == ("fine", "scripted-1", "stop")
    assert reply.usage == Usage(*USAGE)
    assert reply.cost == event.cost == spent.usd == pytest.approx(0.0002)
    assert len(server.requests) == 2
    assert (event.failure, event.retries, event.role, event.model) == (None, 1, "judge", "m-1")
    assert (spent.calls, spent.replies, spent.tokens) == (1, 1, sum(USAGE))


FINAL = {
    "429": (Step(status=429), ModelFailure.RATE_LIMITED),
    "503": (Step(status=503), ModelFailure.SERVER),
    "cut": (Step(kind="cut"), ModelFailure.CONNECTION),
    "hang": (Step(kind="hang"), ModelFailure.TIMED_OUT),
    "slow bytes": (Step(kind="drip", body=b"x" * 5_000), ModelFailure.TIMED_OUT),
}


@pytest.mark.parametrize(("step", "failure"), FINAL.values(), ids=FINAL)
def test_retries_end_in_an_error_that_says_why(
    make: Make, step: Step, failure: ModelFailure
) -> None:
    seconds = 5.0 if failure is ModelFailure.TIMED_OUT else 60.0  # a request has to be there
    with FaultyServer(lambda *_: step) as server:
        error, event, spent = ask(make(server, retries=1, timeout=seconds))
        deadline = time.monotonic() + 60
        while (server.under_way or len(server.requests) < 2) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert isinstance(error, ModelError)
    assert error.failure is failure
    assert "after 2 attempts" in str(error)
    assert (len(server.requests), server.under_way) == (2, 0)
    assert (event.failure, event.retries, event.cost) == (failure.value, 1, 0.0)
    assert (spent.calls, spent.tokens) == (1, 0)


@pytest.mark.parametrize("status", [307, 400, 401])
def test_a_refusal_is_not_asked_again(make: Make, status: int) -> None:
    headers = {"location": "http://127.0.0.1:1/elsewhere"}
    with FaultyServer([Step(status=status, headers=headers)]) as server:
        error, event, _ = ask(make(server))
    assert (error.failure, event.failure) == (ModelFailure.REFUSED, "refused")
    assert f"HTTP {status}" in str(error)
    assert len(server.requests) == 1


SHAPES = {"openai": openai_reply, "anthropic": anthropic_reply}


def test_a_reply_that_reports_usage_is_counted_though_it_is_of_no_use(
    provider: str, make: Make
) -> None:
    shaped = SHAPES[provider]("x")
    wrong = Step(body={**shaped, "choices": [], "content": None})
    failed = Step(status=400, body={"error": {"message": "late"}, "usage": shaped["usage"]})
    for step in (wrong, failed):
        with FaultyServer([step]) as server:
            error, event, spent = ask(make(server))
        assert isinstance(error, ModelError)
        assert (event.prompt_tokens, event.completion_tokens) == USAGE
        assert event.cost == spent.usd == pytest.approx(0.0002)


@pytest.mark.parametrize("told", [None, {"prompt_tokens": "7", "completion_tokens": -1}, 3])
def test_a_reply_without_usage_is_unknown_not_free(make: Make, told: Any, provider: str) -> None:
    body = {**SHAPES[provider]("x", None), "usage": told}
    with FaultyServer([Step(body=body)]) as server:
        reply, event, spent = ask(make(server))
    assert (reply.text, reply.usage, reply.cost, event.cost) == ("x", None, None, None)
    assert (spent.unreported, spent.unpriced) == (1, 1)


def test_no_more_requests_at_once_than_configured(make: Make) -> None:
    async def many() -> None:
        await asyncio.gather(*(client.complete(HELLO) for _ in range(30)))

    with FaultyServer(lambda *_: Step(seconds=0.02)) as server:
        client = make(server, max_concurrency=3)
        asyncio.run(many())
    assert (len(server.requests), server.most_under_way) == (30, 3)


def test_arguments_win_over_the_configuration(provider: str, make: Make) -> None:
    with FaultyServer() as server:
        client = make(server, temperature=0.1, max_tokens=7)
        ask(client)
        ask(client, temperature=0.9, top_p=0.5, max_tokens=9, stop=["END"], seed=3)
    plain, asked = (request.body for request in server.requests)
    assert (plain["temperature"], plain["max_tokens"], plain["model"]) == (0.1, 7, "m-1")
    assert "top_p" not in plain
    assert (asked["temperature"], asked["top_p"], asked["max_tokens"]) == (0.9, 0.5, 9)
    openai = provider == "openai"
    assert asked["stop" if openai else "stop_sequences"] == ["END"]
    assert asked.get("seed") == (3 if openai else None)


def test_a_client_travels_without_key_or_connection(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAVEL_KEY", "sk-travel-0123456789")
    with FaultyServer() as server:
        client = make(server, api_key_env="TRAVEL_KEY")
        ask(client)
        packed = pickle.dumps(client)
        assert b"sk-travel" not in packed
        reply, event, _ = ask(pickle.loads(packed))
    assert (reply.text, event.role) == ("fine", "judge")
    assert server.requests[1].headers["authorization"] == "Bearer sk-travel-0123456789"


CHOICES: list[Any] = [
    [],
    None,
    [{"finish_reason": "stop"}],
    [{"message": {"role": "assistant", "content": None}, "finish_reason": "stop"}],
    [{"message": {"content": None, "tool_calls": [{"id": "1"}]}, "finish_reason": "x"}],
    ["text"],
]
CONTENTS: list[Any] = [None, "text", [3], [{"type": "text"}], [{"type": "tool_use", "id": "1"}]]


@pytest.mark.parametrize(
    "body",
    [
        *({**openai_reply("x"), "choices": choices} for choices in CHOICES),
        *({**anthropic_reply("x"), "content": content} for content in CONTENTS),
    ],
)
def test_replies_of_a_wrong_shape_are_bad_replies_and_paid(body: Any) -> None:
    with FaultyServer([Step(body=body)]) as server:
        client = openai_client(server) if "choices" in body else anthropic_client(server)
        error, _, spent = ask(client)
    assert error.failure is ModelFailure.BAD_REPLY
    assert spent.prompt_tokens == 100


# What is sent, and what is read of a reply


def openai_client(server: FaultyServer, **settings: Any) -> HttpClient:
    return make_client(ModelSettings(model="m", base_url=server.openai_url, retries=0, **settings))


def anthropic_client(server: FaultyServer) -> HttpClient:
    return make_client(ModelSettings("anthropic", "claude", server.url, retries=0, prices=PRICES))


ADD = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"n": 2}'}}
PARTS = [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]


def openai_choice(reason: str, **message: Any) -> Any:
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return {**openai_reply("x"), "choices": [choice]}


def used(name: str, given: Any) -> Any:
    use = {"type": "tool_use", "id": "c1", "name": name, "input": given}
    return anthropic_reply("ok", USAGE, use, reason="tool_use")


LIST = {"type": "array", "items": {"type": "integer"}}
READ: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "tool call": (openai_reply(None, tool_calls=[ADD]), {"tools": [TOOL]}, ("", "stop", (ADD,))),
    "parts": (openai_reply(PARTS), {}, ("in parts", "stop", ())),  # type: ignore[arg-type]
    "empty": (openai_reply(""), {}, ("", "stop", ())),
    "cut short": (openai_choice("length"), {}, ("", "length", ())),
    "refusal": (openai_choice("stop", refusal="No."), {}, ("No.", "content_filter", ())),
    "used tool": (used("add", {"n": 2}), {"tools": [TOOL]}, ("ok", "tool_calls", (ADD,))),
    "schema": (used("answer", {"n": 2}), {"schema": SCHEMA}, ('{"n": 2}', "stop", ())),
    "wrapped": (used("answer", {"value": [1, 2]}), {"schema": LIST}, ("[1, 2]", "stop", ())),
    "max_tokens": (anthropic_reply("x", reason="max_tokens"), {}, ("x", "length", ())),
}


@pytest.mark.parametrize(("body", "options", "expected"), READ.values(), ids=READ)
def test_what_is_read_of_a_reply(body: Any, options: Any, expected: tuple[Any, ...]) -> None:
    with FaultyServer([Step(body=body)]) as server:
        client = openai_client(server) if "choices" in body else anthropic_client(server)
        reply, _, _ = ask(client, **options)
    assert (reply.text, reply.finish_reason, reply.tool_calls) == expected


def test_what_openai_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultyServer([Step(), Step(text='{"n": 2}')]) as server:
        client = openai_client(server)
        ask(client, tools=[TOOL])
        ask(client, schema=SCHEMA)
        ask(client, schema={"type": "object", "properties": {"n": {}}, "required": []})
    tools, strict, loose = (request.body for request in server.requests)
    assert tools["tools"] == [TOOL]
    wanted = {"name": "answer", "schema": SCHEMA, "strict": True}
    assert strict["response_format"] == {"type": "json_schema", "json_schema": wanted}
    assert loose["response_format"]["json_schema"]["strict"] is False
    # OpenAI's own address gets the newer name of the limit.
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
    own = make_client(ModelSettings(model="gpt-4o-mini"))
    body = own._body(Ask(messages=HELLO, max_tokens=5))
    assert (body["max_completion_tokens"], "max_tokens" in body) == (5, False)


def test_what_anthropic_is_asked() -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "first"},
        {"role": "user", "content": [{"type": "text", "text": "second"}]},
        {"role": "assistant", "content": "", "tool_calls": [ADD]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    with FaultyServer() as server:
        client = anthropic_client(server)
        ask(client, conversation, tools=[TOOL])
        ask(client, schema=LIST)
        for odd in ({"role": "function", "content": "x"}, {"role": "user", "content": [{}]}):
            with pytest.raises(BadInput, match=r"messages\[0\]"):
                asyncio.run(client.complete([odd]))
    body, schema = (request.body for request in server.requests)
    assert (body["system"], body["max_tokens"]) == ("Be brief.\n\nBe kind.", 4096)
    texts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    used = {"type": "tool_use", "id": "c1", "name": "add", "input": {"n": 2}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "4"}
    assert body["messages"] == [
        {"role": "user", "content": texts},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    assert body["tools"] == [{"name": "add", "input_schema": SCHEMA, "description": "Adds."}]
    assert "tool_choice" not in body
    assert schema["tool_choice"] == {"type": "tool", "name": "answer"}
    assert schema["tools"][0]["input_schema"]["type"] == "object"


def test_cached_tokens() -> None:
    """80 of 100 prompt tokens cached: 20 * 1e-6 + 80 * 0.5e-6 + 10 * 10e-6 = 0.00016; and 5
    fresh, 7 written to the cache, 11 read from it: a prompt of 23."""
    first, second = openai_reply("x"), anthropic_reply("x", (5, 2))
    first["usage"]["prompt_tokens_details"] = {"cached_tokens": 80}
    second["usage"] |= {"cache_creation_input_tokens": 7, "cache_read_input_tokens": 11}
    prices = PriceSettings(input=1.0, output=10.0, cached_input=0.5)
    with FaultyServer([Step(body=first), Step(body=second)]) as server:
        reply, _, _ = ask(openai_client(server, prices=prices))
        other, _, _ = ask(anthropic_client(server))
    assert (reply.usage, reply.cost) == (Usage(100, 10, 80), pytest.approx(0.00016))
    assert other.usage == Usage(23, 2, 11)


@pytest.mark.parametrize("messages", [[], "hello", [{"content": "x"}], ["hello"]])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with FaultyServer() as server, pytest.raises(BadInput, match="cannot be asked"):
        asyncio.run(openai_client(server).complete(messages))
    assert server.requests == []


KEY = "sk-agentscope-0123456789"


def openai_model(server: FaultyServer, **options: Any) -> OpenAIChatModel:
    if SECOND:
        from agentscope.credential import OpenAICredential

        credential = OpenAICredential(api_key=KEY, base_url=server.openai_url)
        kwargs = {"max_retries": 0}
        return OpenAIChatModel(credential, "m", max_retries=0, client_kwargs=kwargs, **options)
    kwargs = {"base_url": server.openai_url, "max_retries": 0}
    return OpenAIChatModel("m", api_key=KEY, client_kwargs=kwargs, **options)


def anthropic_model(server: FaultyServer) -> AnthropicChatModel:
    if SECOND:
        from agentscope.credential import AnthropicCredential

        credential = AnthropicCredential(api_key="k", base_url=server.url)
        return AnthropicChatModel(credential, "m", stream=False)
    kwargs = {"base_url": server.url}
    return AnthropicChatModel("m", api_key="k", stream=False, client_kwargs=kwargs)


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


def test_agentscopes_anthropic_model_gets_a_tool_for_the_schema_and_no_arguments() -> None:
    use = {"type": "tool_use", "id": "t", "name": "answer", "input": {"n": 2}}
    with FaultyServer([Step(body=anthropic_reply(None, (7, 3), use))]) as server:
        client = as_client(anthropic_model(server))
        reply = asyncio.run(client.complete(HELLO, schema=SCHEMA, seed=1))
        with pytest.raises(BadInput, match="stop"):
            asyncio.run(client.complete(HELLO, stop=["END"]))
    assert (reply.text, reply.tool_calls, reply.usage) == ('{"n": 2}', (), Usage(7, 3))
    sent = server.requests[0].body
    assert ("seed" in sent, sent["tool_choice"]["name"]) == (False, "answer")


@only_second
def test_a_conversation_reaches_a_model_of_agentscope_2_as_its_messages() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "add", "content": "2"},
        {"role": "user", "content": [{"type": "text", "text": "and now?"}]},
    ]
    with FaultyServer() as server:
        client = as_client(openai_model(server, stream=False))
        assert asyncio.run(client.complete(messages)).text == "fine"
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        with pytest.raises(BadInput, match="image_url"):
            asyncio.run(client.complete([image]))
    (request,) = server.requests
    sent = request.body["messages"]
    assert [(it["role"], text_of(it["content"])) for it in sent] == [
        (it["role"], text_of(it["content"])) for it in messages
    ]
    assert sent[2]["tool_calls"] == [call]
    assert sent[3]["tool_call_id"] == "c"


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

    for option in ({"temperature": 0.1}, {"tools": [TOOL]}):
        with pytest.raises(BadInput, match=next(iter(option))):
            asyncio.run(client.complete(HELLO, **option))


@pytest.mark.parametrize("thing", [None, "gpt-4o", lambda prompt: "x", AflowLlm, object()])
def test_what_is_no_model_is_refused(thing: Any) -> None:
    with pytest.raises(BadInput, match="cannot be used as a model"):
        as_client(thing)


def test_a_script_answers_in_order_or_by_function() -> None:
    async def later(messages: Any) -> str:
        return str(messages[-1]["content"]) + "!"

    async def ask(model: ScriptedModel, count: int) -> list[str]:
        return [(await model.complete(HELLO)).text for _ in range(count)]

    whole = Reply(text="b", model="x", usage=Usage(1, 2))
    assert asyncio.run(ask(ScriptedModel(["a", whole]), 2)) == ["a", "b"]
    assert asyncio.run(ask(ScriptedModel(later), 1)) == ["hello!"]
    model = ScriptedModel(["a"])
    with pytest.raises(ModelError, match="has 1 replies, this is call 2"):
        asyncio.run(ask(model, 2))
    assert [question.messages for question in model.asked] == [HELLO, HELLO]
