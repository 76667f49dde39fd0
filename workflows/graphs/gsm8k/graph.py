"""Solve a problem of GSM8K twice, and let a third call settle on one of the two answers.

Written as AFlow writes its graphs. It runs in the sandbox; its prompts are in prompts.json.
"""

import workspace.GSM8K.workflows.round_1.prompt as prompt_custom
import workspace.GSM8K.workflows.template.operator as operator
from scripts.async_llm import create_llm_instance
from scripts.evaluator import DatasetType


class Workflow:
    def __init__(self, name: str, llm_config, dataset: DatasetType) -> None:
        self.name = name
        self.dataset = dataset
        self.llm = create_llm_instance(llm_config)
        self.solve = operator.Custom(self.llm)
        self.review = operator.Custom(self.llm)

    async def __call__(self, problem: str):
        first = await self.solve(input=problem, instruction=prompt_custom.SOLVE)
        second = await self.solve(input=problem, instruction=prompt_custom.SOLVE)
        both = f"{problem}\n\nA: {first['response']}\n\nB: {second['response']}"
        final = await self.review(input=both, instruction=prompt_custom.SETTLE)
        return final["response"], self.llm.get_usage_summary()["total_cost"]
