"""What written graphs may cost at worst: by hand, and never too low in real runs."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from written_samples import ASK, DONE, PLAIN, graphs, workflow

from aflow_tune.graph.graph import Graph
from aflow_tune.graph.run import GraphLimits
from aflow_tune.models.client import ScriptedModel
from aflow_tune.operators import OPERATORS
from aflow_tune.writer.check import check_graph_of
from aflow_tune.writer.results import operators_of, structure_of
from aflow_tune.writer.types import CheckLimits, RefusalKind, Verdict, Written

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from generated_graphs import Generator


def check(code: str, prompts: dict[str, str] | None = None, **limits: Any) -> Verdict:
    chosen = CheckLimits(**{"model_calls": 10_000, **limits})
    return check_graph_of(Written(code, prompts or {}), operators=OPERATORS, limits=chosen)


def calls_of(
    code: str, prompts: dict[str, str] | None = None, **limits: Any
) -> tuple[int, int] | None:
    verdict = check(code, prompts, **limits)
    assert verdict.refusals == ()
    bound = verdict.bound
    return None if bound is None else (bound.operator_calls, bound.model_calls)


def loop(head: str, before: str = "") -> str:
    return f"{before}\n{head}\n    {ASK}return str(r)"


BY_HAND = [
    (ASK + DONE, 1),
    (ASK + ASK + 'b = await self.pick(["a", "b"])\nreturn b["response"]', 3),
    (f"if problem:\n    {ASK}    {ASK}else:\n    {ASK}" + DONE, 2),
    (f"if problem:\n    {ASK}    {DONE}\n{ASK}{ASK}{ASK}" + DONE, 3),
    ("r = await self.solve(problem) if problem else None\nreturn str(r)", 1),
    (loop("for _ in range(3):"), 3),
    (loop("for _ in range(10, 0, -3):"), 4),
    (loop("for n in (1, 2, 3):"), 3),
    (loop('for letter in "abcd":'), 4),
    (loop("for a in range(3):\n  for b in range(2):"), 6),
    (loop("for n in range(times):", "times = 4"), 4),
    (loop("for n in range(len([1, 2])):"), 2),
    (loop("for n in range(min(len(problem), 5)):"), 5),
    (loop("for n in range(max(2, 3) * 2 - 1):"), 5),
    (loop("for x in problem.split()[:3]:"), 3),
    (loop("for i, x in enumerate(zip([1, 2, 3], range(9))):"), 3),
    (loop("for k in {'a': 1, 'b': 2}:"), 2),
    ("rs = [await self.solve(problem) for _ in range(4)]\nreturn str(rs)", 4),
    ("import asyncio\nr = await asyncio.gather(*[self.solve(p) for p in 'ab'])\nreturn str(r)", 2),
    (f"for _ in range(3):\n    {ASK}    if r:\n        {ASK}        break\n" + DONE, 6),
    (f"try:\n    {ASK}    {ASK}except ValueError:\n    {ASK}finally:\n    {ASK}" + DONE, 4),
    (f"for _ in range(2):\n    {ASK}else:\n    {ASK}" + DONE, 3),
    # A `break` passes over the `else`, which returns.
    (f"for _ in range(2):\n    {ASK}    break\nelse:\n    return 'x'\n{ASK}{ASK}" + DONE, 4),
    ("x = await self.llm('a') + await self.llm.aask('b')\nreturn x", 2),
    # What costs nothing may turn as often as it likes; what costs has no bound then.
    (f"n = 0\nfor line in problem.splitlines():\n    n += 1\n{ASK}{DONE}", 1),
    (loop("for x in xs:", "xs = [1, 2]"), None),
    (f"i = 0\nwhile i < 3:\n    {ASK}    i += 1\n{DONE}", None),
]


@pytest.mark.parametrize(("call", "calls"), BY_HAND)
def test_by_hand(call: str, calls: int | None) -> None:
    assert calls_of(workflow(call)) == (None if calls is None else (calls, calls))


@pytest.mark.parametrize(
    ("init", "call", "model_calls"),
    [
        ("self.x = operator.Programmer(self.llm)", "self.x(problem)", 3),
        ("self.x = operator.Programmer(self.llm, programs=5)", "self.x(problem)", 5),
        ("self.x = operator.MdEnsemble(self.llm)", 'self.x(["a", "b"])', 5),
        ("n = 2\nself.x = operator.MdEnsemble(self.llm, vote_count=n)", 'self.x(["a"])', 2),
        ("self.x = operator.Test(self.llm)", 'self.x(problem, "s", "f", test_loop=1)', 1),
        ("self.x = operator.Test(self.llm)", 'self.x(problem, "s", "f", int(problem))', 20),
        ("self.x = operator.Programmer(self.llm, retries=1)", "self.x(problem)", 3),
        ("self.x = operator.Programmer(self.llm, retries=3 - 2)", "self.x(problem)", 3),
    ],
)
def test_what_operators_may_ask(init: str, call: str, model_calls: int) -> None:
    code = workflow(f"r = await {call}\nreturn str(r)", init=init)
    assert calls_of(code) == (1, model_calls)
    if "retries" in init:  # asking again counts, as far as the run allows it
        assert calls_of(code, retries=2) == (1, 3 * (1 + 1))


def test_tokens_and_money() -> None:
    code = workflow(loop("for _ in range(5):"))
    limits = {"call_prompt_tokens": 100, "call_completion_tokens": 10}
    prices = {"usd_per_prompt_token": 0.001, "usd_per_completion_token": 0.002}
    bound = check(code, **limits, **prices).bound
    assert bound is not None
    assert (bound.prompt_tokens, bound.completion_tokens) == (500, 50)
    assert bound.usd == pytest.approx(500 * 0.001 + 50 * 0.002)
    assert check(code, **limits, tokens=550).ok
    assert check(code, **limits, **prices, usd=0.61).ok
    for over in ({"model_calls": 4}, {"tokens": 549}, {**prices, "usd": 0.59}):
        refusals = check(code, **limits, **over).refusals
        assert [(one.kind, one.line) for one in refusals] == [(RefusalKind.OVER_BUDGET, 10)]
    # Without a bound no more calls are made than the money pays for; one costs $0.12 here.
    assert CheckLimits(model_calls=20, usd=0.5, **prices, **limits).affordable_calls == 4
    assert CheckLimits(model_calls=3, usd=0.5, **prices, **limits).affordable_calls == 3
    assert CheckLimits(model_calls=20, usd=0.5).affordable_calls == 20


def test_no_run_of_a_graph_that_passes_uses_more_than_its_bound() -> None:
    chance = random.Random(11)
    words = ("", "1", "no", "<answer>2</answer>", "<review_result>false</review_result>", "A", "x")
    generator, ended, bounds = Generator(11, programs=False), set(), 0
    for _ in range(40):
        prompts, code = generator.graph()
        bound = calls_of(code, prompts, retries=0)
        bounds += bound is not None
        graph = Graph("g", {"graph.py": code}, trust=True, instructions=prompts)
        settings = GraphLimits(seconds=20, retries=0)
        for _ in range(2):
            model = ScriptedModel(lambda _: " ".join(chance.choices(words, k=3)))
            run = asyncio.run(graph.run("a b c", model=model, limits=settings))
            assert bound is None or (run.calls <= bound[0] and len(model.asked) <= bound[1])
            ended.add(run.ending.value)
    # What passes also runs: nothing but an empty answer keeps it from one.
    assert ended <= {"answered", "no_answer"}
    assert bounds > 15


@pytest.mark.parametrize(
    "name",
    [
        "while true",
        "a list that grows by another name",
        "a limit that runs away",
        "lines in a comprehension",
    ],
)
def test_the_meter_stops_what_has_no_bound(name: str) -> None:
    code = graphs("frozen/graphs.jsonl")[f"bad: {name}"]
    assert calls_of(code) is None
    model = ScriptedModel(lambda _: "")
    limits = GraphLimits(seconds=20, model_calls=7)
    graph = Graph("g", {"graph.py": code}, trust=True)
    asyncio.run(graph.run("a b c " * 5, model=model, limits=limits))
    assert len(model.asked) <= 7


def drawn(code: str, prompts: dict[str, str] | None = None) -> tuple[str, dict[str, int]]:
    graph = check(code, prompts).graph
    assert graph is not None
    return structure_of(graph), operators_of(graph)


def test_the_structure_leaves_names_prompts_and_the_order_of_lines_out() -> None:
    other = PLAIN.replace("self.solve", "self.draft").replace("input=", "instruction='x', input=")
    for code in (PLAIN, other):
        assert drawn(code, {"solve": "a"}) == ("Custom | P>0 0>A", {"Custom": 1})
    looped = workflow(
        f"xs = []\nfor _ in range(3):\n    {ASK}"
        '    xs.append(r["response"])\nb = await self.pick(xs)\nreturn b["response"]'
    )
    counted = {"Custom": 1, "ScEnsemble": 1}
    assert drawn(looped) == ("Custom[1] ScEnsemble | P>0 0>1 1>A", counted)
    compute = "c = await self.code(problem)\n"
    for calls in (ASK + compute, compute + ASK):
        code = workflow(
            calls + 'return r["response"] + c["output"]',
            "self.code = operator.Programmer(self.llm)",
        )
        assert drawn(code)[0] == "Custom Programmer | P>0 P>1 0>A 1>A"
