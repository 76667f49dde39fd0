"""Runs of graphs on scripted models: in the sandbox and trusted, they come to the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from graph_samples import (
    CODE,
    CODE_PROMPTS,
    GATHER,
    MATH,
    MATH_PROMPTS,
    own_form,
    simple,
    write_round,
)

from aflow_tune.context import RolloutContext
from aflow_tune.errors import BadInput, BudgetReached
from aflow_tune.graph.graph import Graph, load_graph
from aflow_tune.graph.run import GraphEnding, GraphLimits, GraphRun
from aflow_tune.models import Reply, ScriptedModel, Usage
from aflow_tune.models.prices import FixedPrice
from aflow_tune.operators import Operator, Outcome, TestCases, use_test_cases
from aflow_tune.operators.prompts import Prompt, fill, with_instruction
from aflow_tune.trace import ModelCall, OperatorCall, Trace

LETTER = "<thought>t</thought><solution_letter>B</solution_letter>"
GOOD_REVIEW = "<review_result>true</review_result><feedback>good</feedback>"


@pytest.fixture(params=[False, True], ids=["sandboxed", "trusted"])
def trust(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def graph_of(call: str, init: str = "pass", head: str = "", **given: Any) -> Graph:
    """A graph with an operator `custom`; its call's body begins in line 9 plus those of `init`."""
    return Graph("own", {"graph.py": simple(call, init, head)}, **given)


def run(graph: Graph, model: ScriptedModel | None = None, **given: Any) -> GraphRun:
    return asyncio.run(graph.run("1+1?", model=model or ScriptedModel([]), **given))


def says(text: str) -> ScriptedModel:
    return ScriptedModel(lambda _: text)


def asked(model: ScriptedModel) -> list[str]:
    return [str(ask.messages[-1]["content"]) for ask in model.asked]


def traced(graph: Graph, model: ScriptedModel, *arguments: Any) -> tuple[GraphRun, Trace]:
    async def both() -> tuple[GraphRun, Trace]:
        with RolloutContext().activate(), Trace().activate() as trace:
            return await graph.run(*arguments, model=model), trace

    return asyncio.run(both())


def test_math_of_metagpt(tmp_path: Path, trust: bool) -> None:
    folder = write_round(tmp_path, "MATH", 2, MATH, MATH_PROMPTS)
    model = ScriptedModel(["first \\boxed{2}", "second \\boxed{3}", LETTER])
    ran, trace = traced(load_graph(folder, trust=trust), model, "What is 1+2?")
    assert (ran.ending, ran.answer) == (GraphEnding.ANSWERED, "second \\boxed{3}")
    assert (ran.calls, ran.model_calls, dict(ran.failures)) == (3, 3, {})
    callers = [call.caller for call in trace.of(ModelCall)]
    assert callers == ["Custom.custom", "Custom.custom", "ScEnsemble.sc_ensemble"]
    texts = asked(model)
    assert "Put the answer into a box." in texts[0]
    assert "A first attempt: first \\boxed{2}" in texts[1]
    assert "second \\boxed{3}" in texts[2]


def test_code_with_its_public_tests_and_an_entry_point(tmp_path: Path, trust: bool) -> None:
    graph = load_graph(write_round(tmp_path, "HumanEval", 4, CODE, CODE_PROMPTS), trust=trust)
    model = says("```python\ndef f(x):\n    return 2 * x\n```")
    for number, ending in ((2, Outcome.ANSWERED), (3, Outcome.TESTS_FAILED)):
        rows = [{"entry_point": "f", "test": [f"assert candidate(1) == {number}"]}]
        with use_test_cases(TestCases.of_rows(rows)):
            ran, trace = traced(graph, model, "def f(x): ...", "f")
        assert "return 2 * x" in ran.text
        uses = [(use.instance, use.outcome) for use in trace.of(OperatorCall)]
        assert uses[:2] == [("custom_code_generate", "answered"), ("test", ending)]
    with pytest.raises(BadInput, match="takes an entry point"):
        run(graph)


def test_gather_is_concurrent_and_keeps_order_and_attribution(tmp_path: Path, trust: bool) -> None:
    folder = write_round(tmp_path, "GSM8K", 7, GATHER)
    both_there = asyncio.Event()
    waiting: list[str] = []

    async def reply(messages: Sequence[Any]) -> str:
        text = str(messages[-1]["content"])
        if text.startswith(("0. ", "1. ")):
            waiting.append(text[:2])
            if len(waiting) == 2:
                both_there.set()
            await asyncio.wait_for(both_there.wait(), 60)  # neither ends before both began
            if text.startswith("0. "):
                await asyncio.sleep(0.05)
            return f"answer {text[0]}"
        return "done" if text.startswith("In one word") else GOOD_REVIEW

    ran, trace = traced(load_graph(folder, trust=trust), ScriptedModel(reply), "1+1?")
    assert ran.answer == "['answer 0', 'answer 1'] answer 0 done"
    # They end in the other order: attribution follows the call.
    callers = [call.caller for call in trace.of(ModelCall)]
    assert callers == ["Custom.solvers_2", "Custom.solvers_1", "Review.review", "llm"]


def test_usage_and_cost_reach_the_graph_and_the_result(trust: bool) -> None:
    graph = graph_of(
        "await self.custom(input=problem, instruction='')\n"
        "await self.other(input=problem, instruction='')\n"
        "await self.llm('x')\n"
        "mine, total = self.llm.cost_manager, self.llm.get_usage_summary()\n"
        "return [mine.total_cost, total['total_cost'], total['total_tokens'],\n"
        "        total['call_count'], self.second.get_usage_summary()['total_cost']], 99.0",
        "self.second = create_llm_instance(llm_config)\nself.other = operator.Custom(self.second)",
        trust=trust,
    )
    # 10 tokens at a cent and 5 at three cents: a quarter of a dollar.
    said = Reply("a", "m", Usage(10, 5))
    ran = run(graph, ScriptedModel([said, said, said], price=FixedPrice(10_000, 30_000)))
    assert ran.answer == [0.5, 0.5, 30, 2, 0.25]
    assert (ran.cost, ran.prompt_tokens, ran.completion_tokens) == (0.75, 30, 15)
    # An unknown price is not zero.
    unpriced = graph_of("await self.llm('x')\nreturn str(self.llm.cost_manager.total_cost)")
    ran = run(unpriced, says("a"))
    assert (ran.answer, ran.cost) == ("nan", None)


def test_instances_are_named_by_what_they_are_assigned_to(trust: bool) -> None:
    graph = graph_of(
        "local = operator.Custom(self.llm)\n"
        "for one in (self.custom, self.pair[1], *self.many, local, Twice(self.llm)):\n"
        "    await one(input=problem, instruction='')\n"
        "await operator.Custom(self.llm)(input=problem, instruction='')\n"
        "return 'x'",
        "self.pair = [operator.Review(self.llm), operator.Custom(self.llm)]\n"
        "self.many = [operator.Custom(self.llm) for _ in range(2)]",
        "class Twice(operator.Custom):\n"
        "    async def __call__(self, **given):\n"
        "        return await super().__call__(**given)\n",
        trust=trust,
    )
    _, trace = traced(graph, says("a"), "p")
    names = [use.instance for use in trace.of(OperatorCall)]
    assert names == ["custom", "pair_2", "many", "many", "local", "custom_1", "custom_2"]


def test_other_roles_for_operators(trust: bool) -> None:
    graph = graph_of(
        "await self.custom(input=problem, instruction='')\n"
        "await self.review(problem=problem, solution='s')\n"
        "await create_llm_instance('gpt-9')('x')\n"
        "return 'x'",
        "self.review = operator.Review(self.llm)",
        trust=trust,
    )
    policy = says("a")
    judge = ScriptedModel(lambda _: GOOD_REVIEW, role="judge")
    models = {"Review": "judge", "gpt-9": "judge"}
    assert run(graph, policy, clients={"judge": judge}, models=models).ok
    assert (len(policy.asked), len(judge.asked)) == (1, 2)
    unknown = run(graph, policy, clients={"judge": judge}, models={"Review": "judge"})
    assert unknown.ending is GraphEnding.RAISED
    assert "gpt-9" in unknown.reason
    with pytest.raises(BadInput, match="examiner"):
        run(graph, policy, models={"Review": "examiner"})


@pytest.mark.parametrize(
    ("call", "ending", "told"),
    [
        ("return 'x', 0.1", "answered", "x"),
        ("return 3", "answered", 3),
        ("return {'a': [1, None]}", "answered", {"a": [1, None]}),
        ("return None", "no_answer", "own: "),
        ("return '  ', 0.1", "no_answer", "own: "),
        ("return 'a', 'b', 0.1", "raised", "own: ValueError"),
        ("x = {}\nreturn x['response']", "raised", "own/graph.py:10: KeyError"),
    ],
)
def test_what_a_graph_returns_or_raises(trust: bool, call: str, ending: str, told: Any) -> None:
    ran = run(graph_of(call, trust=trust))
    assert (ran.ending, ran.built) == (ending, True)
    assert ran.answer == told if ran.ok else ran.reason.startswith(told)
    ran = run(graph_of(call, "raise ValueError('no')", trust=trust))
    assert (ran.built, ran.reason) == (False, "own/graph.py:6: ValueError: no")


def test_a_budget_ends_the_run_although_the_graph_catches_everything(trust: bool) -> None:
    call = "try:\n    await self.llm('x')\nexcept BaseException:\n    pass\nreturn 'x'"
    with pytest.raises(BudgetReached, match="spent"):
        run(graph_of(call, trust=trust), ScriptedModel([BudgetReached("spent")]))


def test_a_cancelled_run_cancels_its_calls(trust: bool) -> None:
    graph = graph_of("await self.llm('x')\nreturn 'x'", trust=trust)
    ended: list[bool] = []

    async def work() -> None:
        began = asyncio.Event()

        async def never(_: Sequence[Any]) -> str:
            began.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)
            return "a"

        task = asyncio.create_task(graph.run("p", model=ScriptedModel(never)))
        await asyncio.wait_for(began.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert ended == [True]


def test_the_graph_of_the_documentation_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "graphs.md").read_text()
    source = text.partition("```python\n")[2].partition("```")[0]
    folder = own_form(tmp_path / "g", source, '{"SOLVE": "Solve step by step: "}')
    assert run(load_graph(folder), ScriptedModel(["a", "b", "c", LETTER])).answer == "b"


# Prompts and instructions


def test_instructions_are_read_by_the_code_or_become_the_argument(trust: bool) -> None:
    graph = graph_of(
        "first = await self.custom(input=problem)\n"
        "second = await self.custom(input=problem, instruction='Of the code.')\n"
        "third = await self.custom(problem, self.prompts['custom'] + ' Twice.')\n"
        "fourth = await self.custom(problem, prompt_custom.custom)\n"
        "return [self.seen, self.prompts['own'], self.prompts['custom'], self.prompts['x']], 0",
        "self.seen = self.prompts['custom'] + '|' + self.prompts['other']\n"
        "self.prompts = {'own': 'kept', 'custom': 'mine'}",
        instructions={"custom": "Add {both}."},
        trust=trust,
    )
    model = says("two")
    assert run(graph, model).answer == ["Add {both}.|", "kept", "Add {both}.", ""]
    words = ["Add {both}.\n\n", "Of the code.", "Add {both}. Twice.", "Add {both}."]
    assert asked(model) == [f"{text}1+1?" for text in words]


@pytest.mark.parametrize("text", ["{x}", "{{x}}", "{{{x}}}", "{ x }", "{}", "{x}{y}{{z}}", "}{x{"])
def test_braces_of_an_instruction_are_text(text: str) -> None:
    whole = with_instruction("Base {x}.", text, Prompt(needs=("none",)))
    assert fill(whole, {"x": "X", "y": "Y", "z": "Z"}) == f"{text}\n\nBase X."
    assert with_instruction("Base {x}.", "All {x}", Prompt(needs=("x",))) == "All {x}"


# Limits of the models

MANY = (
    "import asyncio\n"
    "done = await asyncio.gather(*[self.custom(input=problem) for _ in range(12)],"
    " return_exceptions=True)\n"
    "return str(len(done)), 0"
)


@pytest.mark.parametrize(
    ("limits", "named", "calls"),
    [
        (GraphLimits(model_calls=7), "limit model_calls", 7),
        # 5 calls of 60 tokens spend 300; what is in flight ends before another begins.
        (GraphLimits(tokens=300, call_completion_tokens=10), "limit tokens", 5),
        (GraphLimits(call_prompt_tokens=0), "limit call_prompt_tokens", 0),
        (GraphLimits(model_calls=12, tokens=100_000), "", 12),
    ],
)
def test_gathered_calls_cannot_pass_a_limit(
    trust: bool, limits: GraphLimits, named: str, calls: int
) -> None:
    together = 12 if not named else 0
    running = most = 0

    async def reply(_: Sequence[Any]) -> Reply:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        while most < together:
            await asyncio.sleep(0.01)
        running -= 1
        return Reply(text="two", model="m", usage=Usage(50, 10))

    model = ScriptedModel(reply)
    ran = run(graph_of(MANY, trust=trust), model, limits=limits)
    assert ran.ending is (GraphEnding.TOO_MANY_CALLS if named else GraphEnding.ANSWERED)
    assert named in ran.reason
    assert len(model.asked) <= calls
    assert {ask.max_tokens for ask in model.asked} <= {limits.call_completion_tokens}
    if limits.tokens == 300:
        assert ran.prompt_tokens + ran.completion_tokens == 300
    if not named:
        assert (ran.answer, ran.model_calls, most) == ("12", 12, 12)


def test_tokens_are_counted_where_a_model_reports_none() -> None:
    call = "for _ in range(5):\n    await self.custom(input=problem)\nreturn 'done', 0"
    ran = run(graph_of(call), model := says("x" * 300), limits=GraphLimits(tokens=250))
    # A call is 4 and 300 bytes: 102 tokens. Two are 204, the third passes 250.
    assert (ran.ending, len(model.asked)) == (GraphEnding.TOO_MANY_CALLS, 3)
    assert ran.prompt_tokens == 0


class Deaf(Operator):
    """Asks again whatever happens, and returns what cannot travel."""

    async def run(self, input: str) -> dict[str, Any]:
        for _ in range(5):
            try:
                await self.llm.complete([{"role": "user", "content": input}])
            except Exception:
                continue
        return {"response": {1}}


def test_an_operator_of_the_users_passes_no_limit_and_hands_over_plain_data_only() -> None:
    call = "try:\n    await self.deaf(problem)\nexcept Exception as e:\n    return str(e), 0"
    graph = graph_of(call, "self.deaf = operator.Deaf(self.llm)", operators={"Deaf": Deaf})
    model = says("two")
    ran = run(graph, model, limits=GraphLimits(model_calls=2))
    assert (ran.ending, len(model.asked)) == (GraphEnding.TOO_MANY_CALLS, 2)
    assert "set" in str(run(graph, model).answer)
