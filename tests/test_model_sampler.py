"""Our client against the local sampler's own server: the policy reached as any endpoint is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import tiny_sampler

from aflow_tune.engines.local.models import load_tokenizer
from aflow_tune.engines.local.server import SamplerServer
from aflow_tune.models import ModelError, ModelFailure, make_client
from aflow_tune.models.http_client import HttpClient
from aflow_tune.sections import ModelSettings, PriceSettings

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(tiny_model_dir: Path) -> Iterator[HttpClient]:
    with tiny_sampler(tiny_model_dir, max_model_len=500) as sampler:
        server = SamplerServer(sampler, load_tokenizer(tiny_model_dir), "tiny", api_key=None)
        url = server.start()
        free = PriceSettings(input=0.0, output=0.0)
        settings = ModelSettings(model="tiny", base_url=f"{url}/v1", prices=free, max_tokens=8)
        yield make_client(settings, "policy")
        server.stop()


def test_answers_repeat_with_their_seed_and_cost_nothing(client: HttpClient) -> None:
    async def ask(seed: int) -> str:
        reply = await client.complete(HELLO, seed=seed)
        assert reply.usage is not None
        assert reply.usage.completion_tokens <= 8
        assert (reply.model, reply.cost) == ("tiny", 0.0)
        return reply.text

    async def both() -> list[str]:
        return list(await asyncio.gather(*(ask(seed) for seed in (1, 2, 1))))

    first, other, again = asyncio.run(both())
    assert first == again != other


def test_a_schema_is_followed(client: HttpClient) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    reply = asyncio.run(client.complete(HELLO, schema=schema, max_tokens=60, seed=0))
    assert 0 <= json.loads(reply.text)["n"] <= 9


def test_what_the_server_refuses_is_refused_with_its_reason(client: HttpClient) -> None:
    long = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(ModelError, match="max_model_len") as caught:
        asyncio.run(client.complete(long))
    assert caught.value.failure is ModelFailure.REFUSED
