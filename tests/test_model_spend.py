"""Prices, and what a run may spend: within one process and across several."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_server import FaultyServer, Step, openai_reply

from aflow_tune.errors import BadInput, BudgetReached
from aflow_tune.models import (
    ModelError,
    Reply,
    ScriptedModel,
    Spend,
    Usage,
    make_client,
)
from aflow_tune.models.clients import RunSpend
from aflow_tune.models.prices import FixedPrice, price_of, stands_in
from aflow_tune.models.settings import check_models
from aflow_tune.sections import BudgetSection, ModelSettings, PriceSettings

HELLO = [{"role": "user", "content": "hello"}]
PRICES = PriceSettings(input=1.0, output=10.0)
"""A good reply of the server, (100, 10) tokens, costs 0.0002 dollars."""


# Prices


def test_a_fixed_price_by_hand() -> None:
    """(1000 - 400) * 3 + 400 * 0.3 + 200 * 15 = 4920 millionths of a dollar."""
    assert FixedPrice(3.0, 15.0, 0.3).cost(Usage(1000, 200, 400)) == pytest.approx(0.00492)
    assert FixedPrice(3.0, 15.0).cost(Usage(1000, 200, 400)) == pytest.approx(0.006)


def test_listed_prices() -> None:
    listed = price_of("openai", None, "gpt-4o-mini")
    assert listed is not None
    # 0.15 and 0.60 dollars for a million tokens since the model's release in July 2024.
    assert listed.cost(Usage(1_000_000, 0)) == pytest.approx(0.15)
    assert listed.cost(Usage(0, 1_000_000)) == pytest.approx(0.60)
    assert listed.cost(Usage(1_000_000, 0, 1_000_000)) == pytest.approx(0.075)
    assert price_of("openai", None, "a-model-of-mine") is None
    assert price_of("anthropic", None, "claude-sonnet-4-5") is not None
    assert pickle.loads(pickle.dumps(listed)) == listed
    given = PriceSettings(input=7.0, output=0.0)
    assert price_of("openai", None, "gpt-4o-mini", given) == FixedPrice(7.0, 0.0)


@pytest.mark.parametrize(
    ("address", "model", "dollars", "told"),
    [
        ("https://llm.example.com/v1", "gpt-4o-mini", 0.15, "openai/gpt-4o-mini, $0.15 in"),
        ("https://llm.example.com/v1", "openai/gpt-4o-mini", 0.15, "openai/gpt-4o-mini"),
        ("https://openrouter.ai/api/v1", "openai/gpt-4o-mini", 0.15, None),
        ("https://mine.openai.azure.com/openai/v1", "gpt-4o-mini", 0.15, None),
        ("https://llm.example.com/v1", "Qwen/Qwen2.5-7B-Instruct", None, None),
        ("http://127.0.0.1:8000/v1", "gpt-4o-mini", None, None),
        ("http://10.0.0.5/v1", "gpt-4o-mini", None, None),
        ("http://[::1]:8000/v1", "gpt-4o-mini", None, None),
        ("http://gpu-node:8000/v1", "gpt-4o-mini", None, None),
        ("http://vllm.svc.cluster.local/v1", "gpt-4o-mini", None, None),
    ],
)
def test_a_proxy_has_the_vendor_s_price_and_a_server_of_one_s_own_has_none(
    address: str, model: str, dollars: float | None, told: str | None
) -> None:
    price = price_of("openai", address, model)
    cost = None if price is None else price.cost(Usage(1_000_000, 0))
    assert cost == (None if dollars is None else pytest.approx(dollars))
    said = stands_in(ModelSettings(model=model, base_url=address))
    assert (said is None) if told is None else (said is not None and told in said)


def test_a_listed_price_may_be_named() -> None:
    prices = PriceSettings(listed="azure/gpt-4o-mini")
    here = ModelSettings(model="my-deployment", base_url="http://127.0.0.1:1/v1", prices=prices)
    price = price_of("openai", here.base_url, "my-deployment", prices)
    assert price is not None
    assert price.cost(Usage(0, 1_000_000)) == pytest.approx(0.6)
    assert (stands_in(here), check_models({"judge": here})) == (None, [])
    (fault,) = check_models({"judge": replace(here, prices=PriceSettings(listed="gtp-4o"))})
    assert fault.where == "models.judge.prices.listed"


@pytest.mark.parametrize(
    ("price", "usage", "cost"),
    [
        (None, Usage(5, 5), None),
        (None, None, None),
        (FixedPrice(0.0, 0.0), Usage(5, 5), 0.0),
        (FixedPrice(0.0, 0.0), None, 0.0),
        (FixedPrice(1.0, 1.0), None, None),
    ],
)
def test_what_is_not_priced_is_unknown_and_what_is_priced_zero_is_free(
    price: Any, usage: Usage | None, cost: float | None
) -> None:
    model = ScriptedModel([Reply(text="x", model="m", usage=usage)], price=price)
    assert asyncio.run(model.complete(HELLO)).cost == cost


# Limits


def limited(**limits: Any) -> Spend:
    return Spend(BudgetSection(**limits))


def scripted(usage: Usage | None = None, **options: Any) -> ScriptedModel:
    return ScriptedModel(lambda _: Reply(text="x", model="m", usage=usage), **options)


def under_way(spend: Spend) -> int:
    with spend._transaction() as connection:
        return int(connection.execute("SELECT COUNT(*) FROM held").fetchone()[0])


def calls_until_reached(spend: Spend, client: Any, **options: Any) -> int:
    async def work() -> int:
        with spend.activate():
            for made in range(1000):
                try:
                    await client.complete(HELLO, **options)
                except BudgetReached:
                    return made
        raise AssertionError("the budget was never reached")

    return asyncio.run(work())


def together(spend: Spend, client: Any, count: int, **options: Any) -> list[Any]:
    async def work() -> list[Any]:
        with spend.activate():
            calls = (client.complete(HELLO, **options) for _ in range(count))
            return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(work())


def test_calls_are_limited_exactly_one_after_the_other_and_at_once() -> None:
    spend, client = limited(calls=7), scripted()
    assert calls_until_reached(spend, client) == len(client.asked) == spend.spent().calls == 7
    assert spend.reached() == "budget.calls: 7 of 7 are used"
    spend, client = limited(calls=50), scripted()
    outcomes = together(spend, client, 200)
    assert len(client.asked) == 50
    assert sum(isinstance(outcome, BudgetReached) for outcome in outcomes) == 150


def test_tokens_stop_before_a_call_that_could_exceed_them() -> None:
    """Worst case 130 + 70 = 200, used 100 each: the 9th call could end at 1,000, no 10th."""
    spend, client = limited(tokens=1000), scripted(Usage(60, 40))
    assert calls_until_reached(spend, client, max_tokens=70) == 9
    assert (spend.spent().tokens, spend.spent().calls) == (900, 9)
    assert "tokens: 900 of 1000" in str(spend.reached())
    # Without a bound they stop once they are used.
    assert calls_until_reached(limited(tokens=1000), client) == 10


def test_money_is_counted_exactly_and_never_exceeded() -> None:
    """A call costs 60 + 400 = 460 and at most 130 + 1000 = 1130 millionths of a dollar.

    The 19th begins at 18 * 460 = 8280: 9410 fit into 9500. The 20th would begin at 8740.
    """
    spend = limited(usd=0.0095)
    client = scripted(Usage(60, 40), price=FixedPrice(1.0, 10.0))
    assert calls_until_reached(spend, client, max_tokens=100) == 19
    assert spend.spent().pico == 19 * 460 * 10**6


def test_concurrent_calls_wait_for_each_other_rather_than_exceed_or_give_up() -> None:
    """Only five worst cases fit at once, but all twenty calls fit one after the other."""
    now, most = 0, 0

    async def answer(_: Any) -> Reply:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return Reply(text="x", model="m", usage=Usage(30, 10))

    spend = limited(tokens=1000)
    assert len(together(spend, ScriptedModel(answer), 20, max_tokens=70)) == 20
    assert (most <= 5, spend.spent().tokens, under_way(spend)) == (True, 800, 0)


def test_a_reply_without_usage_counts_with_its_worst_case() -> None:
    spend = limited(tokens=450)
    assert calls_until_reached(spend, scripted(None), max_tokens=70) == 2
    assert spend.spent().estimated_tokens == 400


def test_a_call_inside_of_another_does_not_wait_for_it() -> None:
    """The outer holds 130 of 300 tokens; the inner could need 200 and must not wait for that."""
    inner = scripted(Usage(1, 1))

    async def outer(_: Any) -> str:
        return (await inner.complete(HELLO, max_tokens=70)).text

    async def nested() -> None:
        with limited(tokens=300).activate():
            await ScriptedModel(outer).complete(HELLO)

    with pytest.raises(BudgetReached, match="next call might exceed"):
        asyncio.run(asyncio.wait_for(nested(), 60))


def test_a_model_without_a_price_is_refused_under_a_limit_on_money() -> None:
    async def call(spend: Spend, role: str) -> Reply:
        with spend.activate():
            return await scripted(Usage(1, 1), role=role).complete(HELLO)

    spend = Spend(BudgetSection(usd=1.0), prices={"policy": FixedPrice(2.0, 2.0)})
    assert asyncio.run(call(spend, "policy")).cost == pytest.approx(4e-6)
    with pytest.raises(BadInput, match=r"models\.critic\.prices") as caught:
        asyncio.run(call(spend, "critic"))
    assert "budget.tokens" in caught.value.faults[0].cure


def test_a_paid_reply_counts_although_nobody_waits_for_it() -> None:
    """A reply that cannot be read has to be paid; a caller that leaves gives back its part."""

    async def leave() -> None:
        with spend.activate():
            with pytest.raises(ModelError):
                await client.complete(HELLO, max_tokens=70)
            call = asyncio.ensure_future(client.complete(HELLO, max_tokens=70))
            while len(server.requests) < 2:
                await asyncio.sleep(0.005)
            call.cancel()
            await asyncio.wait([call])
            while under_way(spend):
                await asyncio.sleep(0.005)

    steps = [Step(body={**openai_reply("x"), "choices": []}), Step(kind="hang")]
    spend = limited(tokens=1000)
    with FaultyServer(steps) as server:
        client = make_client(ModelSettings(model="m", base_url=server.openai_url, backoff=0.001))
        asyncio.run(asyncio.wait_for(leave(), 60))
    assert (spend.spent().tokens, spend.spent().replies) == (110, 1)


def test_concurrent_money_is_exact_on_a_failing_server() -> None:
    """0.02 dollars, 0.0002 a reply and 0.00013 + 0.0007 at worst; every third request fails."""
    failing = [Step(status=500), Step(kind="cut"), Step(kind="cut_body"), Step(status=429)]

    def script(number: int, _: Any) -> Step:
        return failing[number // 3 % 4] if number % 3 == 0 else Step()

    spend = limited(usd=0.02)
    with FaultyServer(script) as server:
        settings = ModelSettings(
            model="m", base_url=server.openai_url, backoff=0.001, retries=20, prices=PRICES
        )
        outcomes = together(spend, make_client(settings), 300, max_tokens=70)
    answered = sum(isinstance(outcome, Reply) for outcome in outcomes)
    assert all(isinstance(outcome, Reply | BudgetReached) for outcome in outcomes)
    spent = spend.spent()
    assert (spent.pico, spent.unreported) == (answered * 200_000_000, 0)
    assert 0.02 - 0.00083 < spent.usd <= 0.02
    assert under_way(spend) == 0


# One file, several processes


def work(path: Path) -> None:
    client = scripted(Usage(60, 40), role=f"worker-{os.getpid()}")
    calls_until_reached(Spend(BudgetSection(calls=100, tokens=7000), path), client, max_tokens=70)


def test_processes_share_one_budget(tmp_path: Path) -> None:
    """The tokens run out first: 100 a call, 200 at worst, so 69 calls."""
    path = tmp_path / "account.sqlite"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(path,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    spend = Spend(path=path)
    spent = spend.spent()
    assert (spent.tokens, spent.replies, under_way(spend)) == (6900, 69, 0)
    assert sum(spend.spent(f"worker-{worker.pid}").replies for worker in workers) == 69
    assert "tokens" in str(spend.reached())


def reserve_and_die(path: Path) -> None:
    async def call() -> None:
        with Spend(BudgetSection(tokens=1000), path).activate():
            await ScriptedModel(lambda _: os.kill(os.getpid(), signal.SIGKILL)).complete(
                HELLO, max_tokens=800
            )

    asyncio.run(call())


def test_what_a_killed_process_held_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "account.sqlite"
    worker = multiprocessing.get_context("fork").Process(target=reserve_and_die, args=(path,))
    worker.start()
    worker.join(60)
    spend = Spend(BudgetSection(tokens=1000), path)
    assert under_way(spend) == 1
    (reply,) = together(spend, scripted(Usage(1, 1)), 1, max_tokens=70)
    assert reply.text == "x"
    assert (under_way(spend), spend.spent().tokens) == (0, 2)


OF_AN_EARLIER_VERSION = """
CREATE TABLE spent (
    role TEXT, model TEXT, calls INTEGER DEFAULT 0, replies INTEGER DEFAULT 0,
    prompt_tokens INTEGER DEFAULT 0, completion_tokens INTEGER DEFAULT 0,
    estimated_tokens INTEGER DEFAULT 0, pico INTEGER DEFAULT 0,
    unpriced INTEGER DEFAULT 0, unreported INTEGER DEFAULT 0, PRIMARY KEY (role, model)
);
CREATE TABLE held (id INTEGER PRIMARY KEY, pid INTEGER, pico INTEGER, tokens INTEGER, expires REAL);
CREATE TABLE reached (reason TEXT);
INSERT INTO spent VALUES ('policy', 'm', 3, 3, 30, 6, 0, 42, 0, 0);
INSERT INTO reached VALUES ('budget.calls: 3 were made');
"""


def test_a_run_goes_on_where_an_earlier_command_stopped(tmp_path: Path) -> None:
    path = tmp_path / "account.sqlite"
    made = sqlite3.connect(path)
    made.executescript(OF_AN_EARLIER_VERSION)
    made.close()
    run = RunSpend(str(path), BudgetSection(calls=5))
    assert run.reached() == "budget.calls: 3 were made"
    run.start()
    assert run.reached() is None
    assert calls_until_reached(Spend(run.limits, path), scripted(Usage(1, 1))) == 2
    spent = Spend(path=path).spent()
    assert (spent.calls, spent.tokens, spent.pico) == (5, 40, 42)


def test_without_a_limit_nothing_is_written(tmp_path: Path) -> None:
    spend = Spend(path=tmp_path / "account.sqlite")
    together(spend, scripted(Usage(1, 1)), 3)
    assert list(tmp_path.iterdir()) == []
