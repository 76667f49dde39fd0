"""Programmer: answers by a program that runs in the sandbox, and mends what fails.

The program defines `solve()`. The answer is what that returns, or what was printed where it
returns None. Nothing of the program is run in this process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from aflow_tune.operators.base import RETRIES, Operator
from aflow_tune.operators.checks import checked_limits, whole_number
from aflow_tune.operators.fields import Field, Kind
from aflow_tune.operators.outcome import OperatorResult, Outcome
from aflow_tune.operators.prompts import Prompt
from aflow_tune.operators.reading import Form
from aflow_tune.sandbox import run_program
from aflow_tune.sandbox.policy import installed, meant, parts
from aflow_tune.sandbox.types import Ending, Execution, Limits, SandboxUnavailable
from aflow_tune.scoring.boxed import boxed_if_asked

PROGRAMS = 3
MAX_PROGRAMS = 10
"""How many programs are written at most, the first included."""
MAX_OUTPUT = 20_000
"""Characters of an output that are handed on."""
MAX_ERROR = 2_000
"""Characters of an error that the model is shown, its end."""
_libraries: ContextVar[tuple[str, ...]] = ContextVar("aflow_tune_programmer", default=())


@contextlib.contextmanager
def use_libraries(names: Sequence[str]) -> Iterator[None]:
    """Let programs of Programmer import these packages, those of them that are installed, in the
    current context and in everything it starts."""
    token = _libraries.set(tuple(names))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # closed by the collector, in another context
            _libraries.reset(token)


class Programmer(Operator):
    """Writes a Python program that computes the answer, runs it in the sandbox, mends it.

    Args:
        programs: how many programs are written at most, from 1 to 10.
        limits: of one run.

    Which wall they run behind is the run's configuration, never an argument: an operator may be
    built by a graph that somebody's model wrote.
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
        self.programs, self.limits = programs, checked_limits(limits, self.caller)

    @classmethod
    def most_calls(
        cls, *, retries: int = RETRIES, programs: int | None = PROGRAMS, **settings: Any
    ) -> int:
        """One call for each program."""
        return (MAX_PROGRAMS if programs is None else programs) * (1 + retries)

    async def run(self, problem: str, analysis: str = "None") -> OperatorResult:
        """The program and its output.

        Raises:
            SandboxUnavailable: no program was run.
        """
        policy = meant("+".join(("auto", *installed(_libraries.get()))))
        *others, last_one = ("the standard library", *parts(policy)[1])
        values: dict[str, object] = {
            "libraries": f"{', '.join(others)} and {last_one}" if others else last_one,
            "problem": problem,
            "analysis": analysis,
            "seconds": f"{self.limits.seconds:g}",
        }
        written = await self.ask(values)
        mended, error = False, ""
        for attempt in range(self.programs):
            if attempt:
                mended = True
                values |= {"code": written["code"], "error": error}
                rewritten = await self.ask(values, "again")
                if rewritten.outcome is Outcome.UNREADABLE:
                    break
                written = rewritten
            if written.outcome is Outcome.UNREADABLE:
                result = {
                    "code": "",
                    "output": f"Error: no program could be read: {written.reason}",
                }
                return OperatorResult(result, Outcome.UNREADABLE, written.reason)
            execution = await self._execute(written["code"], policy)
            output, error = outcome_of(execution)
            if not error:
                outcome = Outcome.REPAIRED if mended else written.outcome
                answer = boxed_if_asked(output, problem)  # a program computes the bare value
                return OperatorResult({"code": written["code"], "output": answer}, outcome)
        last = error.strip().splitlines()[-1]
        result = {"code": written["code"], "output": f"Error: {last}"}
        return OperatorResult(result, Outcome.PROGRAM_FAILED, last)

    async def _execute(self, code: str, policy: str) -> Execution:
        files = {"solution.py": code}
        # Room for an error beside the longest output; what exceeds it is the program's fault.
        limits = replace(self.limits, output_kb=max(self.limits.output_kb, 64))
        try:
            return await run_program(_runner(), files=files, limits=limits, policy=policy)
        except SandboxUnavailable:
            if policy == meant("auto"):
                raise
        # Nobody asked for these packages, and they may lie where no program can reach them.
        return await run_program(_runner(), files=files, limits=limits)


def outcome_of(execution: Execution) -> tuple[str, str]:
    """(output, error) of a run; the error is empty where there is an output."""
    hit = f" (limit reached: {', '.join(execution.limits_hit)})" if execution.limits_hit else ""
    if execution.ending is Ending.FINISHED:
        output = execution.stdout.strip()
        if output:
            return (output if len(output) <= MAX_OUTPUT else output[:MAX_OUTPUT] + "..."), ""
        return "", "solve() returned None and printed nothing, or it ended the program"
    if execution.ending is Ending.FAILED:
        told = execution.stderr.strip()[-MAX_ERROR:]
        return "", told or f"the program ended with exit code {execution.exit_code}{hit}"
    return "", f"the program was stopped: {execution.ending.value}{hit}"


@functools.cache
def _runner() -> str:
    return Path(__file__).with_name("_solve_program.py").read_text(encoding="utf-8")
