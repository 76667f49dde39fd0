"""Workflows as a policy would write them, and a writer around scripted models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aflow_tune.context import RolloutContext
from aflow_tune.models import ScriptedModel
from aflow_tune.operators import OPERATORS
from aflow_tune.trace import Trace
from aflow_tune.writer.form import as_text
from aflow_tune.writer.workflow import WriterWorkflow

ROW = {"question": "What is 1+2?", "answer": "It is 3.\n#### 3"}
SOLVE = "Solve it. "


def graph(body: str, operators: str = "self.solve = operator.Custom(self.llm)") -> str:
    """`class Workflow` with these operators and this body of `__call__`."""
    built = "".join(f"        {line}\n" for line in operators.splitlines())
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return (
        "class Workflow:\n"
        "    def __init__(self, name, llm_config, dataset):\n"
        "        self.llm = create_llm_instance(llm_config)\n"
        f"{built}\n"
        "    async def __call__(self, problem):\n"
        f"{lines}"
    )


ONE = graph('found = await self.solve(input=problem)\nreturn found["response"]')
TWO = graph(
    "found = await self.solve(input=problem)\n"
    'again = await self.solve(input=problem + found["response"])\n'
    'return again["response"]'
)
RAISES = graph('found = await self.solve(input=problem)\nreturn int(found["response"] + "x")')
NO_ANSWER = graph('found = await self.solve(input=problem)\nreturn found["response"][:0]')
REFUSED = graph("import os\nreturn os.getcwd()")
PROMPTS = {"solve": SOLVE}


def text(source: str = ONE, /, **prompts: str) -> str:
    """A whole reply in the hybrid form."""
    return as_text(prompts or PROMPTS, source)


def writer(**more: Any) -> WriterWorkflow:
    """A writer of Custom and Programmer for rows of GSM8K."""
    operators = {name: OPERATORS[name] for name in ("Custom", "Programmer")}
    settings = {"executor": "executor", "operators": operators, "benchmark": "gsm8k"}
    return WriterWorkflow(**{**settings, **more})


def executing(replies: Sequence[Any] | Callable[..., Any]) -> ScriptedModel:
    """A scripted executor."""
    return ScriptedModel(replies, role="executor", model="frozen")


class Ran:
    """One run of a writer: `reward`, `metrics`, `record`, `trace`, `calls` (states of the
    policy's calls)."""

    def __init__(
        self, workflow: WriterWorkflow, policy: ScriptedModel, row: Any = None, **more: Any
    ) -> None:
        self.reward: float | None = None
        self.error: Exception | None = None
        self.context, self.trace = RolloutContext(), Trace()

        async def work() -> None:
            with self.context.activate(), self.trace.activate():
                try:
                    self.reward = await workflow(task=dict(row or ROW), model=policy, **more)  # type: ignore[arg-type]
                except Exception as error:
                    self.error = error

        asyncio.run(work())

    @property
    def metrics(self) -> dict[str, float]:
        return self.context.metrics

    @property
    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = self.context.kept["writer"]
        return record


def run(texts: Sequence[Any], answers: Any, row: Any = None, **more: Any) -> Ran:
    """The policy writes `texts`, the executor answers `answers`."""
    clients = {"executor": executing(answers), **more.pop("clients", {})}
    return Ran(writer(clients=clients, **more), ScriptedModel(texts), row)
