"""Finding the Python program in a reply: fenced blocks, or the text itself.

Of several Python blocks (or blocks without a language), the last that defines the entry point is
taken; without an entry point, the last that parses. Definitions and imports that it needs are added
from the other blocks. An unclosed block reaches to the end. Without blocks the whole text is tried,
then the part from the first line that looks like code. Code is parsed, never executed. Programs in
answers to be scored are found by other rules: `aflow_tune.scoring.code`.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aflow_tune.scoring.code import MAX_CHARACTERS

MAX_BLOCKS = 20  # fenced blocks examined, from the last
MAX_FENCES = 4_000  # fence lines examined, from the last
MAX_CUTS = 20  # attempts to cut trailing prose off a text without blocks
_FENCE = re.compile(r"^[ \t]{0,16}(`{3,20}|~{3,20})([^\n`]*)$", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py", "py3", "python 3")
_UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError)
_CODE_LINE = re.compile(
    r"^(?:from[ \t]+[\w.]+[ \t]+import\b|import[ \t]+\w|def[ \t]+\w|async[ \t]+def[ \t]+\w"
    r"|class[ \t]+\w|@\w)",
    re.MULTILINE,
)


class Block(NamedTuple):
    """One fenced block; `start` and `end` include its fences."""

    language: str
    code: str
    start: int
    end: int
    closed: bool


def fenced_blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a text in order; an unclosed one comes last."""

    def block(opening: re.Match[str], stop: int, end: int, closed: bool) -> Block:
        code = text[opening.end() + 1 : stop]
        return Block(opening[2].strip().casefold(), code, opening.start(), end, closed)

    opening: re.Match[str] | None = None
    for fence in deque(_FENCE.finditer(text), MAX_FENCES):
        if opening is None:
            opening = fence
        elif fence[1].startswith(opening[1]) and not fence[2].strip():
            yield block(opening, fence.start(), fence.end(), closed=True)
            opening = None
        # A nested opening fence is content, as in Markdown examples.
    if opening is not None:
        yield block(opening, len(text), len(text), closed=False)


def program_in(text: str, entry_point: str = "") -> tuple[str, bool]:
    """The program in a text, and whether it took more than removing one fence to get it.

    Raises:
        ValueError: there is no program; the message completes 'the code ...'.
    """
    blocks = list(fenced_blocks(text))
    blocks = [block for block in blocks if block.language in _PYTHON] or blocks
    blocks = blocks[-MAX_BLOCKS:]
    codes = [textwrap.dedent(block.code).strip("\n") for block in blocks]
    reason = ""
    for number, code in [*enumerate(codes)][::-1] if blocks else enumerate(_candidates(text)):
        fault = _fault(code, entry_point)
        reason = reason or fault
        if not fault and not blocks:
            return code, code != text.strip()
        if not fault:
            whole = _completed(code, codes[:number] + codes[number + 1 :])
            return whole, not blocks[number].closed or whole != code
    raise ValueError(reason or "is missing")


def _candidates(text: str) -> Iterator[str]:
    """Parts of a text without fences that may be its program, the whole text first."""
    if len(text) > MAX_CHARACTERS:
        return
    whole = text.strip().strip("`").strip("\n")
    yield whole
    first = _CODE_LINE.search(whole)
    lines = whole[first.start() :].split("\n") if first else []
    for _ in range(MAX_CUTS):
        if not lines:
            return
        code = "\n".join(lines)
        error = _parse(code)
        if isinstance(error, ast.Module):
            yield code
            return
        line = error.lineno or 0 if isinstance(error, SyntaxError) else 0
        lines = lines[: max(0, min(line - 1, len(lines) - 1))]


def _fault(code: str, entry_point: str) -> str:
    """Why `code` is not the program; empty if it is."""
    if len(code) > MAX_CHARACTERS:
        return f"is longer than {MAX_CHARACTERS:,} characters"
    tree = _parse(code)
    if not isinstance(tree, ast.Module):
        line = f"{tree.msg} (line {tree.lineno})" if isinstance(tree, SyntaxError) else ""
        return f"is no Python: {line or type(tree).__name__}"
    own = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    if entry_point and entry_point not in _defined(own):
        return f"defines no `{entry_point}`"
    # A bare name or constant is prose that happens to parse.
    values = [node.value if isinstance(node, ast.Expr) else None for node in tree.body]
    return "is missing" if all(isinstance(v, ast.Name | ast.Constant) for v in values) else ""


def _parse(code: str) -> ast.Module | Exception:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes and the like
        try:
            return ast.parse(code)
        except _UNPARSED as error:
            return error


def _completed(code: str, others: Sequence[str]) -> str:
    """The code, preceded by the definitions and imports that it needs from other blocks. Other
    statements there, such as examples of its use, are left out."""
    wanted = [*_needed(code)]
    trees = map(_parse, others if wanted else ())
    bodies = [node for tree in trees for node in getattr(tree, "body", ())]
    found = [(node, names) for node in bodies if (names := _defined([node]))]
    taken: list[ast.stmt] = []
    while wanted:
        name = wanted.pop()
        # The last definition wins, as if the blocks were one file.
        giver = next((node for node, names in reversed(found) if name in names), None)
        if giver is not None and giver not in taken:
            taken.append(giver)
            wanted += _needed(ast.unparse(giver))
    parts = [ast.unparse(node) for node, _ in found if node in taken]
    whole = "\n\n\n".join([*parts, code])
    return whole if len(whole) <= MAX_CHARACTERS else code


def _needed(code: str) -> set[str]:
    """Names that a program reads but does not bind, except builtins."""
    nodes = list(ast.walk(tree)) if isinstance(tree := _parse(code), ast.Module) else []
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = _defined([node for node in nodes if isinstance(node, ast.stmt)]) | {*dir(builtins)}
    own |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return {node.id for node in names} - own


def _defined(body: Sequence[ast.stmt]) -> set[str]:
    """The names bound by definitions, imports and plain assignments."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names
