"""Graphs as AFlow's users have them, written for these tests: the published imports and shapes."""

from __future__ import annotations

from pathlib import Path

AFLOW_HEAD = """\
from typing import Literal
import workspace.{dataset}.workflows.template.operator as operator
import workspace.{dataset}.workflows.round_{round}.prompt as prompt_custom
from scripts.async_llm import create_llm_instance

from scripts.evaluator import DatasetType

"""
METAGPT_HEAD = """\
from typing import Literal
import metagpt.ext.aflow.scripts.optimized.{dataset}.workflows.template.operator as operator
import metagpt.ext.aflow.scripts.optimized.{dataset}.workflows.round_{round}.prompt as prompt_custom
from metagpt.provider.llm_provider_registry import create_llm_instance
from metagpt.utils.cost_manager import CostManager

DatasetType = Literal["HumanEval", "MBPP", "GSM8K", "MATH", "HotpotQA", "DROP"]

"""

INIT = """\
class Workflow:
    def __init__(
        self,
        name: str,
        llm_config,
        dataset: DatasetType,
    ) -> None:
        self.name = name
        self.dataset = dataset
        self.llm = create_llm_instance(llm_config)
"""

MATH = (
    METAGPT_HEAD.format(dataset="MATH", round=2)
    + INIT
    + """\
        self.llm.cost_manager = CostManager()
        self.custom = operator.Custom(self.llm)
        self.sc_ensemble = operator.ScEnsemble(self.llm)

    async def __call__(self, problem: str):
        \"\"\"
        Draft, look at it again, choose.
        \"\"\"
        draft = await self.custom(input=problem, instruction=prompt_custom.DRAFT_PROMPT)
        second = await self.custom(
            input=problem + f"\\nA first attempt: {draft['response']}",
            instruction=prompt_custom.AGAIN_PROMPT,
        )
        chosen = await self.sc_ensemble(
            solutions=[draft['response'], second['response']], problem=problem
        )
        return chosen['response'], self.llm.cost_manager.total_cost
"""
)
MATH_PROMPTS = '''DRAFT_PROMPT = """
Solve the problem. Put the answer into a box.
"""

AGAIN_PROMPT = "Look for an error in the attempt, then solve the problem: "
'''

CODE = (
    AFLOW_HEAD.format(dataset="HumanEval", round=4)
    + INIT
    + """\
        self.custom_code_generate = operator.CustomCodeGenerate(self.llm)
        self.test = operator.Test(self.llm)

    async def __call__(self, problem: str, entry_point: str):
        for attempt in range(2):
            solution = await self.custom_code_generate(
                problem=problem, entry_point=entry_point, instruction=prompt_custom.CODE_PROMPT
            )
            checked = await self.test(
                problem=problem, solution=solution['response'], entry_point=entry_point
            )
            if checked['result']:
                return checked['solution'], self.llm.get_usage_summary()["total_cost"]
        return solution['response'], self.llm.get_usage_summary()["total_cost"]
"""
)
CODE_PROMPTS = 'CODE_PROMPT = "Write the function.\\n"\n'


GATHER = (
    "import asyncio\nfrom collections import Counter\n"
    + AFLOW_HEAD.format(dataset="GSM8K", round=7)
    + INIT
    + """\
        self.solvers = [operator.Custom(self.llm), operator.Custom(self.llm)]
        self.review = operator.Review(self.llm)
        self.revise = operator.Revise(self.llm)

    async def solve(self, problem):
        replies = await asyncio.gather(
            *[
                solver(input=problem, instruction=f"{number}. ")
                for number, solver in enumerate(self.solvers)
            ]
        )
        return [reply["response"] for reply in replies]

    async def __call__(self, problem: str):
        solutions = await self.solve(problem)
        best = Counter(solutions).most_common(1)[0][0]
        turns = 0
        while turns < 3:
            verdict = await self.review(problem=problem, solution=best)
            if verdict["review_result"]:
                break
            revised = await self.revise(
                problem=problem, solution=best, feedback=verdict["feedback"]
            )
            best = revised["solution"]
            turns += 1
        extra = await self.llm("In one word: " + best)
        return f"{solutions} {best} {extra}", self.llm.get_usage_summary()["total_cost"]
"""
)


def write_round(root: Path, dataset: str, number: int, graph: str, prompts: str = "") -> Path:
    """A `round_N` folder where AFlow has it; returns it."""
    folder = root / "workspace" / dataset / "workflows" / f"round_{number}"
    folder.mkdir(parents=True)
    (folder / "graph.py").write_text(graph)
    (folder / "prompt.py").write_text(prompts)
    return folder


def own_form(folder: Path, body: str, prompts: str = "{}") -> Path:
    """A graph in our own form; `body` is what follows `class Workflow`'s constructor line."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "graph.py").write_text(body)
    (folder / "prompts.json").write_text(prompts)
    return folder


def simple(call: str, init: str = "pass", head: str = "") -> str:
    """A graph without imports: `init` and `call` are the bodies of its methods."""
    return (
        f"{head}\n"
        "class Workflow:\n"
        "    def __init__(self, name, llm_config, dataset):\n"
        "        self.llm = create_llm_instance(llm_config)\n"
        "        self.custom = operator.Custom(self.llm)\n"
        + "".join(f"        {line}\n" for line in init.splitlines())
        + "\n    async def __call__(self, problem):\n"
        + "".join(f"        {line}\n" for line in call.splitlines())
    )
