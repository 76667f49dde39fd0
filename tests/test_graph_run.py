"""Runs of graphs on a scripted model: in the sandbox and trusted, they come to the same."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
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

from aflow_tune.context import RunContext
from aflow_tune.errors import BadInput, BudgetReached
from aflow_tune.graph.graph import Graph, load_graph
from aflow_tune.graph.run import GraphEnding, GraphRun
from aflow_tune.models import Reply, ScriptedModel, Usage
from aflow_tune.models.prices import FixedPrice
from aflow_tune.models.types import ModelError, ModelFailure
from aflow_tune.trace import ModelCall, OperatorCall, Trace

LETTER = "<thought>t</thought><solution_letter>B</solution_letter>"


def run(
    graph: Graph, problem: str = "1+1?", entry_point: str | None = None, **given: Any
) -> GraphRun:
    return asyncio.run(graph.run(problem, entry_point, **given))


def last_text(messages: Sequence[Any]) -> str:
    return str(messages[-1]["content"])


def traced(graph: Graph, model: ScriptedModel, *arguments: Any) -> tuple[GraphRun, Trace]:
    async def both() -> tuple[GraphRun, Trace]:
        with RunContext().activate(), Trace().activate() as trace:
            return await graph.run(*arguments, model=model), trace

    return asyncio.run(both())


@pytest.fixture(params=[False, True], ids=["sandboxed", "trusted"])
def trust(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def own(tmp_path: Path, trust: bool) -> Callable[..., Graph]:
    """A graph in our form from the bodies of its methods."""

    def make(call: str, init: str = "pass", head: str = "", prompts: str = "{}") -> Graph:
        folder = own_form(tmp_path / "own", simple(call, init, head), prompts)
        return load_graph(folder, trust=trust)

    return make


def test_math_of_metagpt(tmp_path: Path, trust: bool) -> None:
    folder = write_round(tmp_path, "MATH", 2, MATH, MATH_PROMPTS)
    model = ScriptedModel(["first \\boxed{2}", "second \\boxed{3}", LETTER])
    ran, trace = traced(load_graph(folder, trust=trust), model, "What is 1+2?")
    assert ran.ending is GraphEnding.ANSWERED
    assert ran.answer == "second \\boxed{3}"
    assert (ran.calls, ran.model_calls, dict(ran.failures)) == (3, 3, {})
    assert [call.caller for call in trace.of(ModelCall)] == [
        "Custom.custom",
        "Custom.custom",
        "ScEnsemble.sc_ensemble",
    ]
    asked = [last_text(ask.messages) for ask in model.asked]
    assert "Put the answer into a box." in asked[0]
    assert "What is 1+2?" in asked[0]
    assert "A first attempt: first \\boxed{2}" in asked[1]
    assert "second \\boxed{3}" in asked[2]


def test_code_with_tests_and_an_entry_point(tmp_path: Path, trust: bool) -> None:
    folder = write_round(tmp_path, "HumanEval", 4, CODE, CODE_PROMPTS)
    problem = 'def twice(x):\n    """Double it.\n\n    >>> twice(2)\n    4\n    """\n'
    model = ScriptedModel(lambda _: "```python\ndef twice(x):\n    return 2 * x\n```")
    ran, trace = traced(load_graph(folder, trust=trust), model, problem, "twice")
    assert ran.ending is GraphEnding.ANSWERED
    assert "return 2 * x" in ran.text
    assert "Write the function." in last_text(model.asked[0].messages)
    used = [(use.operator, use.instance) for use in trace.of(OperatorCall)]
    assert used[:2] == [("CustomCodeGenerate", "custom_code_generate"), ("Test", "test")]


def test_gather_is_concurrent_and_keeps_order_and_attribution(tmp_path: Path, trust: bool) -> None:
    folder = write_round(tmp_path, "GSM8K", 7, GATHER)
    both_there = asyncio.Event()
    waiting: list[str] = []

    async def reply(messages: Sequence[Any]) -> str:
        text = last_text(messages)
        if text.startswith(("0. ", "1. ")):
            waiting.append(text[:2])
            if len(waiting) == 2:
                both_there.set()
            await asyncio.wait_for(both_there.wait(), 60)  # neither ends before both began
            if text.startswith("0. "):
                await asyncio.sleep(0.05)
            return f"answer {text[0]}"
        if text.startswith("In one word"):
            return "done"
        return "<review_result>true</review_result><feedback>good</feedback>"

    ran, trace = traced(load_graph(folder, trust=trust), ScriptedModel(reply), "1+1?")
    assert ran.answer == "['answer 0', 'answer 1'] answer 0 done"
    # They end in the other order: attribution follows the call.
    assert [call.caller for call in trace.of(ModelCall)] == [
        "Custom.solvers_2",
        "Custom.solvers_1",
        "Review.review",
        "llm",
    ]


def test_usage_and_cost_reach_the_graph_and_the_result(own: Callable[..., Graph]) -> None:
    graph = own(
        "await self.custom(input=problem, instruction='')\n"
        "await self.other(input=problem, instruction='')\n"
        "await self.llm('x')\n"
        "mine, total = self.llm.cost_manager, self.llm.get_usage_summary()\n"
        "return [mine.total_cost, total['total_cost'], total['total_tokens'],\n"
        "        total['call_count'], self.second.get_usage_summary()['total_cost']], 99.0",
        "self.second = create_llm_instance(llm_config)\nself.other = operator.Custom(self.second)",
    )
    # 10 tokens at a cent and 5 at three cents: a quarter of a dollar.
    said = Reply("a", "m", Usage(10, 5))
    model = ScriptedModel([said, said, said], price=FixedPrice(10_000, 30_000))
    ran = run(graph, model=model)
    assert ran.answer == [0.5, 0.5, 30, 2, 0.25]
    assert (ran.cost, ran.prompt_tokens, ran.completion_tokens) == (0.75, 30, 15)


def test_an_unknown_price_is_not_zero(own: Callable[..., Graph]) -> None:
    graph = own("await self.llm('x')\nreturn str(self.llm.get_usage_summary()['total_cost'])")
    ran = run(graph, model=ScriptedModel(["a"]))
    assert (ran.answer, ran.cost) == ("nan", None)


def test_instances_are_named_by_what_they_are_assigned_to(own: Callable[..., Graph]) -> None:
    graph = own(
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
    )
    model = ScriptedModel(lambda _: "a")
    _, trace = traced(graph, model, "p")
    assert [use.instance for use in trace.of(OperatorCall)] == [
        "custom",
        "pair_2",
        "many",
        "many",
        "local",
        "custom_1",
        "custom_2",
    ]


def test_prompts_are_data(own: Callable[..., Graph]) -> None:
    graph = own(
        "x = await self.custom(input=problem, instruction=prompt_custom.SOLVE)\n"
        "y = await self.plain(input=problem, instruction=prompt_custom.SOLVE)\n"
        "return 'x'",
        "self.plain = operator.Custom(self.llm)",
        prompts='{"SOLVE": "Solve: "}',
    )
    changed = graph.with_prompts({"SOLVE": "Please: ", "custom": "[{instruction}|{input}]"})
    model = ScriptedModel(lambda _: "a")
    run(changed, model=model)
    texts = [last_text(ask.messages) for ask in model.asked]
    assert texts[0] == "[Please: |1+1?]"
    assert "Please: " in texts[1]
    assert not texts[1].startswith("[")


def test_other_roles_for_operators(own: Callable[..., Graph]) -> None:
    graph = own(
        "await self.custom(input=problem, instruction='')\n"
        "await self.review(problem=problem, solution='s')\n"
        "await create_llm_instance('gpt-9')('x')\n"
        "return 'x'",
        "self.review = operator.Review(self.llm)",
    )
    policy = ScriptedModel(lambda _: "a")
    judge = ScriptedModel(
        lambda _: "<review_result>true</review_result><feedback>f</feedback>", role="judge"
    )
    models = {"Review": "judge", "gpt-9": "judge"}
    ran = run(graph, model=policy, clients={"judge": judge}, models=models)
    assert ran.ok
    assert (len(policy.asked), len(judge.asked)) == (1, 2)
    unknown = run(graph, model=policy, clients={"judge": judge}, models={"Review": "judge"})
    assert unknown.ending is GraphEnding.RAISED
    assert "the graph asks for the model 'gpt-9'" in unknown.reason
    with pytest.raises(BadInput, match="no client for the role examiner"):
        run(graph, model=policy, models={"Review": "examiner"})


def test_a_failing_model_is_an_exception_that_the_graph_may_catch(
    own: Callable[..., Graph],
) -> None:
    graph = own(
        "try:\n"
        "    await self.custom(input=problem, instruction='')\n"
        "except Exception as error:\n"
        "    return 'caught ' + str(error)",
    )
    error = ModelError(ModelFailure.SERVER, "it is down")
    ran = run(graph, model=ScriptedModel([error]))
    assert ran.answer == "caught ModelError: it is down (server_error)"
    assert dict(ran.failures) == {"server_error": 1}


def test_wrong_arguments_fail_as_they_would_at_home(own: Callable[..., Graph]) -> None:
    graph = own(
        "try:\n"
        "    await self.custom(question=problem)\n"
        "except TypeError as error:\n"
        "    return str(error)",
    )
    ran = run(graph, model=ScriptedModel([]))
    assert ran.answer == "missing a required argument: 'input'"
    assert dict(ran.failures) == {"TypeError": 1}


def test_an_exception_of_the_graph_names_its_line(own: Callable[..., Graph]) -> None:
    graph = own("x = {}\nreturn x['response']")
    ran = run(graph, model=ScriptedModel([]))
    assert ran.ending is GraphEnding.RAISED
    assert ran.reason == f"{graph.label}/graph.py:10: KeyError: 'response'"
    missing = own("return await self.genrate(problem)")
    assert "graph.py:9: AttributeError: 'Workflow' object has no attribute 'genrate'" in (
        run(missing, model=ScriptedModel([])).reason
    )


@pytest.mark.parametrize(
    ("returned", "ending", "answer"),
    [
        ("'x', 0.1", GraphEnding.ANSWERED, "x"),
        ("3", GraphEnding.ANSWERED, 3),
        ("{'a': [1, None]}", GraphEnding.ANSWERED, {"a": [1, None]}),
        ("None", GraphEnding.NO_ANSWER, None),
        ("'  ', 0.1", GraphEnding.NO_ANSWER, None),
        ("'a', 'b', 0.1", GraphEnding.RAISED, None),
    ],
)
def test_what_a_graph_may_return(
    own: Callable[..., Graph], returned: str, ending: GraphEnding, answer: Any
) -> None:
    ran = run(own(f"return {returned}"), model=ScriptedModel([]))
    assert (ran.ending, ran.answer) == (ending, answer)


def test_a_budget_ends_the_run_although_the_graph_catches_everything(
    own: Callable[..., Graph],
) -> None:
    graph = own(
        "try:\n    await self.llm('x')\nexcept BaseException:\n    pass\nreturn 'x'",
    )
    with pytest.raises(BudgetReached, match="spent"):
        run(graph, model=ScriptedModel([BudgetReached("spent")]))


def test_a_cancelled_run_cancels_its_calls(own: Callable[..., Graph]) -> None:
    graph = own("await self.llm('x')\nreturn 'x'")
    said: list[str] = []

    async def work() -> None:
        began = asyncio.Event()

        async def never(_: Sequence[Any]) -> str:
            began.set()
            try:
                await asyncio.sleep(60)
            finally:
                said.append("ended")
            return "a"

        task = asyncio.create_task(graph.run("p", model=ScriptedModel(never)))
        await asyncio.wait_for(began.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert said == ["ended"]


def test_trusted_runs_side_by_side_do_not_share_modules(tmp_path: Path) -> None:
    before = set(sys.modules)
    head = "kept = []\n"
    call = "kept.append(problem)\nawait self.llm(problem)\nreturn ' '.join(kept)"
    graph = load_graph(own_form(tmp_path / "g", simple(call, head=head)), trust=True)

    async def both() -> list[GraphRun]:
        model = ScriptedModel(lambda _: "a")
        return list(await asyncio.gather(*[graph.run(name, model=model) for name in "ab"]))

    assert [ran.answer for ran in asyncio.run(both())] == ["a", "b"]
    assert not {name for name in set(sys.modules) - before if "aflow_graph" in name}
    assert "workspace" not in sys.modules


def test_the_graph_of_the_documentation_runs(tmp_path: Path, trust: bool) -> None:
    text = (Path(__file__).parents[1] / "docs" / "graphs.md").read_text()
    source = text.partition("```python\n")[2].partition("```")[0]
    folder = own_form(tmp_path / "g", source, '{"SOLVE": "Solve step by step: "}')
    model = ScriptedModel(["a", "b", "c", LETTER])
    assert run(load_graph(folder, trust=trust), model=model).answer == "b"
