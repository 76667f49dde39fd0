"""Graphs written to do harm: none may read, reach, outlive or fake anything, or stop the parent."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from graph_samples import own_form, simple
from sandbox_outside import eventually

from aflow_tune.graph.broker import GraphLimits
from aflow_tune.graph.graph import load_graph
from aflow_tune.graph.run import GraphEnding, GraphRun
from aflow_tune.models import ScriptedModel

KEY = "sk-never-to-be-seen"
LIMITS = GraphLimits(seconds=60, cpu_seconds=30, calls=20, argument_chars=10_000, memory_mb=256)
"""The start of a sandbox counts, on a busy machine as well."""


def run(
    tmp_path: Path, call: str, *, init: str = "pass", head: str = "", limits: GraphLimits = LIMITS
) -> tuple[GraphRun, ScriptedModel]:
    graph = load_graph(own_form(tmp_path / "graph", simple(call, init, head)))
    model = ScriptedModel(lambda _: "the reply")
    return asyncio.run(graph.run("the problem", model=model, limits=limits)), model


CHANNEL = "aflow_channel = __import__('aflow_channel')\n"
CALL = {
    "id": 1,
    "call": "operator",
    "operator": "Custom",
    "instance": "custom",
    "model": "policy",
    "options": {},
    "args": [],
    "kwargs": {"input": "i", "instruction": "j"},
}


def sends(message: object, after: str = "import time; time.sleep(30)") -> str:
    return f"{CHANNEL}aflow_channel.send({message!r})\n{after}\nreturn 'x'"


def test_the_corpus_would_pass_if_it_were_honest(tmp_path: Path) -> None:
    """The message that the forgeries are made from is a good one."""
    ran, model = run(tmp_path, sends(CALL, "import asyncio\nawait asyncio.sleep(0.5)"))
    assert ran.answer == "x"
    assert len(model.asked) == 1


@pytest.mark.parametrize(
    "message",
    [
        3,
        [1],
        {},
        {**CALL, "id": "1"},
        {**CALL, "id": True},
        {**CALL, "id": -1},
        {**CALL, "id": 1.0},
        {**CALL, "call": "eval"},
        {**CALL, "call": ["operator"]},
        {**CALL, "more": 1},
        {key: value for key, value in CALL.items() if key != "model"},
        {**CALL, "operator": "__import__"},
        {**CALL, "operator": {"a": 1}},
        {**CALL, "instance": "x" * 500},
        {**CALL, "instance": "../../etc"},
        {**CALL, "instance": "a\n"},
        {**CALL, "model": ["policy"]},
        {**CALL, "args": "ab"},
        {**CALL, "kwargs": [1]},
        {**CALL, "options": "x"},
        {**CALL, "kwargs": {"input": eval("[" * 60 + "]" * 60), "instruction": ""}},
        {"end": "answer"},
        {"end": "answer", "answer": "x", "cost": 0},
        {"end": "raised", "kind": 1, "text": "", "place": ""},
        {"end": "answered", "answer": "x"},
        {"end": None},
    ],
    ids=lambda message: repr(message)[:60],
)
def test_forged_messages_end_the_run(tmp_path: Path, message: object) -> None:
    ran, _ = run(tmp_path, sends(message))
    assert ran.ending is GraphEnding.FORGED
    assert ran.answer is None


def test_a_bare_null_is_no_message(tmp_path: Path) -> None:
    """`aflow_channel.send` refuses it; written past it, it ends the program."""
    written = "import os, time\nos.write(aflow_channel.fd, b'null\\n')\ntime.sleep(30)"
    ran, _ = run(tmp_path, f"{CHANNEL}{written}\nreturn 'x'")
    assert ran.ending in (GraphEnding.FORGED, GraphEnding.DIED)
    assert ran.answer is None


def test_a_number_is_used_once(tmp_path: Path) -> None:
    call = f"{CHANNEL}aflow_channel.send({CALL!r})\n" + sends(CALL)
    assert run(tmp_path, call)[0].ending is GraphEnding.FORGED


@pytest.mark.parametrize(
    "options", [{"llm": "x"}, {"name": "other"}, {"prompts": {"main": "x"}}, {"nothing": 1}]
)
def test_an_operator_is_built_by_the_parent(tmp_path: Path, options: object) -> None:
    message = {**CALL, "options": options}
    after = "import asyncio\nawait asyncio.sleep(0.5)"
    ran, model = run(tmp_path, sends(message, after))
    assert ran.answer == "x"
    assert model.asked == []
    assert sum(ran.failures.values()) == 1


@pytest.mark.parametrize(
    "kwargs",
    [
        {"input": "x" * 20_000, "instruction": ""},
        {"input": ["x" * 100] * 200, "instruction": ""},
        {"input": {"k": list(range(20_000))}, "instruction": ""},
        {"instruction": "j"},
        {"input": "i", "instruction": "j", "llm": "policy"},
        {"input": "i", "instruction": "j", "self": 1},
    ],
    ids=lambda kwargs: repr(kwargs)[:40],
)
def test_arguments_that_do_not_fit_reach_no_model(tmp_path: Path, kwargs: object) -> None:
    message = {**CALL, "kwargs": kwargs}
    ran, model = run(tmp_path, sends(message, "import asyncio\nawait asyncio.sleep(0.5)"))
    assert ran.answer == "x"
    assert model.asked == []


def test_a_message_without_end_ends_the_run(tmp_path: Path) -> None:
    call = CHANNEL + "aflow_channel.send('x' * 50_000_000)\nreturn 'x'"
    ran, model = run(tmp_path, call)
    assert ran.ending is GraphEnding.DIED
    assert "output_kb" in ran.reason
    assert model.asked == []


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xfe\x00 garbage\n",
        b'{"id": 1\n',
        b'{"end": "answer", "answer": NaN}\n',
        b"[" * 200_000 + b"\n",
        b'{"id": 1' + b"0" * 5000 + b"}\n",
        b'{"end": "answer", "answer": "\\ud800"}\n',
    ],
    ids=lambda raw: repr(raw)[:30],
)
def test_bytes_that_are_no_message(tmp_path: Path, raw: bytes) -> None:
    """Written to every descriptor there is, past the module that speaks the channel's form."""
    call = f"""\
import os, time
for number in range(3, 64):
    try:
        os.write(number, {raw!r})
    except OSError:
        pass
time.sleep(30)"""
    ran, model = run(tmp_path, call)
    assert model.asked == []
    assert ran.ending is not GraphEnding.ANSWERED or ran.text == "\ud800"


def test_closing_the_channel_is_a_death(tmp_path: Path) -> None:
    ran, _ = run(tmp_path, "import os\nos.closerange(3, 64)\nreturn 'x'")
    assert ran.ending in (GraphEnding.DIED, GraphEnding.TIMED_OUT)


@pytest.mark.parametrize(
    "call",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "import os\nos.kill(os.getpid(), 9)",
        "import os\nos.abort()",
        "import ctypes\nctypes.string_at(0)",
        "import ctypes\nctypes.CDLL(None).exit(0)",
        "raise KeyboardInterrupt",
        "raise BaseException('x')",
        "import os\nos.execv('/bin/true', ['true'])",
    ],
)
def test_an_end_without_an_answer_is_none(tmp_path: Path, call: str) -> None:
    ran, _ = run(tmp_path, call)
    assert ran.ending in (GraphEnding.DIED, GraphEnding.RAISED, GraphEnding.OUT_OF_MEMORY)
    assert ran.answer is None


@pytest.mark.parametrize(
    "call",
    [
        "while True: pass",
        "import time\ntime.sleep(1000)",
        "import asyncio\nawait asyncio.Event().wait()",
        "import signal, time\nfor n in range(1, 32):\n    try:\n"
        "        signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\n"
        "while True: time.sleep(1)",
        "import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
        "import re\nre.match('(a+)+$', 'a' * 64 + 'b')",
        "print('x' * 10**9)\nwhile True: print('y' * 10**6)",
    ],
)
def test_what_never_ends_is_ended(tmp_path: Path, call: str) -> None:
    ran, _ = run(tmp_path, call, limits=replace(LIMITS, seconds=6, cpu_seconds=3))
    assert not ran.ok
    assert ran.level


def test_a_flood_of_calls_is_cut_off(tmp_path: Path) -> None:
    call = (
        "import asyncio\nawait asyncio.gather(*[self.llm('x') for _ in range(10_000)])\nreturn 'x'"
    )
    ran, model = run(tmp_path, call)
    assert ran.ending is GraphEnding.TOO_MANY_CALLS
    assert len(model.asked) <= LIMITS.calls


def test_many_operators_are_cut_off(tmp_path: Path) -> None:
    call = f"""\
import asyncio
aflow_channel = __import__("aflow_channel")
for number in range(1, 300):
    aflow_channel.send({{**{CALL!r}, "id": number, "instance": f"i{{number}}"}})
    await asyncio.sleep(0)
await asyncio.sleep(30)"""
    limits = replace(LIMITS, calls=1000)
    assert run(tmp_path, call, limits=limits)[0].ending is GraphEnding.TOO_MANY_CALLS


def test_memory_is_bounded(tmp_path: Path) -> None:
    ran, _ = run(tmp_path, "x = []\nwhile True: x.append(bytearray(10**7))")
    assert not ran.ok
    assert ran.ending is not GraphEnding.TIMED_OUT


def test_files_outside_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(KEY)
    call = f"""\
import os, glob
found = []
for path in [{str(secret)!r}, '/proc/1/environ', '/proc/self/environ', '/root/.ssh/id_rsa',
             '/proc/1/cwd/secret.txt', '/proc/self/root' + {str(secret)!r}, '/etc/shadow']:
    try:
        found.append(open(path, errors='replace').read())
    except OSError as error:
        found.append(type(error).__name__)
return found + [str(dict(os.environ))]"""
    ran, _ = run(tmp_path, call)
    assert ran.ok
    assert KEY not in ran.text
    assert "root:" not in ran.text


def test_the_environment_holds_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    ran, _ = run(
        tmp_path,
        "import os\nreturn str(dict(os.environ)) + open('/proc/self/environ').read()",
    )
    assert ran.ok
    assert KEY not in ran.text


def test_files_outside_are_not_written(tmp_path: Path) -> None:
    target = tmp_path / "written"
    call = f"""\
try:
    open({str(target)!r}, 'w').write('x')
except OSError as error:
    return type(error).__name__
return 'wrote'"""
    run(tmp_path, call)
    assert not target.exists()


def test_nothing_is_reached_by_network(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reached = []

        def listen() -> None:
            try:
                reached.append(server.accept())
            except OSError:
                return

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        port = server.getsockname()[1]
        call = f"""\
import socket
found = []
for family, address in [(socket.AF_INET, ('127.0.0.1', {port})), (socket.AF_INET, ('1.1.1.1', 53))]:
    try:
        with socket.socket(family) as made:
            made.settimeout(2)
            made.connect(address)
            found.append('connected')
    except OSError as error:
        found.append(type(error).__name__)
return found"""
        ran, _ = run(tmp_path, call)
        assert "connected" not in ran.text
        assert reached == []


def test_no_process_outlives_the_run(tmp_path: Path) -> None:
    mark = f"hostile-{time.time_ns()}"
    call = f"""\
import subprocess, sys, os
try:
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}],
                     start_new_session=True)
except OSError:
    pass
try:
    if os.fork() == 0:
        os.setsid()
        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}])
except OSError:
    pass
return 'x'"""
    run(tmp_path, call)

    def gone() -> bool:
        return not any(mark in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))

    assert eventually(gone), "processes outlived the run"


@pytest.mark.parametrize(
    "call",
    [
        "x = []\nx.append(x)\nreturn x",
        "class A:\n    def __str__(self): raise ValueError('no')\nreturn A()",
        "class E(Exception):\n    def __str__(self): raise ValueError('no')\nraise E",
        "raise ValueError('x' * 10**7)",
        "return 'x' * 5_000_000",
        "x = 'a'\nfor _ in range(60): x = [x]\nreturn x",
        "return 10 ** 10_000",
    ],
)
def test_answers_and_errors_that_cannot_be_told(tmp_path: Path, call: str) -> None:
    ran, _ = run(tmp_path, call)
    assert ran.ending in (GraphEnding.RAISED, GraphEnding.FORGED, GraphEnding.DIED)
    assert len(ran.reason) < 5000


def test_prompt_py_is_behind_the_wall_too(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(KEY)
    folder = own_form(tmp_path / "graph", simple("return prompt_custom.A"))
    (folder / "prompt.py").write_text(
        f"try:\n    A = open({str(secret)!r}).read()\nexcept OSError:\n    A = 'nothing'\n"
    )
    ran = asyncio.run(load_graph(folder).run("p", model=ScriptedModel([])))
    assert ran.answer == "nothing"


def test_patched_shims_fool_nobody(tmp_path: Path) -> None:
    """What a graph does to its own side of the channel changes its own answers only."""
    head = """\
operator.Custom.__call__ = None
type(create_llm_instance(None)).count = lambda *_: None
"""
    call = """\
self.llm.usage_tracker.total_cost = -100
await self.llm('x')
return 'x', -100"""
    ran, model = run(tmp_path, call, head=head)
    assert ran.answer == "x"
    assert ran.cost is None
    assert len(model.asked) == 1


def test_importing_this_project_gives_no_key_and_no_model(tmp_path: Path) -> None:
    call = """\
try:
    import aflow_tune.models
except ImportError:
    return 'not there'
import os
return str([name for name in os.environ if 'KEY' in name])"""
    ran, model = run(tmp_path, call)
    assert ran.text in ("not there", "[]")
    assert model.asked == []
