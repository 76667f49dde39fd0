"""From an object that is to be sent to the modules that it needs where it arrives.

An object of an importable module is sent by name: that module is needed. An object that has no
importable home (`__main__`, a notebook, a function made inside another one) is sent by value;
then what its code refers to is looked at in the same way, and what it imports while it runs.

Looking at objects cannot be exact: what pickling makes of one is its own affair
(`__reduce__`). `modules_in_pickle` reads off the bytes which modules they name.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import inspect
import logging
import os
import pickletools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

MAIN = "__main__"
MOST_OBJECTS = 1_000_000
"""Objects that are looked at, plain texts and numbers not counted: about three seconds. A
workflow with its helpers has a few hundred, a list of tasks some thousands."""
_LONGEST_PATH = 4096
_PLAIN = {str, bytes, bytearray, int, float, complex, bool, type(None)}
BY_NAME = (ModuleType, logging.Logger, logging.Handler, enum.Enum)
"""Sent by name, or never: what they hold does not travel."""


@dataclass
class Reach:
    """What some objects lead to."""

    modules: set[str] = field(default_factory=set)
    """By name, `__main__` among them where it is."""
    paths: set[Path] = field(default_factory=set)
    """Files and folders that closures, partials and the like hold, as absolute paths."""
    places: set[str] = field(default_factory=set)
    """Where functions that are sent by value were written: files, or cells of a notebook."""
    complete: bool = True
    """False: there were more than `MOST_OBJECTS`."""


def reach(objects: Iterable[Any], most: int = MOST_OBJECTS) -> Reach:
    """What `objects` need where they arrive.

    Looked through: partials, bound methods, what `functools.wraps` wrapped, containers, the
    attributes of objects (of one with a property `carries` what that names), closures, defaults,
    classes with their bases. Code comes before data.
    """
    found = Reach()
    seen: set[int] = set()
    waiting = deque(item for item in objects if item is not None)
    kept: list[Any] = []  # so that no id is used twice
    while waiting:
        item = waiting.popleft()
        if isinstance(item, (str, PurePath)) and (path := _existing(item)):
            found.paths.add(path)
        if type(item) in _PLAIN or id(item) in seen:
            continue
        if len(kept) >= most:
            found.complete = False
            break
        seen.add(id(item))
        kept.append(item)
        if isinstance(item, ModuleType):
            found.modules.add(item.__name__)
            continue
        if isinstance(item, (FunctionType, type)):
            found.modules.add(str(item.__module__))
        for inner in _inside(item):
            if callable(inner):
                waiting.appendleft(inner)
            else:
                waiting.append(inner)
        if isinstance(item, FunctionType) and is_by_value(item):
            found.modules |= set(_imports_of(item.__code__))
            found.places.add(item.__code__.co_filename)
    return found


def modules_in_pickle(content: bytes) -> set[str]:
    """Every module that unpickling would import, by the names in the bytes. Nothing is run."""
    return {module for module, _ in names_in_pickle(content)}


def names_in_pickle(content: bytes) -> set[tuple[str, str]]:
    """What unpickling would import: a module and a name in it, "" for the module itself."""
    found: set[tuple[str, str]] = set()
    memo: dict[Any, Any] = {}
    texts: list[str] = [""]
    last: Any = None
    """What the operation before left on top: a text, `_Subimport`, or anything else as None."""
    for operation, argument, _ in pickletools.genops(content):
        name = operation.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "MEMOIZE":
            memo[len(memo)] = last
            continue
        if name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = last
            continue
        if name == "STACK_GLOBAL":
            found.add((texts[-2], texts[-1]))
            last = _Subimport if texts[-1] == "subimport" else None
            continue
        if name == "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
            found.add((module, attribute))
            last = _Subimport if attribute == "subimport" else None
            continue
        if name in ("GET", "BINGET", "LONG_BINGET"):
            top = memo.get(argument)
        else:
            top = argument if "UNICODE" in name else None
        if isinstance(top, str):
            if last is _Subimport:  # cloudpickle's way of sending a module
                found.add((top, ""))
            texts = [texts[-1], top]
        last = top
    return found


class _Subimport:
    """Stands for cloudpickle's function `subimport` on the stack."""


def is_by_value(function: FunctionType) -> bool:
    """Whether pickling sends the function's code: it cannot be found under its name."""
    if function.__module__ == MAIN or "<locals>" in function.__qualname__:
        return True
    home: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        home = getattr(home, part, None)
    return home is None or inspect.unwrap(home) is not inspect.unwrap(function)


def is_class_by_value(kind: type) -> bool:
    """Whether pickling sends a class with its members."""
    return kind.__module__ == MAIN or "<locals>" in kind.__qualname__


def attributes_of(item: Any) -> dict[str, Any]:
    """What an object holds in its `__dict__` and slots; no property and no `__getattr__` runs."""
    try:
        held = dict(object.__getattribute__(item, "__dict__"))
    except (AttributeError, TypeError):
        held = {}
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                mangled = f"_{kind.__name__.lstrip('_')}{name}" if private else name
                try:
                    held[mangled] = object.__getattribute__(item, mangled)
                except AttributeError:
                    continue  # never set
    return held


def _inside(item: Any) -> Iterable[Any]:
    """What an object holds that goes where it goes."""
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, FunctionType):
        return _inside_function(item)
    if isinstance(item, type):
        bases = [base for base in item.__mro__[1:] if base.__module__ != "builtins"]
        return [*bases, *(_members(item) if is_class_by_value(item) else ())]
    if isinstance(item, (*BY_NAME, PurePath)):
        return [type(item)]
    if isinstance(getattr(type(item), "carries", None), property):
        return [type(item), *item.carries]
    held: list[Any] = [type(item), *attributes_of(item).values()]
    if isinstance(item, dict):
        held += [*item.keys(), *item.values()]
    elif isinstance(item, (list, tuple, set, frozenset, deque)):
        held += list(item)
    return held


def _inside_function(function: FunctionType) -> list[Any]:
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    if wrapped := inspect.getattr_static(function, "__wrapped__", None):
        held.append(wrapped)
    if is_by_value(function):
        scope = function.__globals__
        held += [scope[name] for name in _names_of(function.__code__) if name in scope]
    return held


def _members(kind: type) -> list[Any]:
    members: list[Any] = []
    for name, value in vars(kind).items():
        if isinstance(value, property):
            members += [value.fget, value.fset]
        elif name not in ("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__"):
            members.append(getattr(value, "__func__", value))
    return [member for member in members if member is not None]


def _names_of(code: CodeType) -> set[str]:
    """Global names that a function's code, inner functions included, refers to."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_of(constant)
    return names - set(vars(builtins))


def _imports_of(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME" and instruction.argval:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imports_of(constant)


def _existing(value: Any) -> Path | None:
    """The file or folder that an absolute path names; not the root of everything."""
    if not isinstance(value, (str, PurePath)):
        return None
    text = str(value)
    if not text.startswith("/") or text.count("/") < 2 or len(text) > _LONGEST_PATH:
        return None
    try:
        # Without `..`, which would pass for the name of a hidden folder.
        return Path(os.path.normpath(text)) if os.path.exists(text) else None
    except (OSError, ValueError):
        return None


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
