"""Prices, and what a run may spend; the section `models` and its keys; the cache of answers."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import signal
import sqlite3
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_server import USAGE, FaultyServer, Step, openai_reply

from aflow_tune.errors import BadInput, BudgetReached
from aflow_tune.models import (
    ModelError,
    Reply,
    ResponseCache,
    ScriptedModel,
    Spend,
    Usage,
    make_client,
)
from aflow_tune.models.clients import RunSpend
from aflow_tune.models.prices import FixedPrice, price_of, stands_in
from aflow_tune.models.redaction import HIDDEN, scrub, short
from aflow_tune.models.settings import check_models
from aflow_tune.models.types import Ask
from aflow_tune.sections import BudgetSection, ModelSettings, PriceSettings
from aflow_tune.trace import ModelCall, Trace

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
    assert listed.cost(Usage(1_000_000, 1_000_000)) == pytest.approx(0.75)
    assert listed.cost(Usage(1_000_000, 0, 1_000_000)) == pytest.approx(0.075)
    assert price_of("openai", None, "a-model-of-mine") is None
    assert price_of("anthropic", None, "claude-sonnet-4-5") is not None
    given = PriceSettings(input=7.0, output=0.0)
    assert price_of("openai", None, "gpt-4o-mini", given) == FixedPrice(7.0, 0.0)


@pytest.mark.parametrize(
    ("address", "model", "dollars", "told"),
    [
        ("https://llm.example.com/v1", "gpt-4o-mini", 0.15, "openai/gpt-4o-mini"),
        ("https://llm.example.com/v1", "openai/gpt-4o-mini", 0.15, "openai/gpt-4o-mini"),
        ("https://openrouter.ai/api/v1", "openai/gpt-4o-mini", 0.15, None),
        ("https://llm.example.com/v1", "Qwen/Qwen2.5-7B-Instruct", None, None),
        ("http://127.0.0.1:8000/v1", "gpt-4o-mini", None, None),
        ("http://10.0.0.5/v1", "gpt-4o-mini", None, None),
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
    assert stands_in(ModelSettings(model=model, base_url=address)) == told


def test_a_listed_price_may_be_named() -> None:
    prices = PriceSettings(listed="azure/gpt-4o-mini")
    here = ModelSettings(model="my-deployment", base_url="http://127.0.0.1:1/v1", prices=prices)
    price = price_of("openai", here.base_url, "my-deployment", prices)
    assert price is not None
    assert price.cost(Usage(0, 1_000_000)) == pytest.approx(0.6)
    (fault,) = check_models({"judge": replace(here, prices=PriceSettings(listed="gtp-4o"))})
    assert fault.where == "models.judge.prices.listed"


@pytest.mark.parametrize(
    ("price", "usage", "cost"),
    [
        (None, Usage(5, 5), None),
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
    # Without a bound they stop once they are used; without usage the worst case counts.
    assert calls_until_reached(limited(tokens=1000), client) == 10
    spend = limited(tokens=450)
    assert calls_until_reached(spend, scripted(None), max_tokens=70) == 2
    assert spend.spent().estimated_tokens == 400


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
        client = client_of(server, backoff=0.001, retries=20)
        outcomes = together(spend, client, 300, max_tokens=70)
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


KEY = 'sk-live+/0123456789"ü'[:19]
HEADER = "org-secret-0123456789"


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)


@pytest.mark.usefixtures("no_keys")
def test_all_faults_at_once_and_missing_keys_by_name() -> None:
    models = {
        "judge": ModelSettings(model="gpt-4o-mini"),
        "critic": ModelSettings(provider="anthropic", model="claude"),
        "local": ModelSettings(model="m", base_url="http://127.0.0.1:1/v1"),
        "odd": ModelSettings(base_url="nowhere", temperature=-1.0, timeout=0.0),
        "policy": ModelSettings(prices=PriceSettings(input=1.0)),
    }
    found = {fault.where: fault for fault in check_models(models)}
    odd = {"model", "base_url", "temperature", "timeout"}
    keys = {"judge.api_key_env", "critic.api_key_env", "policy.prices.output"}
    assert set(found) == {f"models.{key}" for key in keys | {f"odd.{name}" for name in odd}}
    assert "OPENAI_API_KEY" in found["models.judge.api_key_env"].cure
    assert "ANTHROPIC_API_KEY" in found["models.critic.api_key_env"].expected


@pytest.mark.parametrize(
    "settings",
    [
        ModelSettings(model="m", api_key_env="sk-live-0123456789"),
        ModelSettings(model="m", base_url="https://user:sk-live-0123456789@host/v1"),
        ModelSettings(model="m", base_url="https://host/v1?key=sk-live-0123456789"),
        ModelSettings(model="m", headers_env={"x-key": "sk-live-0123456789"}),
    ],
)
@pytest.mark.usefixtures("no_keys")
def test_a_key_where_none_belongs_is_refused_and_not_shown(settings: ModelSettings) -> None:
    faults = check_models({"judge": settings})
    assert faults
    with pytest.raises(BadInput) as caught:
        make_client(settings)
    assert "sk-live" not in f"{faults}{caught.value}{caught.value!r}"


@pytest.mark.parametrize("value", ["  ", "01234\n56789", "kéy-0123456789"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", value)
    with pytest.raises(BadInput, match="SOME_API_KEY") as caught:
        make_client(ModelSettings(model="m", api_key_env="SOME_API_KEY"))
    assert "56789" not in str(caught.value)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_vendors_key_goes_to_the_vendor_only(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(name, KEY)
    with FaultyServer() as server:
        client = make_client(
            ModelSettings(provider=provider, model="m", base_url=server.openai_url)
        )
        asyncio.run(client.complete(HELLO))
    assert KEY not in str(server.requests[0].headers)


def test_scrubbing_knows_every_form_of_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_TOKEN", "token-0123456789")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "x-one: value-of-one\nx-two: value-of-two")
    monkeypatch.setenv("SHORT_KEY", "yes")
    secret = 'a"b/c+d'
    text = 'a"b/c+d a\\"b/c+d a%22b%2Fc%2Bd token-0123456789 value-of-two yes'
    assert scrub(text, [secret]) == " ".join([HIDDEN] * 5) + " yes"
    assert KEY not in short("x" * 290 + " " + KEY, [KEY])


FAILURES: dict[str, Step] = {
    "401 that repeats the key": Step(
        status=401, body={"error": {"message": f"Incorrect API key provided: {KEY}."}}
    ),
    "403 in JSON": Step(status=403, body={"told": [KEY, {"deep": HEADER}]}),
    "a reply with the key and no choices": Step(body={"key": KEY, "header": HEADER}),
    "a reply with the key that is no JSON": Step(body=f"{{{KEY} {HEADER}".encode()),
    "cut": Step(kind="cut"),
}


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
@pytest.mark.parametrize("step", FAILURES.values(), ids=FAILURES)
def test_no_key_in_errors_logs_traces_or_files(
    provider: str,
    step: Step,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.setenv("MY_HEADER", HEADER)
    caplog.set_level(logging.DEBUG)
    trace = Trace()
    spend = Spend(BudgetSection(calls=10), tmp_path / "account.sqlite")

    async def fail() -> None:
        cache = ResponseCache(tmp_path / "cache")
        with trace.activate(), spend.activate(), cache.activate(weights="w"):
            await client.complete(HELLO)

    with FaultyServer(lambda *_: step) as server:
        keys: Any = {"api_key_env": "MY_KEY", "headers_env": {"x-org": "MY_HEADER"}}
        settings = ModelSettings(provider, "m", server.openai_url, retries=1, backoff=0.001, **keys)
        client = make_client(settings)
        with pytest.raises(ModelError) as caught:
            asyncio.run(fail())
        assert server.requests[0].headers["x-org"] == HEADER
        assert KEY in server.requests[0].headers["authorization"]
    spend.close()
    error = caught.value
    assert (error.__cause__, error.__context__) == (None, None)
    shown = "".join(traceback.TracebackException.from_exception(error).format())
    shown += f"{error!r}{pickle.loads(pickle.dumps(error))}"
    out = capfd.readouterr()
    told = shown + str(trace.events) + out.out + out.err
    told += caplog.text + repr(client.__reduce__())
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (KEY, HEADER):
        assert secret not in told
        assert secret.encode() not in files


# The cache of answers

BASE: dict[str, Any] = {"messages": HELLO, "temperature": 0.5, "seed": 1}
OLD_KEY = "3f67b4c72af8ad628589a5ca3ce3ffa68dc65506dfe809ed519af89d131a544c"
ENDPOINT = {"provider": "openai", "base_url": "https://api.example.com/v1", "model": "m"}


def numbered(number: int, _: Any) -> Step:
    return Step(text=f"answer {number}")


def client_of(server: FaultyServer, **settings: Any) -> Any:
    return make_client(
        ModelSettings(model="m", base_url=server.openai_url, prices=PRICES, **settings)
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


CHANGES: dict[str, Any] = {
    **{"messages": [{"role": "system", "content": "hello"}], "temperature": 0.6, "top_p": 0.5},
    **{"max_tokens": 5, "stop": ["x"], "seed": 2, "schema": {"type": "object"}},
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


def key(ask: dict[str, Any], endpoint: Any = ENDPOINT, sample: Any = 0, weights: str = "") -> str:
    with ResponseCache("nowhere").activate(sample, weights) as use:
        entry = use.entry(endpoint, Ask(**ask))
    assert entry is not None
    return entry.stem


def test_whatever_changes_the_answer_changes_the_key() -> None:
    changed = [key({**BASE, name: value}) for name, value in CHANGES.items()]
    changed += [key(BASE, {**ENDPOINT, name: "other"}) for name in ENDPOINT]
    changed += [key(dict(BASE)), key(BASE, sample=1), key(BASE, weights="w")]
    assert len(set(changed)) == len(changed)
    # The key of a cache that an earlier version wrote.
    old = key({"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5})
    assert old == OLD_KEY


def answer(cache: ResponseCache, client: Any, sample: int = 0) -> str:
    async def ask() -> str:
        with cache.activate(sample, weights="w"):
            return str((await client.complete(HELLO)).text)

    return asyncio.run(ask())


OTHER_KEY = '{"key": "%s", "reply": {}}'


@pytest.mark.parametrize("damage", ["", "[]", OTHER_KEY % ("0" * 64)])
def test_a_broken_entry_is_asked_again_and_replaced(tmp_path: Path, damage: Any) -> None:
    cache = ResponseCache(tmp_path)
    with FaultyServer(numbered) as server:
        client = client_of(server)
        assert answer(cache, client) == "answer 0"
        (file,) = tmp_path.rglob("*.json")
        file.write_text(damage)
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
