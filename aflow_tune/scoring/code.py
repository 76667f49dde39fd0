"""Whether a program passes tests: solution and tests in two sandboxed processes.

The tests run in one process and the model's program in another; a call `candidate(...)` travels
over both channels through this module, which passes messages on and believes nothing. The
solution can only answer calls with plain values (`_values.py`): it holds neither the tests nor
the verdict, so printing a marker, ending the process, patching `assert` or returning an object
that equals everything gains nothing.

What it costs: results that are objects of the solution's own classes are opaque to the tests,
which can only hand them back.

The tests decide by raising or not. Tests that call or assert nothing say nothing: unscored. So
do tests that cannot be run, as long as the solution had no part in it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aflow_tune.sandbox import Channel, Ending, Execution, Limits, ProgramEnded, open_channel

MESSAGE_KB = 8192
"""What one call's arguments or result may take as JSON, at least."""
GRACE_SECONDS = 2.0
"""The tests may go on for so much longer than the solution, to say why it failed."""


@dataclass(frozen=True)
class CodeVerdict:
    """Whether the program passed, or None where that cannot be said, and why.

    `executions` has the process whose end decided it, where one did.
    """

    passed: bool | None
    reason: str
    executions: tuple[Execution, ...] = ()


async def check_code(
    solution: str,
    tests: str | Sequence[str],
    entry_point: str,
    *,
    helpers: str = "",
    limits: Limits = Limits(),  # noqa: B008
    policy: str = "auto",
) -> CodeVerdict:
    """Run `tests` against the function `entry_point` of the program `solution`.

    Args:
        tests: a program, or its pieces such as asserts. It may define `check`, which is called
            with the function if it takes an argument; or it asserts on `candidate` or on the
            function by its name.
        helpers: a program that both sides have, such as what a prompt defines.
        limits: of each process; the time is for all tests together.
        policy: as `run_program` takes it.

    Raises:
        SandboxUnavailable: nothing was run.
    """
    text = tests if isinstance(tests, str) else "\n".join(tests)
    if not _asserts(text):
        return CodeVerdict(None, "the tests assert nothing")
    limits = replace(limits, output_kb=max(limits.output_kb, MESSAGE_KB))
    library = {"aflow_values.py": _source("_values.py"), "helpers.py": helpers}
    async with AsyncExitStack() as stack:
        graded = await stack.enter_async_context(
            open_channel(
                _source("_solution_program.py"),
                files={**library, "solution.py": solution},
                limits=limits,
                policy=policy,
            )
        )
        grader = await stack.enter_async_context(
            open_channel(
                _source("_tests_program.py"),
                files={**library, "tests.py": text},
                limits=replace(limits, seconds=limits.seconds + GRACE_SECONDS, cpu_seconds=None),
                policy=policy,
            )
        )
        return await _converse(graded, grader, entry_point)


async def _converse(graded: Channel, grader: Channel, entry_point: str) -> CodeVerdict:
    """Pass calls and results on until the grader has a verdict or one of the two ends."""
    loaded = await graded.receive()
    if loaded is None:
        return _ended(graded, "ended while it was loaded")
    if not isinstance(loaded, dict) or not isinstance(loaded.get("names"), dict):
        return CodeVerdict(False, f"the program does not load: {_failure(loaded)}")
    if not await _handed_on(grader, [entry_point, loaded["names"]]):
        return _UNUSABLE
    calls = 0
    while True:
        message = await grader.receive()
        if message is None:
            return _grader_ended(grader, calls)
        if isinstance(message, dict):
            verdict = message["verdict"]
            return CodeVerdict(verdict["passed"], verdict["reason"])
        calls += 1
        try:
            await graded.send(message)
            reply = await graded.receive()
        except ProgramEnded:
            reply = None
        if reply is None:
            return _ended(graded, "ended during a call")
        if not await _handed_on(grader, reply):
            return _UNUSABLE


_UNUSABLE = CodeVerdict(False, "the program sent a value that is too large or too deep")


async def _handed_on(grader: Channel, message: Any) -> bool:
    """Whether what the solution sent can be sent on: other bytes may have made it shorter."""
    with contextlib.suppress(ProgramEnded):  # which is seen when it is listened to
        try:
            await grader.send(message)
        except (ValueError, RecursionError):
            return False
    return True


def _ended(channel: Channel, what: str) -> CodeVerdict:
    try:
        execution = channel.execution()
    except RuntimeError:  # it goes on, having sent null or closed its end
        return CodeVerdict(False, "the program closed its channel")
    ending = "" if execution.ending is Ending.FINISHED else f": {execution.ending.value}"
    return CodeVerdict(False, f"the program {what}{ending}", (execution,))


def _grader_ended(channel: Channel, calls: int) -> CodeVerdict:
    """The tests' process was killed: by what the solution made of it, if it was called."""
    execution = channel.execution()
    reason = f"the tests ended without a verdict: {execution.ending.value}"
    return CodeVerdict(False if calls else None, reason, (execution,))


def _failure(loaded: Any) -> str:
    try:
        return f"{loaded['failed']['names'][0]}: {loaded['failed']['message']}"[:500]
    except (TypeError, KeyError, IndexError, RecursionError):
        return "it sent something else"


def _asserts(tests: str) -> bool:
    """Whether there is any assert; what cannot be parsed is left to the grader to report."""
    try:
        return any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(tests)))
    except (SyntaxError, ValueError):
        return bool(tests.strip())


@functools.cache
def _source(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
