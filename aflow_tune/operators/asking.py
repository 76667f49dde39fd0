"""Operators that ask once: Custom, AnswerGenerate, CustomCodeGenerate, Format.

Custom and Format take the whole reply; only an empty one cannot be read.
"""

from __future__ import annotations

from dataclasses import replace

from aflow_tune.operators.base import Operator
from aflow_tune.operators.fields import Field, Kind
from aflow_tune.operators.outcome import OperatorResult
from aflow_tune.operators.prompts import Prompt
from aflow_tune.operators.reading import Form


class Custom(Operator):
    """Follows an instruction on an input and returns the whole reply."""

    fields = (Field("response"),)
    form = Form.TEXT
    asks = {"main": Prompt(needs=("input",), may=("instruction",))}
    returns = {"response": "what the model replied"}

    async def run(
        self, input: str, instruction: str = "", mode: str | None = None
    ) -> OperatorResult:
        """The reply to instruction and input, one straight after the other as in AFlow."""
        return await self.ask({"input": input, "instruction": instruction}, mode=mode)


class AnswerGenerate(Operator):
    """Reasons step by step about a task and answers it."""

    fields = (
        Field("thought", description="your reasoning, step by step", required=False),
        Field("answer", description="the final answer and nothing else"),
    )
    asks = {"main": Prompt(needs=("input",))}

    async def run(self, input: str, mode: str | None = None) -> OperatorResult:
        """`thought` may be empty; without an `answer` the reply cannot be read."""
        return await self.ask({"input": input}, mode=mode)


class CustomCodeGenerate(Operator):
    """Writes a Python program that defines a function."""

    fields = (Field("response", Kind.CODE, "the whole program"),)
    form = Form.CODE
    asks = {"main": Prompt(needs=("problem",), may=("instruction", "entry_point"))}
    returns = {"response": "the program, which defines the entry point"}

    async def run(
        self, problem: str, entry_point: str = "", instruction: str = ""
    ) -> OperatorResult:
        """A reply without Python that defines `entry_point` cannot be read."""
        fields = [replace(self.fields[0], entry_point=entry_point or "")]
        values = {"problem": problem, "entry_point": entry_point, "instruction": instruction}
        return await self.ask(values, fields=fields)


class Format(Operator):
    """Takes the final answer out of a worked solution."""

    fields = (Field("response"),)
    form = Form.TEXT
    asks = {"main": Prompt(needs=("solution",), may=("problem",))}
    returns = {"response": "the answer alone", "solution": "the same"}

    async def run(self, problem: str, solution: str, mode: str | None = None) -> OperatorResult:
        """The answer under both names that graphs use."""
        answer = await self.ask({"problem": problem, "solution": solution}, mode=mode)
        answer["solution"] = answer["response"]
        return answer
