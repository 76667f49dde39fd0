"""Counting, prices and the hard budget, within one process and across several."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_server import FaultyServer, Step, openai_reply

from aflow_tune.errors import BadInput, BudgetReached
from aflow_tune.models import (
    Account,
    Budget,
    Ledger,
    Meter,
    ModelError,
    Reply,
    ScriptedModel,
    Usage,
    current_ledger,
    make_client,
)
from aflow_tune.models.ask import Ask
from aflow_tune.models.books import Books
from aflow_tune.models.prices import FixedPrice, ListedPrice, price_of, stands_in
from aflow_tune.models.settings import check_models
from aflow_tune.sections import BudgetSection, ModelSettings, PriceSettings
from aflow_tune.trace import ModelCall, Trace

HELLO = [{"role": "user", "content": "hello"}]
PRICES = PriceSettings(input=1.0, output=10.0)
"""A good reply of the server, (100, 10) tokens, costs 0.0002 dollars."""
WORST_PROMPT = Ask(messages=HELLO).most_prompt_tokens()
"""[[{"role": "user", "content": "hello"}], null, []] is 50 bytes; 64 + 16 for the template."""


def test_the_bound_of_a_prompt_is_its_bytes_and_a_margin() -> None:
    assert WORST_PROMPT == 50 + 64 + 16
    umlauts = Ask(messages=[{"role": "user", "content": "ü" * 10}])
    assert umlauts.most_prompt_tokens() == 50 - 5 + 20 + 64 + 16


# Meter


def test_the_meter_sums_by_role_and_model() -> None:
    meter = Meter()
    meter.count("judge", "a", calls=1)
    meter.count_reply("judge", "a", Usage(10, 2, 4), 0.5)
    meter.count_reply("judge", "b", Usage(1, 1), None)
    meter.count_reply("policy", "a", None, 0.0)
    total = meter.total()
    assert (total.prompt_tokens, total.completion_tokens, total.cached_tokens) == (11, 3, 4)
    assert (total.cost, total.unpriced, total.unreported, total.known_cost) == (0.5, 1, 1, None)
    assert meter.by_model()["a"].known_cost == 0.5
    assert meter.by_role()["policy"].known_cost == 0.0
    assert meter.to_json()["roles"]["judge"]["unpriced"] == 1


# Prices


def test_a_fixed_price_by_hand() -> None:
    """(1000 - 400) * 3 + 400 * 0.3 + 200 * 15 = 4920 millionths of a dollar."""
    assert FixedPrice(3.0, 15.0, 0.3).cost(Usage(1000, 200, 400)) == pytest.approx(0.00492)
    assert FixedPrice(3.0, 15.0).cost(Usage(1000, 200, 400)) == pytest.approx(0.006)


def test_listed_prices_apply_to_the_vendors_own_address_only() -> None:
    listed = price_of("openai", None, "gpt-4o-mini")
    assert isinstance(listed, ListedPrice)
    # 0.15 and 0.60 dollars for a million tokens since the model's release in July 2024.
    assert listed.cost(Usage(1_000_000, 0)) == pytest.approx(0.15)
    assert listed.cost(Usage(0, 1_000_000)) == pytest.approx(0.60)
    assert listed.cost(Usage(1_000_000, 0, 1_000_000)) == pytest.approx(0.075)
    assert price_of("openai", None, "a-model-of-mine") is None
    assert price_of("anthropic", None, "claude-sonnet-4-5") is not None
    assert pickle.loads(pickle.dumps(listed)).cost(Usage(1_000_000, 0)) == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("address", "model", "dollars", "told"),
    [
        ("https://llm.example.com/v1", "gpt-4o-mini", 0.15, "openai/gpt-4o-mini, $0.15 in"),
        ("https://llm.example.com/v1", "openai/gpt-4o-mini", 0.15, "openai/gpt-4o-mini"),
        ("https://openrouter.ai/api/v1", "gpt-4o-mini", 0.15, "openai/gpt-4o-mini"),
        ("https://openrouter.ai/api/v1", "openai/gpt-4o-mini", 0.15, None),
        ("https://mine.openai.azure.com/openai/v1", "gpt-4o-mini", 0.15, None),
        ("https://api.openai.com/v1", "gpt-4o-mini", 0.15, None),
        ("https://llm.example.com/v1", "Qwen/Qwen2.5-7B-Instruct", None, None),
        ("http://127.0.0.1:8000/v1", "gpt-4o-mini", None, None),
        ("http://localhost:11434/v1", "gpt-oss-20b", None, None),
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
    assert stands_in(here) is None
    assert check_models({"judge": here}) == []
    (fault,) = check_models({"judge": replace(here, prices=PriceSettings(listed="gtp-4o"))})
    assert fault.where == "models.judge.prices.listed"


def test_configured_prices_win_over_the_list() -> None:
    price = price_of("openai", None, "gpt-4o-mini", PriceSettings(input=7.0, output=0.0))
    assert price == FixedPrice(7.0, 0.0)


def test_what_is_not_priced_is_unknown_and_what_is_priced_zero_is_free() -> None:
    async def cost(price: Any, usage: Usage | None) -> float | None:
        reply = Reply(text="x", model="m", usage=usage)
        return (await ScriptedModel([reply], price=price).complete(HELLO)).cost

    assert asyncio.run(cost(None, Usage(5, 5))) is None
    assert asyncio.run(cost(None, None)) is None
    assert asyncio.run(cost(FixedPrice(0.0, 0.0), Usage(5, 5))) == 0.0
    assert asyncio.run(cost(FixedPrice(0.0, 0.0), None)) == 0.0
    assert asyncio.run(cost(FixedPrice(1.0, 1.0), None)) is None


# The budget in front of calls


def limited(**limits: Any) -> Ledger:
    return Ledger(budget=Budget(BudgetSection(**limits)))


def scripted(usage: Usage | None = None, **options: Any) -> ScriptedModel:
    return ScriptedModel(lambda _: Reply(text="x", model="m", usage=usage), **options)


async def call_until_reached(ledger: Ledger, client: Any, **options: Any) -> int:
    with ledger.activate():
        for made in range(1000):
            try:
                await client.complete(HELLO, **options)
            except BudgetReached:
                return made
    raise AssertionError("the budget was never reached")


def test_the_message_counts_calls_under_way() -> None:
    async def ask() -> BudgetReached:
        budget = Budget(BudgetSection(usd=1.0, tokens=None, calls=3))
        price = FixedPrice(input=1000.0, output=1000.0)  # a tenth of a cent a token
        for _ in range(2):
            budget.count_call("judge", "m")
            await budget.hold("judge", "m", price, 100, 300, None)
        with pytest.raises(BudgetReached) as caught:
            await budget.hold("judge", "m", price, 100, 300, None, wait=False)
        assert "0 of 1 are spent, 2 calls under way may use 0.8 more" in str(caught.value)
        budget.count_call("judge", "m")
        with pytest.raises(BudgetReached) as caught:
            budget.count_call("judge", "m")
        return caught.value

    assert "calls: 3 were made, 2 of them under way" in str(asyncio.run(ask()))


def test_calls_are_limited_exactly() -> None:
    ledger, client = limited(calls=7), scripted()
    assert asyncio.run(call_until_reached(ledger, client)) == 7
    assert len(client.asked) == 7
    assert ledger.budget is not None
    assert ledger.budget.reached == "budget.calls: 7 were made"
    assert ledger.meter.total().calls == 7


def test_concurrent_calls_never_exceed_the_limit() -> None:
    async def many() -> list[Any]:
        with ledger.activate():
            calls = (client.complete(HELLO) for _ in range(200))
            return await asyncio.gather(*calls, return_exceptions=True)

    ledger, client = limited(calls=50), scripted()
    outcomes = asyncio.run(many())
    assert len(client.asked) == 50
    assert sum(isinstance(outcome, BudgetReached) for outcome in outcomes) == 150


def test_tokens_stop_before_a_call_that_could_exceed_them() -> None:
    """Worst case 130 + 70 = 200, used 100 each: the 9th call could end at 1,000, no 10th."""
    ledger, client = limited(tokens=1000), scripted(Usage(60, 40))
    assert asyncio.run(call_until_reached(ledger, client, max_tokens=70)) == 9
    assert ledger.budget is not None
    assert (ledger.budget.spent.tokens, ledger.budget.spent.calls) == (900, 9)
    assert ledger.meter.total().calls == 9
    assert "tokens: 900 of 1000" in str(ledger.budget.reached)


def test_tokens_without_a_bound_stop_once_they_are_used() -> None:
    ledger, client = limited(tokens=1000), scripted(Usage(60, 40))
    assert asyncio.run(call_until_reached(ledger, client)) == 10


def test_money_is_counted_exactly_and_never_exceeded() -> None:
    """A call costs 60 + 400 = 460 and at most 130 + 1000 = 1130 millionths of a dollar.

    The 19th begins at 18 * 460 = 8280: 9410 fit into 9500. The 20th would begin at 8740.
    """
    ledger = limited(usd=0.0095)
    client = scripted(Usage(60, 40), price=FixedPrice(1.0, 10.0))
    assert asyncio.run(call_until_reached(ledger, client, max_tokens=100)) == 19
    assert ledger.budget is not None
    assert ledger.budget.spent.pico == 19 * 460 * 10**6
    assert ledger.meter.total().cost == pytest.approx(19 * 460e-6)


def test_concurrent_calls_wait_for_each_other_rather_than_exceed_or_give_up() -> None:
    """Only five worst cases fit at once, but all twenty calls fit one after the other."""
    under_way, most = 0, 0

    async def answer(_: Any) -> Reply:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return Reply(text="x", model="m", usage=Usage(30, 10))

    async def many() -> None:
        with ledger.activate():
            await asyncio.gather(*(client.complete(HELLO, max_tokens=70) for _ in range(20)))

    ledger, client = limited(tokens=1000), ScriptedModel(answer)
    asyncio.run(many())
    assert most <= 5
    assert ledger.budget is not None
    assert (ledger.budget.spent.tokens, ledger.budget.account.under_way()[0]) == (800, 0)


def test_a_call_inside_of_another_does_not_wait_for_it() -> None:
    """The outer holds 130 of 300 tokens; the inner could need 200 and must not wait for that."""
    inner = scripted(Usage(1, 1))

    async def outer(_: Any) -> str:
        return (await inner.complete(HELLO, max_tokens=70)).text

    async def nested() -> None:
        with limited(tokens=300).activate():
            await ScriptedModel(outer).complete(HELLO)

    with pytest.raises(BudgetReached, match="might exceed"):
        asyncio.run(asyncio.wait_for(nested(), 60))


def test_a_paid_reply_counts_although_its_caller_went_away() -> None:
    """The first reply has a usage and a wrong shape; the caller leaves during the second."""

    async def leave() -> None:
        with ledger.activate():
            call = asyncio.ensure_future(client.complete(HELLO, max_tokens=70))
            while len(server.requests) < 2:
                await asyncio.sleep(0.005)
            call.cancel()
            await asyncio.wait([call])
            while ledger.budget is not None and ledger.budget.account.under_way()[0]:
                await asyncio.sleep(0.005)

    steps = [Step(body={**openai_reply("x"), "choices": []}), Step(kind="hang")]
    ledger = limited(tokens=1000)
    with FaultyServer(steps) as server:
        settings = ModelSettings(model="m", base_url=server.openai_url, backoff=0.001)
        client = make_client(settings)
        asyncio.run(asyncio.wait_for(leave(), 60))
    assert ledger.budget is not None
    assert ledger.budget.spent.tokens == 110
    assert (ledger.meter.total().prompt_tokens, ledger.meter.total().cancelled) == (100, 1)


def test_a_reply_without_usage_counts_with_its_worst_case() -> None:
    ledger, client = limited(tokens=450), scripted(None)
    assert asyncio.run(call_until_reached(ledger, client, max_tokens=70)) == 2
    assert ledger.budget is not None
    assert ledger.budget.spent.estimated_tokens == 400


def test_what_gave_no_reply_gives_back_what_it_held() -> None:
    async def fail() -> None:
        with ledger.activate():
            for _ in range(5):
                with pytest.raises(ValueError, match="boom"):
                    await client.complete(HELLO, max_tokens=70)

    ledger, client = limited(tokens=250), ScriptedModel([ValueError("boom")] * 5)
    asyncio.run(fail())
    assert ledger.budget is not None
    assert (ledger.budget.spent.tokens, ledger.budget.account.under_way()[0]) == (0, 0)
    assert ledger.meter.total().failed == 5


def test_a_model_without_a_price_is_refused_under_a_limit_on_money() -> None:
    async def call() -> None:
        with limited(usd=1.0).activate():
            await scripted(role="critic").complete(HELLO)

    with pytest.raises(BadInput, match=r"models\.critic\.prices") as caught:
        asyncio.run(call())
    assert "budget.tokens" in caught.value.faults[0].cure


def test_a_role_may_get_its_price_from_the_ledger() -> None:
    ledger = Ledger(budget=Budget(BudgetSection(usd=1.0)), prices={"policy": FixedPrice(2.0, 2.0)})

    async def call() -> Reply:
        with ledger.activate():
            return await scripted(Usage(1, 1)).complete(HELLO)

    assert asyncio.run(call()).cost == pytest.approx(4e-6)


def test_no_call_starts_after_the_wall_clock_limit() -> None:
    budget = Budget(BudgetSection(wall_seconds=10.0), started=time.time() - 11)
    assert budget.seconds_left() == 0.0
    assert asyncio.run(call_until_reached(Ledger(budget=budget), scripted())) == 0
    assert budget.reached == "budget.wall_seconds: 10 s have passed"


def test_a_call_under_way_is_cut_off_at_the_wall_clock_limit() -> None:
    async def call() -> None:
        await client.complete(HELLO)  # what is done once is done before the time counts
        with Ledger(budget=Budget(BudgetSection(wall_seconds=3.0))).activate(), trace.activate():
            await client.complete(HELLO)

    trace = Trace()
    with FaultyServer([Step(), Step(kind="hang")]) as server:
        client = make_client(ModelSettings(model="m", base_url=server.openai_url, timeout=60.0))
        with pytest.raises(BudgetReached, match="wall_seconds"):
            asyncio.run(call())
    assert [event.failure for event in trace.of(ModelCall)] == ["budget_reached"]


@pytest.mark.parametrize("name", ["usd", "tokens", "calls", "wall_seconds"])
def test_a_budget_below_zero_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"budget.{name}"):
        Budget(BudgetSection(**{name: -1}))


def test_a_budget_holds_over_retries_on_a_failing_server() -> None:
    """Every other request fails, half of those with a usage that has to be paid.

    Requests go: good (110 tokens), 500 without usage, good, a wrong shape with 110, ...
    Worst case of a request is 130 + 70 = 200 tokens.
    """
    steps = [Step(), Step(status=500), Step(), Step(body={**openai_reply("x"), "choices": []})]
    ledger = limited(tokens=2000)
    with FaultyServer(lambda number, _: steps[number % 4]) as server:
        settings = ModelSettings(model="m", base_url=server.openai_url, backoff=0.001)
        client = make_client(settings)
        asyncio.run(call_until_reached(ledger, client, max_tokens=70))
        paid = sum(number % 4 != 1 for number in range(len(server.requests)))
    assert ledger.budget is not None
    spent = ledger.budget.spent
    assert spent.tokens == paid * 110 == 1870
    assert spent.replies == paid
    tally = ledger.meter.total()
    assert (tally.prompt_tokens, tally.completion_tokens) == (paid * 100, paid * 10)


def test_concurrent_money_is_exact_on_a_failing_server() -> None:
    """0.02 dollars, 0.0002 a reply and 0.00013 + 0.0007 at worst."""
    failing = [Step(status=500), Step(kind="cut"), Step(kind="cut_body"), Step(body=b"{")]

    def script(number: int, _: Any) -> Step:
        return failing[number // 3 % 4] if number % 3 == 0 else Step()

    async def many() -> list[Any]:
        with ledger.activate():
            calls = (client.complete(HELLO, max_tokens=70) for _ in range(300))
            return await asyncio.gather(*calls, return_exceptions=True)

    ledger = limited(usd=0.02)
    with FaultyServer(script) as server:
        settings = ModelSettings(
            model="m", base_url=server.openai_url, backoff=0.001, retries=20, prices=PRICES
        )
        client = make_client(settings)
        outcomes = asyncio.run(many())
    answered = sum(isinstance(outcome, Reply) for outcome in outcomes)
    assert all(isinstance(outcome, Reply | BudgetReached) for outcome in outcomes)
    assert ledger.budget is not None
    spent = ledger.budget.spent
    assert (spent.pico, spent.unreported) == (answered * 200_000_000, 0)
    assert 0.02 - 0.00083 < spent.usd <= 0.02
    assert ledger.budget.account.under_way()[0] == 0


# One account, several processes


def spend(path: Path, calls: int) -> None:
    async def work() -> None:
        for _ in range(calls):
            try:
                await client.complete(HELLO, max_tokens=70)
            except BudgetReached:
                return

    Ledger(budget=Budget(BudgetSection(calls=100, tokens=7000), Account(path))).install()
    client = scripted(Usage(60, 40), role=f"worker-{os.getpid()}")
    asyncio.run(work())


def test_processes_share_one_budget(tmp_path: Path) -> None:
    """The tokens run out first: 100 a call, 200 at worst, so 69 calls of 4 x 40."""
    path = tmp_path / "account.sqlite"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=spend, args=(path, 40)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    account = Account(path)
    spent = account.spent()
    assert (spent.tokens, spent.replies, account.under_way()[0]) == (6900, 69, 0)
    assert sum(part.replies for part in account.by_role().values()) == 69
    assert "tokens" in str(account.reached())


def hold_and_die(path: Path) -> None:
    held = Account(path).hold(
        0, 900, bounded=True, most_pico=None, most_tokens=1000, seconds=3600.0
    )
    assert held is not None
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_held_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "account.sqlite"
    worker = multiprocessing.get_context("fork").Process(target=hold_and_die, args=(path,))
    worker.start()
    worker.join(60)
    account = Account(path)
    assert account.under_way()[0] == 1
    ledger = Ledger(budget=Budget(BudgetSection(tokens=1000), account))

    async def call() -> None:
        with ledger.activate():
            await scripted(Usage(1, 1)).complete(HELLO, max_tokens=70)

    asyncio.run(asyncio.wait_for(call(), 60))
    assert (account.under_way()[0], account.spent().tokens) == (0, 2)


def test_an_account_goes_on_where_an_earlier_command_stopped(tmp_path: Path) -> None:
    path = tmp_path / "account.sqlite"
    for more in (3, 5):
        account = Account(path)
        account.release_all()
        ledger = Ledger(budget=Budget(BudgetSection(calls=more), account))
        asyncio.run(call_until_reached(ledger, scripted()))
        account.close()
    assert Account(path).spent().calls == 5


def test_an_account_that_another_process_is_just_making_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "account.sqlite"
    making = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    making.execute("BEGIN IMMEDIATE")
    made = threading.Timer(0.3, making.execute, ["COMMIT"])
    made.start()
    account = Account(path)
    account.count_call("judge", "m", None)
    made.join()
    assert account.spent().calls == 1


def test_a_run_whose_folder_was_deleted_counts_anew_in_the_same_process(tmp_path: Path) -> None:
    path = tmp_path / "account.sqlite"
    books = Books(str(path), BudgetSection(calls=2))
    for _ in range(2):
        path.unlink(missing_ok=True)
        books.start()
        with books.open():
            ledger = current_ledger()
        asyncio.run(call_until_reached(ledger, scripted()))
        assert Account(path).spent().calls == 2


def test_an_account_travels_by_its_path(tmp_path: Path) -> None:
    account = Account(tmp_path / "account.sqlite")
    account.count_call("judge", "m", None)
    assert pickle.loads(pickle.dumps(account)).spent().calls == 1
    with pytest.raises(TypeError, match="give it a file"):
        pickle.dumps(Account())


# Ledgers


def test_the_active_ledger_wins_over_the_one_of_the_process() -> None:
    before = current_ledger()
    installed, active = Ledger(), Ledger()
    try:
        installed.install()
        asyncio.run(scripted().complete(HELLO))
        with active.activate():
            asyncio.run(scripted().complete(HELLO))
            asyncio.run(scripted().complete(HELLO))
    finally:
        before.install()
    assert (installed.meter.total().calls, active.meter.total().calls) == (1, 2)


def test_a_failed_call_is_noted_with_its_word() -> None:
    async def call() -> None:
        with trace.activate(), pytest.raises(ModelError, match="has 0 replies"):
            await ScriptedModel([]).complete(HELLO)

    trace = Trace()
    asyncio.run(call())
    (event,) = trace.of(ModelCall)
    assert (event.failure, event.cost, event.retries) == ("refused", 0.0, 0)
