"""ScoreFlow's workflows, and replies with tags, read as graphs of AFlow's form."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path

import pytest

from aflow_tune.graph.graph import Graph, load_graph
from aflow_tune.graph.scoreflow import translated
from aflow_tune.models import ScriptedModel
from aflow_tune.operators import OPERATORS
from aflow_tune.writer.check import check_written
from aflow_tune.writer.form import read_written

HEAD = """\
import asyncio
import ScoreFlow.scripts.GSM8K.operator as operator
from metagpt.provider.llm_provider_registry import create_llm_instance as create

"""
END = """
    async def __call__(self):
        TIMEOUT = 60
        return await asyncio.wait_for(self.run_workflow(), timeout=TIMEOUT)
"""


def workflow(body: str, gid: str = "") -> str:
    """A workflow in ScoreFlow's form; MATH's operators take a `gid` in between."""
    return (
        "class Workflow:\n"
        "    def __init__(\n        self,\n        config,\n        problem\n    ) -> None:\n"
        "        self.problem = problem\n"
        "        self.config = create(config)\n"
        "        self.gid = None\n"
        f"        self.custom = operator.Custom(self.config, {gid}self.problem)\n"
        f"        self.sc_ensemble = operator.ScEnsemble(self.config, {gid}self.problem)\n"
        f"        self.programmer = operator.Programmer(self.config, {gid}self.problem)\n"
        f"        self.review = operator.Review(self.config, {gid}self.problem)\n"
        f"        self.answer_generate = operator.AnswerGenerate(self.config, {gid}self.problem)\n"
        "\n    async def run_workflow(self):\n"
        '        """\n        This is a workflow graph.\n        """\n'
        f"{textwrap.indent(textwrap.dedent(body).strip(), ' ' * 8)}\n"
    )


VOTE = """
solutions = []
for _ in range(2):
    solution = await self.custom(instruction="Think. ")
    solutions.append(solution)
best = await self.sc_ensemble(solutions=solutions)
checked = await self.review(pre_solution=best)
return checked
"""


def answer(messages: list[dict[str, str]]) -> str:
    text = messages[0]["content"]
    if "solution_letter" in text:
        return "<solution_letter>B</solution_letter>"
    if "<solution>" in text:
        return "<solution>revised</solution>"
    if "<answer>" in text:
        return "<thought>t</thought><answer>short</answer>"
    return "```python\ndef solve():\n    return 42\n```" if "solve()" in text else f"said: {text}"


def run(graph: Graph, *arguments: str) -> tuple[str, list[str]]:
    model = ScriptedModel(answer)  # type: ignore[arg-type]
    ran = asyncio.run(graph.run(*arguments, model=model))
    assert ran.ok, ran.reason
    return ran.text, [str(asked.messages[0]["content"]) for asked in model.asked]


@pytest.mark.parametrize(
    ("gid", "head", "end"), [("", "", ""), ("self.gid, ", HEAD, END)], ids=["bare", "published"]
)
def test_a_folder_with_scoreflows_form_is_loaded_and_run(
    tmp_path: Path, gid: str, head: str, end: str
) -> None:
    source = head + workflow(VOTE, gid) + end
    (tmp_path / "graph.py").write_text(source)
    graph = load_graph(tmp_path, trust=True)
    text, asked = run(graph, "1+1?")
    assert text == "revised"
    assert asked[:2] == ["Think. 1+1?"] * 2
    assert "said: Think. 1+1?" in asked[3]
    assert [node.operator for node in graph.flow.nodes] == ["Custom", "ScEnsemble", "Revise"]
    reply = f"<think>Two?</think><graph>```python\n{source}```</graph>"
    assert read_written(reply).notes
    if not head:
        assert check_written(reply, operators=OPERATORS).ok


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return await self.programmer(analysis='none')", "42"),
        ("return await self.answer_generate()", "short"),
        ("step = self.custom\nreturn await step(instruction=self.problem)", "said: pp"),
    ],
)
def test_its_operators_know_the_problem_and_give_texts(body: str, expected: str) -> None:
    source = translated(workflow(body))
    assert run(Graph("g", {"graph.py": source}, trust=True), "p")[0] == expected
