"""Graphs written to do harm: none may read, reach, outlive or fake anything, or stop the parent."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graph_samples import own_form, simple
from sandbox_outside import BACKENDS, need

from aflow_tune.graph.graph import Graph, load_graph
from aflow_tune.graph.run import GraphEnding, GraphLimits, GraphRun
from aflow_tune.models import ScriptedModel

KEY = "sk-never-to-be-seen"
LIMITS = GraphLimits(seconds=60, cpu_seconds=30, calls=20, argument_chars=10_000, memory_mb=256)
"""The start of a sandbox counts, on a busy machine as well."""
CHANNEL = "aflow_channel = __import__('aflow_channel')\n"
WAIT = "import asyncio\nawait asyncio.sleep(0.5)"
CALL = {
    "id": 1, "call": "operator", "operator": "Custom", "instance": "custom", "model": "policy",
    "options": {}, "args": [], "kwargs": {"input": "i", "instruction": "j"},
}  # fmt: skip


def run(
    call: str, *, head: str = "", limits: GraphLimits = LIMITS, problem: str = "p", **given: Any
) -> tuple[GraphRun, ScriptedModel]:
    graph = Graph("hostile", {"graph.py": simple(call, head=head)})
    model = ScriptedModel(lambda messages: messages[-1]["content"])
    return asyncio.run(graph.run(problem, model=model, limits=limits, **given)), model


def sends(message: object, after: str = "import time; time.sleep(30)") -> str:
    return f"{CHANNEL}aflow_channel.send({message!r})\n{after}\nreturn 'x'"


def test_the_corpus_would_pass_if_it_were_honest() -> None:
    """The message that the forgeries are made from is a good one."""
    ran, model = run(sends(CALL, WAIT))
    assert (ran.answer, len(model.asked)) == ("x", 1)


@pytest.mark.parametrize(
    "message",
    [
        3, {}, {"end": None}, {"end": "answer"}, {"end": "answer", "answer": "x", "cost": 0},
        {"end": "raised", "kind": 1, "text": "", "place": ""},
        {**CALL, "id": "1"}, {**CALL, "id": True}, {**CALL, "id": -1}, {**CALL, "more": 1},
        {**CALL, "call": "eval"}, {**CALL, "call": ["operator"]},
        {key: value for key, value in CALL.items() if key != "model"},
        {**CALL, "operator": "__import__"}, {**CALL, "operator": {"a": 1}},
        {**CALL, "instance": "x" * 500}, {**CALL, "instance": "../../etc"},
        {**CALL, "instance": "a\n"}, {**CALL, "model": ["policy"]},
        {**CALL, "args": "ab"}, {**CALL, "kwargs": [1]}, {**CALL, "options": "x"},
        {**CALL, "kwargs": {"input": eval("[" * 60 + "]" * 60), "instruction": ""}},
    ],
    ids=lambda message: repr(message)[:60],
)  # fmt: skip
def test_forged_messages_end_the_run(message: object) -> None:
    ran, _ = run(sends(message))
    assert (ran.ending, ran.answer) == (GraphEnding.FORGED, None)


def test_a_number_is_used_once() -> None:
    call = f"{CHANNEL}aflow_channel.send({CALL!r})\n{sends(CALL)}"
    assert run(call)[0].ending is GraphEnding.FORGED


@pytest.mark.parametrize(
    "changed",
    [
        {"options": {"llm": "x"}},
        {"options": {"prompts": {"main": "x"}}},
        {"options": {"nothing": 1}},
        {"kwargs": {"input": "x" * 20_000, "instruction": ""}},
        {"kwargs": {"input": {"k": list(range(20_000))}, "instruction": ""}},
        {"kwargs": {"instruction": "j"}},
        {"kwargs": {"input": "i", "instruction": "j", "llm": "policy"}},
    ],
    ids=lambda changed: repr(changed)[:50],
)
def test_what_does_not_fit_an_operator_reaches_no_model(changed: dict[str, object]) -> None:
    ran, model = run(sends({**CALL, **changed}, WAIT))
    assert (ran.answer, model.asked, sum(ran.failures.values())) == ("x", [], 1)


def test_a_message_without_end_ends_the_run() -> None:
    ran, model = run(f"{CHANNEL}aflow_channel.send('x' * 50_000_000)\nreturn 'x'")
    assert (ran.ending, model.asked) == (GraphEnding.DIED, [])
    assert "output_kb" in ran.reason


@pytest.mark.parametrize(
    "raw",
    [
        b"null\n", b"\xff\xfe\x00 garbage\n", b'{"id": 1\n', b"[" * 200_000 + b"\n",
        b'{"end": "answer", "answer": NaN}\n', b'{"id": 1' + b"0" * 5000 + b"}\n",
        b'{"end": "answer", "answer": "\\ud800"}\n',
    ],
    ids=lambda raw: repr(raw)[:30],
)  # fmt: skip
def test_bytes_that_are_no_message(raw: bytes) -> None:
    """Written to every descriptor there is, past the module that speaks the channel's form."""
    call = f"""\
import os, time
for number in range(3, 64):
    try:
        os.write(number, {raw!r})
    except OSError:
        pass
time.sleep(30)"""
    ran, model = run(call)
    assert model.asked == []
    assert ran.ending is not GraphEnding.ANSWERED or ran.text == "\ud800"


@pytest.mark.parametrize(
    "call",
    [
        "import os\nos._exit(0)",
        "import os\nos.closerange(3, 64)\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "import os\nos.kill(os.getpid(), 9)",
        "import ctypes\nctypes.string_at(0)",
        "raise BaseException('x')",
        "import os\nos.execv('/bin/true', ['true'])",
        "x = []\nwhile True: x.append(bytearray(10**7))",
        "x = []\nx.append(x)\nreturn x",
        "class A:\n    def __str__(self): raise ValueError('no')\nreturn A()",
        "class E(Exception):\n    def __str__(self): raise ValueError('no')\nraise E",
        "raise ValueError('x' * 10**7)",
        "return 'x' * 5_000_000",
        "x = 'a'\nfor _ in range(60): x = [x]\nreturn x",
        "return 10 ** 10_000",
    ],
)
def test_an_end_that_is_no_answer_is_none(call: str) -> None:
    ran, _ = run(call)
    assert ran.ending in (
        GraphEnding.DIED, GraphEnding.RAISED, GraphEnding.OUT_OF_MEMORY, GraphEnding.FORGED
    )  # fmt: skip
    assert ran.answer is None
    assert len(ran.reason) < 5000


@pytest.mark.parametrize(
    "call",
    [
        "while True: pass",
        "import asyncio\nawait asyncio.Event().wait()",
        "import signal, time\nfor n in range(1, 32):\n    try:\n"
        "        signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\n"
        "while True: time.sleep(1)",
        "print('x' * 10**9)\nwhile True: print('y' * 10**6)",
    ],
)
def test_what_never_ends_is_ended(call: str) -> None:
    ran, _ = run(call, limits=replace(LIMITS, seconds=6, cpu_seconds=3))
    assert not ran.ok
    assert ran.level


def test_floods_of_calls_and_of_operators_are_cut_off() -> None:
    call = "import asyncio\nawait asyncio.gather(*[self.llm('x') for _ in range(10_000)])"
    ran, model = run(call)
    assert ran.ending is GraphEnding.TOO_MANY_CALLS
    assert len(model.asked) <= LIMITS.calls
    call = f"""\
import asyncio
{CHANNEL}for number in range(1, 300):
    aflow_channel.send({{**{CALL!r}, "id": number, "instance": f"i{{number}}"}})
    await asyncio.sleep(0)
await asyncio.sleep(30)"""
    assert run(call, limits=replace(LIMITS, calls=1000))[0].ending is GraphEnding.TOO_MANY_CALLS


def test_files_keys_and_the_network_outside_are_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    secret, target = tmp_path / "secret.txt", tmp_path / "written"
    secret.write_text(KEY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        call = f"""\
import os, socket
found = [str(dict(os.environ))]
for path in [{str(secret)!r}, '/proc/1/environ', '/proc/self/environ', '/root/.ssh/id_rsa',
             '/proc/1/cwd/secret.txt', '/proc/self/root' + {str(secret)!r}, '/etc/shadow']:
    try:
        found.append(open(path, errors='replace').read())
    except OSError as error:
        found.append(type(error).__name__)
try:
    open({str(target)!r}, 'w').write('x')
except OSError:
    pass
for address in [('127.0.0.1', {server.getsockname()[1]}), ('1.1.1.1', 53)]:
    try:
        with socket.socket() as made:
            made.settimeout(2)
            made.connect(address)
            found.append('connected')
    except OSError:
        pass
try:
    import aflow_tune.models
except ImportError:
    pass
return found"""
        ran, model = run(call)
        with pytest.raises(TimeoutError):
            server.accept()
    assert ran.ok
    assert not {word for word in (KEY, "root:", "connected") if word in ran.text}
    assert not target.exists()
    assert model.asked == []
    folder = own_form(tmp_path / "graph", simple("return prompt_custom.A"))
    reading = f"try:\n    A = open({str(secret)!r}).read()\nexcept OSError:\n    A = 'nothing'\n"
    (folder / "prompt.py").write_text(reading)
    assert asyncio.run(load_graph(folder).run("p", model=ScriptedModel([]))).answer == "nothing"


def test_patched_shims_fool_nobody() -> None:
    """What a graph does to its own side of the channel changes its own answers only."""
    head = (
        "operator.Custom.__call__ = None\ntype(create_llm_instance(None)).count = lambda *_: None"
    )
    call = "self.llm.usage_tracker.total_cost = -100\nawait self.llm('x')\nreturn 'x', -100"
    ran, model = run(call, head=head)
    assert (ran.answer, ran.cost, len(model.asked)) == ("x", None, 1)


# Sandboxes that wait for a graph with its modules loaded: one run each, nothing stays behind.


@pytest.mark.parametrize("level", [*BACKENDS, "unsafe_subprocess"])
def test_no_run_meets_what_another_has_left(level: str) -> None:
    need(level)
    call = """\
import json, os, sys
found = getattr(json, 'LEFT', 'nothing'), os.path.exists('left'), 'LEFT' in os.environ
json.LEFT = 'something'
open('left', 'w').close()
os.environ['LEFT'] = '1'
said = (await self.custom(input=problem))['response']
sys.modules['aflow_preloaded'].Operator.__call__ = None
return [str(found), said], 0"""
    answers = [run(call, sandbox=level)[0].answer for _ in range(3)]
    assert answers == [["('nothing', False, False)", "p"]] * 3


def test_runs_of_many_threads_and_loops_do_not_mix() -> None:
    call = (
        "import asyncio\n"
        "found = await asyncio.gather(*[self.custom(input=f'{problem}-{n}') for n in range(5)])\n"
        "return [one['response'] for one in found], 0"
    )
    with ThreadPoolExecutor(6) as threads:
        answers = threads.map(lambda n: run(call, problem=str(n))[0].answer, range(12))
        assert list(answers) == [[f"{n}-{part}" for part in range(5)] for n in range(12)]
