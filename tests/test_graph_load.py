"""Graphs on disk: both forms are read, and each fault is found with its place, without running."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from graph_samples import (
    CODE,
    CODE_PROMPTS,
    GATHER,
    INIT,
    MATH,
    MATH_PROMPTS,
    QA,
    own_form,
    simple,
    write_round,
)

from aflow_tune.errors import BadInput
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


def test_away_from_its_place_a_round_is_known_by_its_imports(tmp_path: Path) -> None:
    folder = tmp_path / "anywhere"
    folder.mkdir()
    (folder / "graph.py").write_text(MATH)
    (folder / "prompt.py").write_text(MATH_PROMPTS)
    loaded = load_graph(folder)
    assert (loaded.dataset, loaded.round) == ("MATH", 2)


def test_a_loaded_graph_travels_without_its_folder(tmp_path: Path) -> None:
    folder = write_round(tmp_path, "MATH", 2, MATH, MATH_PROMPTS)
    loaded = load_graph(folder)
    there = pickle.loads(pickle.dumps(loaded))
    (folder / "graph.py").unlink()
    assert there.shape.instances == {"custom": "Custom", "sc_ensemble": "ScEnsemble"}
    assert len(there.flow.nodes) == 3


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
    assert [line.partition(" | ")[2] for line in sorted(found)] == [
        "operator.Custom()",
        "def __call__(self)",
        "prompt_custom.SOLVE_PROMT",
        "import of metagpt.actions.write_code",
        "import of a_module_that_nobody_has",
        "create_llm_instanze from scripts.async_llm",
        "__init__(self, name, config, dataset)",
        "operator.ScEnsembel",
    ]
    assert sorted(int(line.split(":")[1]) for line in found) == [3, 4, 5, 8, 9, 10, 12, 13]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class Workflow\n    pass\n", "graph.py:1: Python source | expected ':'"),
        ("class SolveGraph:\n    pass\n", "graph.py: a class Workflow | classes SolveGraph"),
        ("", "graph.py: a class Workflow | no class"),
        ("x = " + "(" * 300 + ")" * 300, "graph.py:1: Python source | too many nested"),
        ("x = " + "-" * 100_000 + "1", "graph.py: Python source | "),
        ("x = 1" + " + 1" * 60_000, "graph.py: Python source | RecursionError"),
        ("x\0y", "graph.py: Python source | "),
        ("# " + "x" * 300_000, "graph.py: a file of at most 262144 characters | 300002 characters"),
    ],
)
def test_what_is_no_graph_is_refused_with_its_place(
    tmp_path: Path, source: str, found: str
) -> None:
    assert faults_of(own_form(tmp_path / "g", source))[0].startswith(found)


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


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("prompts.json", "[1]", "list"),
        ("prompts.json", '{"a": 1}', "'a': 1"),
        ("prompts.json", '{"a": ', "Expecting value"),
        ("prompts.json", "[" * 100_000, "recursion"),
        ("prompt.py", "X = (", "'(' was never closed"),
    ],
)
def test_prompt_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, found: str) -> None:
    folder = own_form(tmp_path / "g", simple(CALL))
    (folder / name).write_text(text)
    (line,) = faults_of(folder)
    assert line.startswith(name)
    assert found in line


def test_a_link_to_somewhere_else_is_no_prompt_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("KEY = 'sk-123'")
    folder = own_form(tmp_path / "g", simple(CALL))
    (folder / "prompt.py").symlink_to(secret)
    assert faults_of(folder) == [f"prompt.py: a file | a link to {secret}"]


@pytest.mark.parametrize(
    ("number", "graph", "prompts", "parameters", "instances"),
    [
        (2, MATH, MATH_PROMPTS, ["problem"], "custom Custom, sc_ensemble ScEnsemble"),
        (4, CODE, CODE_PROMPTS, ["problem", "entry_point"],
         "custom_code_generate CustomCodeGenerate, test Test"),
        (3, QA, "", ["problem"], "answer_generate AnswerGenerate, sc_ensemble ScEnsemble"),
        (7, GATHER, "", ["problem"],
         "solvers_1 Custom, solvers_2 Custom, review Review, revise Revise"),
    ],
)  # fmt: skip
def test_a_round_of_aflow_is_read_unchanged(
    tmp_path: Path, number: int, graph: str, prompts: str, parameters: list[str], instances: str
) -> None:
    loaded = load_graph(write_round(tmp_path, "Mine", number, graph, prompts))
    assert (loaded.dataset, loaded.round, loaded.trust) == ("Mine", number, False)
    assert list(loaded.shape.parameters) == parameters
    assert ", ".join(" ".join(pair) for pair in loaded.shape.instances.items()) == instances
    assert loaded.sources["graph.py"] == graph


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        ("async def __call__(self, problem)", True),
        ("async def __call__(self, problem, entry_point=None, test=None)", True),
        ("async def __call__(self, *args)", True),
        ("def __call__(self, problem)", False),
        ("async def __call__(self)", False),
        ("async def __call__(self, problem, entry_point, test)", False),
        ("async def __call__(self, problem, *, entry_point)", False),
    ],
)
def test_the_workflows_call_takes_a_problem_and_an_entry_point(
    tmp_path: Path, call: str, fits: bool
) -> None:
    head = INIT.replace(": DatasetType", "")
    folder = own_form(tmp_path / "g", f"{head}\n    {call}:\n        return 'x'\n")
    if fits:
        load_graph(folder)
    else:
        assert faults_of(folder)[0].startswith("graph.py:12: async def __call__")
