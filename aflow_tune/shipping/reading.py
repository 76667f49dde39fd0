"""What one Python file asks for: modules it imports, files it opens, variables it reads.

Read from the syntax tree, so that imports inside functions are found and nothing is run. Left
out are imports under `if TYPE_CHECKING`; imports that may fail (`try` with `ImportError`) are
marked. Paths are followed as far as they are written with constants from `__file__` on:
`Path(__file__).parent / "data" / "a.json"`, `os.path.join(os.path.dirname(__file__), "a")`, and
names of the module that hold such a path; and texts that name a file or folder from the current
folder on (`Path("prompts")`, `"prompts/*.txt"`, `f"prompts/{name}.txt"`). Names that are computed
otherwise cannot be seen.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_FALLING_BACK = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_SAME_PATH = {"resolve", "absolute", "expanduser", "as_posix"}
_LONGEST_NAME = 200
_BLANK = re.compile(r"[*?\[{%]")
"""Where a part of a text begins that is filled in later."""
_READ_FOLDERS = {"listdir", "scandir", "walk", "FileSystemLoader"}
_OS_SAME_PATH = {"abspath", "realpath", "normpath", "expanduser", "fspath"}


@dataclass(frozen=True)
class Import:
    """One import of a module by its absolute name."""

    name: str
    line: int
    optional: bool = False
    """The file goes on without it."""
    maybe: bool = False
    """`from a import b`: `a.b` may be a module or a name in one."""


@dataclass
class FileReading:
    """What one file asks for."""

    imports: list[Import] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    """Existing files and folders that the code names, from its own place on."""
    variables: dict[str, int] = field(default_factory=dict)
    """Environment variables by the line that reads them first."""


def read_file(path: Path, package: str, source: str | None = None) -> FileReading:
    """Read a file that is a module of `package` (empty for a top-level module).

    A file that cannot be parsed asks for nothing here: importing it will tell.

    Args:
        source: of what is no file, such as the cell of a notebook.
    """
    try:
        tree = ast.parse(path.read_bytes() if source is None else source)
    except (SyntaxError, ValueError, OSError, RecursionError):
        return FileReading()
    reader = _Reader(path, package)
    for statement in tree.body:
        reader.note_constant(statement)
    reader.visit(tree)
    return reader.found


class _Reader(ast.NodeVisitor):
    def __init__(self, path: Path, package: str) -> None:
        self.path, self.package = path, package
        self.found = FileReading()
        self.values: dict[str, Path | str] = {}
        """What the module's own names hold, where that is a path or a text."""
        self._optional = False

    def note_constant(self, statement: ast.stmt) -> None:
        """Remember `NAME = path or text` of the module's top level."""
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        value = getattr(statement, "value", None)
        if targets and isinstance(value, ast.expr):
            held = self._value(value)
            for target in targets:
                if isinstance(target, ast.Name) and held is not None:
                    self.values[target.id] = held

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._import(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._absolute(node.module or "", node.level)
        if base is None:
            return
        for name in _lineage(base):
            self._import(name, node)
        for alias in node.names:
            if alias.name != "*":
                self._import(f"{base}.{alias.name}" if base else alias.name, node, maybe=True)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING":
            for statement in node.orelse:
                self.visit(statement)
            return
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        names = {name for handler in node.handlers for name in _caught(handler)}
        before, self._optional = self._optional, self._optional or bool(names & _FALLING_BACK)
        for statement in node.body:
            self.visit(statement)
        self._optional = before
        for rest in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(rest)

    def visit_With(self, node: ast.With) -> None:
        texts = [ast.unparse(item.context_expr) for item in node.items]
        suppressed = any("suppress(" in text and "Error" in text for text in texts)
        before, self._optional = self._optional, self._optional or suppressed
        self.generic_visit(node)
        self._optional = before

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rpartition(".")[2]
        first = self._value(node.args[0]) if node.args else None
        if isinstance(first, str):
            if name in ("import_module", "__import__"):
                level = len(first) - len(first.lstrip("."))
                absolute = self._absolute(first.lstrip("."), level)
                for part in _lineage(absolute or ""):
                    self._import(part, node)
            elif name == "getenv" or ast.unparse(node.func).endswith("environ.get"):
                self.found.variables.setdefault(first, node.lineno)
        if name in _READ_FOLDERS and isinstance(first, str):
            self._note_text(f"{first}/")
        if ast.unparse(node.func).endswith("path.join"):
            self._note_start(node.args)
        self._note_path(node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        key = self._value(node.slice)
        if isinstance(key, str) and ast.unparse(node.value).endswith("environ"):
            self.found.variables.setdefault(key, node.lineno)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._note_path(node)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._note_path(node)
        start = ""
        for part in node.values:
            held = self._value(part)
            if not isinstance(held, str):
                self._note_text(f"{start}*")
                break
            start += held
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._note_text(node.value)

    def _note_text(self, text: str) -> None:
        """Note what a text names from the folder that the command was started in: a file, a
        folder, or the folder before what is filled in (`prompts/*.txt`)."""
        if not 2 < len(text) < _LONGEST_NAME or not ("." in text or "/" in text):
            return
        try:
            if (Path.cwd() / text).is_file():
                self.found.paths.append(Path(os.path.normpath(Path.cwd() / text)))
                return
            start = _BLANK.split(text, maxsplit=1)[0]
            folder = text if start == text else start.rpartition("/")[0]
            named = _from_here(folder) if "/" in start else None
            if named is not None and named.is_dir() and self._is_data(named):
                self.found.paths.append(named)
        except (OSError, ValueError):
            return

    def _note_start(self, parts: Sequence[ast.expr]) -> None:
        """Of `os.path.join("data", name)`, the folder before the first part that is computed."""
        start: Path | str | None = None
        for part in parts:
            held = self._value(part)
            if held is None:
                break
            start = _from_here(held) if start is None else _joined(start, held)
            if start is None:
                return
        # Unlike `Path.is_dir`, which raises for what may not be looked at.
        if isinstance(start, Path) and self._is_data(start) and os.path.isdir(start):
            self.found.paths.append(start)

    def _is_data(self, path: Path) -> bool:
        """The file's own folder is no data: nearly every use of `__file__` names it. Nor is the
        current one."""
        here = Path.cwd()
        return path not in (self.path, here, *self.path.parents, *here.parents)

    def _import(self, name: str, node: ast.AST, maybe: bool = False) -> None:
        parts, line = list(_lineage(name)), getattr(node, "lineno", 0)
        for part in parts:
            last = maybe and part == parts[-1]
            self.found.imports.append(Import(part, line, self._optional, last))

    def _absolute(self, name: str, level: int) -> str | None:
        if level == 0:
            return name
        parts = self.package.split(".") if self.package else []
        if level - 1 >= max(len(parts), 1):
            return None
        base = parts[: len(parts) - (level - 1)]
        return ".".join([*base, name] if name else base)

    def _note_path(self, node: ast.expr) -> None:
        value = self._value(node)
        if isinstance(value, str) and not isinstance(node, ast.Call):
            self._note_text(value)
        if isinstance(value, Path) and self._is_data(value):
            try:
                if value.exists():
                    self.found.paths.append(value)
            except OSError:
                return

    def _value(self, node: ast.expr) -> Path | str | None:
        """The path or text that an expression stands for, where that can be read off."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.Name):
            return self.path if node.id == "__file__" else self.values.get(node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return _joined(self._value(node.left), self._value(node.right))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return _appended(self._value(node.left), self._value(node.right))
        if isinstance(node, ast.FormattedValue):
            return self._value(node.value)
        if isinstance(node, ast.JoinedStr):
            parts = [self._value(part) for part in node.values]
            return functools.reduce(_appended, parts[1:], parts[0]) if parts else None
        if isinstance(node, ast.Attribute) and node.attr == "parent":
            left = self._value(node.value)
            return left.parent if isinstance(left, Path) else None
        if isinstance(node, ast.Subscript):
            return self._ancestor(node)
        return self._called(node) if isinstance(node, ast.Call) else None

    def _ancestor(self, node: ast.Subscript) -> Path | None:
        number = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(node.value, ast.Attribute) and node.value.attr == "parents":
            left = self._value(node.value.value)
            if isinstance(left, Path) and isinstance(number, int):
                parents = left.parents
                return parents[number] if 0 <= number < len(parents) else None
        return None

    def _called(self, node: ast.Call) -> Path | str | None:
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        values = [self._value(argument) for argument in node.args]
        first = values[0] if values else None
        if last == "str" and first is not None:
            return first
        if last in ("Path", "PurePath", "PosixPath") and first is not None:
            return _all_joined(_from_here(first), values[1:])
        if last == "dirname" and isinstance(first, Path):
            return first.parent
        if last in _OS_SAME_PATH and isinstance(first, Path):
            return Path(os.path.normpath(first))
        if name.endswith("path.join") and first is not None:
            return _all_joined(_from_here(first), values[1:])
        if not isinstance(node.func, ast.Attribute):
            return None
        owner = self._value(node.func.value)
        if isinstance(owner, Path):
            if last in _SAME_PATH:
                return owner
            if last == "joinpath":
                return _all_joined(owner, values)
            if last == "with_name" and isinstance(first, str):
                return owner.with_name(first)
        return None


def _from_here(named: Path | str) -> Path | None:
    """A path; a text as it is understood from the current folder on. None for an absolute text:
    what it names may be a disk that all nodes share."""
    if isinstance(named, Path):
        return named
    return None if named.startswith(("/", "~")) else Path(os.path.normpath(Path.cwd() / named))


def _all_joined(first: Path | str | None, more: Sequence[Path | str | None]) -> Path | str | None:
    return functools.reduce(_joined, more, first)


def _joined(left: Path | str | None, right: Path | str | None) -> Path | str | None:
    if isinstance(left, Path) and isinstance(right, (str, Path)):
        return Path(os.path.normpath(left / right))
    return None


def _appended(left: Path | str | None, right: Path | str | None) -> Path | str | None:
    """`folder + "/name"`, as texts are put together."""
    if isinstance(left, Path) and isinstance(right, str):
        return Path(os.path.normpath(str(left) + right))
    return left + right if isinstance(left, str) and isinstance(right, str) else None


def _lineage(name: str) -> Iterator[str]:
    """`a.b.c` as `a`, `a.b`, `a.b.c`: importing one imports all of them."""
    parts = name.split(".") if name else []
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])


def _caught(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"BaseException"}
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind).rpartition(".")[2] for kind in kinds}
