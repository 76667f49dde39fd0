"""The section `models`: what is refused, where keys come from, and that they never show."""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
from faulty_server import USAGE, FaultyServer, Step, openai_reply

from aflow_tune.errors import BadInput
from aflow_tune.models import ModelError, Reply, ResponseCache, Spend, Usage, make_client
from aflow_tune.models.redaction import HIDDEN, scrub, short
from aflow_tune.models.settings import check_models
from aflow_tune.models.types import Ask
from aflow_tune.sections import BudgetSection, ModelSettings, PriceSettings
from aflow_tune.trace import ModelCall, Trace

HELLO = [{"role": "user", "content": "hello"}]
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
        "odd": ModelSettings(
            base_url="nowhere", temperature=-1.0, timeout=0.0, max_concurrency=0, retries=-1
        ),
        "policy": ModelSettings(prices=PriceSettings(input=1.0)),
    }
    found = {fault.where: fault for fault in check_models(models)}
    odd = {"model", "base_url", "temperature", "timeout", "max_concurrency", "retries"}
    keys = {"judge.api_key_env", "critic.api_key_env", "policy.prices.output"}
    assert set(found) == {f"models.{key}" for key in keys | {f"odd.{name}" for name in odd}}
    assert "OPENAI_API_KEY" in found["models.judge.api_key_env"].cure
    assert "ANTHROPIC_API_KEY" in found["models.critic.api_key_env"].expected


@pytest.mark.parametrize(
    "settings",
    [
        ModelSettings(model="m", api_key_env="sk-live-0123456789"),
        ModelSettings(model="m", api_key_env="export X=sk-live-0123456789"),
        ModelSettings(model="m", base_url="https://user:sk-live-0123456789@host/v1"),
        ModelSettings(model="m", base_url="https://host/v1?key=sk-live-0123456789"),
        ModelSettings(
            model="m", base_url="https://host/v1", headers_env={"x-key": "sk-live-0123456789"}
        ),
    ],
)
@pytest.mark.usefixtures("no_keys")
def test_a_key_where_none_belongs_is_refused_and_not_shown(settings: ModelSettings) -> None:
    faults = check_models({"judge": settings})
    assert faults
    with pytest.raises(BadInput) as caught:
        make_client(settings)
    assert "sk-live" not in f"{faults}{caught.value}{caught.value!r}"


@pytest.mark.parametrize("value", ["", "  ", "two\nlines", "kéy-0123456789"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", value)
    with pytest.raises(BadInput, match="SOME_API_KEY") as caught:
        make_client(ModelSettings(model="m", api_key_env="SOME_API_KEY"))
    assert "0123456789" not in str(caught.value)
    assert "lines" not in str(caught.value)


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
    "429 with the key in a header": Step(status=429, headers={"x-debug": KEY}),
    "a reply with the key and no choices": Step(body={"key": KEY, "header": HEADER}),
    "a reply with the key that is no JSON": Step(body=f"{{{KEY} {HEADER}".encode()),
    "content of a wrong type with the key": Step(body=openai_reply({"x": KEY})),  # type: ignore[arg-type]
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
        with (
            trace.activate(),
            spend.activate(),
            ResponseCache(tmp_path / "cache").activate(weights="w"),
        ):
            await client.complete(HELLO)

    with FaultyServer(lambda *_: step) as server:
        settings = ModelSettings(
            provider=provider,
            model="m",
            base_url=server.openai_url,
            api_key_env="MY_KEY",
            headers_env={"x-org": "MY_HEADER"},
            retries=1,
            backoff=0.001,
        )
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
    # The server's own header is logged by the HTTP library where debugging is on.
    told += "" if "x-debug" in step.headers else caplog.text
    told += repr(client.__reduce__())
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
    return entry.stem


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
