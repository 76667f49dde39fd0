"""One call of the model; the first line of its reply is the answer. A search may begin with it."""

import workspace.Questions.workflows.template.operator as operator
from scripts.async_llm import create_llm_instance
from scripts.evaluator import DatasetType


class Workflow:
    def __init__(self, name: str, llm_config, dataset: DatasetType) -> None:
        self.name = name
        self.dataset = dataset
        self.llm = create_llm_instance(llm_config)
        self.ask = operator.Custom(self.llm)

    async def __call__(self, problem: str):
        result = await self.ask(input=problem)
        answer = result["response"].strip().split("\n")[0]
        return answer, self.llm.get_usage_summary()["total_cost"]
