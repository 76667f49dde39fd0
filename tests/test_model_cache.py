"""The cache of answers: what is one question, and what happens to broken entries."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from faulty_server import USAGE, FaultyServer, Step, openai_reply

from aflow_tune.models import Reply, ResponseCache, Spend, Usage, make_client
from aflow_tune.models.types import Ask
from aflow_tune.sections import BudgetSection, ModelSettings, PriceSettings
from aflow_tune.trace import ModelCall, Trace

HELLO = [{"role": "user", "content": "hello"}]
BASE: dict[str, Any] = {"messages": HELLO, "temperature": 0.5, "seed": 1}
OLD_KEY = "3f67b4c72af8ad628589a5ca3ce3ffa68dc65506dfe809ed519af89d131a544c"
ENDPOINT = {"provider": "openai", "base_url": "https://api.example.com/v1", "model": "m"}


def numbered(number: int, _: Any) -> Step:
    return Step(text=f"answer {number}")


def client_of(server: FaultyServer, **settings: Any) -> Any:
    prices = PriceSettings(input=1.0, output=10.0)
    return make_client(
        ModelSettings(model="m", base_url=server.openai_url, prices=prices, **settings)
    )


def test_the_same_question_is_asked_once_for_each_sample(tmp_path: Path) -> None:
    async def sample(number: int) -> list[str]:
        with cache.activate(sample=number, weights="w"):
            return [(await client.complete(HELLO)).text for _ in range(2)]

    cache = ResponseCache(tmp_path)
    with FaultyServer(numbered) as server:
        client = client_of(server)
        first = [asyncio.run(sample(0)), asyncio.run(sample(1))]
        again = [asyncio.run(sample(0)), asyncio.run(sample(1))]
    # Within a sample the second asking is a question of its own: ensembles need other answers.
    assert first == again == [["answer 0", "answer 1"], ["answer 2", "answer 3"]]
    assert len(server.requests) == 4


def test_an_answer_from_the_cache_is_free_but_keeps_what_it_had_cost(tmp_path: Path) -> None:
    async def evaluate() -> Reply:
        with ResponseCache(tmp_path).activate(weights="w"), spend.activate(), trace.activate():
            return await client.complete(HELLO)

    spend, trace = Spend(BudgetSection(calls=1, usd=1.0)), Trace()
    with FaultyServer() as server:
        client = client_of(server)
        paid, cached = asyncio.run(evaluate()), asyncio.run(evaluate())
    assert (paid.from_cache, cached.from_cache) == (False, True)
    assert (cached.text, cached.model, cached.usage) == ("fine", "scripted-1", Usage(*USAGE))
    assert cached.cost == paid.cost == pytest.approx(0.0002)
    first, second = trace.of(ModelCall)
    assert (first.from_cache, second.from_cache, second.cost) == (False, True, cached.cost)
    assert (spend.spent().calls, spend.spent().tokens) == (1, 110)


CHANGES: dict[str, dict[str, Any]] = {
    "text": {"messages": [{"role": "user", "content": "hello!"}]},
    "role": {"messages": [{"role": "system", "content": "hello"}]},
    "order": {"messages": [*HELLO, {"role": "user", "content": "x"}]},
    "temperature": {"temperature": 0.6},
    "no temperature": {"temperature": None},
    "top_p": {"top_p": 0.5},
    "max_tokens": {"max_tokens": 5},
    "stop": {"stop": ["x"]},
    "seed": {"seed": 2},
    "schema": {"schema": {"type": "object"}},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
}


def key(ask: dict[str, Any], endpoint: Any = ENDPOINT, sample: Any = 0, weights: str = "") -> str:
    with ResponseCache("nowhere").activate(sample, weights) as use:
        entry = use.entry(endpoint, Ask(**ask))
    assert entry is not None
    return entry.key


def test_whatever_changes_the_answer_changes_the_key() -> None:
    changed = [key({**BASE, **change}) for change in CHANGES.values()]
    changed += [key(BASE, {**ENDPOINT, name: "other"}) for name in ENDPOINT]
    changed += [key(dict(BASE)), key(BASE, sample=1), key(BASE, weights="w")]
    assert len(set(changed)) == len(changed)
    # The key of a cache that an earlier version wrote.
    old = key({"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5})
    assert old == OLD_KEY


def answer(cache: ResponseCache, client: Any) -> str:
    async def ask() -> str:
        with cache.activate(weights="w"):
            return str((await client.complete(HELLO)).text)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"\xff\xfe" + raw,
        lambda raw: b"[]",
        lambda raw: json.dumps({**json.loads(raw), "key": "0" * 64}).encode(),
    ],
)
def test_a_broken_entry_is_asked_again_and_replaced(tmp_path: Path, damage: Any) -> None:
    cache = ResponseCache(tmp_path)
    with FaultyServer(numbered) as server:
        client = client_of(server)
        assert answer(cache, client) == "answer 0"
        (file,) = tmp_path.rglob("*.json")
        file.write_bytes(damage(file.read_bytes()))
        assert answer(cache, client) == "answer 1"
        assert answer(cache, client) == "answer 1"
    assert len(server.requests) == 2
    assert [path.suffix for path in tmp_path.rglob("*.*")] == [".json"]


def test_failures_and_answers_with_keys_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_API_KEY", "sk-cache-0123456789")
    cache = ResponseCache(tmp_path)
    steps = [Step(status=400), Step(body=openai_reply("your key is sk-cache-0123456789"))]
    with FaultyServer(steps) as server:
        client = client_of(server, api_key_env="CACHE_API_KEY")
        with pytest.raises(RuntimeError):
            answer(cache, client)
        assert "your key" in answer(cache, client)
        assert answer(cache, client) == "fine"
    (file,) = tmp_path.rglob("*.json")
    assert b"sk-cache" not in file.read_bytes()
