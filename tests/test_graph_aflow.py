"""Rounds written for AFlow run with the operators that AFlow's template of the data set offers.

The stand-ins have the signatures of AFlow's operators, and add instruction and input up as those
do; whatever was written without a word must run with them.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from aflow_tune.errors import BadInput
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.save import SavedRound, save_round

CALLS = {
    "Custom": "input, instruction",
    "AnswerGenerate": "input, mode=None",
    "CustomCodeGenerate": "problem, entry_point, instruction",
    "Programmer": "problem, analysis='None'",
    "ScEnsemble": "solutions, problem",
    "Test": "problem, solution, entry_point, test_loop=3",
}
RESULTS = {
    "Custom": "{'response': instruction + input}",
    "AnswerGenerate": "{'thought': 't', 'answer': str(input)}",
    "CustomCodeGenerate": "{'response': instruction + problem}",
    "Programmer": "{'code': 'c', 'output': str(problem)}",
    "ScEnsemble": "{'response': solutions[0]}",
    "Test": "{'result': True, 'solution': solution}",
}
OFFERED = {
    "GSM8K": ("Custom", "Programmer", "ScEnsemble"),
    "MATH": ("Custom", "Programmer", "ScEnsemble"),
    "HumanEval": ("Custom", "CustomCodeGenerate", "ScEnsemble", "Test"),
    "MBPP": ("Custom", "CustomCodeGenerate", "ScEnsemble", "Test"),
    "HotpotQA": ("Custom", "AnswerGenerate", "ScEnsemble"),
    "DROP": ("Custom", "AnswerGenerate", "ScEnsemble"),
}
FIRST_LINE = 5
"""Of `init`."""
SOLVE = "self.solve = operator.Custom(self.llm)\n"
PICK = "self.pick = operator.ScEnsemble(self.llm)\n"
DONE = "return r['response'], 0"


def graph_of(init: str, call: str, parameters: str = "problem") -> Graph:
    source = (
        "class Workflow:\n"
        "    def __init__(self, name, llm_config, dataset):\n"
        "        self.name = name\n"
        "        self.llm = create_llm_instance(llm_config)\n"
        f"{textwrap.indent(init.strip() or 'pass', ' ' * 8)}\n"
        f"    async def __call__(self, {parameters}):\n"
        f"{textwrap.indent(call, ' ' * 8)}\n"
    )
    return Graph("mine", {"graph.py": source})


def written(root: Path, dataset: str, graph: Graph) -> SavedRound:
    return save_round(graph, root / "workspace" / dataset / "workflows" / "round_2")


def run_there(root: Path, dataset: str) -> str:
    """What the round answers where it is imported and called as AFlow does it."""
    template = root / "workspace" / dataset / "workflows" / "template"
    template.mkdir(exist_ok=True)
    text = "class Operator:\n    pass\n"
    for name in OFFERED[dataset]:
        takes = CALLS[name]
        if name == "ScEnsemble" and dataset in ("HotpotQA", "DROP"):
            takes = "solutions"
        text += (
            f"class {name}(Operator):\n"
            f"    def __init__(self, llm, name='{name}'): pass\n"
            f"    async def __call__(self, {takes}): return {RESULTS[name]}\n"
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


RUNS = {
    "Custom without instruction": ("MATH", SOLVE, f"r = await self.solve(input=problem)\n{DONE}"),
    "by position": ("GSM8K", SOLVE, f"r = await self.solve(problem)\n{DONE}"),
    "None as instruction": ("DROP", SOLVE, f"r = await self.solve(problem, None)\n{DONE}"),
    "a vote without the problem": (
        "MATH",
        SOLVE + PICK,
        f"a = await self.solve(problem)\nr = await self.pick([a['response']] * 2)\n{DONE}",
    ),
    "a vote with the problem": (
        "HotpotQA",
        SOLVE + PICK,
        f"a = await self.solve(problem)\n"
        f"r = await self.pick(solutions=[a['response']], problem=problem)\n{DONE}",
    ),
    "the problem by position": (
        "DROP",
        SOLVE + PICK,
        f"a = await self.solve(problem)\nr = await self.pick([a['response']], problem)\n{DONE}",
    ),
    "code without its entry point": (
        "MBPP",
        "self.write = operator.CustomCodeGenerate(self.llm)",
        f"r = await self.write(problem)\n{DONE}",
    ),
    "options of ours": (
        "GSM8K",
        "self.code = operator.Programmer(self.llm, programs=1, retries=0)",
        "r = await self.code(problem=problem)\nreturn r['output'], 0",
    ),
    "through a dict": (
        "MATH",
        "self.steps = {'solve': operator.Custom(self.llm), 'vote': operator.ScEnsemble(self.llm)}",
        "a = await self.steps['solve'](input=problem)\n"
        f"r = await self.steps['vote'](solutions=[a['response']])\n{DONE}",
    ),
    "through the values of a dict": (
        "MATH",
        "self.steps = {}\nself.steps['a'] = operator.Custom(self.llm)",
        f"for step in self.steps.values():\n    r = await step(input=problem)\n{DONE}",
    ),
    "through a variable": ("MATH", SOLVE, f"ask = self.solve\nr = await ask(problem)\n{DONE}"),
    "through getattr": (
        "MATH",
        SOLVE,
        f"name = 'sol' + 've'\nr = await getattr(self, name)(input=problem)\n{DONE}",
    ),
    "through a function": (
        "MATH",
        SOLVE,
        "async def twice(op, text):\n"
        "    return await op(input=(await op(input=text))['response'])\n"
        f"r = await twice(self.solve, problem)\n{DONE}",
    ),
    "built where it is called": (
        "MATH",
        "",
        f"r = await operator.Custom(self.llm)(input=problem)\n{DONE}",
    ),
    "a class from a dict": (
        "MATH",
        "kinds = {'a': operator.Custom}\nself.a = kinds['a'](self.llm)",
        f"r = await self.a(input=problem)\n{DONE}",
    ),
    "inside of a formatted text": (
        "MATH",
        SOLVE,
        "return f\"{(await self.solve(input=problem))['response']}\", 0",
    ),
    "an answer without its cost": (
        "MATH",
        SOLVE,
        "r = await self.solve(input=problem)\nreturn r['response']",
    ),
    "a workflow of code without the entry point": (
        "HumanEval",
        SOLVE,
        f"r = await self.solve(input=problem)\n{DONE}",
    ),
    "whole results in a vote": (
        "GSM8K",
        SOLVE + PICK,
        "a = await self.solve(problem)\nb = await self.pick([a, a])\n"
        "return b['response']['response'], 0",
    ),
    "prompts that nobody gave": (
        "MATH",
        SOLVE,
        f"r = await self.solve(problem, self.prompts['solve'])\n{DONE}",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_lacks_is_written_and_what_is_too_much_left_out(tmp_path: Path, name: str) -> None:
    dataset, init, call = RUNS[name]
    written(tmp_path, dataset, graph_of(init, call))
    assert run_there(tmp_path, dataset) == "1+1?"


REFUSED = {
    "an operator that the template lacks": ("MATH", "self.r = operator.Review(self.llm)", "", 0),
    "one of another data set": ("GSM8K", "self.a = operator.AnswerGenerate(self.llm)", "", 0),
    "through getattr": ("DROP", "k = getattr(operator, 'Programmer')\nself.p = k(self.llm)", "", 0),
    "as the base of a class": (
        "MBPP",
        "class Mine(operator.Revise):\n    pass\nself.r = Mine(self.llm)",
        "",
        0,
    ),
    "a result as the input": (
        "MATH",
        SOLVE,
        f"a = await self.solve(problem)\nr = await self.solve(a)\n{DONE}",
        3,
    ),
    "a list as the input": ("MATH", SOLVE, f"r = await self.solve([problem])\n{DONE}", 2),
    "a whole result as the answer": (
        "MATH",
        SOLVE,
        "r = await self.solve(problem)\nreturn r, 0",
        3,
    ),
    "an argument that must be computed": (
        "DROP",
        SOLVE + PICK,
        f"r = await self.pick([problem], problem=(await self.solve(problem))['response'])\n{DONE}",
        3,
    ),
    "MetaGPT's name of a call": ("MATH", SOLVE, "return await self.llm.aask(problem), 0", 2),
    "MetaGPT's cost": (
        "MATH",
        "",
        "return await self.llm('x'), self.llm.cost_manager.total_cost",
        2,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_fails_there_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    dataset, init, call, line = REFUSED[name]
    call = call or "return await self.llm(problem), 0"
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


@pytest.mark.parametrize(
    ("dataset", "init", "call"),
    [
        ("MATH", SOLVE, f"given = {{'input': problem}}\nr = await self.solve(**given)\n{DONE}"),
        ("MATH", SOLVE, f"r = await outside(self.solve, problem)\n{DONE}"),
        ("MATH", SOLVE, "r = await self.solve(problem)\npair = (r['response'], 0)\nreturn pair"),
        (
            "DROP",
            "self.steps = [operator.Custom(self.llm), operator.AnswerGenerate(self.llm)]",
            "for step in self.steps:\n    r = await step(input=problem)\nreturn str(r), 0",
        ),
        ("Mine", SOLVE, f"r = await self.solve(problem)\n{DONE}"),
    ],
)
def test_what_may_fail_there_is_noted(tmp_path: Path, dataset: str, init: str, call: str) -> None:
    assert written(tmp_path, dataset, graph_of(init, call)).notes


def test_the_template_that_lies_there_decides(tmp_path: Path) -> None:
    template = tmp_path / "workspace" / "MATH" / "workflows" / "template"
    template.mkdir(parents=True)
    (template / "operator.py").write_text(
        "class Review:\n    async def __call__(self, solution, problem): ...\n"
    )
    review = "self.r = operator.Review(self.llm)"
    call = "r = await self.r(solution='s', problem=problem)\nreturn r['feedback'], 0"
    assert not written(tmp_path, "MATH", graph_of(review, call)).notes
    with pytest.raises(BadInput, match="Custom"):
        save_round(graph_of(SOLVE, call), template.parent / "round_3")
