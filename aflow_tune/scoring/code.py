"""Whether a program passes tests: in one sandboxed process with them, and apart from them.

`check_together` gives the field's verdict on every program; but there a solution can read the
tests, patch what they use and return objects that equal everything. `check_code` resists that: what
passes together runs once more with the tests in another process. A call `candidate(...)` travels
over both channels through this module, which passes messages on and believes nothing; the solution
can only answer calls with values (`_values.py`). The table of outcomes stands in docs/scoring.md.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aflow_tune.sandbox import Channel, Ending, Limits, ProgramEnded, open_channel

MESSAGE_KB = 8192
"""What one call's arguments or result may take as JSON, at least."""
GRACE_SECONDS = 2.0
"""The tests may go on for so much longer than the solution, to say why it failed."""


@dataclass(frozen=True)
class CodeVerdict:
    """Whether the program passed, or None where that cannot be said, and why."""

    passed: bool | None
    reason: str


_UNUSABLE = CodeVerdict(False, "the program sent a value that is too large or too deep")


async def check_together(
    solution: str,
    tests: str | Sequence[str],
    entry_point: str,
    *,
    helpers: str = "",
    limits: Limits = Limits(),  # noqa: B008
    policy: str = "auto",
    shared: bool = True,
) -> CodeVerdict:
    """Run `tests` against a program in one process. Arguments and errors as of `check_code`.

    Args:
        shared: also let them share their global names, as the field does: what the tests define
            replaces what the solution defined. Else neither changes what the other's names mean.
    """
    text = tests if isinstance(tests, str) else "\n".join(tests)
    if unusable := _unusable(text):
        return CodeVerdict(None, unusable)
    token = secrets.token_hex()
    async with open_channel(
        _source("_together_program.py"),
        files={"aflow_values.py": _source("_values.py")},
        limits=_roomy(limits),
        policy=policy,
    ) as channel:
        with contextlib.suppress(ProgramEnded):  # which is seen when it is listened to
            await channel.send([token, shared, entry_point, helpers, solution, text])
        said = await channel.receive()
        if said is None:
            return _ended(channel, "the program ended")
        if not isinstance(said, list) or said[:1] != [token]:
            return CodeVerdict(False, "the program sent something else than a verdict")
        _, passed, reason = said
        return CodeVerdict(passed, reason)


async def check_code(
    solution: str,
    tests: str | Sequence[str],
    entry_point: str,
    *,
    helpers: str = "",
    limits: Limits = Limits(),  # noqa: B008
    policy: str = "auto",
    passes_together: bool = False,
) -> CodeVerdict:
    """Run `tests` against the function `entry_point` of the program `solution`.

    Args:
        tests: a program, or its pieces such as asserts. It may define `check`, which is called
            with the function if it takes an argument; or it asserts on `candidate` or on the
            function by its name.
        helpers: a program that both sides have, such as what a prompt defines.
        limits: of each process; the time is for all tests together.
        policy: as `run_program` takes it.
        passes_together: whether it is known that `check_together` lets it pass.

    Raises:
        SandboxUnavailable: nothing was run.
    """
    text = tests if isinstance(tests, str) else "\n".join(tests)
    if not passes_together:
        given: dict[str, Any] = {"helpers": helpers, "limits": limits, "policy": policy}
        together = await check_together(solution, text, entry_point, **given, shared=False)
        if not together.passed:
            return together
    limits = _roomy(limits)
    longer = replace(limits, seconds=limits.seconds + GRACE_SECONDS, cpu_seconds=None)
    library = {"aflow_values.py": _source("_values.py"), "helpers.py": helpers}
    mine, theirs = {**library, "solution.py": solution}, {**library, "tests.py": text}
    programs = _source("_solution_program.py"), _source("_tests_program.py")
    async with (
        open_channel(programs[0], files=mine, limits=limits, policy=policy) as graded,
        open_channel(programs[1], files=theirs, limits=longer, policy=policy) as grader,
    ):
        return await _converse(graded, grader, entry_point)


def _roomy(limits: Limits) -> Limits:
    return replace(limits, output_kb=max(limits.output_kb, MESSAGE_KB))


async def _converse(graded: Channel, grader: Channel, entry_point: str) -> CodeVerdict:
    """Pass calls and results on until the grader has a verdict or one of the two ends."""
    loaded = await graded.receive()
    if loaded is None:
        return _ended(graded, "the program ended while it was loaded", apart=True)
    if not isinstance(loaded, dict) or "loaded" not in loaded:
        fault = loaded.get("failed") if isinstance(loaded, dict) else None
        text = fault if isinstance(fault, str) else "it sent something else"
        return CodeVerdict(False, f"the program does not load: {text}"[:500])
    reply: Any = entry_point
    while True:
        with contextlib.suppress(ProgramEnded):  # which is seen when it is listened to
            try:
                await grader.send(reply)
            except (ValueError, RecursionError):  # other bytes may have made it shorter
                return _UNUSABLE
        message = await grader.receive()
        if message is None:
            return _ended(grader, "the tests ended without a verdict", apart=True)
        if isinstance(message, dict):
            verdict = message["verdict"]
            return CodeVerdict(verdict["passed"], verdict["reason"])
        with contextlib.suppress(ProgramEnded):
            await graded.send(message)
        reply = await graded.receive()
        if reply is None:
            return _ended(graded, "the program ended during a call", apart=True)


def _ended(channel: Channel, what: str, *, apart: bool = False) -> CodeVerdict:
    """Its process has ended. What passed together may need more apart: that is no fault."""
    execution = channel.execution()
    if execution.ending is Ending.FINISHED:
        return CodeVerdict(False, what)
    passed = None if apart and execution.ending is not Ending.FAILED else False
    return CodeVerdict(passed, f"{what}: {execution.ending.value}")


def _unusable(tests: str) -> str:
    try:
        tree = ast.parse(tests)
        compile(tree, "tests.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"the tests are no Python: {error}"
    asserts = any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    return "" if asserts else "the tests assert nothing"


@functools.cache
def _source(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
