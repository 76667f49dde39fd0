"""Review and Revise: judge a solution, and write it anew after a review."""

from __future__ import annotations

from aflow_tune.operators.base import Operator
from aflow_tune.operators.fields import Field, Kind
from aflow_tune.operators.outcome import OperatorResult, Outcome
from aflow_tune.operators.prompts import Prompt


class Review(Operator):
    """Checks a solution and says whether it is right."""

    fields = (
        Field("review_result", Kind.BOOL, "whether the solution is right"),
        Field("feedback", description="what is wrong with it and how to mend it", required=False),
    )
    asks = {"main": Prompt(needs=("solution",), may=("problem",))}

    async def run(self, problem: str, solution: str, mode: str | None = None) -> OperatorResult:
        """`review_result` is a bool. A review that cannot be read approves nothing: False."""
        return await self.ask({"problem": problem, "solution": solution}, mode=mode)


class Revise(Operator):
    """Writes a solution anew after a review."""

    fields = (Field("solution", description="the whole corrected solution"),)
    asks = {"main": Prompt(needs=("solution", "feedback"), may=("problem",))}

    async def run(
        self, problem: str, solution: str, feedback: str, mode: str | None = None
    ) -> OperatorResult:
        """A revision that cannot be read leaves the solution as it was."""
        values = {"problem": problem, "solution": solution, "feedback": feedback}
        revised = await self.ask(values, mode=mode)
        if revised.outcome is Outcome.UNREADABLE:
            revised["solution"] = solution
        return revised
