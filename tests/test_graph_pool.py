"""Sandboxes that wait for a graph with its modules loaded: one run each, and nothing stays behind.

What a sandbox keeps in and out is for `test_sandbox*.py`; here, what waiting could have changed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from graph_samples import simple
from sandbox_outside import BACKENDS, alive, eventually, need

from aflow_tune.graph import inside
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.run import GraphEnding, GraphRun
from aflow_tune.models import ScriptedModel
from aflow_tune.sandbox import Limits, SandboxUnavailable, open_channel

PROJECT = Path(__file__).parents[1]


@pytest.fixture(params=[*BACKENDS, "unsafe_subprocess"])
def level(request: pytest.FixtureRequest) -> str:
    return need(request.param)


def graph_of(call: str, head: str = "") -> Graph:
    code = simple(call, "self.custom = operator.Custom(self.llm)", head)
    return Graph("pooled", {"graph.py": code})


async def run(graph: Graph, problem: str = "p", **given: Any) -> GraphRun:
    model = ScriptedModel(lambda messages: messages[-1]["content"])
    return await graph.run(problem, model=model, **given)


async def told(program: str, level: str, preload: str = "") -> Any:
    """The one message of a program."""
    limits = Limits(seconds=60)
    async with open_channel(program, policy=level, limits=limits, preload=preload) as channel:
        return await channel.receive()


def test_the_module_is_loaded_before_the_program_and_only_where_it_was_asked_for(
    level: str,
) -> None:
    program = """
import sys
names = [name for name in ("aflow_preloaded", "asyncio", "ssl") if name in sys.modules]
import aflow_channel
aflow_channel.send([names, hasattr(sys.modules.get("aflow_preloaded"), "Operator")])
"""
    names, has_operator = asyncio.run(told(program, level, inside.__name__))
    assert names[:2] == ["aflow_preloaded", "asyncio"]
    assert has_operator
    assert asyncio.run(told(program, level)) == [[], False]


def test_a_module_that_does_not_load_is_no_failure_of_the_program() -> None:
    for name in ("aflow_tune.nothing.here", "aflow_tune.sandbox"):
        with pytest.raises(SandboxUnavailable, match="was not run"):
            asyncio.run(told("", "auto", name))


def test_no_run_meets_what_another_has_left(level: str) -> None:
    head = "import json, sys, os"
    call = (
        "found = getattr(json, 'LEFT', 'nothing'), os.path.exists('left'), 'LEFT' in os.environ;"
        " json.LEFT = 'something'; open('left', 'w').close(); os.environ['LEFT'] = '1';"
        " sys.modules['aflow_preloaded'].Operator.__call__ = None;"
        " return [str(found), (await self.custom(input=problem))['response']], 0"
    )
    graph = graph_of(call, head)
    ended = [asyncio.run(run(graph, sandbox=level)) for _ in range(4)]
    # Each has broken its own operators, and found nothing that another did.
    assert {ran.ending for ran in ended} == {GraphEnding.RAISED}
    graph = graph_of(call.replace("sys.modules['aflow_preloaded'].Operator.__call__ = None;", ""))
    graph = Graph("pooled", {"graph.py": f"{head}\n{graph.sources['graph.py']}"})
    answers = [asyncio.run(run(graph, sandbox=level)).answer for _ in range(4)]
    assert answers == [["('nothing', False, False)", "p"]] * 4


def test_runs_of_many_threads_and_loops_do_not_mix() -> None:
    graph = graph_of(
        "import asyncio;"
        "found = await asyncio.gather(*[self.custom(input=f'{problem}-{n}') for n in range(5)]);"
        "return [one['response'] for one in found], 0"
    )

    def one(number: int) -> Any:
        return asyncio.run(run(graph, f"problem {number}")).answer

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(one, range(18)))
    expected = [[f"problem {number}-{n}" for n in range(5)] for number in range(18)]
    assert answers == expected


SCRIPT = """
import asyncio, sys, threading, time
from aflow_tune.graph.graph import Graph
from aflow_tune.models import ScriptedModel
code = '''class Workflow:
    def __init__(self, name, llm_config, dataset):
        pass
    async def __call__(self, problem):
        while problem == "stay":
            pass
        return problem, 0
'''
graph = Graph("g", {"graph.py": code})
def run(problem):
    return asyncio.run(graph.run(problem, model=ScriptedModel([]))).answer
assert [run("a"), run("b")] == ["a", "b"]
if sys.argv[1] == "stay":
    threading.Thread(target=run, args=("stay",)).start()
time.sleep(1)
print("warm", flush=True)
input()
"""


@pytest.mark.parametrize("end", ["exit", "kill -9"])
def test_nothing_outlives_the_process_that_they_wait_for(end: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", SCRIPT, "stay" if end == "kill -9" else "leave"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "warm\n"
    parent = psutil.Process(process.pid)
    assert eventually(lambda: len(parent.children(recursive=True)) >= 2)
    below = parent.children(recursive=True)
    if end == "kill -9":
        process.kill()
    else:
        process.stdin.write("go\n")
        process.stdin.close()
    process.wait(timeout=120)
    process.stdout.close()
    assert process.returncode == (-9 if end == "kill -9" else 0)
    assert eventually(lambda: not any(alive(child) for child in below))
