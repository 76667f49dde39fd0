"""The server through the public OpenAI client, and through AgentScope."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from agentscopes import SECOND
from tiny import tiny_sampler

from aflow_tune.engines.local.chat import Renderer
from aflow_tune.engines.local.models import load_tokenizer
from aflow_tune.engines.local.sampler import Completion, Sampler, SamplingParams
from aflow_tune.engines.local.server import (
    GreedyAnswers,
    SamplerServer,
)
from aflow_tune.errors import BadInput

HELLO = [{"role": "user", "content": "hello"}]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=5)
    age: int = pydantic.Field(ge=0, le=99)


TOOL = {
    "type": "function",
    "function": {
        "name": "meet",
        "description": "Meet a person.",
        "parameters": Person.model_json_schema(),
    },
}
OTHER_TOOL = {"type": "function", "function": {"name": "leave"}}


@pytest.fixture(scope="module")
def sampler(tiny_model_dir: Path) -> Iterator[Sampler]:
    with tiny_sampler(tiny_model_dir, max_model_len=1000) as sampler:
        yield sampler


@pytest.fixture(scope="module")
def url(sampler: Sampler, tiny_model_dir: Path) -> Iterator[str]:
    server = SamplerServer(sampler, load_tokenizer(tiny_model_dir), "tiny")
    yield server.start()
    server.stop()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **options: Any) -> Any:
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 5, "seed": 0, **options}
    return client.chat.completions.create(**options)


def test_a_call_and_its_result_are_served_as_they_are_learned(
    url: str, tiny_model_dir: Path
) -> None:
    """Over HTTP: the prompt of the last answer holds the first one as it was learned."""
    call = {"id": "a", "type": "function", "function": {"name": "meet", "arguments": '{"age": 3}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "met"},
        {"role": "assistant", "content": "Done."},
    ]
    request = {"messages": messages[:3], "tools": [TOOL], "max_tokens": 1, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=request).json()
    (learned,) = Renderer(load_tokenizer(tiny_model_dir)).examples(messages, [TOOL])
    served = answer["prompt_token_ids"]
    assert learned.tokens_T[: len(served)] == served
    assert any(learned.learned_R[: len(served) - learned.prompt_length])


def test_tokens_and_logprobs_are_the_samplers(
    client: openai.OpenAI, sampler: Sampler, tiny_model_dir: Path
) -> None:
    tokenizer = load_tokenizer(tiny_model_dir)
    answer = ask(client, n=2, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True})
    text = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    assert answer.prompt_token_ids == tokenizer(text)["input_ids"]
    expected = sampler.generate(
        [answer.prompt_token_ids], [SamplingParams(max_tokens=5, n=2, seed=0)]
    )[0]
    for choice, completion in zip(answer.choices, expected, strict=True):
        assert choice.token_ids == completion.token_ids
        assert choice.message.content == completion.text
        assert choice.finish_reason == completion.finish_reason
        found = [entry.logprob for entry in choice.logprobs.content]
        assert found == pytest.approx(completion.logprobs, abs=1e-5)
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    drawn = sum(len(c.token_ids) for c in expected)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(answer.prompt_token_ids), drawn)
    assert usage.total_tokens == len(answer.prompt_token_ids) + drawn


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"stream": True}, 400, "stream"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"top_logprobs": 2}, 400, "logprobs"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"content": "x"}]}, 400, "role"),
        ({"messages": [{"role": "user", "content": "x" * 1000}]}, 400, "max_model_len"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, 400, "content"),
        ({"messages": [{"role": "user", "tool_calls": [{"id": "x"}]}]}, 400, "function"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         400, "meet"),
        ({"response_format": {"type": "json_schema"}}, 400, "json_schema"),
        ({"response_format": {"type": "json_schema",
                              "json_schema": {"name": "x", "schema": {"type": "odd"}}}},
         400, "cannot be enforced"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": None}}},
         400, "json_schema"),
        ({"model": "gpt"}, 404, "gpt"),
    ],
)  # fmt: skip
def test_refusals_have_openais_shape(client, options, status, words) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, **options)
    assert caught.value.status_code == status
    assert words in caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"


def test_a_body_that_is_no_text_is_refused(url: str) -> None:
    for body in (b"\xff\xfe", b"{"):
        assert httpx.post(f"{url}/v1/chat/completions", content=body).status_code == 400


def test_structured_output_parses_also_through_agentscope(client, url: str) -> None:
    from agentscope.model import OpenAIChatModel

    for seed in range(4):
        answer = client.chat.completions.parse(
            model="tiny", messages=HELLO, response_format=Person, seed=seed, max_tokens=200
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
        assert answer.choices[0].finish_reason == "stop"
    if SECOND:
        from agentscope.credential import OpenAICredential
        from agentscope.message import UserMsg

        credential = OpenAICredential(api_key="none", base_url=f"{url}/v1")
        model = OpenAIChatModel(credential, "tiny", stream=False)
        asked = model.generate_structured_output(
            [UserMsg(name="user", content="hello")], Person, max_tokens=300, seed=1
        )
        Person.model_validate(asyncio.run(asked).content)
        return
    for fallback in (False, True):
        model = OpenAIChatModel(
            "tiny",
            api_key="none",
            stream=False,
            client_kwargs={"base_url": f"{url}/v1"},
            generate_kwargs={"max_tokens": 300, "seed": 1},
        )
        model._structured_output_fallback = fallback
        Person.model_validate(asyncio.run(model(HELLO, structured_model=Person)).metadata)


def test_a_client_that_leaves_frees_its_place(url: str, sampler: Sampler) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 900, "ignore_eos": True, "n": 4}
    patience = httpx.Timeout(60, read=0.1)

    def until_one_is_cut_off() -> None:
        for _ in range(50):
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=patience)

    with pytest.raises(httpx.ReadTimeout):
        until_one_is_cut_off()
    deadline = time.monotonic() + 60
    while sampler._active and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sampler._active


def test_the_key_is_asked_for(sampler: Sampler, tiny_model_dir: Path) -> None:
    server = SamplerServer(sampler, load_tokenizer(tiny_model_dir), "tiny", api_key="secret")
    url = server.start()
    try:
        wrong, right = (
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            for key in ("wrong", "secret")
        )
        assert ask(right).choices
        for call in (lambda: ask(wrong), wrong.models.list):
            with pytest.raises(openai.AuthenticationError):
                call()
    finally:
        server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=60)


# --- a frozen model ----------------------------------------------------------------------------


def test_what_leaves_nothing_to_chance_is_decoded_once(sampler: Sampler) -> None:
    asked = 0

    async def submit(prompt: list[int], params: SamplingParams) -> list[Completion]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise BadInput("no")
        return await sampler.submit(prompt, params)

    async def ask_all() -> None:
        answers, greedy = GreedyAnswers(submit), SamplingParams(max_tokens=8, temperature=0.0)
        asking = (answers.submit([5, 6, 7], replace(greedy, seed=seed)) for seed in range(3))
        failed = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(error) for error in failed] == [BadInput] * 3  # and it is not remembered
        leaving, *staying = (
            asyncio.ensure_future(answers.submit([5, 6, 7], greedy)) for _ in range(3)
        )
        await asyncio.sleep(0)
        leaving.cancel()
        together = [*await asyncio.gather(*staying), await answers.submit([5, 6, 7], greedy)]
        assert together == [await sampler.submit([5, 6, 7], greedy)] * 3
        assert asked == 2

    asyncio.run(ask_all())


# --- tool-call text ----------------------------------------------------------------------------
