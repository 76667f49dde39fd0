"""The server: what it answers, whom it lets in, and how it ends. Plain HTTP, no browser."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer
from writer_servers import EVIL, GOOD, executor, policy, write_config

from aflow_tune.cli import main
from aflow_tune.errors import RunFailed
from aflow_tune.using.inferring import open_trained
from aflow_tune.using.server import MAX_BODY_BYTES, SolveServer, is_loopback, own_hosts
from aflow_tune.using.solved import Problem, Solved

QUESTION = {"problem": "What is 17 * 23?", "type": "math"}
JSON = {"content-type": "application/json"}


@dataclass
class Waiting:
    """A solver that waits until it is cancelled, or fails as its problem says."""

    begun: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    async def solve(self, problem: Problem) -> Solved:
        if "crash" in problem.text:
            raise RuntimeError("/home/somebody/secret.txt: key sk-1234567890")
        if "known" in problem.text:
            raise RunFailed("/home/somebody/secret.txt is missing")
        if "infinite" in problem.text:
            return {"usd": float("inf"), "calls": [{"seconds": float("nan")}]}
        self.begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError("nobody waits that long")


@dataclass
class Client:
    """Requests to a server in another thread, one connection each."""

    port: int

    def __call__(
        self,
        path: str = "/solve",
        body: Any = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (read as JSON where it is), headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        text = body if isinstance(body, (bytes, str, type(None))) else json.dumps(body)
        sent = headers if headers is not None else (JSON if text is not None else {})
        connection.request(method or ("GET" if text is None else "POST"), path, text, sent)
        answer = connection.getresponse()
        content: Any = answer.read().decode()
        with contextlib.suppress(ValueError):
            content = json.loads(content)
        connection.close()
        return answer.status, content, dict(answer.getheaders())


@contextlib.contextmanager
def serving(make: Callable[[], Any], **settings: Any) -> Iterator[Client]:
    """A server of `make()`'s solver in a thread with a loop of its own."""
    ready = threading.Event()
    held: dict[str, Any] = {}

    async def work() -> None:
        async with contextlib.AsyncExitStack() as stack:
            solver = make()
            if hasattr(solver, "__aenter__"):
                await stack.enter_async_context(solver)
            server = SolveServer(solver, "run/global_step_2", port=0, **settings)
            server.listen()
            held.update(server=server, loop=asyncio.get_running_loop())
            asyncio.get_running_loop().call_later(0.1, ready.set)
            await server.run(signals=False)

    thread = threading.Thread(target=asyncio.run, args=(work(),), daemon=True)
    thread.start()
    assert ready.wait(120)
    try:
        yield Client(held["server"].port)
    finally:
        held["loop"].call_soon_threadsafe(held["server"].stop)
        thread.join(120)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server over scripted policy and executor."""
    with ScriptedServer(policy) as writes, ScriptedServer(executor) as runs:
        config = write_config(tmp_path_factory.mktemp("serve"), runs.url)

        def make() -> Any:
            return open_trained(None, config=config, endpoint=writes.url, served_model="tuned")

        with serving(make) as client:
            yield client


@pytest.fixture
def waiting() -> Iterator[tuple[Client, Waiting]]:
    """A server that works on one problem at a time, for minutes."""
    solver = Waiting()
    with serving(lambda: solver, at_once=1) as client:
        yield client, solver


def test_a_problem_is_solved_and_what_a_model_wrote_travels_as_data(trained: Client) -> None:
    status, got, headers = trained(body={**QUESTION, "truth": "391"})
    assert (status, headers["content-type"]) == (200, "application/json")
    assert (got["answer"], got["score"]) == ("The answer is 391", 1.0)
    assert got["workflow"]["code"].strip() == GOOD.strip()
    assert "/" not in got["calls"][0]["model"]
    status, got, _ = trained(body={"problem": "evil rubbish", "type": "math"})
    assert (status, got["level"]) == (200, 3)
    assert all(EVIL in text for text in (got["workflow"]["text"], got["answer"]))
    assert EVIL not in got["ran"]["svg"]


def test_the_page_is_ours_alone(trained: Client) -> None:
    texts = {}
    for path, kind in {"/": "html", "/page.js": "javascript", "/page.css": "css"}.items():
        status, texts[kind], headers = trained(path)
        assert (status, headers["x-content-type-options"]) == (200, "nosniff")
        assert headers["content-type"].startswith(f"text/{kind}")
    policy = headers["content-security-policy"]
    assert all(words in policy for words in ("default-src 'none'", "frame-ancestors 'none'"))
    assert "unsafe" not in policy
    assert "//" not in texts["html"].replace("<!doctype html>", "")  # nothing from elsewhere
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in texts["javascript"]
    assert trained("/health")[:2] == (200, {"status": "ok", "working": 0, "at_once": 4})
    assert trained("/about")[1]["title"] == "run/global_step_2"
    for path, status in (("/docs", 404), ("/../../etc/passwd", 404), ("/solve", 405)):
        assert trained(path)[0] == status


def test_addresses_of_models_stay_here(tmp_path: Path) -> None:
    """The executor's address and the model's folder are in reasons, and not in answers."""
    nowhere = "http://127.0.0.1:9"
    with ScriptedServer(policy) as writes:
        config = write_config(tmp_path, nowhere, model=tmp_path / "secret" / "model")

        def make() -> Any:
            return open_trained(None, config=config, endpoint=writes.url, served_model="tuned")

        private = make().private
        assert private[f"{nowhere}/v1"] == private["127.0.0.1:9"] == "(an address)"
        assert private[str(tmp_path / "secret" / "model")] == "model"
        with serving(make, private={**private, "no answer": "NO ANSWER"}) as client:
            status, got, _ = client(body={"problem": "no answer from nobody?", "type": "math"})
    assert status == 200
    assert not got["answered"]
    text = json.dumps(got)
    assert "127.0.0.1" not in text
    assert str(tmp_path) not in text
    assert got["problem"] == "no answer from nobody?"
    assert "NO ANSWER" in got["reason"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example:80"}, 403),  # DNS rebinding
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),  # another port of this machine
        ({"content-type": "text/plain"}, 415),  # what a form of a foreign page can send
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": ""}, 415),
    ],
)
def test_other_pages_cannot_drive_it(headers: dict[str, str], status: int, trained: Client) -> None:
    found, got, answered = trained(body=QUESTION, headers={**JSON, **headers})
    assert (found, set(got)) == (status, {"error"})
    preflight = {"access-control-request-method": "POST", "origin": "http://evil.example"}
    found, _, answers = trained(method="OPTIONS", headers=preflight)
    assert found == 403
    assert not any(name.startswith("access-control") for name in (*answered, *answers))


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("{", 400, "a JSON object"),
        ("[1]", 400, "a JSON object"),
        ("[" * 100_000, 400, "a JSON object"),
        ({"type": "math"}, 400, "problem"),
        ({"problem": "2?", "type": "poem"}, 400, "math | code | qa"),
        ({"problem": "x" * 50_001, "type": "math"}, 400, "at most 50000"),
        ({"problem": "2?", "type": "code", "entry_point": "os.system"}, 400, "name of a function"),
        ({"problem": "2?", "type": "math", "truth": ["4"]}, 400, "truth"),
        ({"problem": "x" * MAX_BODY_BYTES, "type": "math"}, 413, "KiB"),
    ],
)
def test_requests_that_are_refused(body: Any, status: int, said: str, trained: Client) -> None:
    found, got, _ = trained(body=body)
    assert found == status
    assert said in json.dumps(got)


def test_a_body_without_a_length_is_bounded_too(trained: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", trained.port, timeout=120)
    chunks = (b"x" * 65536 for _ in range(64))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request("POST", "/solve", chunks, JSON, encode_chunked=True)
        assert connection.getresponse().status == 413
    connection.close()


def test_failures_tell_no_paths_and_no_keys(waiting: tuple[Client, Waiting]) -> None:
    client, _ = waiting
    for word in ("crash", "known"):
        status, got, _ = client(body={"problem": word, "type": "math"})
        assert status == 500
        assert "log" in got["error"]
        assert not {"secret", "sk-", "home"} & set(got["error"].replace("/", " ").split())
    got = client(body={"problem": "infinite", "type": "math"})[1]
    assert (got["usd"], got["calls"]) == (None, [{"seconds": None}])


def test_one_too_many_is_told_429(waiting: tuple[Client, Waiting]) -> None:
    client, solver = waiting
    first = threading.Thread(target=client, kwargs={"body": QUESTION}, daemon=True)
    first.start()
    assert solver.begun.wait(60)
    assert client("/health")[1]["working"] == 1
    status, got, headers = client(body=QUESTION)
    assert status == 429
    assert "try again" in got["error"]
    assert int(headers["retry-after"]) > 0


def test_a_client_that_goes_away_cancels_its_run(waiting: tuple[Client, Waiting]) -> None:
    client, solver = waiting
    connection = http.client.HTTPConnection("127.0.0.1", client.port)
    connection.request("POST", "/solve", json.dumps(QUESTION), JSON)
    assert solver.begun.wait(60)
    connection.close()
    assert solver.cancelled.wait(60)
    deadline = time.monotonic() + 60
    while client("/health")[1]["working"]:
        assert time.monotonic() < deadline, "the run still counts as worked on"
        time.sleep(0.05)


def test_a_token_opens_what_works() -> None:
    token = "a-token-of-24-characters"
    solver = Waiting()
    with serving(lambda: solver, token=token, seconds=0.2) as client:
        assert client("/")[0] == 200
        assert client("/health")[0] == 200
        assert client("/about")[0] == 401
        for given in ("", f"Bearer {token}x", token, "Bearer tökén"):
            sent = {**JSON, "authorization": given.encode("latin-1").decode("latin-1")}
            status, got, _ = client(body=QUESTION, headers=sent)
            assert (status, got) == (401, {"error": "the token is missing or wrong"})
        assert not solver.begun.is_set()
        sent = {**JSON, "authorization": f"Bearer {token}"}
        assert client(body=QUESTION, headers=sent)[0] == 504  # it takes too long
        assert solver.cancelled.wait(60)


def test_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))
    assert own_hosts("0.0.0.0", 8080) is None
    assert "localhost" not in (own_hosts("127.0.0.1", 8080) or ())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "--token-env"),
        (["--host", "0.0.0.0", "--token-env", "AFLOW_TEST_TOKEN"], "16 or more"),
        (["--token-env", "NOT_SET_ANYWHERE"], "not set"),
        (["--timeout", "nan"], "seconds above 0"),
    ],
)
def test_servers_that_are_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("AFLOW_TEST_TOKEN", "short")
    assert main(["serve", "--config", "none.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "short" not in error.replace("shorten", "")


@pytest.mark.slow
def test_the_command_serves_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    with ScriptedServer(policy) as writes, ScriptedServer(executor) as runs:
        config = write_config(tmp_path, runs.url)
        model = ["--endpoint", writes.url, "--model", "tuned", "--port", "0"]
        command = [sys.executable, "-m", "aflow_tune.cli", "serve", "--config", str(config), *model]
        pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
        assert process.stdout is not None
        try:
            said = ""
            while "serving on" not in said:
                said = process.stdout.readline()
                assert said, process.stderr.read() if process.stderr else ""
            client = Client(int(said.partition("127.0.0.1:")[2].partition("/")[0]))
            assert client(body=QUESTION)[1]["answer"] == "The answer is 391"
            slow = {"body": {"problem": "slow", "type": "math"}}
            threading.Thread(target=client, kwargs=slow, daemon=True).start()
            while client("/health")[1]["working"] == 0:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0
    assert out.endswith("stopped\n")
    assert "Traceback" not in errors
