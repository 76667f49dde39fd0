"""Running what the policy wrote: the three fallbacks forced, hostile graphs, hostile executors.

Most verdicts are made by hand, so that graphs get to run which the check would refuse: the
sandbox and limits must hold without it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from aflow_tune.errors import BudgetReached
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.run import GraphEnding, GraphLimits
from aflow_tune.models import Reply, ScriptedModel, Usage
from aflow_tune.sandbox.types import SandboxUnavailable
from aflow_tune.writer.results import Executed, run_written
from aflow_tune.writer.types import Level, Refusal, RefusalKind, Verdict, Written

LIMITS = GraphLimits(seconds=120, cpu_seconds=2, model_calls=20, retries=0)
HEAD = """\
class Workflow:
    def __init__(self, name, llm_config, dataset):
        self.llm = create_llm_instance(llm_config)
        self.solve = operator.Custom(self.llm)
        self.judge = operator.Review(self.llm)
"""
CALL = """\
    async def __call__(self, problem):
        solution = await self.solve(input=problem)
        return solution["response"], 0
"""
PROMPTS = {"solve": "Mine.", "judge": "Harsh."}
DEFAULT = "```python\ndef solve():\n    return 99\n```"


def verdict(code: str, prompts: Mapping[str, str] = PROMPTS, *refused: RefusalKind) -> Verdict:
    graph = Graph("written", {"graph.py": code}, instructions=dict(prompts))
    refusals = tuple(Refusal(kind, "because") for kind in refused)
    return Verdict(Written(code, dict(prompts)), graph, refusals)


def say(messages: Sequence[Any]) -> Reply:
    text = str(messages[0]["content"])
    reply = "plain"
    if "Write a Python program" in text:
        reply = DEFAULT
    elif "```python" in text:
        reply = "```python\ndef f():\n    return 1\n```"
    elif "<answer>" in text:
        reply = "<answer>short</answer>"
    return Reply(text=reply, model="m", usage=Usage(10, 5))


def execute(made: Verdict, model: Any = None, **given: Any) -> Executed:
    executor = ScriptedModel(say, role="executor") if model is None else model
    given = {"limits": LIMITS, **given}
    return asyncio.run(run_written(made, "1+1?", executor=executor, **given))


def levels(executed: Executed) -> list[int]:
    return [int(attempt.level) for attempt in executed.attempts]


def test_a_constructor_that_fails_on_its_prompts_runs_with_plain_ones() -> None:
    init = (
        "        if self.prompts['solve'].startswith('Mine'):\n            raise ValueError('x')\n"
    )
    model = ScriptedModel(say)
    executed = execute(verdict(HEAD + init + CALL), model)
    assert (executed.level, executed.run.answer) == (Level.DEFAULT_PROMPTS, "plain")
    assert levels(executed) == [0, 1]
    assert executed.why == "raised: written/graph.py:7: ValueError: x"
    assert [ask.messages[0]["content"] for ask in model.asked] == [
        "Solve the problem step by step, and end with the final answer.\n\n1+1?"
    ]


def test_refused_prompts_never_reach_the_model() -> None:
    model = ScriptedModel(say)
    executed = execute(verdict(HEAD + CALL, PROMPTS, RefusalKind.PROMPT), model)
    assert (executed.level, levels(executed)) == (Level.DEFAULT_PROMPTS, [1])
    assert not any("Mine" in str(ask.messages) for ask in model.asked)


@pytest.mark.parametrize(
    "returned",
    ["solution, 0", "dict(solution), 0", "solution", "[solution['response']], 0", "(solution, 0)"],
)
def test_an_answer_that_is_no_text_is_none_at_all(returned: str) -> None:
    code = HEAD + CALL.replace('solution["response"], 0', returned)
    executed = execute(verdict(code))
    assert (executed.level, levels(executed)) == (Level.SIMPLER, [0, 2])
    assert "return solution" in executed.why


FAILING = {
    "raised": ("raise ValueError('late')", GraphEnding.RAISED),
    "none": ("return None, 0", GraphEnding.NO_ANSWER),
    "endless": ("while True: pass", GraphEnding.TIMED_OUT),
    "memory": ("return len('x' * 10**9), 0", GraphEnding.RAISED),
    "calls": ("for _ in range(30): await self.solve(input=problem)", GraphEnding.TOO_MANY_CALLS),
    "died": ("import os; os._exit(0)", GraphEnding.DIED),
    "forged": (
        "import aflow_channel; aflow_channel.send({'id': 1, 'call': 'keys'}); await self.solve('')",
        GraphEnding.FORGED,
    ),
    "files": ("return open('/etc/shadow').read(), 0", GraphEnding.RAISED),
    "network": ("import socket; socket.create_connection(('1.1.1.1', 80))", GraphEnding.RAISED),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_graph_that_fails_while_it_runs_is_replaced_by_a_simpler_one(name: str) -> None:
    body, ending = FAILING[name]
    code = f"{HEAD}\n    async def __call__(self, problem):\n        {body}\n"
    limits = GraphLimits(seconds=120, cpu_seconds=1, model_calls=20)
    executed = execute(verdict(code), limits=limits)
    assert [attempt.run.ending for attempt in executed.attempts] == [ending, GraphEnding.ANSWERED]
    assert (executed.level, executed.run.answer) == (Level.SIMPLER, "plain")
    assert executed.graph.label == "a straight line of Custom"
    assert executed.attempts[0].why.startswith(ending.value)


def test_refused_code_is_never_run() -> None:
    model = ScriptedModel(say)
    code = f"{HEAD}\n    async def __call__(self, problem):\n        await self.solve('RUN')\n"
    for refused in (RefusalKind.NOT_ALLOWED, RefusalKind.OVER_BUDGET):
        executed = execute(verdict(code, PROMPTS, RefusalKind.PROMPT, refused), model)
        assert (executed.level, levels(executed)) == (Level.DEFAULT_WORKFLOW, [3])
        assert executed.run.answer == "99"
        assert executed.graph.label == "template program_or_answer"
    assert not any("RUN" in str(ask.messages) for ask in model.asked)
    refusal = Refusal(RefusalKind.UNREADABLE, "no JSON")
    executed = execute(Verdict(None, None, (refusal,)), problem_type="qa")
    assert (executed.level, executed.run.answer) == (Level.DEFAULT_WORKFLOW, "plain")
    assert executed.graph.label == "template extract_then_answer"


def test_a_budget_that_is_used_up_and_a_missing_sandbox_are_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ScriptedModel(lambda _: BudgetReached("usd", 1.0, 1.0))
    with pytest.raises(BudgetReached):
        execute(verdict(HEAD + CALL), model)
    from aflow_tune.graph import run as run_module

    async def none(*_: Any) -> Any:
        raise SandboxUnavailable("no sandbox here")

    monkeypatch.setattr(run_module, "_sandboxed", none)
    with pytest.raises(SandboxUnavailable, match="no sandbox here"):
        execute(verdict(HEAD + CALL))


def test_an_executor_that_never_answers_ends_in_time_and_leaves_nothing() -> None:
    async def silent(_: Sequence[Any]) -> str:
        await asyncio.Event().wait()
        return ""

    async def both() -> tuple[Executed, list[Any]]:
        before = asyncio.all_tasks()
        executed = await run_written(
            verdict(HEAD + CALL),
            "1+1?",
            executor=ScriptedModel(silent),
            limits=GraphLimits(seconds=3),
        )
        return executed, [task for task in asyncio.all_tasks() if task not in before]

    executed, left = asyncio.run(both())
    assert levels(executed) == [0, 2, 3]
    assert {attempt.run.ending for attempt in executed.attempts} == {GraphEnding.TIMED_OUT}
    # What they took is the machine's affair; what they were given is no more than there was.
    told = [re.search(r"no answer in ([\d.]+) s", each.run.reason) for each in executed.attempts]
    assert 0 < sum(float(found[1]) for found in told if found) <= 3.01
    assert left == []
