"""The only resolver of user code: `module:function` and `path/file.py:function`.

A file is loaded once, under a module name made from its path, so that it can be imported
again by nobody and pickled by value. Its folder is appended to `sys.path` for its siblings;
appended, so that it never hides what is installed.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

from aflow_tune.errors import BadInput, Fault

MARK = "__aflow_tune_workflow__"
_FORMS = "`path/file.py:function` or `module:function`"

F = TypeVar("F", bound=Callable[..., Any])


@overload
def workflow(function: F) -> F: ...
@overload
def workflow(*, name: str | None = None) -> Callable[[F], F]: ...
def workflow(function: F | None = None, *, name: str | None = None) -> F | Callable[[F], F]:
    """Mark a function as a workflow, so that its file can be named without the function.

    Sets an attribute and nothing else; `name` is how it is listed.
    """

    def mark(target: F) -> F:
        setattr(target, MARK, name or getattr(target, "__name__", type(target).__name__))
        return target

    return mark if function is None else mark(function)


def discover(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The marked functions of a module, by the attribute that holds them."""
    return {
        attribute: value
        for attribute, value in vars(module).items()
        if callable(value) and hasattr(value, MARK) and not isinstance(value, type)
    }


def resolve(spec: str, base_dir: Path | None = None) -> Any:
    """The object that `spec` names.

    Args:
        spec: `module:function`, `path/file.py:function`, or `path/file.py` alone where it
            holds exactly one function marked with `@workflow`.
        base_dir: where a relative path is looked for if it is not below the working folder.

    Raises:
        BadInput: with what is there and what to write instead.
    """
    place, colon, attribute = spec.rpartition(":") if ":" in spec else (spec, "", "")
    if not place or (colon and not attribute):
        raise _refused(spec, _FORMS, "an incomplete name", f"write {_FORMS}")
    if place.endswith(".py") or "/" in place:
        module = _load_file(spec, place, base_dir)
    elif colon:
        module = _import_module(spec, place)
    else:
        raise _refused(spec, _FORMS, "no colon and no .py file", f"write {_FORMS}")
    return _attribute(spec, module, attribute) if attribute else _only_marked(spec, module)


def loaded_from_file() -> list[ModuleType]:
    """The modules that were loaded from a file by `resolve`."""
    return [module for name, module in sys.modules.items() if name.startswith(_PREFIX)]


_PREFIX = "aflow_tune_user_"


def _load_file(spec: str, place: str, base_dir: Path | None) -> ModuleType:
    path = _find(spec, place, base_dir)
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"{_PREFIX}{''.join(c if c.isalnum() else '_' for c in path.stem)}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    loader = importlib.util.spec_from_file_location(name, path)
    if loader is None or loader.loader is None:
        raise _refused(spec, "a Python file", str(path), "name a file that ends in .py")
    module = importlib.util.module_from_spec(loader)
    sys.modules[name] = module
    try:
        loader.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, (KeyboardInterrupt, BadInput)):
            raise
        raise _broken(spec, error, path) from error
    return module


def _find(spec: str, place: str, base_dir: Path | None) -> Path:
    relative = Path(place).expanduser()
    candidates = [relative] if base_dir is None else [relative, base_dir / relative]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    folder = next((c.parent for c in candidates if c.parent.is_dir()), Path())
    names = [path.name for path in folder.glob("*.py")]
    near = difflib.get_close_matches(relative.name, names, n=3, cutoff=0.4)
    cure = f"did you mean {', '.join(near)}?" if near else f"{folder} holds no such file"
    raise _refused(spec, "a Python file", f"no file {place}", cure)


def _import_module(spec: str, name: str) -> ModuleType:
    # A module beside the user counts, as it does for `python -m`.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name != missing and not name.startswith(f"{missing}."):
            raise _broken(spec, error, None) from error
        known = [module for module in sys.modules if "." not in module]
        near = difflib.get_close_matches(name, known, n=3)
        cure = "check the name, or name the file: path/file.py:function"
        if near:
            cure = f"did you mean {', '.join(near)}? or " + cure
        raise _refused(spec, "an importable module", f"no module {missing!r}", cure) from None
    except Exception as error:
        raise _broken(spec, error, None) from error


def _attribute(spec: str, module: ModuleType, attribute: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name, value in vars(module).items() if callable(value)]
            near = difflib.get_close_matches(part, names, n=3, cutoff=0.4)
            marked = ", ".join(discover(module)) or "none is marked with @workflow"
            cure = f"did you mean {', '.join(near)}?" if near else f"workflows there: {marked}"
            raise _refused(
                spec, f"a function {part!r} in {module.__file__}", "no such name", cure
            )
        found = getattr(found, part)
    if not callable(found):
        raise _refused(
            spec, "a function", f"{type(found).__name__} {found!r:.80}", "name a function"
        )
    return found


def _only_marked(spec: str, module: ModuleType) -> Any:
    marked = discover(module)
    if len(marked) == 1:
        return next(iter(marked.values()))
    found = f"{len(marked)} functions marked with @workflow"
    cure = (
        f"name one: {', '.join(f'{spec}:{name}' for name in marked)}"
        if marked
        else f"write {spec}:function, or mark one with @workflow"
    )
    raise _refused(spec, "exactly one marked function", found, cure)


def _broken(spec: str, error: BaseException, path: Path | None) -> BadInput:
    """The user's module raised while it was loaded: show their line, not ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if path is not None and f.filename == str(path)]
    last = (own or frames)[-1]
    line, where = last.lineno, last.filename
    if isinstance(error, SyntaxError) and error.filename:
        line, where = error.lineno, error.filename
    found = f"{type(error).__name__}: {error} ({where}:{line})"
    return _refused(spec, "a module that loads", found, "correct that line")


def _refused(spec: str, expected: str, found: str, cure: str) -> BadInput:
    return BadInput(f"{spec!r} names no function.", [Fault(spec, expected, found, cure)])
