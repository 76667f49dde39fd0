"""The worst case of written graphs: hand-computed, and held against what real runs use."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from written_corpus import ENDLESS
from written_samples import PLAIN, workflow

from aflow_tune.graph.broker import GraphLimits
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.run import GraphEnding, GraphRun
from aflow_tune.models.client import ScriptedModel
from aflow_tune.models.types import Message
from aflow_tune.operators import OPERATORS
from aflow_tune.writer.check import check_graph_of
from aflow_tune.writer.results import operators_of, structure_of
from aflow_tune.writer.types import CheckLimits, RefusalKind, Verdict, Written

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from generated_graphs import Generator

ASK = "r = await self.solve(input=problem)\n"
DONE = 'return r["response"]'


def check(code: str, prompts: dict[str, str] | None = None, **limits: Any) -> Verdict:
    limits = {"model_calls": 10_000, **limits}
    return check_graph_of(
        Written(code, prompts or {}), operators=OPERATORS, limits=CheckLimits(**limits)
    )


def loop(head: str, before: str = "") -> str:
    return f"{before}\n{head}\n    {ASK}" + "return str(r)"


@pytest.mark.parametrize(
    ("call", "calls", "model_calls"),
    [
        (ASK + DONE, 1, 1),
        (ASK + ASK + 'b = await self.pick(["a", "b"])\nreturn b["response"]', 3, 3),
        (f"if problem:\n    {ASK}    {ASK}else:\n    {ASK}" + DONE, 2, 2),
        (f"if problem:\n    {ASK}    {DONE}\n{ASK}{ASK}{ASK}" + DONE, 3, 3),
        ("r = await self.solve(problem) if problem else None\nreturn str(r)", 1, 1),
        (loop("for _ in range(3):"), 3, 3),
        (loop("for _ in range(1, 10, 4):"), 3, 3),
        (loop("for _ in range(10, 0, -3):"), 4, 4),
        (loop("for n in (1, 2, 3):"), 3, 3),
        (loop('for letter in "abcd":'), 4, 4),
        (loop("for n in range(5000):"), 5000, 5000),
        (loop("for a in range(3):\n  for b in range(2):"), 6, 6),
        (loop("for n in range(times):", "times = 4"), 4, 4),
        (loop("for n in range(len(xs)):", "xs = [1, 2]"), 2, 2),
        (loop("for n in range(min(len(problem), 5)):"), 5, 5),
        (loop("for n in range(max(2, 3) * 2 - 1):"), 5, 5),
        (loop("for x in xs:", "xs = []\nfor n in range(4):\n    xs.append(n)"), 4, 4),
        (loop("for x in xs:", "xs = [n for n in range(4) if n]"), 4, 4),
        (loop("for x in problem.split()[:3]:"), 3, 3),
        (loop('for x in problem.split(",", 2):'), 3, 3),
        (loop("for x in xs:", "import itertools\nxs = itertools.product([1, 2], [3, 4])"), 4, 4),
        (loop("for i, x in enumerate(zip([1, 2, 3], range(9))):"), 3, 3),
        (loop("for k in {'a': 1, 'b': 2}:"), 2, 2),
        (loop("for x in sorted({1, 2}, key=lambda one: -one):"), 2, 2),
        (loop("while i < 3:", "i = 0").replace(ASK, ASK + "    i += 1\n"), 3, 3),
        (
            loop("while True:", "i = 0").replace(
                ASK, ASK + "    i += 1\n    if i >= 3:\n        break\n"
            ),
            3,
            3,
        ),
        ("rs = [await self.solve(problem) for _ in range(4)]\nreturn str(rs)", 4, 4),
        (
            "import asyncio\nrs = await asyncio.gather(*[self.solve(p) for p in ('a', 'b')])\n"
            "ms = await asyncio.gather(*map(self.solve, ['c', 'd', 'e']))\nreturn str(rs + ms)",
            5,
            5,
        ),
        (
            f"try:\n    {ASK}    {ASK}except ValueError:\n    {ASK}except KeyError:\n"
            f"    {ASK}    {ASK}finally:\n    {ASK}" + DONE,
            5,
            5,
        ),
        (f"for _ in range(2):\n    {ASK}else:\n    {ASK}" + DONE, 3, 3),
        ("x = await self.llm('a') + await self.llm.aask('b')\nreturn x", 2, 2),
        # Free loops may turn as often as they like.
        (
            "n = 0\nfor line in problem.splitlines():\n    n += 1\n"
            + ASK
            + "return str(r) + str(n)",
            1,
            1,
        ),
    ],
)
def test_by_hand(call: str, calls: int, model_calls: int) -> None:
    verdict = check(workflow(call))
    assert verdict.refusals == ()
    assert verdict.bound is not None
    assert (verdict.bound.operator_calls, verdict.bound.model_calls) == (calls, model_calls)


@pytest.mark.parametrize(
    ("init", "call", "model_calls"),
    [
        ("self.x = operator.Programmer(self.llm)", "self.x(problem)", 3),
        ("self.x = operator.Programmer(self.llm, programs=5)", "self.x(problem)", 5),
        ("self.x = operator.MdEnsemble(self.llm)", 'self.x(["a", "b"])', 5),
        ("self.x = operator.MdEnsemble(self.llm, vote_count=2)", 'self.x(["a", "b"])', 2),
        ("n = 2\nself.x = operator.MdEnsemble(self.llm, vote_count=n)", 'self.x(["a"])', 2),
        ("self.x = operator.Test(self.llm)", 'self.x(problem, "s", "f")', 3),
        ("self.x = operator.Test(self.llm)", 'self.x(problem, "s", "f", test_loop=1)', 1),
        ("self.x = operator.Test(self.llm)", 'self.x(problem, "s", "f", int(problem))', 20),
        ("self.x = operator.Custom(self.llm, retries=2)", "self.x(problem)", 1),
        (
            "self.x = operator.Custom if name else operator.Programmer\nself.x = self.x(self.llm)",
            "self.x(problem)",
            3,
        ),
    ],
)
def test_what_operators_may_ask(init: str, call: str, model_calls: int) -> None:
    verdict = check(workflow(f"r = await {call}\nreturn str(r)", init=init))
    assert verdict.refusals == ()
    assert verdict.bound is not None
    assert verdict.bound.model_calls == model_calls


def test_asking_again_counts() -> None:
    code = workflow(
        "r = await self.x(problem)\n" + ASK + DONE,
        init="self.x = operator.Programmer(self.llm, retries=1)",
    )
    once, twice = check(code), check(code, retries=2)
    assert once.bound is not None
    assert twice.bound is not None
    assert once.bound.model_calls == 3 + 1
    assert twice.bound.model_calls == 3 * (1 + 1) + (1 + 2)


def test_helpers_cost_what_they_cost_where_they_are_called() -> None:
    code = workflow(
        "a = await self.many(problem)\nb = await self.many(problem, times=5)\nreturn a + b",
        rest=f"async def many(self, problem, times=2):\n    for _ in range(times):\n        {ASK}"
        "    return r['response']",
    )
    verdict = check(code)
    assert verdict.bound is not None
    assert verdict.bound.model_calls == 2 + 5


def test_tokens_and_money() -> None:
    code = workflow(loop("for _ in range(5):"))
    limits = {"call_prompt_tokens": 100, "call_completion_tokens": 10}
    prices = {"usd_per_prompt_token": 0.001, "usd_per_completion_token": 0.002}
    verdict = check(code, **limits)
    assert verdict.bound is not None
    assert (verdict.bound.prompt_tokens, verdict.bound.completion_tokens) == (500, 50)
    assert verdict.bound.usd is None
    priced = check(code, **limits, **prices)
    assert priced.bound is not None
    assert priced.bound.usd == pytest.approx(500 * 0.001 + 50 * 0.002)
    assert check(code, **limits, tokens=550).ok
    assert check(code, **limits, **prices, usd=0.61).ok
    for over, said in (
        ({"model_calls": 4}, "5 calls of models, and 4 are allowed"),
        ({"tokens": 549}, "550 tokens, and 549 are allowed"),
        ({**prices, "usd": 0.59}, "$0.6000, and $0.5900 are allowed"),
    ):
        refusals = check(code, **limits, **over).refusals
        assert [refusal.kind for refusal in refusals] == [RefusalKind.OVER_BUDGET]
        assert said in refusals[0].message
        assert refusals[0].line == 10
    assert "Custom on line 10 takes up to 5" in refusals[0].message


ALIASES = {
    "a method of the class": "for n in range(9):\n    list.append(xs, n)",
    "a method that is handed over": "list(map(xs.append, range(9)))",
    "a lambda": "list(map(lambda n: xs.append(n), range(9)))",
    "a heap": "import heapq\nfor n in range(9):\n    heapq.heappush(xs, n)",
    "an unknown object": 'import json\nd = json.loads("{}")\nd["x"] = xs\nfor n in range(9):\n'
    '    d["x"].append(n)',
    "a helper": "def fill(ys):\n    for n in range(9):\n        ys.append(n)\nfill(xs)",
    "times": "xs.append(0)\nys = xs\nys *= 9",
    "a slice": "xs[0:0] = range(9)",
    "reduce": "import functools\nfunctools.reduce(lambda a, n: a.append(n) or a, range(9), xs)",
    "a generator": "gs = (x for x in xs)\nfor n in range(9):\n    xs.append(n)\nxs = gs",
    "setdefault": 'd = {}\nfor n in range(9):\n    d.setdefault("x", xs).append(n)',
    "one of two": "ys = []\nzs = xs if problem else ys\nfor n in range(9):\n    zs.append(n)",
    "filtered": "xs = list(filter(None, range(10)))",
    "a class's copy": "import copy\nxs = copy.copy(list(range(9)))",
}


@pytest.mark.parametrize("name", ALIASES)
def test_lists_that_are_filled_out_of_sight_are_not_counted_too_low(name: str) -> None:
    """Either no bound is told, or it holds for a real run."""
    code = workflow(loop("for x in xs:", f"xs = []\n{ALIASES[name]}"))
    verdict = check(code)
    run = run_of(Graph("g", {"graph.py": code}, trust=True), lambda messages: "fine")
    assert run.calls == 9
    assert verdict.ok
    assert verdict.bound is None or verdict.bound.model_calls >= 9


@pytest.mark.parametrize(
    "code",
    [
        loop("for k in r:", ASK + 'r["a"], r["b"] = "1", "2"'),
        loop("for k in r.values():", ASK + 'r.update(a="1", b="2")'),
        loop(
            "for x in itertools.accumulate([1, 2], initial=0):",
            "import itertools",
        ),
    ],
)
def test_what_holds_more_than_it_was_given_is_not_counted_too_low(code: str) -> None:
    verdict = check(workflow(code))
    assert verdict.refusals == ()
    assert verdict.bound is None


def run_of(graph: Graph, replies: Any) -> GraphRun:
    model = ScriptedModel(replies)
    run = asyncio.run(graph.run("a b c", model=model, limits=GraphLimits(seconds=20, calls=400)))
    assert len(model.asked) == run.model_calls
    return run


def test_no_run_of_a_graph_that_passes_uses_more_than_its_bound() -> None:
    chance = random.Random(11)
    words = ("", "1", "no", "<answer>2</answer>", "<review_result>false</review_result>", "A", "x")

    def reply(messages: Sequence[Message]) -> str:
        return " ".join(chance.choices(words, k=3))

    generator, ended = Generator(11, programs=False), []
    limits = CheckLimits(model_calls=200, retries=0)
    for _ in range(40):
        prompts, code = generator.graph()
        verdict = check_graph_of(Written(code, prompts), operators=OPERATORS, limits=limits)
        assert verdict.ok
        assert verdict.bound is not None
        assert verdict.graph is not None
        graph = Graph(
            "g",
            dict(verdict.graph.sources),
            trust=True,
            instructions=dict(verdict.graph.instructions),
        )
        settings = GraphLimits(seconds=20, retries=0)
        for _ in range(3):
            model = ScriptedModel(reply)
            run = asyncio.run(graph.run("a b c", model=model, limits=settings))
            assert run.calls <= verdict.bound.operator_calls
            assert len(model.asked) <= verdict.bound.model_calls
            ended.append((run.ending.value, run.reason))
    # What passes also runs: nothing but an empty answer keeps it from one.
    assert {ending for ending, _ in ended} <= {"answered", "no_answer"}, ended


@pytest.mark.parametrize("name", ENDLESS)
def test_the_meter_stops_what_has_no_bound(name: str) -> None:
    code = ENDLESS[name]
    verdict = check(code)
    assert verdict.refusals == ()
    assert verdict.bound is None
    assert verdict.graph is not None
    graph = Graph("g", dict(verdict.graph.sources), trust=True)
    model = ScriptedModel(lambda messages: "")
    limits = GraphLimits(seconds=20, model_calls=7)
    run = asyncio.run(graph.run("a b c " * 5, model=model, limits=limits))
    assert len(model.asked) <= 7
    assert run.ending in (GraphEnding.TOO_MANY_CALLS, GraphEnding.RAISED) or run.model_calls <= 7


def test_nested_loops_and_helpers_are_counted_in_no_time() -> None:
    nested = "".join("    " * depth + f"for a{depth} in range(30):\n" for depth in range(8))
    code = workflow(f"xs = []\n{nested}{'    ' * 8}xs.append(a7)\n" + ASK + DONE)
    verdict = check(code)
    assert verdict.bound is not None
    assert verdict.bound.model_calls == 1
    doubled = "\n".join(
        f"async def f{n}(self, p):\n    await self.f{n + 1}(p)\n    await self.f{n + 1}(p)"
        for n in range(40)
    )
    last = "\nasync def f40(self, p):\n    await self.solve(p)"
    assert check(workflow("await self.f0(problem)\n" + ASK + DONE, rest=doubled + last)).ok
    sums = "\n".join(f"a{n} = a{n + 1} + a{n + 1}" for n in range(200))
    assert (
        check(workflow(f"{sums}\nfor x in a0:\n    {ASK}" + DONE, head="a200 = [1]\n")).bound
        is None
    )


def test_the_structure_leaves_names_and_prompts_out() -> None:
    one = check(PLAIN, {"solve": "a"}).graph
    other = check(
        PLAIN.replace("self.solve", "self.draft").replace("input=problem", "input='x ' + problem")
    )
    assert one is not None
    assert other.graph is not None
    assert structure_of(one) == structure_of(other.graph) == "Custom | P>0 0>A"
    assert operators_of(one) == {"Custom": 1}
    looped = workflow(
        "xs = []\nfor _ in range(3):\n    r = await self.solve(problem)\n"
        '    xs.append(r["response"])\nb = await self.pick(xs)\nreturn b["response"]'
    )
    graph = check(looped).graph
    assert graph is not None
    assert structure_of(graph) == "Custom[1] ScEnsemble | P>0 0>1 1>A"
    assert operators_of(graph) == {"Custom": 1, "ScEnsemble": 1}
    more = check(looped.replace("range(3)", "range(4)")).graph
    assert more is not None
    assert structure_of(more) == structure_of(graph)


def test_statements_that_do_not_depend_on_each_other_have_no_order() -> None:
    solve, compute = "s = await self.solve(input=problem)\n", "c = await self.code(problem)\n"
    build = "self.code = operator.Programmer(self.llm)"
    done = 'return s["response"] + c["output"]'
    orders = (solve + compute, compute + solve)
    one, other = (check(workflow(calls + done, build)).graph for calls in orders)
    assert one is not None
    assert other is not None
    assert structure_of(one) == structure_of(other) == "Custom Programmer | P>0 P>1 0>A 1>A"
    chain = solve + 'c = await self.code(s["response"])\nreturn c["output"]'
    chained = check(workflow(chain, build)).graph
    assert chained is not None
    assert structure_of(chained) == "Custom Programmer | P>0 0>1 1>A"


def test_without_a_bound_no_more_calls_are_made_than_the_money_pays_for() -> None:
    prices = {"usd_per_prompt_token": 0.001, "usd_per_completion_token": 0.002}
    tokens = {"call_prompt_tokens": 100, "call_completion_tokens": 10}  # a call costs $0.12
    assert CheckLimits(model_calls=20, usd=0.5, **prices, **tokens).affordable_calls == 4
    assert CheckLimits(model_calls=3, usd=0.5, **prices, **tokens).affordable_calls == 3
    assert CheckLimits(model_calls=20, usd=0.5).affordable_calls == 20
