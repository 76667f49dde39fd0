"""Graphs on disk: both forms are read, with their faults and edges, without running."""

from __future__ import annotations

from pathlib import Path

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

from aflow_tune.errors import BadInput
from aflow_tune.graph.flow import ANSWER, PROBLEM
from aflow_tune.graph.graph import load_graph

CALL = 'return (await self.custom(input=problem, instruction=""))["response"]'


def faults_of(folder: Path) -> list[str]:
    """`line: expected | found` of every fault."""
    with pytest.raises(BadInput) as refused:
        load_graph(folder)
    return [
        f"{fault.where.removeprefix(f'{folder}/')}: {fault.expected} | {fault.found}"
        for fault in refused.value.faults
    ]


def test_prompts_change_without_code(tmp_path: Path) -> None:
    loaded = load_graph(write_round(tmp_path, "MATH", 2, MATH, MATH_PROMPTS))
    changed = loaded.with_prompts({"DRAFT_PROMPT": "Other: ", "sc_ensemble": "Choose {solutions}"})
    assert changed.constants == {"DRAFT_PROMPT": "Other: "}
    assert changed.operator_prompts == {"sc_ensemble": "Choose {solutions}"}
    assert loaded.prompts == {}
    with pytest.raises(BadInput) as refused:
        loaded.with_prompts({"DRAFT_PROMTP": "x", "custom": 3})  # type: ignore[dict-item]
    assert [fault.found for fault in refused.value.faults] == ["'custom': 3", "DRAFT_PROMTP"]
    assert refused.value.faults[1].cure == "did you mean DRAFT_PROMPT?"


def test_all_faults_are_found_at_once_with_their_lines(tmp_path: Path) -> None:
    graph = """\
import workspace.X.workflows.template.operator as operator
import workspace.X.workflows.round_1.prompt as prompt_custom
import metagpt.actions.write_code
import a_module_that_nobody_has
from scripts.async_llm import create_llm_instanze

class Workflow:
    def __init__(self, name, config, dataset):
        self.a = operator.ScEnsembel(self.llm)
        self.b = operator.Custom()

    def __call__(self):
        return prompt_custom.SOLVE_PROMT
"""
    found = faults_of(write_round(tmp_path, "X", 1, graph, 'SOLVE_PROMPT = "s"\n'))
    assert sorted(int(line.split(":")[1]) for line in found) == [3, 4, 5, 8, 9, 10, 12, 13]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("graph.py", "class Workflow\n    pass\n", "graph.py:1: Python source | expected ':'"),
        ("graph.py", "class SolveGraph:\n    pass\n", "graph.py: a class Workflow | classes Sol"),
        ("graph.py", "x = 1" + " + 1" * 60_000, "graph.py: Python source | RecursionError"),
        ("graph.py", "# " + "x" * 300_000, "graph.py: a file of at most 262144 characters"),
        ("prompts.json", '{"a": 1}', "prompts.json: "),
        ("prompts.json", "[" * 100_000, "prompts.json: a JSON object | "),
        ("prompt.py", "X = (", "prompt.py:1: Python source | '(' was never closed"),
    ],
)
def test_files_that_cannot_be_read_are_refused_with_their_place(
    tmp_path: Path, name: str, text: str, found: str
) -> None:
    folder = own_form(tmp_path / "g", simple(CALL))
    (folder / name).write_text(text)
    (line,) = faults_of(folder)
    assert line.startswith(found)


def test_names_may_come_by_other_imports(tmp_path: Path) -> None:
    head = """\
from __future__ import annotations
import json as operator_data
import workspace.X.workflows.template.operator
import workspace.X.workflows.round_1.prompt as texts
from workspace.X.workflows.template.operator import Custom as Ask
from . import prompt
from .prompt import SOLVE
from ..template import operator as ops
try:
    import a_module_that_nobody_has
except ImportError:
    pass

class Twice(Ask):
    pass
"""
    init = (
        "self.b = Ask(self.llm)\nself.c = ops.Review(self.llm)\nself.d = Twice(self.llm)\n"
        "self.e = workspace.X.workflows.template.operator.Format(self.llm)"
    )
    graph = simple(f"x = texts.SOLVE + prompt.SOLVE\n{CALL}", init, head)
    loaded = load_graph(write_round(tmp_path, "X", 1, graph, 'SOLVE = "s"\n'))
    assert loaded.shape.instances == {
        "custom": "Custom",
        "b": "Custom",
        "c": "Review",
        "d": "Custom",
        "e": "Format",
    }


def test_a_link_to_somewhere_else_is_no_prompt_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("KEY = 'sk-123'")
    folder = own_form(tmp_path / "g", simple(CALL))
    (folder / "prompt.py").symlink_to(secret)
    (fault,) = faults_of(folder)
    assert f"a link to {secret}" in fault


def edges_of(folder: Path) -> set[str]:
    """`source>target` for data, `source~>target` for the next turn, `source?target`."""
    flow = load_graph(folder).flow
    names = {node.number: f"{node.instance}{node.line}" for node in flow.nodes}
    names |= {PROBLEM: "problem", ANSWER: "answer"}
    arrows = {"data": ">", "carried": "~>", "decides": "?"}
    return {f"{names[e.source]}{arrows[e.kind]}{names[e.target]}" for e in flow.edges}


EDGES = {
    "MATH": (
        MATH,
        MATH_PROMPTS,
        "problem>custom27 problem>custom28 problem>sc_ensemble32 custom27>custom28 "
        "custom27>sc_ensemble32 custom28>sc_ensemble32 sc_ensemble32>answer",
    ),
    "a loop that a test ends": (
        CODE,
        CODE_PROMPTS,
        "problem>custom_code_generate23 problem>test26 custom_code_generate23>test26 "
        "test26?custom_code_generate23 test26>answer custom_code_generate23>answer",
    ),
    "gather, helpers and while": (
        GATHER,
        "",
        "problem>solvers_127 problem>solvers_227 problem>review38 problem>revise41 "
        "solvers_127>review38 solvers_227>review38 solvers_127>revise41 solvers_227>revise41 "
        "review38>revise41 revise41~>review38 revise41~>revise41 solvers_127>llm46 "
        "solvers_227>llm46 revise41>llm46 solvers_127>answer solvers_227>answer revise41>answer "
        "llm46>answer",
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_of_rounds(tmp_path: Path, name: str) -> None:
    graph, prompts, expected = EDGES[name]
    folder = write_round(tmp_path, "MATH", 2, graph, prompts)
    assert edges_of(folder) == set(expected.split())
    if graph is CODE:
        loops = [[label for _, label in node.loops] for node in load_graph(folder).flow.nodes]
        assert loops == [["for attempt in range(2)"]] * 2


BRANCHES = """\
first = await self.custom(input=problem, instruction="")
if first["response"] == "easy":
    result = first
else:
    result = await self.b(input="again", instruction="")
return result["response"]"""
INNER = """\
async def ask(text, *, extra=''):
    reply = await self.b(input=text, instruction=extra)
    return reply["response"]
one = await ask(problem)
two = await ask("x", extra=one)
shout = lambda text: text.upper()
return shout(two)"""
ONE = "custom10>answer"


@pytest.mark.parametrize(
    ("call", "edges"),
    [
        (BRANCHES, "problem>custom9 custom9?b13 custom9>answer b13>answer"),
        (INNER, "problem>b10 b10>b10 b10>answer"),
        ("d = {}\nd['x'] = await self.custom(input='a')\nreturn d", ONE),
        ("d = []\nd.append(await self.custom(input='a'))\nreturn sorted(d)[0]", ONE),
        ("d = ''\nd += (await self.custom(input='a'))['response']\nreturn d", ONE),
        ("\n(d, e), f = (1, 2), await self.custom(input='a')\nreturn f'{f:>10}'", ONE),
        ("\nif (d := await self.custom(input='a')):\n    return d", ONE),
        ("\nd = (await self.custom(input='a')) or 'x'\nreturn d, 0.5", ONE),
    ],
)
def test_results_are_followed_through_branches_functions_and_names(
    tmp_path: Path, call: str, edges: str
) -> None:
    graph = simple(call, "self.b = operator.Custom(self.llm)")
    assert edges_of(own_form(tmp_path / "g", graph)) == set(edges.split())


def test_a_graph_that_multiplies_its_calls_is_cut_off(tmp_path: Path) -> None:
    graph = simple("return await self.f0(problem)")
    for number in range(8):
        calls = " + ".join([f"await self.f{number + 1}(x)"] * 12)
        graph += f"\n    async def f{number}(self, x):\n        return {calls}\n"
    graph += "\n    async def f8(self, x):\n        return await self.custom(x, '')\n"
    # 12 to the power of 8 calls of one operator: this returns at all.
    assert len(load_graph(own_form(tmp_path / "g", graph)).flow.nodes) <= 1
