"""Resolves a reference in a YAML to the object that it names. All references are resolved here.

    module:function            path/file.py:function            path/file.py

Without `function`, exactly one must be marked with `@workflow`. A file that belongs to a
package is imported under its package name, so that relative imports work; any other file is loaded
once per path under a name made from the path. Its folder, and for modules the current and the base
folder, are appended to `sys.path`: siblings can be imported, and nothing installed is shadowed.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

from aflow_tune.contract.import_faults import import_fault
from aflow_tune.errors import BadInput, Fault

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__aflow_workflow__"
_MOST_NAMES = 8
_FOLDERS: set[Path] = set()
"""The folders that this module added to `sys.path`."""


@overload
def workflow(function: F) -> F: ...
@overload
def workflow(*, name: str | None = None) -> Callable[[F], F]: ...
def workflow(function: Any = None, *, name: str | None = None) -> Any:
    """Mark a workflow function, so that its file can be named without it; returns the function
    itself. `name` is another name for it in `path/file.py:name`. TypeError: it is not callable."""
    # Not the function's __module__: that of a partial or an object differs.
    home = sys._getframe(1).f_globals.get("__name__", "")

    def mark(marked: F) -> F:
        if not callable(marked):
            raise TypeError(f"@workflow marks functions, not {marked!r:.80}")
        named = getattr(marked, "__name__", None) or type(marked).__name__
        setattr(marked, _MARK, (name or named, home))
        return marked

    return mark if function is None else mark(function)


def resolve(spec: str, base_dir: Path | None = None) -> Any:
    """The callable that `spec` names: `module:function`, `path/file.py:function` or
    `path/file.py`, relative to the current folder or else to `base_dir`. `function` may be dotted.

    Raises BadInput: nothing is there, it cannot be imported, or it cannot be called; at `spec`, or
    at the line of the user's file that fails."""
    if not spec.strip() or spec.strip().startswith(":"):
        expected = "`module:function` or `path/file.py:function`"
        raise _refused(spec, expected, repr(spec), "write `workflow: path/file.py:function`")
    place, colon, name = spec.strip().rpartition(":")
    if not colon:
        place, name = name, ""
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    module = _load_file(spec, place, base_dir) if is_file else _import(spec, place, base_dir)
    marked = discover(module)
    known = [
        key
        for key, value in vars(module).items()
        if inspect.isroutine(value)
        and getattr(value, "__module__", None) == module.__name__
        and not key.startswith("_")
    ]
    if not name:
        if len(marked) == 1:
            return marked[0][1]
        found = ", ".join(marked_as for marked_as, _ in marked) or "none"
        fix = f"name one: `{place}:{known[0] if known else 'function'}`"
        raise _refused(spec, "one function marked with @workflow", found, fix)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            for marked_as, function in marked:
                if marked_as == name:
                    return function
            break
        target = getattr(target, part)
    else:
        if callable(target):
            return target
    near = difflib.get_close_matches(name, known, 1, 0.5) or known[:_MOST_NAMES]
    listed = f"{module.__file__ or place} has {', '.join(near) or 'no function'}"
    raise _refused(spec, f"a function `{name}`", listed, "name one of its functions")


def discover(module: ModuleType) -> list[tuple[str, Callable[..., Any]]]:
    """The functions marked with `@workflow` in a module itself, with their names, in its order."""
    found: dict[int, tuple[str, Callable[..., Any]]] = {}
    for value in vars(module).values():
        mark = inspect.getattr_static(value, _MARK, None)
        if isinstance(mark, tuple) and mark[1] == module.__name__:
            found.setdefault(id(value), (mark[0], value))
    return list(found.values())


def _load_file(spec: str, place: str, base_dir: Path | None) -> ModuleType:
    path = _find_file(spec, place, base_dir)
    package = _package_name(path)
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = package or f"_aflow_tune_{re.sub(r'[^0-9a-zA-Z]', '_', path.stem)}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    _refuse_twins(path)
    if package:
        with _importing(spec):
            return importlib.import_module(package)
    _append_to_sys_path(path.parent)
    file_spec = importlib.util.spec_from_file_location(name, path)
    assert file_spec is not None
    assert file_spec.loader is not None
    module = importlib.util.module_from_spec(file_spec)
    sys.modules[name] = module
    try:
        with _importing(spec):
            file_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(spec: str, name: str, base_dir: Path | None) -> ModuleType:
    for folder in (Path.cwd(), base_dir):
        if folder is not None:
            _append_to_sys_path(folder.absolute())
    with _importing(spec):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # the missing module is one that it imports
    parent, _, last = name.rpartition(".")
    meant = f"`{parent}:{last}`" if parent and ":" not in spec else f"`path/{last}.py:function`"
    fix = f"install it, or write {meant}"
    raise _refused(spec, f"a module `{name}` that can be imported", "no such module", fix)


@contextlib.contextmanager
def _importing(spec: str) -> Iterator[None]:
    """Turn whatever the user's code raises into a BadInput at the failing line."""
    try:
        yield
    except (KeyboardInterrupt, BadInput):
        raise
    except BaseException as error:
        raise BadInput(f"{spec} could not be imported.", [import_fault(spec, error)]) from error


def _find_file(spec: str, place: str, base_dir: Path | None) -> Path:
    path = Path(place).expanduser()
    candidates = [path, *([base_dir / path] if base_dir is not None else [])]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    looked = " or ".join(str(candidate.absolute()) for candidate in candidates)
    folders = [one if one.is_dir() else one.parent for one in candidates]
    names = [file.name for folder in folders for file in sorted(folder.glob("*.py"))]
    near = difflib.get_close_matches(path.name, names, 1, 0.5) or names[:_MOST_NAMES]
    fix = f"there is {', '.join(near)}" if near else "write an absolute path"
    raise _refused(spec, "a Python file", f"no file {looked}", fix)


def _package_name(path: Path) -> str | None:
    """The dotted name of a file in an importable package, or None."""
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if folder == path.parent or not all(part.isidentifier() for part in parts):
        return None
    _append_to_sys_path(folder)
    with contextlib.suppress(ImportError, ValueError):
        top = importlib.util.find_spec(parts[0])
        if top is not None and top.origin is not None:
            same = Path(top.origin).resolve() == (folder / parts[0] / "__init__.py").resolve()
            return ".".join(parts) if same else None
    return None


def _refuse_twins(path: Path) -> None:
    """Refuse a file that imports a sibling if a module of that name is already loaded from the
    folder of another file: it would silently get that one."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return  # reported when it is executed
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for name in {name.partition(".")[0] for name in names}:
            sibling = path.parent / f"{name}.py"
            loaded = Path(getattr(sys.modules.get(name), "__file__", None) or sibling)
            if sibling.is_file() and loaded.resolve() != sibling and loaded.parent in _FOLDERS:
                raise BadInput.of(
                    f"{path.name} would get another file's modules.",
                    f"{path}:{getattr(node, 'lineno', 0)}",
                    f"`{name}` to be {sibling}",
                    f"{loaded}, imported before under the same name",
                    "rename one of the two files, or put each into a package of its own",
                )


def _append_to_sys_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        _FOLDERS.add(folder)
        importlib.invalidate_caches()


def _refused(spec: str, expected: str, found: str, fix: str) -> BadInput:
    return BadInput(f"{spec!r} names no function.", [Fault(spec, expected, found, fix)])
