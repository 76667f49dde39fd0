"""Finds the program in an answer, and checks whether it passes its tests.

published (`sanitize` in scripts/utils/sanitize.py of the public AFlow code, after EvalPlus): the
longest run of lines that is Python; of that imports, and definitions that the entry point reaches.
strict: the whole text, or its one fenced block that defines the entry point.

`check_together` gives the verdict of the public code; but there a solution can read the tests,
patch what they use and return objects that equal everything. So `check_code` runs what passes a
second time with the tests in another process. A call `candidate(...)` goes through this module,
which trusts neither side; the solution can only answer calls with values (`_graded.py`). Outcomes:
docs/scoring.md.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import itertools
import re
import secrets
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aflow_tune.sandbox import Channel, Ending, Limits, ProgramEnded, open_channel

MESSAGE_KB = 8192  # least limit for the arguments or the result of a call as JSON
GRACE_SECONDS = 2.0  # for the tests to say why the solution's process ended


@dataclass(frozen=True)
class CodeVerdict:
    """Whether the program passed (None: undecided), and why not."""

    passed: bool | None
    reason: str


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
    """Run `tests` against a program in one process; arguments and errors as `check_code`. `shared`:
    both use one global namespace, as in the public code; else neither can redefine the other's."""
    text = tests if isinstance(tests, str) else "\n".join(tests)
    try:
        tree = ast.parse(text)
        compile(tree, "tests.py", "exec", dont_inherit=True)
    except _NO_PYTHON as error:
        return CodeVerdict(None, f"the tests are no Python: {error}")
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        return CodeVerdict(None, "the tests assert nothing")
    token, program = secrets.token_hex(), _program("run_together")
    async with open_channel(program, limits=_roomy(limits), policy=policy) as channel:
        with contextlib.suppress(ProgramEnded):  # `receive` then returns None
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
) -> CodeVerdict:
    """Run `tests` against the function `entry_point` of the program `solution`.

    `tests` assert on `candidate` or the function by its name, or define `check`, which is called
    with the function if it takes an argument. Both sides have `helpers`. `limits` hold for each
    process; the tests' own has `GRACE_SECONDS` more. Raises SandboxUnavailable: nothing was run.
    """
    text = tests if isinstance(tests, str) else "\n".join(tests)
    given: dict[str, Any] = {"helpers": helpers, "limits": limits, "policy": policy}
    shared = not _may_clash(solution, text)
    together = await check_together(solution, text, entry_point, **given, shared=shared)
    if not together.passed:
        return together
    limits = _roomy(limits)
    longer = replace(limits, seconds=limits.seconds + GRACE_SECONDS, cpu_seconds=None)
    mine = {"helpers.py": helpers, "solution.py": solution}
    theirs = {"helpers.py": helpers, "tests.py": text}
    serves, asks = _program("serve_solution"), _program("run_tests")
    async with (
        open_channel(serves, files=mine, limits=limits, policy=policy) as graded,
        open_channel(asks, files=theirs, limits=longer, policy=policy) as grader,
    ):
        return await _converse(graded, grader, entry_point)


def _roomy(limits: Limits) -> Limits:
    return replace(limits, output_kb=max(limits.output_kb, MESSAGE_KB))


async def _converse(graded: Channel, grader: Channel, entry_point: str) -> CodeVerdict:
    """Relay calls and results until the grader has a verdict or one of the two ends."""
    loaded = await graded.receive()
    if loaded is None:
        return _ended(graded, "the program ended while it was loaded", apart=True)
    if not isinstance(loaded, dict) or "loaded" not in loaded:
        fault = loaded.get("failed") if isinstance(loaded, dict) else None
        text = fault if isinstance(fault, str) else "it sent something else"
        return CodeVerdict(False, f"the program does not load: {text}"[:500])
    reply: Any = entry_point
    while True:
        with contextlib.suppress(ProgramEnded):  # `receive` then returns None
            try:
                await grader.send(reply)
            except (ValueError, RecursionError):  # our JSON can be longer than what arrived
                return CodeVerdict(False, "the program sent a value that is too large or too deep")
        message = await grader.receive()
        if message is None:
            return _ended(grader, "the tests ended without a verdict", apart=True)
        if isinstance(message, dict):
            return CodeVerdict(*message["verdict"])
        with contextlib.suppress(ProgramEnded):
            await graded.send(message)
        reply = await graded.receive()
        if reply is None:
            return _ended(graded, "the program ended during a call", apart=True)


def _ended(channel: Channel, what: str, *, apart: bool = False) -> CodeVerdict:
    """The verdict on a process that ended. `apart`: hitting a limit is undecided, not a failure."""
    execution = channel.execution()
    if execution.ending is Ending.FINISHED:
        return CodeVerdict(False, what)
    passed = None if apart and execution.ending is not Ending.FAILED else False
    return CodeVerdict(passed, f"{what}: {execution.ending.value}")


@functools.cache
def _program(role: str) -> str:
    """The source of one role: without the grader, so that no solution can find it in its frames."""
    text = Path(__file__).with_name("_graded.py").read_text(encoding="utf-8")
    top, *parts = text.split("\n# role: ")
    (own,) = (part for part in parts if part.startswith(f"{role}\n"))
    return f"{top}\n# {own}\n{role}()\n"


# The program in an answer

MAX_CHARACTERS = 100_000
MAX_SEARCH_LINES = 400  # in which the published rule looks for a program
MAX_PARSED_LINES = 200_000  # by that search, repeats included: some seconds at most
_FENCED = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL
)
_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


class NoProgram(ValueError):
    """The answer has no program, or more than one."""


def published_program(answer: str, entry_point: str) -> str:
    """The program that the published rule runs; it may lack the entry point. Raises NoProgram: the
    answer is too long to search."""
    code = _longest_run(answer)
    try:
        return _reachable(_parse(code), entry_point)
    except _NO_PYTHON:
        return code


def strict_program(answer: str, entry_point: str) -> str:
    """The whole answer if it is Python, else its one fenced program that defines the entry point.
    Raises NoProgram: the answer is too long, or has none or several different ones."""
    if len(answer) > MAX_CHARACTERS:
        raise NoProgram(f"longer than {MAX_CHARACTERS:,} characters")
    if _fault(answer) is None:
        return answer
    blocks = [match[2] for match in _FENCED.finditer(answer)]
    programs = {
        ast.dump(_parse(block)): block
        for block in blocks
        if _fault(block) is None and entry_point in _defined(_parse(block))
    }
    if not programs:
        raise NoProgram(f"no Python program that defines {entry_point}")
    if len(programs) > 1:
        raise NoProgram(f"{len(programs)} programs that differ")
    return next(iter(programs.values()))


def _may_clash(program: str, tests: str) -> bool:
    """Whether one may redefine a global name that the other uses."""
    try:
        return bool(_defined(_parse(program)) & (_defined(_parse(tests)) | vars(builtins).keys()))
    except _NO_PYTHON:
        return True


def helpers_of(prompt: str, entry_point: str) -> str:
    """What a prompt defines besides the entry point; empty if it is not Python."""
    if _fault(prompt) is not None:
        return ""
    kept = [node for node in _parse(prompt).body if getattr(node, "name", "") != entry_point]
    return ast.unparse(ast.Module(body=kept, type_ignores=[]))


def _longest_run(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise NoProgram(f"longer than {MAX_CHARACTERS:,} characters")
    if _fault(text) is None:
        return text
    lines = text.split("\n")
    if len(lines) > MAX_SEARCH_LINES:
        raise NoProgram(f"no Python as a whole, and more than {MAX_SEARCH_LINES} lines")
    filled = [0, *itertools.accumulate(bool(line.strip()) for line in lines)]
    # Longest first; ties in the order of the published loop.
    runs = sorted(
        (filled[first] - filled[last], first, last)
        for first in range(len(lines))
        for last in range(first + 2, len(lines) + 1)
        if filled[last] > filled[first]
    )
    parsed = 0
    hopeless: dict[int, int] = {}  # by first line: the line that no valid run from there includes
    for _, first, last in runs:
        if last > hopeless.get(first, len(lines)):
            continue
        fault = _fault("\n".join(lines[first:last]))
        if fault is None:
            return "\n".join(lines[first:last])
        line = getattr(fault, "lineno", None)
        if line and getattr(fault, "msg", "") == "invalid syntax":
            # No run from the same line that includes the faulty line can be parsed.
            hopeless[first] = first + line - 1
        parsed += last - first
        if parsed > MAX_PARSED_LINES:
            raise NoProgram(f"none found within {MAX_PARSED_LINES:,} parsed lines")
    return lines[0]


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes and the like
        return ast.parse(text)


def _fault(text: str) -> Exception | None:
    try:
        _parse(text)
    except _NO_PYTHON as error:
        return error
    return None


def _reachable(tree: ast.Module, entry_point: str) -> str:
    """Imports, and definitions that the entry point refers to, directly or through others."""
    imported = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    definitions = [(name, node) for node in tree.body for name in _names(node)]
    known = {name for name, _ in definitions}
    uses: dict[str, set[str]] = {name: set() for name in known}
    for name, node in definitions:
        uses[name] |= {
            part.id for part in ast.walk(node) if isinstance(part, ast.Name) and part.id in known
        }
    reached: set[str] = set()
    waiting = [entry_point] if entry_point in known else []
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(uses[name])
    kept = [*imported, *(node for name, node in definitions if name in reached)]
    return "\n".join(map(ast.unparse, kept))


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _defined(tree: ast.Module) -> set[str]:
    return {name for node in tree.body for name in _names(node)}
