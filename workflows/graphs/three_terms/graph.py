"""Add three numbers with two operators: the first adds two, the second adds the third to it.

Written as AFlow writes its graphs. It runs in the sandbox; its prompts are in prompts.json.
"""

import re

import workspace.Sums.workflows.round_1.prompt as prompt_custom
import workspace.Sums.workflows.template.operator as operator
from scripts.async_llm import create_llm_instance
from scripts.evaluator import DatasetType


class Workflow:
    def __init__(self, name: str, llm_config, dataset: DatasetType) -> None:
        self.name = name
        self.dataset = dataset
        self.llm = create_llm_instance(llm_config)
        self.first_sum = operator.Custom(self.llm)
        self.second_sum = operator.Custom(self.llm)

    async def __call__(self, problem: str):
        a, b, c = problem.split(" + ")
        first = await self.first_sum(input=f"{a} + {b}", instruction=prompt_custom.ADD)
        partial = number(first["response"])
        second = await self.second_sum(input=f"{partial} + {c}", instruction=prompt_custom.ADD)
        total = number(second["response"])
        return f"{partial} + {c} = {total}", self.llm.get_usage_summary()["total_cost"]


def number(text: str) -> str:
    """The first number of an answer."""
    found = re.search(r"\d+", text)
    return found[0][:4] if found else "0"
