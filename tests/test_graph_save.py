"""Graphs written back as rounds of AFlow, and what they are when they are read again."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from graph_samples import CODE, CODE_PROMPTS, GATHER, MATH, MATH_PROMPTS, own_form, simple
from graph_samples import write_round as round_of

from aflow_tune.errors import BadInput
from aflow_tune.graph.graph import load_graph
from aflow_tune.graph.save import literal, save_round

CALL = 'return (await self.custom(input=problem, instruction=prompt_custom.SOLVE))["response"], 0.0'


def target(root: Path, dataset: str = "GSM8K", number: int = 21) -> Path:
    return root / "out" / "workspace" / dataset / "workflows" / f"round_{number}"


@pytest.mark.parametrize(
    ("graph", "prompts", "dataset"),
    [(MATH, MATH_PROMPTS, "GSM8K"), (CODE, CODE_PROMPTS, "MBPP"), (GATHER, "", "Mine")],
)
def test_there_and_back(tmp_path: Path, graph: str, prompts: str, dataset: str) -> None:
    loaded = load_graph(round_of(tmp_path, "MATH", 2, graph, prompts))
    saved = save_round(loaded, target(tmp_path, dataset))
    assert [path.name for path in saved.files] == ["graph.py", "prompt.py", "__init__.py"]
    assert saved.only_here == ()
    again = load_graph(saved.folder)
    assert (again.dataset, again.round) == (dataset, 21)
    assert again.shape.constants == loaded.shape.constants
    assert again.shape.instances == loaded.shape.instances
    assert [edge for edge in again.flow.edges] == [edge for edge in loaded.flow.edges]
    assert saved.files[1].read_text() == prompts


def test_changed_prompts_are_written_into_prompt_py(tmp_path: Path) -> None:
    loaded = load_graph(round_of(tmp_path, "MATH", 2, MATH, MATH_PROMPTS))
    tuned = 'Line one\n"""quoted""" \\n and a \\ and äöü "'
    changed = loaded.with_prompts({"DRAFT_PROMPT": tuned})
    saved = save_round(changed, target(tmp_path))
    namespace: dict[str, str] = {}
    exec(saved.files[1].read_text(), namespace)
    assert namespace["DRAFT_PROMPT"] == tuned
    assert namespace["AGAIN_PROMPT"] == loaded.shape.constants["AGAIN_PROMPT"]
    assert load_graph(saved.folder).shape.constants["DRAFT_PROMPT"] == tuned


def test_our_own_form_becomes_a_round(tmp_path: Path) -> None:
    prompts = json.dumps({"SOLVE": "Solve:\n", "custom": "{instruction}{input}"})
    loaded = load_graph(own_form(tmp_path / "mine", simple(CALL), prompts))
    saved = save_round(loaded, target(tmp_path))
    assert saved.only_here == ("custom",)
    assert (saved.folder / "prompt.py").read_text() == '\nSOLVE = """Solve:\n"""\n'
    again = load_graph(saved.folder)
    assert again.shape.constants == {"SOLVE": "Solve:\n"}
    assert again.operator_prompts == {"custom": "{instruction}{input}"}


def test_other_imports_are_kept_or_become_names(tmp_path: Path) -> None:
    head = """\
from __future__ import annotations
import re; import workspace.X.workflows.template.operator as ops
from workspace.X.workflows.template.operator import Custom as Ask, Review
from workspace.X.workflows.round_1.prompt import SOLVE
import workspace.X.workflows.round_1.prompt as prompt_custom; x = 1
"""
    init = "from workspace.X.workflows.round_1 import prompt\nself.p = prompt.SOLVE"
    folder = round_of(tmp_path, "X", 1, simple(CALL, init, head), 'SOLVE = "s"\n')
    saved = save_round(load_graph(folder), target(tmp_path, "Mine"))
    text = saved.files[0].read_text()
    assert text.startswith("from __future__ import annotations\nfrom typing import Literal\n")
    for line in (
        "import re; ops = operator",
        "Ask = operator.Custom; Review = operator.Review",
        "SOLVE = prompt_custom.SOLVE",
        "pass; x = 1",
        "        prompt = prompt_custom\n        self.p = prompt.SOLVE",
    ):
        assert line in text
    ast.parse(text)
    assert ".X." not in text


def test_where_it_cannot_go(tmp_path: Path) -> None:
    loaded = load_graph(own_form(tmp_path / "mine", simple("return 'x'")))
    with pytest.raises(BadInput) as refused:
        save_round(loaded, tmp_path / "somewhere")
    assert [fault.found for fault in refused.value.faults] == ["None", "none"]
    with pytest.raises(BadInput, match="exists"):
        save_round(loaded, tmp_path / "mine", dataset="X", round_number=1)
    with pytest.raises(BadInput, match="data set"):
        save_round(loaded, tmp_path / "round_3", dataset="X; import os")
    saved = save_round(loaded, tmp_path / "round_3", dataset="GSM8K")
    assert "GSM8K.workflows.round_3.prompt" in saved.files[0].read_text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        'a"b',
        "a'b",
        "\n",
        'a\n"',
        'a\n"""',
        "a\n\\",
        "\r\n",
        "\0",
        "tab\t\n",
        "\n\\N{x}",
        "\n\ud800",
    ],
)
def test_literals_give_back_their_text(text: str) -> None:
    assert ast.literal_eval(literal(text)) == text
