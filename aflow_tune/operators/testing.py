"""Test: runs a task's public tests on a solution, and has the model mend what fails.

Solution and tests run in two sandboxed processes (`aflow_tune.scoring.code`), so a solution can
neither see the tests nor fake their result. Where there is no test for the entry point, nothing
passes: `result` is False and the outcome says 'no_tests'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aflow_tune.operators.base import RETRIES, Operator
from aflow_tune.operators.checks import checked_limits
from aflow_tune.operators.fields import Field, Kind
from aflow_tune.operators.outcome import READ_OUTCOMES, OperatorResult, Outcome
from aflow_tune.operators.prompts import Prompt
from aflow_tune.operators.python_code import program_in
from aflow_tune.operators.reading import Form
from aflow_tune.operators.test_cases import TestCases, current_test_cases, telling
from aflow_tune.sandbox.types import Limits
from aflow_tune.scoring.code import check_code
from aflow_tune.scoring.programs import helpers_of

LOOPS = 3
MAX_LOOP = 20


class Test(Operator):
    """Runs the public tests of a task on a program and mends the program where they fail.

    Args:
        tests: where its tests come from: `TestCases`, or asserts by entry point. None: those of
            the context, see `test_cases.use_test_cases`.
        limits: of one round of tests.

    Which wall they run behind is the run's configuration, never an argument: an operator may be
    built by a graph that somebody's model wrote.
    """

    __test__ = False  # for pytest: no test class

    fields = (Field("solution", Kind.CODE, "the whole corrected program"),)
    form = Form.CODE
    asks = {
        "revise": Prompt(needs=("solution", "failure"), may=("problem", "entry_point")),
    }
    returns = {
        "result": "whether the solution passes the tests (a bool; False without tests)",
        "solution": "the last solution",
    }

    def __init__(
        self,
        llm: Any,
        name: str | None = None,
        prompts: Any = None,
        tests: TestCases | Mapping[str, Sequence[str]] | None = None,
        limits: Limits | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(llm, name, prompts, **settings)
        if tests is not None and not isinstance(tests, TestCases):
            rows = [{"entry_point": key, "test": list(value)} for key, value in tests.items()]
            tests = TestCases.of_rows(rows, f"{self.caller}: tests")
        self.tests, self.limits = tests, checked_limits(limits, self.caller)

    @classmethod
    def most_calls(
        cls, *, retries: int = RETRIES, test_loop: int | None = LOOPS, **settings: Any
    ) -> int:
        """One call for each time that the program is mended."""
        loops = MAX_LOOP if test_loop is None else min(max(0, test_loop), MAX_LOOP)
        return loops * (1 + retries)

    async def run(
        self, problem: str, solution: str, entry_point: str, test_loop: int = LOOPS
    ) -> OperatorResult:
        """Test, and mend at most `test_loop` times; the last program is tested as well.

        Raises:
            SandboxUnavailable: nothing could be tested.
        """
        # As AFlow's, which puts whatever a graph hands over into a text.
        problem, solution = ("" if item is None else str(item) for item in (problem, solution))
        cases = current_test_cases() if self.tests is None else self.tests
        tests, why_none = cases.of(entry_point, problem)
        if not tests:
            return _result(False, solution, Outcome.NO_TESTS, why_none)
        asserts = [telling(test) for test in tests]
        fields = [replace(self.fields[0], entry_point=entry_point)]
        # Of a problem in words that happens to be Python there is nothing to run.
        helpers = helpers_of(problem, entry_point) if f"def {entry_point}" in problem else ""
        loops = min(max(0, int(test_loop)), MAX_LOOP)
        for loop in range(loops + 1):
            verdict = await check_code(
                _program(solution, entry_point),
                asserts,
                entry_point,
                helpers=helpers,
                limits=self.limits,
            )
            if verdict.passed is None:
                return _result(False, solution, Outcome.UNDECIDED, verdict.reason)
            if verdict.passed:
                return _result(True, solution, Outcome.REPAIRED if loop else Outcome.ANSWERED)
            if loop == loops:
                break
            values = {
                "problem": problem,
                "solution": solution,
                "entry_point": entry_point,
                "failure": verdict.reason,
            }
            revised = await self.ask(values, "revise", fields=fields)
            if revised.outcome in READ_OUTCOMES:
                solution = revised["solution"]
        return _result(False, solution, Outcome.TESTS_FAILED, verdict.reason)


def _program(solution: str, entry_point: str) -> str:
    """The solution without a fence around it, as graphs may hand it over."""
    try:
        return program_in(solution, entry_point)[0] if "```" in solution else solution
    except ValueError:
        return solution


def _result(passed: bool, solution: str, outcome: Outcome, reason: str = "") -> OperatorResult:
    return OperatorResult({"result": passed, "solution": solution}, outcome, reason)
