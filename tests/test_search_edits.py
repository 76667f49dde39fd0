"""Typed edits: what comes of one loads, passes the static check, is another graph, and runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from graph_samples import (
    AFLOW_HEAD,
    CODE,
    CODE_PROMPTS,
    GATHER,
    INIT,
    MATH,
    MATH_PROMPTS,
)
from writer_samples import ONE, TWO, graph

from aflow_tune.graph.graph import Graph, load_graph
from aflow_tune.graph.run import GraphEnding, GraphRun
from aflow_tune.models import ScriptedModel
from aflow_tune.operators import OPERATORS
from aflow_tune.sandbox import run_program_sync
from aflow_tune.sandbox.types import SandboxUnavailable
from aflow_tune.search.edits import Editor, Move, ablations, moves
from aflow_tune.search.layout import write_graph
from aflow_tune.search.state import WorkflowState
from aflow_tune.writer.check import check_loaded
from aflow_tune.writer.templates import TEMPLATES, Template
from aflow_tune.writer.types import CheckLimits

GRAPHS = Path(__file__).parents[1] / "workflows" / "graphs"
TOLD = {"short": "Answer in one word.", "example": "Question: 1 + 1?\nAnswer: 2"}
LIMITS = CheckLimits(model_calls=500)
BRANCHES = (
    AFLOW_HEAD.format(dataset="GSM8K", round=3)
    + INIT
    + """\
        self.custom = operator.Custom(self.llm)
        self.answer_generate = operator.AnswerGenerate(self.llm)
        self.sc_ensemble = operator.ScEnsemble(self.llm)
        self.programmer = operator.Programmer(self.llm)

    async def __call__(self, problem: str):
        # Numbers are computed, the rest is voted on: ä, ö.
        if any(sign.isdigit() for sign in problem):
            program = await self.programmer(problem=problem, analysis="None")
            if program["output"]:
                return program["output"], self.llm.get_usage_summary()["total_cost"]
        found = []
        for _ in range(2):
            reply = await self.custom(
                input=problem, instruction=prompt_custom.SOLVE_PROMPT
            )
            found.append(reply["response"])
        plain = await self.answer_generate(input=problem)
        chosen = await self.sc_ensemble(solutions=[*found, plain["answer"]], problem=problem)
        return chosen["response"], self.llm.get_usage_summary()["total_cost"]
"""
)
SHORT = """\
class Workflow:
    def __init__(self, name, llm_config, dataset):
        self.llm = create_llm_instance(llm_config); self.solve = operator.Custom(self.llm)
    async def __call__(self, problem): return (await self.solve(input=problem))["response"]
"""
WRITTEN = {
    "one": ONE,
    "two": TWO,
    "on one line": SHORT,
    "with tabs": ONE.replace("    ", "\t"),
    "of another system": ONE.replace("\n", "\r\n"),
    "without a last line": ONE.rstrip(),
    "the constructor last": graph("found = 1\nreturn str(found)")
    .replace("found = 1", 'found = (await self.solve(input=problem))["response"]')
    .replace("    def __init__", "    async def aid(self): return 1\n\n    def __init__"),
    "one model each": graph(
        'found = await self.solve(input=problem)\nreturn found["response"]',
        "self.other = create_llm_instance(llm_config)\nself.second = operator.Custom(self.other)",
    ).replace("self.second", "self.solve"),
    "nothing but operators": ONE.replace(
        "        self.llm = create_llm_instance(llm_config)\n", ""
    ).replace("self.llm", "create_llm_instance(llm_config)"),
}


def two_questions() -> dict[str, Graph]:
    found = {}
    for path in sorted((GRAPHS / "two_questions").glob("*.yaml")):
        found[path.stem] = Template.of(path.stem, yaml.safe_load(path.read_text())).graph
    return found


def samples() -> dict[str, Graph]:
    """Graphs that pass the check."""
    found = {f"template {name}": template.graph for name, template in TEMPLATES.items()}
    found |= {name: Graph(name, {"graph.py": code}) for name, code in WRITTEN.items()}
    found |= dict(list(two_questions().items())[:3])
    found |= {name: load_graph(GRAPHS / name) for name in ("plain", "three_terms")}
    for name, code, prompts in (
        ("branches", BRANCHES, 'SOLVE_PROMPT = "Solve it: "\n'),
        ("code", CODE, CODE_PROMPTS),
        ("gather", GATHER, ""),
        ("math", MATH.replace("        self.llm.cost_manager = CostManager()\n", ""), MATH_PROMPTS),
    ):
        found[name] = Graph(name, {"graph.py": code, "prompt.py": prompts})
    told = {"solve": "Think. ", "Custom": "For all. "}
    found["told"] = Graph("told", {"graph.py": TWO}, instructions=told)
    return found


SAMPLES = samples()


def moves_of(graph: Graph, allowed: Sequence[str] = (), **more: Any) -> list[Move]:
    operators = {name: OPERATORS[name] for name in allowed or OPERATORS}
    return list(moves(graph, operators, instructions=TOLD, joints=[" and "], **more))


def refusals(graph: Graph) -> set[str]:
    verdict = check_loaded(graph, operators=OPERATORS, limits=LIMITS)
    return {refusal.message for refusal in verdict.refusals}


def state(graph: Graph) -> WorkflowState:
    return WorkflowState.of("t", graph)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_edit_passes_the_check_and_is_another_graph(name: str, tmp_path: Path) -> None:
    parent = SAMPLES[name]
    found = moves_of(parent, problem_type="math", adopt=True)
    assert {"swap", "split", "instruct", "adopt"} <= {move.kind for move in found}
    for move in found:
        assert refusals(move.graph) == set(), (move.what, move.graph.sources["graph.py"])
        assert state(move.graph) != state(parent), move.what
    for number, move in enumerate(found[:: max(1, len(found) // 5)]):
        if name == "of another system":  # files have this one's ends of lines
            continue
        write_graph(tmp_path / str(number), state(move.graph))
        assert state(load_graph(tmp_path / str(number))) == state(move.graph)


def test_the_samples_pass_the_check() -> None:
    refused = {name for name, sample in SAMPLES.items() if refusals(sample)}
    assert refused == set()


def test_the_same_input_gives_the_same_edits_in_the_same_order() -> None:
    for name in ("branches", "template review_then_revise"):
        first = [(one.kind, one.what, state(one.graph).key) for one in moves_of(SAMPLES[name])]
        again = samples()[name]
        assert first == [(one.kind, one.what, state(one.graph).key) for one in moves_of(again)]


def test_the_same_edit_of_other_graphs_has_the_same_name() -> None:
    one, two = ({move.what for move in moves_of(SAMPLES[name])} for name in ("one", "two"))
    assert one < two  # nothing can be removed of the first
    assert two - one == {"remove Custom"}


@pytest.mark.parametrize("allowed", [("Custom",), ("Custom", "Review"), ("AnswerGenerate",)])
def test_only_allowed_operators_appear(allowed: tuple[str, ...]) -> None:
    for parent in SAMPLES.values():
        before = {*parent.shape.instances.values()}
        for move in moves_of(parent, allowed, problem_type="math", adopt=True):
            there = {*move.graph.shape.instances.values()}
            if move.kind == "adopt":
                assert there <= {*allowed}
            assert there <= before | {*allowed}, move.what


HEAD = """\
class Workflow:
    def __init__(self, name, llm_config, dataset):
        self.llm = create_llm_instance(llm_config)
        self.solve = operator.Custom(self.llm)
"""
CALL = """
    async def __call__(self, problem):
        found = await self.solve(input=problem)
        return found["response"], 0
"""
NOT_EDITABLE = {
    "empty": "",
    "no Python": "class (",
    "a null": "x = '\0'",
    "no class": "x = 1\n",
    "no call": HEAD,
    "no constructor": "class Workflow:" + CALL,
    "any arguments": HEAD + CALL.replace("self, problem", "self, *problem"),
    "not awaited": HEAD + CALL.replace("async def", "def").replace("await ", ""),
    "self by another name": (HEAD + CALL).replace("self", "me"),
    "a constructor on one line": HEAD.replace(
        "\n        self.llm = create_llm_instance(llm_config)\n        self.solve",
        " self.solve",
    ).replace("self.llm)", "create_llm_instance(llm_config))")
    + CALL,
}
"""Of what can be read the instruction may change still, which leaves the source as it is."""


@pytest.mark.parametrize("name", NOT_EDITABLE)
def test_a_form_that_cannot_be_edited_is_left_as_it_is(name: str) -> None:
    parent = Graph("odd", {"graph.py": NOT_EDITABLE[name]})
    for move in moves_of(parent):
        assert (move.kind, move.graph.sources) == ("instruct", parent.sources)
    assert ablations(parent, OPERATORS) == {}
    if parent.shape.tree is not None:
        assert Editor(parent, OPERATORS).graft(SAMPLES["one"], "how") is None
        assert Editor(SAMPLES["one"], OPERATORS).graft(parent, "how") is None


PARTLY = {
    "in an f-string": "return f\"{(await self.solve(input=problem))['response']}!\", 0",
    "in a lambda": 'ask = lambda text: self.solve(input=text)\nreturn (await ask("x"))["response"]',
    "given from a list": 'return (await self.solve(*[problem]))["response"], 0',
    "given from a dict": 'return (await self.solve(**{"input": problem}))["response"], 0',
    "a pair in places": (
        'found = await self.solve(input=problem)\nif problem == "x":\n    return "x"\n'
        'return found["response"], 0'
    ),
    "a pair by name": (
        'found = await self.solve(input=problem)\npair = found["response"], 0\nreturn pair'
    ),
}


@pytest.mark.parametrize("name", PARTLY)
def test_of_odd_calls_only_what_is_sure_is_edited(name: str) -> None:
    parent = Graph(name, {"graph.py": graph(PARTLY[name])})
    assert not refusals(parent)
    kinds = set()
    for move in moves_of(parent):
        assert refusals(move.graph) == set(), move.graph.sources["graph.py"]
        kinds.add(move.kind)
    assert (
        kinds == {"instruct", "swap", "vote", "refine"}
        if "pair" in name
        else kinds
        <= {
            "instruct",
            "split",
        }
    )


# Running


def reply(messages: Sequence[Any]) -> str:
    """Fits whatever is asked; names what the operator was told."""
    asked = str(messages[-1]["content"])
    if "solve()" in asked:
        return "```python\ndef solve():\n    return 'computed'\n```"
    if "```python" in asked:
        return "```python\ndef f():\n    return 1\n```"
    for sign, text in {
        "review_result": "<review_result>no</review_result><feedback>wrong</feedback>",
        "solution_letter": "<solution_letter>A</solution_letter>",
        "<solution>": "<solution>revised</solution>",
        "<answer>": "<thought>So.</thought><answer>generated</answer>",
    }.items():
        if sign in asked:
            return text
    return "12"


@pytest.fixture(scope="module")
def sandbox() -> None:
    try:
        run_program_sync("pass")
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox can be built here: {error}")


def run_all(graphs: Sequence[Graph], problem: str = "1 + 2 + 3") -> list[GraphRun]:
    async def together() -> list[GraphRun]:
        slots = asyncio.Semaphore(4)

        async def one(graph: Graph) -> GraphRun:
            async with slots:
                entry = "f" if graph.shape.needs_entry_point else None
                return await graph.run(problem, entry, model=ScriptedModel(reply))

        return await asyncio.gather(*map(one, graphs))

    return asyncio.run(together())


@pytest.mark.parametrize(
    "name",
    ["plain", "branches", "with tabs", "on one line", "gather", "template review_then_revise"],
)
@pytest.mark.usefixtures("sandbox")
def test_one_edit_of_each_kind_runs(name: str) -> None:
    found = {move.kind: move for move in moves_of(SAMPLES[name])}
    found |= {f"{move.kind}, last": move for move in moves_of(SAMPLES[name])[::-1]}
    ran = run_all([move.graph for move in found.values()])
    for move, run in zip(found.values(), ran, strict=True):
        told = move.what, run.reason, move.graph.sources["graph.py"]
        assert (run.ending, bool(run.text)) == (GraphEnding.ANSWERED, True), told
        assert run.answered > 0, told


def says(graph: Graph, problem: str) -> tuple[str, int]:
    (run,) = run_all([graph], problem)
    assert run.ending is GraphEnding.ANSWERED, run.reason
    return run.text, run.calls


@pytest.mark.usefixtures("sandbox")
def test_each_kind_of_edit_does_what_it_says() -> None:
    by_name = {move.what: move.graph for move in moves_of(SAMPLES["two"])}
    assert says(SAMPLES["two"], "What?") == ("12", 2)
    assert says(by_name["remove Custom"], "What?") == ("What?12", 1)  # the second
    assert says(by_name["swap Custom for AnswerGenerate"], "What?") == ("generated", 2)
    assert says(by_name["swap Custom for Programmer"], "What?") == ("computed", 2)
    assert says(by_name["vote of Custom by ScEnsemble"], "What?") == ("12", 2 + 2 + 1)
    assert says(by_name["refine Custom"], "What?") == ("revised", 2 + 2)
    split = by_name["split at ' and '"]
    assert says(split, "What?") == ("12", 2)
    assert says(split, "What and why?") == ("12 12", 4)
    told = by_name["instruct Custom: short"]
    assert told.instructions == {"solve": TOLD["short"]}


def echo(messages: Sequence[Any]) -> str:
    return str(messages[-1]["content"])


@pytest.mark.usefixtures("sandbox")
def test_a_router_sends_problems_by_their_word() -> None:
    first = Graph("a", {"graph.py": ONE}, instructions={"solve": "First."})
    second = Graph("b", {"graph.py": ONE}, instructions={"solve": "Second."})
    routed = Editor(first, OPERATORS).graft(second, "how")
    assert routed is not None
    assert refusals(routed) == set()

    def asked(problem: str, graph: Graph = routed) -> str:
        return str(asyncio.run(graph.run(problem, model=ScriptedModel(echo))).text)

    assert "First." in asked("How many?")
    assert "Second." in asked("What is it?")
    # And once more, by the graph that it became.
    third = Graph("c", {"graph.py": ONE}, instructions={"solve": "Third."})
    again = Editor(routed, OPERATORS).graft(third, "many")
    assert again is not None
    assert refusals(again) == set()
    told = {
        problem: next(w for w in ("First", "Second", "Third") if w in asked(problem, again))
        for problem in ("how many?", "many?", "how?")
    }
    assert told == {"how many?": "First", "many?": "Second", "how?": "Third"}


def test_graphs_are_grafted_only_if_they_fit() -> None:
    def joined(one: str, other: str) -> Graph | None:
        return Editor(SAMPLES[one], OPERATORS).graft(SAMPLES[other], "how")

    assert joined("one", "plain") is None  # one returns a pair, the other a text
    assert joined("plain", "code") is None  # another needs an entry point
    assert joined("plain", "branches") is None  # constants of a prompt.py
    assert joined("plain", "three_terms") is None  # a function beside the class
    whole = Graph("w", {"graph.py": ONE.replace("solve", "whole")})
    for one, other in ((whole, SAMPLES["one"]), (SAMPLES["one"], whole)):
        routed = Editor(one, OPERATORS).graft(other, "how")
        assert routed is not None
        assert refusals(routed) == set()


def test_instructions_of_what_is_gone_go_too() -> None:
    parent = SAMPLES["told"]
    swapped = next(move.graph for move in moves_of(parent) if move.what.startswith("swap"))
    assert swapped.shape.instances == {"solve": "Custom", "answergenerate": "AnswerGenerate"}
    assert swapped.instructions == parent.instructions
    once = Graph("once", {"graph.py": ONE}, instructions=parent.instructions)
    swapped = next(move.graph for move in moves_of(once) if move.what.startswith("swap"))
    assert (swapped.shape.instances, swapped.instructions) == (
        {"answergenerate": "AnswerGenerate"},
        {},
    )
