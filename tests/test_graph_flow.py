"""Edges of graphs, against edges that were read off the source by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from graph_samples import CODE, CODE_PROMPTS, GATHER, MATH, MATH_PROMPTS, own_form, simple
from graph_samples import write_round as round_of

from aflow_tune.graph.flow import ANSWER, PROBLEM
from aflow_tune.graph.graph import load_graph


def edges_of(folder: Path) -> set[str]:
    """`source>target` for data, `source~>target` for the next turn, `source?target`."""
    flow = load_graph(folder).flow
    names = {node.number: f"{node.instance}{node.line}" for node in flow.nodes}
    names |= {PROBLEM: "problem", ANSWER: "answer"}
    arrows = {"data": ">", "carried": "~>", "decides": "?"}
    return {f"{names[e.source]}{arrows[e.kind]}{names[e.target]}" for e in flow.edges}


def simple_edges(tmp_path: Path, call: str, init: str = "pass") -> set[str]:
    """Edges of a graph whose call's body starts in line 9 plus the lines of `init`."""
    return edges_of(own_form(tmp_path / "g", simple(call, init)))


def test_math(tmp_path: Path) -> None:
    edges = edges_of(round_of(tmp_path, "MATH", 2, MATH, MATH_PROMPTS))
    assert edges == {
        "problem>custom27",
        "problem>custom28",
        "problem>sc_ensemble32",
        "custom27>custom28",
        "custom27>sc_ensemble32",
        "custom28>sc_ensemble32",
        "sc_ensemble32>answer",
    }


def test_a_loop_that_a_test_ends(tmp_path: Path) -> None:
    folder = round_of(tmp_path, "HumanEval", 4, CODE, CODE_PROMPTS)
    assert edges_of(folder) == {
        "problem>custom_code_generate23",
        "problem>test26",
        "custom_code_generate23>test26",
        "test26?custom_code_generate23",
        "test26>answer",
        "custom_code_generate23>answer",
    }
    loops = [[loop.label for loop in node.loops] for node in load_graph(folder).flow.nodes]
    assert loops == [["for attempt in range(2)"]] * 2


def test_gather_helpers_and_while(tmp_path: Path) -> None:
    folder = round_of(tmp_path, "GSM8K", 7, GATHER)
    flow = load_graph(folder).flow
    assert [(node.instance, node.line) for node in flow.nodes] == [
        ("solvers_1", 27),
        ("solvers_2", 27),
        ("review", 38),
        ("revise", 41),
        ("llm", 46),
    ]
    assert edges_of(folder) == {
        "problem>solvers_127",
        "problem>solvers_227",
        "problem>review38",
        "problem>revise41",
        "solvers_127>review38",
        "solvers_227>review38",
        "solvers_127>revise41",
        "solvers_227>revise41",
        "review38>revise41",
        "revise41~>review38",
        "revise41~>revise41",
        "solvers_127>llm46",
        "solvers_227>llm46",
        "revise41>llm46",
        "solvers_127>answer",
        "solvers_227>answer",
        "revise41>answer",
        "llm46>answer",
    }


def test_both_branches_and_their_condition(tmp_path: Path) -> None:
    call = """\
first = await self.custom(input=problem, instruction="")
if first["response"] == "easy":
    result = first
else:
    result = await self.b(input="again", instruction="")
return result["response"]"""
    assert simple_edges(tmp_path, call, "self.b = operator.Custom(self.llm)") == {
        "problem>custom9",
        "custom9?b13",
        "custom9>answer",
        "b13>answer",
    }


@pytest.mark.parametrize(
    "call",
    [
        "d = {}\nd['x'] = await self.custom(input='a', instruction='')\nreturn d",
        "d = []\nd.append(await self.custom(input='a', instruction=''))\nreturn sorted(d)[0]",
        "d = ''\nd += (await self.custom(input='a', instruction=''))['response']\nreturn d",
        "\n(d, e), f = (1, 2), await self.custom(input='a', instruction='')\nreturn f'{f:>10}'",
        "\nself.kept = await self.custom(input='a', instruction='')\nreturn self.kept",
        "\nif (d := await self.custom(input='a', instruction='')):\n    return d",
        "\nd = (await self.custom(input='a', instruction='')) or 'x'\nreturn d, 0.5",
    ],
)
def test_results_are_followed_through_names(tmp_path: Path, call: str) -> None:
    assert simple_edges(tmp_path, call) == {"custom10>answer"}


def test_functions_inside_and_lambdas(tmp_path: Path) -> None:
    call = """\
async def ask(text, *, extra=''):
    reply = await self.custom(input=text, instruction=extra)
    return reply["response"]
one = await ask(problem)
two = await ask("x", extra=one)
shout = lambda text: text.upper()
return shout(two)"""
    assert simple_edges(tmp_path, call) == {
        "problem>custom10",
        "custom10>custom10",
        "custom10>answer",
    }


def test_a_graph_that_multiplies_its_calls_is_cut_off(tmp_path: Path) -> None:
    graph = simple("return await self.f0(problem)")
    for number in range(8):
        calls = " + ".join([f"await self.f{number + 1}(x)"] * 12)
        graph += f"\n    async def f{number}(self, x):\n        return {calls}\n"
    graph += "\n    async def f8(self, x):\n        return await self.custom(x, '')\n"
    # 12 to the power of 8 calls of one operator: this returns at all.
    assert len(load_graph(own_form(tmp_path / "g", graph)).flow.nodes) <= 1
