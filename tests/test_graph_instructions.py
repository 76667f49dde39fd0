"""Instructions of a graph's instances, and the limits that hold its models: on scripted models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aflow_tune.graph.broker import GraphLimits
from aflow_tune.graph.graph import Graph, load_graph
from aflow_tune.graph.run import GraphEnding, GraphRun
from aflow_tune.graph.save import save_round
from aflow_tune.models import Reply, ScriptedModel, Usage
from aflow_tune.operators.prompts import fill, use_prompts

CODE_OF = """\
class Workflow:
    def __init__(self, name, llm_config, dataset):
        self.llm = create_llm_instance(llm_config)
{init}

    async def __call__(self, problem):
{call}
"""


@pytest.fixture(params=[False, True], ids=["sandboxed", "trusted"])
def trust(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def graph_of(init: str, call: str, instructions: dict[str, str], trust: bool = False) -> Graph:
    lines = [f"        {line}" for line in init.splitlines()]
    body = [f"        {line}" for line in call.splitlines()]
    code = CODE_OF.format(init="\n".join(lines), call="\n".join(body))
    return Graph("written", {"graph.py": code}, trust=trust, instructions=instructions)


def run(graph: Graph, model: ScriptedModel, **given: Any) -> GraphRun:
    return asyncio.run(graph.run("1+1?", model=model, **given))


def asked(model: ScriptedModel) -> list[str]:
    return [str(ask.messages[0]["content"]) for ask in model.asked]


def echo(_: Sequence[Any]) -> str:
    return "two"


def test_the_instruction_of_custom_is_its_argument_where_the_code_leaves_it_out(
    trust: bool,
) -> None:
    graph = graph_of(
        "self.solve = operator.Custom(self.llm)",
        "first = await self.solve(input=problem)\n"
        "second = await self.solve(input=problem, instruction='Of the code.')\n"
        "third = await self.solve(problem, self.prompts['solve'] + ' Twice.')\n"
        "fourth = await self.solve(problem, prompt_custom.solve)\n"
        "return fourth['response'], 0",
        {"solve": "Add {both} numbers."},
        trust,
    )
    model = ScriptedModel(echo)
    ran = run(graph, model)
    assert (ran.ending, ran.answer, ran.built) == (GraphEnding.ANSWERED, "two", True)
    assert asked(model) == [
        "Add {both} numbers.\n\n1+1?",
        "Of the code.1+1?",
        "Add {both} numbers. Twice.1+1?",
        "Add {both} numbers.1+1?",
    ]


def test_prompts_are_there_in_the_constructor_and_a_name_that_lacks_is_an_empty_text(
    trust: bool,
) -> None:
    graph = graph_of(
        "self.seen = self.prompts['solve'] + '|' + self.prompts['other']\n"
        "self.prompts = {'own': 'kept', 'solve': 'mine'}",
        "return [self.seen, self.prompts['own'], self.prompts['solve'], self.prompts['x']], 0",
        {"solve": "given"},
        trust,
    )
    assert run(graph, ScriptedModel([])).answer == ["given|", "kept", "given", ""]
    without = Graph("w", graph.sources, trust=trust)
    assert run(without, ScriptedModel([])).answer is None  # its own dict is a plain one


def test_for_other_operators_it_stands_in_front_of_the_text_that_the_run_uses(trust: bool) -> None:
    graph = graph_of(
        "self.judge = operator.Review(self.llm)\nself.plain = operator.Review(self.llm)",
        "await self.judge(problem, 'x')\nawait self.plain(problem, 'y')\nreturn 'done', 0",
        {"judge": 'Be strict. {problem} {{two}} {"a": 1} {}'},
        trust,
    )
    model = ScriptedModel(lambda _: "<review_result>true</review_result>")
    with use_prompts({"Review": "Look at {solution} of {problem}."}):
        assert run(graph, model).ok
    first, second = asked(model)
    assert first.startswith('Be strict. {problem} {{two}} {"a": 1} {}\n\nLook at x of 1+1?.')
    assert second.startswith("Look at y of 1+1?.")


@pytest.mark.parametrize("text", ["{x}", "{{x}}", "{{{x}}}", "{ x }", "{}", "{x}{y}{{z}}", "}{x{"])
def test_braces_of_an_instruction_are_text(text: str) -> None:
    from aflow_tune.operators.prompts import Prompt, with_instruction

    whole = with_instruction("Base {x}.", text, Prompt(needs=("none",)))
    assert fill(whole, {"x": "X", "y": "Y", "z": "Z"}) == f"{text}\n\nBase X."


# -- whether the constructor came to its end


def test_a_run_says_whether_the_workflow_was_constructed(trust: bool) -> None:
    failing = graph_of("raise ValueError('no')", "return 1, 0", {}, trust)
    ran = run(failing, ScriptedModel([]))
    assert (ran.ending, ran.built) == (GraphEnding.RAISED, False)
    assert ran.reason == "written/graph.py:4: ValueError: no"
    ran = run(graph_of("pass", "raise ValueError('later')", {}, trust), ScriptedModel([]))
    assert (ran.ending, ran.built) == (GraphEnding.RAISED, True)
    assert ran.reason == "written/graph.py:7: ValueError: later"
    module = Graph("m", {"graph.py": "raise ValueError('at once')"}, trust=trust)
    assert not run(module, ScriptedModel([])).built


def test_who_lies_about_the_construction_loses_by_it() -> None:
    lie = "import aflow_channel; aflow_channel.send({'built': True})"
    ran = run(graph_of(lie, "return 1, 0", {}), ScriptedModel([]))
    assert ran.ending is GraphEnding.FORGED  # our side says it once more
    ran = run(graph_of(f"{lie}; raise ValueError", "return 1, 0", {}), ScriptedModel([]))
    assert (ran.ending, ran.built) == (GraphEnding.RAISED, True)
    for word in ("1", "'true'", "True, 'id': 1"):
        forged = lie.replace("True", word)
        ran = run(graph_of(forged, "return 1, 0", {}), ScriptedModel([]))
        assert ran.ending is GraphEnding.FORGED


# -- limits of the models


def model_with(
    tokens: tuple[int, int], seconds: float = 0.0, together: int = 0
) -> tuple[ScriptedModel, list[int]]:
    """A model whose every reply has this usage and waits until so many ran together, and the most
    of its calls that ran at once."""
    running, most = 0, [0]

    async def reply(_: Sequence[Any]) -> Reply:
        nonlocal running
        running += 1
        most[0] = max(most[0], running)
        await asyncio.sleep(seconds)
        while most[0] < together:
            await asyncio.sleep(0.01)
        running -= 1
        return Reply(text="two", model="m", usage=Usage(*tokens))

    return ScriptedModel(reply), most


GATHER = (
    "import asyncio\n"
    "done = await asyncio.gather(*[self.solve(input=problem) for _ in range(12)],"
    " return_exceptions=True)\n"
    "return str(len(done)), 0"
)


def many(trust: bool) -> Graph:
    return graph_of("self.solve = operator.Custom(self.llm)", GATHER, {}, trust)


def test_gathered_calls_cannot_pass_the_limit_of_model_calls(trust: bool) -> None:
    model, _ = model_with((10, 5), 0.05)
    ran = run(many(trust), model, limits=GraphLimits(model_calls=7))
    assert ran.ending is GraphEnding.TOO_MANY_CALLS
    assert ran.reason == "more than 7 calls of models (limit model_calls)"
    assert len(model.asked) <= 7
    model, _ = model_with((10, 5))
    ran = run(many(trust), model, limits=GraphLimits(model_calls=12))
    assert (ran.answer, ran.model_calls) == ("12", 12)


def test_gathered_calls_pass_the_limit_of_tokens_by_one_call_at_most(trust: bool) -> None:
    model, most = model_with((50, 10), 0.02)
    ran = run(many(trust), model, limits=GraphLimits(tokens=300, call_completion_tokens=10))
    assert ran.ending is GraphEnding.TOO_MANY_CALLS
    assert ran.reason == "more than 300 tokens of models (limit tokens)"
    # 5 calls spend 300; what was in flight ends before another begins.
    assert ran.prompt_tokens + ran.completion_tokens == 300
    assert len(model.asked) == 5
    assert model.asked[0].max_tokens == 10
    model, most = model_with((50, 10), together=12)
    ran = run(many(trust), model, limits=GraphLimits(tokens=100_000))
    assert (ran.answer, most[0]) == ("12", 12)


def test_tokens_are_counted_where_a_model_reports_none() -> None:
    model = ScriptedModel(lambda _: "x" * 300)
    graph = graph_of(
        "self.solve = operator.Custom(self.llm)",
        "for _ in range(5):\n    await self.solve(input=problem)\nreturn 'done', 0",
        {},
    )
    ran = run(graph, model, limits=GraphLimits(tokens=250))
    # A call is 4 and 300 bytes: 102 tokens. Two are 204, the third passes 250.
    assert (ran.ending, len(model.asked)) == (GraphEnding.TOO_MANY_CALLS, 3)
    assert ran.prompt_tokens == 0


def test_a_prompt_that_is_too_long_ends_the_run_before_it_is_sent() -> None:
    graph = graph_of(
        "self.solve = operator.Custom(self.llm)",
        "return (await self.solve(input='word ' * 1000))['response'], 0",
        {},
    )
    model = ScriptedModel(echo)
    ran = run(graph, model, limits=GraphLimits(call_prompt_tokens=1000))
    assert (ran.ending, len(model.asked)) == (GraphEnding.TOO_MANY_CALLS, 0)
    assert "a prompt of about 1250 tokens, more than the 1000" in ran.reason
    assert run(graph, model, limits=GraphLimits(call_prompt_tokens=1250)).ok


def test_an_operator_that_catches_everything_passes_no_limit() -> None:
    from aflow_tune.operators import Operator

    class Deaf(Operator):
        """Asks again whatever happens."""

        async def run(self, input: str) -> dict[str, str]:
            for _ in range(5):
                try:
                    await self.llm.complete([{"role": "user", "content": input}])
                except Exception:
                    continue
            return {"response": "done"}

    graph = graph_of(
        "self.deaf = operator.Deaf(self.llm)",
        "try:\n    await self.deaf(problem)\nexcept Exception:\n    pass\nreturn 'done', 0",
        {},
    )
    graph = Graph(graph.label, graph.sources, operators={"Deaf": Deaf})
    model = ScriptedModel(echo)
    ran = run(graph, model, limits=GraphLimits(model_calls=2))
    assert (ran.ending, len(model.asked)) == (GraphEnding.TOO_MANY_CALLS, 2)


@pytest.mark.parametrize(
    ("options", "retries", "calls"),
    [("", None, 3), ("", 0, 1), ("", 1, 2), (", retries=5", 1, 2), (", retries=0", 1, 1)],
)
def test_operators_ask_again_as_often_as_the_run_allows(
    options: str, retries: int | None, calls: int
) -> None:
    graph = graph_of(
        f"self.judge = operator.Review(self.llm{options})",
        "return str((await self.judge(problem, 'x'))['review_result']), 0",
        {},
    )
    model = ScriptedModel(lambda _: "hm")
    assert run(graph, model, limits=GraphLimits(retries=retries)).answer == "False"
    assert len(model.asked) == calls


# -- written back for AFlow


def test_a_round_keeps_instructions_over_those_that_its_code_sets(tmp_path: Path) -> None:
    init = (
        'self.prompts = {"solve": "Plain. ", "more": "More. "}\n'
        "self.solve = operator.Custom(self.llm)"
    )
    call = (
        'text = self.prompts["solve"] + self.prompts["more"]\n'
        'return (await self.solve(input=problem, instruction=text))["response"]'
    )
    graph = graph_of(init, call, {"solve": "Better. "})
    save_round(graph, tmp_path / "round_1", dataset="GSM8K")
    for ran in (graph, load_graph(tmp_path / "round_1")):
        model = ScriptedModel(echo)
        assert run(ran, model).answer == "two"
        assert asked(model)[0].startswith("Better. More. ")


def test_a_round_holds_instructions_as_constants_that_its_code_hands_over(tmp_path: Path) -> None:
    graph = graph_of(
        "self.solve = operator.Custom(self.llm)\n"
        "self.write = operator.CustomCodeGenerate(self.llm)\n"
        "self.compute = operator.Programmer(self.llm)",
        "first = await self.solve(input=problem)\n"
        "again = await self.solve((first['response']), instruction=self.prompts['other'])\n"
        "code = await self.write(problem=problem, entry_point='f',)\n"
        "last = await self.compute(problem=f\"{(await self.solve(input='in'))['response']}\")\n"
        "return last['output'], 0",
        {
            "solve": "Add.",
            "write": 'Write "it".',
            "other": "Once more.",
            "compute": "Fractions.",
            "no name": "unused",
        },
    )
    saved = save_round(graph, tmp_path / "Mine" / "workflows" / "round_3")
    assert saved.only_here == ("compute",)
    constants: dict[str, Any] = {}
    exec((saved.folder / "prompt.py").read_text(), constants)
    assert {name: constants[name] for name in ("solve", "write", "other")} == {
        "solve": "Add.",
        "write": 'Write "it".',
        "other": "Once more.",
    }
    kept = json.loads((saved.folder / "prompts.json").read_text())
    assert list(kept) == ["compute"]
    assert kept["compute"]["main"].startswith("Fractions.\n\nWrite a Python program")

    def ask(which: Graph) -> list[str]:
        model = ScriptedModel(
            lambda messages: (
                "```python\ndef f():\n    return 1\ndef solve():\n    return 7\n```"
                if "Python" in messages[0]["content"] or "Write" in messages[0]["content"]
                else "said"
            )
        )
        assert run(which, model).answer == "7"
        return asked(model)

    assert ask(load_graph(saved.folder)) == ask(graph)
