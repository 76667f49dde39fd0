"""The operators that run programs, always in the sandbox: Programmer and Test.

Test runs solution and tests in two sandboxed processes (`aflow_tune.scoring.code`), so a solution
can neither see the tests nor fake their result. The sandbox backend comes from the run's
configuration, never from an argument: a graph that a model wrote may build the operator.
"""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.operators.base import (
    READ_OUTCOMES,
    RETRIES,
    Operator,
    OperatorResult,
    Outcome,
    whole_number,
)
from aflow_tune.operators.fields import Field, Form, Kind
from aflow_tune.operators.prompts import Prompt, use
from aflow_tune.operators.python_code import program_in
from aflow_tune.sandbox import run_program
from aflow_tune.sandbox.policy import installed, meant, parts
from aflow_tune.sandbox.types import Ending, Execution, Limits, SandboxUnavailable
from aflow_tune.scoring.code import check_code, helpers_of
from aflow_tune.scoring.numbers import boxed_if_asked

PROGRAMS = 3
MAX_PROGRAMS = 10  # programs written at most, including the first
MAX_OUTPUT = 20_000  # characters of an output that are returned
MAX_ERROR = 2_000  # characters, from its end, of an error that the model is shown
LOOPS = 3
MAX_LOOP = 20
_UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError)

_libraries: ContextVar[tuple[str, ...]] = ContextVar("aflow_tune_programmer", default=())


def use_libraries(names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Let Programmer's programs import the installed ones of these packages, in the current context
    and in tasks started from it."""
    return use(_libraries, tuple(names))


class Programmer(Operator):
    """Writes a Python program that computes the answer, runs it in the sandbox, mends it.

    Args:
        programs: the most programs that are written, from 1 to 10.
        limits: of the execution of one program.
    """

    fields = (Field("code", Kind.CODE, "the whole program", entry_point="solve"),)
    form = Form.CODE
    asks = {
        "main": Prompt(needs=("problem",), may=("analysis", "seconds", "libraries")),
        "again": Prompt(
            needs=("problem", "code", "error"), may=("analysis", "seconds", "libraries")
        ),
    }
    returns = {
        "code": "the last program; empty where none could be read",
        "output": "what it computed, as text; where it failed a line that begins with `Error:`",
    }

    def __init__(
        self,
        llm: Any,
        name: str | None = None,
        prompts: Any = None,
        programs: int = PROGRAMS,
        limits: Limits | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(llm, name, prompts, **settings)
        whole_number(f"{self.caller}: programs", programs, 1, MAX_PROGRAMS)
        self.programs, self.limits = programs, _checked_limits(limits, self.caller)

    @classmethod
    def most_calls(
        cls, *, retries: int = RETRIES, programs: int | None = PROGRAMS, **settings: Any
    ) -> int:
        """One call for each program, each with its retries."""
        return (MAX_PROGRAMS if programs is None else programs) * (1 + retries)

    async def run(self, problem: str, analysis: str = "None") -> OperatorResult:
        """The program and its output. Raises `SandboxUnavailable` if it cannot be executed."""
        policy = meant("+".join(("auto", *installed(_libraries.get()))))
        *others, last_one = ("the standard library", *parts(policy)[1])
        values: dict[str, object] = {
            "libraries": f"{', '.join(others)} and {last_one}" if others else last_one,
            "problem": problem,
            "analysis": analysis,
            "seconds": f"{self.limits.seconds:g}",
        }
        written = await self.ask(values)
        if written.outcome is Outcome.UNREADABLE:
            output = f"Error: no program could be read: {written.reason}"
            return OperatorResult({"code": "", "output": output}, written.outcome, written.reason)
        for attempt in range(1, self.programs + 1):
            output, error = outcome_of(await self._execute(written["code"], policy))
            if not error:
                answer = boxed_if_asked(output, problem)  # the program computes only the value
                outcome = Outcome.REPAIRED if attempt > 1 else written.outcome
                return OperatorResult({"code": written["code"], "output": answer}, outcome)
            if attempt == self.programs:
                break
            rewritten = await self.ask({**values, "code": written["code"], "error": error}, "again")
            if rewritten.outcome is Outcome.UNREADABLE:
                break
            written = rewritten
        last = error.strip().splitlines()[-1]
        result = {"code": written["code"], "output": f"Error: {last}"}
        return OperatorResult(result, Outcome.PROGRAM_FAILED, last)

    async def _execute(self, code: str, policy: str) -> Execution:
        runner = Path(__file__).with_name("_solve_program.py").read_text(encoding="utf-8")
        files = {"solution.py": code}
        # Enough for MAX_OUTPUT and an error; a program that prints more fails.
        limits = replace(self.limits, output_kb=max(self.limits.output_kb, 64))
        try:
            return await run_program(runner, files=files, limits=limits, policy=policy)
        except SandboxUnavailable:
            if policy == meant("auto"):
                raise
        # The packages are optional, and the sandbox may not be able to reach them.
        return await run_program(runner, files=files, limits=limits)


def outcome_of(execution: Execution) -> tuple[str, str]:
    """(output, error) of an execution; the error is empty if there is an output."""
    hit = f" (limit reached: {', '.join(execution.limits_hit)})" if execution.limits_hit else ""
    if execution.ending is Ending.FINISHED:
        output = execution.stdout.strip()
        if len(output) > MAX_OUTPUT:
            output = output[:MAX_OUTPUT] + "..."
        nothing = "solve() returned None and printed nothing, or it ended the program"
        return output, "" if output else nothing
    if execution.ending is Ending.FAILED:
        told = execution.stderr.strip()[-MAX_ERROR:]
        return "", told or f"the program ended with exit code {execution.exit_code}{hit}"
    return "", f"the program was stopped: {execution.ending.value}{hit}"


def _checked_limits(limits: Limits | None, caller: str) -> Limits:
    """The limits, or the sandbox's defaults. Raises `BadInput` for a wrong type."""
    if not isinstance(limits, Limits | None):
        title, where = "An operator cannot be built.", f"{caller}: limits"
        raise BadInput.of(title, where, "aflow_tune.sandbox.Limits", f"{limits!r:.80}", "pass them")
    return limits or Limits()


@dataclass(frozen=True)
class TestCases:
    """The public tests that the operator Test may use: asserts on `candidate`, by entry point.

    A solver may see these (such as AFlow's `humaneval_public_test.jsonl`), never those that score
    the answer. If several rows have the same entry point (six names in HumanEval), the one whose
    calls appear in the problem's text is used; if that is ambiguous, none.
    """

    __test__ = False  # not a test class for pytest

    sets: Mapping[str, Sequence[tuple[str, ...]]] = field(default_factory=dict)

    @classmethod
    def of_rows(cls, rows: Iterable[Any], where: str = "test cases") -> TestCases:
        """From rows with `entry_point` and `test`, a list of asserts or a single text. Raises
        `BadInput` with every faulty row."""
        sets: dict[str, list[tuple[str, ...]]] = {}
        faults = []
        for number, row in enumerate(rows, 1):
            values = row if isinstance(row, Mapping) else {}
            entry_point, tests = values.get("entry_point"), values.get("test")
            tests = [tests] if isinstance(tests, str) else tests
            good = isinstance(tests, list) and all(isinstance(test, str) for test in tests)
            if not isinstance(entry_point, str) or not good:
                expected = '{"entry_point": NAME, "test": [ASSERT, ...]}'
                fix = "correct the row, or leave it out"
                faults.append(Fault(f"{where}:{number}", expected, f"{row!r:.120}", fix))
                continue
            kept = tuple(test for test in tests or () if test.strip())
            if kept and kept not in sets.setdefault(entry_point, []):
                sets[entry_point].append(kept)
        if faults:
            raise BadInput("These are no test cases.", faults)
        return cls(sets)

    @classmethod
    def load(cls, path: str | Path) -> TestCases:
        """From a JSONL file. Raises `BadInput` if it cannot be read or has faulty rows."""
        rows: list[Any] = []
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            title, expected = "The test cases cannot be read.", "a JSONL file in UTF-8"
            raise BadInput.of(title, str(path), expected, str(error), "name such a file") from None
        for line in filter(str.strip, lines):
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):
                rows.append(line)  # `of_rows` refuses it, with its number
        return cls.of_rows(rows, str(path))

    def of(self, entry_point: str, problem: str = "") -> tuple[tuple[str, ...], str]:
        """The asserts for an entry point of a problem, and if there are none, why."""
        sets = self.sets.get(entry_point, ())
        if not sets:
            return (), f"there are no tests for {entry_point!r}"
        if len(sets) == 1:
            return tuple(sets[0]), ""
        squeezed = "".join(problem.split())
        shown = [sum(call in squeezed for call in _calls(tests, entry_point)) for tests in sets]
        best = max(shown)
        if best and shown.count(best) == 1:
            return tuple(sets[shown.index(best)]), ""
        return (), f"{len(sets)} problems have tests for {entry_point!r}, and the text fits no one"


_cases: ContextVar[TestCases] = ContextVar("aflow_tune_test_cases", default=TestCases())  # noqa: B039


def use_test_cases(cases: TestCases) -> contextlib.AbstractContextManager[None]:
    """Let Test operators use these, in the current context and in tasks started from it."""
    return use(_cases, cases)


class Test(Operator):
    """Runs the public tests of a task on a program and mends the program where they fail.

    Without a test for the entry point, `result` is False and the outcome 'no_tests'.

    Args:
        tests: `TestCases`, or asserts by entry point. None: those of the context, see
            `use_test_cases`.
        limits: of one round of tests.
    """

    __test__ = False  # not a test class for pytest

    fields = (Field("solution", Kind.CODE, "the whole corrected program"),)
    form = Form.CODE
    asks = {"revise": Prompt(needs=("solution", "failure"), may=("problem", "entry_point"))}
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
        self.tests, self.limits = tests, _checked_limits(limits, self.caller)

    @classmethod
    def most_calls(
        cls, *, retries: int = RETRIES, test_loop: int | None = LOOPS, **settings: Any
    ) -> int:
        """One call for each revision of the program, each with its retries."""
        loops = MAX_LOOP if test_loop is None else min(max(0, test_loop), MAX_LOOP)
        return loops * (1 + retries)

    async def run(
        self, problem: str, solution: str, entry_point: str, test_loop: int = LOOPS
    ) -> OperatorResult:
        """Test, and revise at most `test_loop` times; the last revision is tested too. Raises
        `SandboxUnavailable` if nothing can be tested."""
        # As in AFlow, which formats into its prompt whatever a graph passes.
        problem, solution = ("" if item is None else str(item) for item in (problem, solution))

        def result(passed: bool, outcome: Outcome, reason: str = "") -> OperatorResult:
            return OperatorResult({"result": passed, "solution": solution}, outcome, reason)

        cases = _cases.get() if self.tests is None else self.tests
        tests, why_none = cases.of(entry_point, problem)
        if not tests:
            return result(False, Outcome.NO_TESTS, why_none)
        asserts = [telling(test) for test in tests]
        fields = [replace(self.fields[0], entry_point=entry_point)]
        # Without a `def` of the entry point, a problem has no helpers, even if it parses as Python.
        helpers = helpers_of(problem, entry_point) if f"def {entry_point}" in problem else ""
        loops = min(max(0, int(test_loop)), MAX_LOOP)
        for loop in range(loops + 1):
            program = solution
            if "```" in solution:  # a graph may pass it in a fence
                with contextlib.suppress(ValueError):
                    program = program_in(solution, entry_point)[0]
            verdict = await check_code(
                program, asserts, entry_point, helpers=helpers, limits=self.limits
            )
            if verdict.passed is None:
                return result(False, Outcome.UNDECIDED, verdict.reason)
            if verdict.passed:
                return result(True, Outcome.REPAIRED if loop else Outcome.ANSWERED)
            if loop == loops:
                break
            values = {"problem": problem, "solution": solution, "entry_point": entry_point}
            values["failure"] = verdict.reason
            revised = await self.ask(values, "revise", fields=fields)
            if revised.outcome in READ_OUTCOMES:
                solution = revised["solution"]
        return result(False, Outcome.TESTS_FAILED, verdict.reason)


def telling(test: str) -> str:
    """Add a message to a test that is one assert: its text, and the unexpected value."""
    try:
        body = ast.parse(test).body
    except _UNPARSED:
        return test
    if len(body) != 1 or not isinstance(body[0], ast.Assert) or body[0].msg:
        return test
    condition = body[0].test
    shown = ast.unparse(body[0])
    shown = shown if len(shown) <= 300 else shown[:297] + "..."
    if not isinstance(condition, ast.Compare) or len(condition.ops) != 1:
        return f"assert {ast.unparse(condition)}, {shown!r}"
    # Evaluate the left side once: a second evaluation could print or differ.
    left = ast.unparse(condition.left)
    condition.left = ast.Name("got_", ast.Load())
    message = f'{shown!r} + " -- but the left side is " + repr(got_)[:200]'
    return f"got_ = {left}\nassert {ast.unparse(condition)}, {message}"


def _calls(tests: Sequence[str], entry_point: str) -> set[str]:
    """The calls in asserts as a problem's examples show them, without whitespace."""
    found = set()
    for test in tests:
        with contextlib.suppress(*_UNPARSED):
            for node in ast.walk(ast.parse(test)):
                name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
                if name and name in ("candidate", entry_point):
                    text = ast.get_source_segment(test, node) or ""
                    arguments = "".join(text.partition("(")[2].split())
                    found.add(f"{entry_point}({arguments}")
    return found
