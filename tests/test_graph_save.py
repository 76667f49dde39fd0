"""Graphs written back as rounds of AFlow, which run with AFlow's operators."""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graph_samples import CODE, CODE_PROMPTS, GATHER, MATH, MATH_PROMPTS, own_form, simple
from graph_samples import write_round as round_of

from aflow_tune.errors import BadInput
from aflow_tune.graph.graph import Graph, load_graph
from aflow_tune.graph.run import GraphRun
from aflow_tune.graph.save import SavedRound, save_round
from aflow_tune.models import ScriptedModel

CALL = 'return (await self.custom(input=problem, instruction=prompt_custom.SOLVE))["response"], 0.0'


def target(root: Path, dataset: str = "GSM8K", number: int = 21) -> Path:
    return root / "out" / "workspace" / dataset / "workflows" / f"round_{number}"


@pytest.mark.parametrize(
    ("graph", "prompts", "dataset"),
    [(CODE, CODE_PROMPTS, "MBPP"), (GATHER, "", "Mine")],
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
    loaded = load_graph(round_of(tmp_path, "MBPP", 2, CODE, CODE_PROMPTS + "OTHER = 'o'\n"))
    tuned = 'Line one\n"""quoted""" \\n and a \\ and äöü "'
    saved = save_round(loaded.with_prompts({"CODE_PROMPT": tuned}), target(tmp_path, "MBPP"))
    namespace: dict[str, str] = {}
    exec(saved.files[1].read_text(), namespace)
    assert (namespace["CODE_PROMPT"], namespace["OTHER"]) == (tuned, "o")
    assert load_graph(saved.folder).shape.constants["CODE_PROMPT"] == tuned


def test_imports_of_metagpt_are_refused_with_their_lines(tmp_path: Path) -> None:
    loaded = load_graph(round_of(tmp_path, "MATH", 2, MATH, MATH_PROMPTS))
    with pytest.raises(BadInput) as caught:
        save_round(loaded, target(tmp_path, "MATH"))
    assert [fault.where[-10:] for fault in caught.value.faults] == ["graph.py:5"]


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
    assert text.startswith("from __future__ import annotations\nimport workspace.Mine.")
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
    assert len(refused.value.faults) == 2
    with pytest.raises(BadInput, match="exists"):
        save_round(loaded, tmp_path / "mine", dataset="X", round_number=1)
    with pytest.raises(BadInput, match="data set"):
        save_round(loaded, tmp_path / "round_3", dataset="X; import os")
    saved = save_round(loaded, tmp_path / "round_3", dataset="GSM8K")
    assert "GSM8K.workflows.round_3.prompt" in saved.files[0].read_text()


MATH_LIKE = ("Custom", "Programmer", "ScEnsemble")
CODE_LIKE = ("Custom", "CustomCodeGenerate", "ScEnsemble", "Test")
QA_LIKE = ("Custom", "AnswerGenerate", "ScEnsemble")
OFFERED = {"GSM8K": MATH_LIKE, "MATH": MATH_LIKE, "HumanEval": CODE_LIKE, "MBPP": CODE_LIKE,
           "DROP": QA_LIKE}  # fmt: skip
THERE = {
    "Custom": ("input, instruction", "{'response': instruction + input}"),
    "AnswerGenerate": ("input, mode=None", "{'thought': 't', 'answer': str(input)}"),
    "CustomCodeGenerate": ("problem, entry_point, instruction", "{'response': problem}"),
    "Programmer": ("problem, analysis='None'", "{'code': 'c', 'output': str(problem)}"),
    "ScEnsemble": ("solutions, problem", "{'response': solutions[0]}"),
    "Test": ("problem, solution, entry_point, test_loop=3", "{'solution': solution}"),
}
"""What AFlow's operators take, and what those of the test give back."""
FIRST_LINE = 6  # of `init`
SOLVE = "self.solve = operator.Custom(self.llm)\n"
PICK = "self.pick = operator.ScEnsemble(self.llm)\n"
DONE = "return r['response'], 0"


def graph_of(init: str, call: str, parameters: str = "problem") -> Graph:
    source = simple(call, init).replace("(self, problem)", f"(self, {parameters})")
    return Graph("mine", {"graph.py": source})


def written(root: Path, dataset: str, graph: Graph) -> SavedRound:
    return save_round(graph, root / "workspace" / dataset / "workflows" / "round_2")


def run_there(root: Path, dataset: str) -> str:
    """What the round answers where it is imported and called as AFlow does it."""
    template = root / "workspace" / dataset / "workflows" / "template"
    template.mkdir(exist_ok=True)
    text = "class Operator:\n    pass\n"
    for name in OFFERED[dataset]:
        takes, gives = THERE[name]
        takes = "solutions" if (name, dataset) == ("ScEnsemble", "DROP") else takes
        text += (
            f"class {name}(Operator):\n"
            f"    def __init__(self, llm, name='{name}'): pass\n"
            f"    async def __call__(self, {takes}): return {gives}\n"
        )
    (template / "operator.py").write_text(text)
    scripts = root / "scripts"
    scripts.mkdir()
    (scripts / "__init__.py").write_text("")
    (scripts / "async_llm.py").write_text(
        "class LLM:\n"
        "    async def __call__(self, prompt): return 'said'\n"
        "    def get_usage_summary(self): return {'total_cost': 0.5}\n"
        "def create_llm_instance(config): return LLM()\n"
    )
    (scripts / "evaluator.py").write_text("DatasetType = str\n")
    given = "('1+1?', 'f')" if dataset in ("HumanEval", "MBPP") else "('1+1?',)"
    program = (
        "import asyncio\n"
        f"module = __import__('workspace.{dataset}.workflows.round_2.graph', fromlist=[''])\n"
        "graph = module.Workflow(name='d', llm_config={}, dataset={})\n"
        f"answer, cost = asyncio.run(graph(*{given}))\n"
        "assert isinstance(answer, str), answer\n"
        "print(answer)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


ASK = "r = await self.solve(input=problem)\n"
RUNS = [
    ("MATH", SOLVE, ASK + DONE),  # Custom without instruction
    ("MATH", SOLVE + PICK,  # a vote without the problem
     f"a = await self.solve(problem)\nr = await self.pick([a['response']] * 2)\n{DONE}"),
    ("GSM8K", "self.code = operator.Programmer(self.llm, programs=1, retries=0)",
     "r = await self.code(problem=problem)\nreturn r['output'], 0"),
    ("MATH", "self.ops = {'a': operator.Custom(self.llm), 'b': operator.ScEnsemble(self.llm)}",
     "a = await self.ops['a'](input=problem)\n"
     f"r = await self.ops['b'](solutions=[a['response']])\n{DONE}"),
    ("MATH", SOLVE, f"r = await getattr(self, 'sol' + 've')(input=problem)\n{DONE}"),
    ("MATH", "", f"r = await operator.Custom(self.llm)(input=problem)\n{DONE}"),
    ("MATH", SOLVE, "return f\"{(await self.solve(input=problem))['response']}\", 0"),
    ("MATH", SOLVE, ASK + "return r['response']"),  # an answer without its cost
    ("HumanEval", SOLVE, ASK + DONE),  # a workflow of code without the entry point
    ("MATH", SOLVE, f"r = await self.solve(problem, self.prompts['solve'])\n{DONE}"),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "init", "call"), RUNS)
def test_what_lacks_is_written_and_what_is_too_much_left_out(
    tmp_path: Path, dataset: str, init: str, call: str
) -> None:
    written(tmp_path, dataset, graph_of(init, call))
    assert run_there(tmp_path, dataset) == "1+1?"


ASKS = "return await self.llm(problem), 0"
REFUSED = [
    ("MATH", "self.r = operator.Review(self.llm)", ASKS, 0),
    ("MATH", SOLVE, f"r = await self.solve(problem, 'Do: ', 'fast', 'x')\n{DONE}", 3),
    ("DROP", SOLVE + PICK,
     f"r = await self.pick([problem], problem=(await self.solve(problem))['response'])\n{DONE}", 4),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "init", "call", "line"), REFUSED)
def test_what_fails_there_is_refused_with_its_line(
    tmp_path: Path, dataset: str, init: str, call: str, line: int
) -> None:
    with pytest.raises(BadInput) as caught:
        written(tmp_path, dataset, graph_of(init, call))
    places = {fault.where for fault in caught.value.faults}
    assert f"mine/graph.py:{FIRST_LINE + line}" in places
    assert not (tmp_path / "workspace").exists()


def test_the_entry_point_of_another_kind_of_problem_is_refused(tmp_path: Path) -> None:
    graph = graph_of(SOLVE, f"r = await self.solve(problem)\n{DONE}", "problem, entry_point")
    with pytest.raises(BadInput, match="entry point"):
        written(tmp_path, "MATH", graph)
    written(tmp_path, "MBPP", graph)
    assert run_there(tmp_path, "MBPP") == "1+1?"
    for named in ("problem=''", "problem, *, entry_point=''"):  # none can be put in there
        with pytest.raises(BadInput, match="entry point"):
            written(tmp_path / "other", "MBPP", graph_of(SOLVE, DONE, named))


NOTED = [
    ("MATH", SOLVE, f"given = {{'input': problem}}\nr = await self.solve(**given)\n{DONE}"),
    ("MATH", SOLVE, "r = await self.solve(problem)\npair = (r['response'], 0)\nreturn pair"),
    ("DROP", "self.steps = [operator.Custom(self.llm), operator.AnswerGenerate(self.llm)]",
     "for step in self.steps:\n    r = await step(input=problem)\nreturn str(r), 0"),
    ("Mine", SOLVE, f"r = await self.solve(problem)\n{DONE}"),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "init", "call"), NOTED)
def test_what_may_fail_there_is_noted(tmp_path: Path, dataset: str, init: str, call: str) -> None:
    assert written(tmp_path, dataset, graph_of(init, call)).notes


def run(graph: Graph, model: ScriptedModel) -> GraphRun:
    return asyncio.run(graph.run("1+1?", model=model))


def asked(model: ScriptedModel) -> list[str]:
    return [str(ask.messages[0]["content"]) for ask in model.asked]


def test_a_round_keeps_instructions_over_those_that_its_code_sets(tmp_path: Path) -> None:
    init = f'self.prompts = {{"solve": "Plain. ", "more": "More. "}}\n{SOLVE}'
    call = (
        'text = self.prompts["solve"] + self.prompts["more"]\n'
        'return (await self.solve(input=problem, instruction=text))["response"]'
    )
    graph = replace(graph_of(init, call), instructions={"solve": "Better. "})
    save_round(graph, tmp_path / "round_1", dataset="GSM8K")
    again = load_graph(tmp_path / "round_1")
    save_round(again, tmp_path / "round_2", dataset="GSM8K")
    assert "_INSTRUCTION" not in (tmp_path / "round_2" / "prompt.py").read_text()
    for ran in (graph, again, load_graph(tmp_path / "round_2")):
        model = ScriptedModel(lambda _: "two")
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
    )
    told = {"solve": "Add.", "write": 'Write "it".', "other": "Once more."}
    told |= {"compute": "Fractions.", "no name": "unused"}
    graph = replace(graph, instructions=told)
    saved = save_round(graph, tmp_path / "Mine" / "workflows" / "round_3")
    assert saved.only_here == ("compute",)
    constants: dict[str, Any] = {}
    exec((saved.folder / "prompt.py").read_text(), constants)
    assert all(constants[name] == told[name] for name in ("solve", "write", "other"))
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
