"""Finding the program in an answer: as AFlow's public code does, and whole.

published (`sanitize` in scripts/utils/sanitize.py of the public AFlow code, after EvalPlus): the
longest run of lines that is Python; of that imports, and definitions that the entry point reaches.
strict: the whole text, or its one fenced block that defines the entry point. Only parses.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import warnings
from collections.abc import Iterator

MAX_CHARACTERS = 100_000
MAX_SEARCH_LINES = 400
"""Lines of an answer that is no Python as a whole in which the published rule searches."""
MAX_PARSED_LINES = 200_000
"""Lines that the search may parse, repeats counted: some seconds at most."""
_FENCED = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL
)


_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


class NoProgram(ValueError):
    """The answer has no program, or more than one."""


def published_program(answer: str, entry_point: str) -> str:
    """The program that the published rule runs; it may lack the entry point. Raises NoProgram: the
    answer is too long to be searched through."""
    code = _longest_run(answer)
    try:
        return _reachable(_parse(code), entry_point)
    except _NO_PYTHON:
        return code


def strict_program(answer: str, entry_point: str) -> str:
    """The one program of the answer. Raises NoProgram: nothing in it is Python with the entry
    point, or several different programs."""
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


def same_program(first: str, second: str) -> bool:
    """Whether two texts are the same Python, but for layout and comments."""
    try:
        return first == second or ast.dump(_parse(first)) == ast.dump(_parse(second))
    except _NO_PYTHON:
        return False


def may_clash(program: str, tests: str) -> bool:
    """Whether one may change what a global name means to the other."""
    try:
        return bool(_defined(_parse(program)) & (_defined(_parse(tests)) | vars(builtins).keys()))
    except _NO_PYTHON:
        return True


def helpers_of(prompt: str, entry_point: str) -> str:
    """What a prompt defines beside the entry point: its imports and other functions. Empty where
    the prompt is not Python, as a task in words."""
    if _fault(prompt) is not None:
        return ""
    kept = [node for node in _parse(prompt).body if getattr(node, "name", "") != entry_point]
    return ast.unparse(ast.Module(body=kept, type_ignores=[]))


def _longest_run(text: str) -> str:
    # A text that is Python as a whole is its own longest run, up to blank lines around it.
    if len(text) > MAX_CHARACTERS:
        raise NoProgram(f"longer than {MAX_CHARACTERS:,} characters")
    if _fault(text) is None:
        return text
    lines = text.split("\n")
    if len(lines) > MAX_SEARCH_LINES:
        raise NoProgram(f"no Python as a whole, and more than {MAX_SEARCH_LINES} lines")
    filled = [0, *itertools.accumulate(bool(line.strip()) for line in lines)]
    # The first of the longest, in the order in which the published loop meets them.
    runs = sorted(
        (filled[first] - filled[last], first, last)
        for first in range(len(lines))
        for last in range(first + 2, len(lines) + 1)
        if filled[last] > filled[first]
    )
    parsed = 0
    hopeless: dict[int, int] = {}  # first line to the line that no run from there may have
    for _, first, last in runs:
        if last > hopeless.get(first, len(lines)):
            continue
        fault = _fault("\n".join(lines[first:last]))
        if fault is None:
            return "\n".join(lines[first:last])
        line = getattr(fault, "lineno", None)
        if line and getattr(fault, "msg", "") == "invalid syntax":
            # Nothing that goes on like this up to that line can be parsed.
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
