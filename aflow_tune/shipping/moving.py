"""Paths inside objects that were sent by value, changed to where the files lie now.

A closure, a partial or an object of the user's may hold the path of a file that travelled:
`self.data = Path(__file__).parent / "data"`. What is looked through is what `reach.py` looks
through on the user's machine. Objects are changed in place, so that whatever refers to them goes
on doing so; only what cannot be changed (texts, paths, tuples) is replaced where it is held.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections import deque
from collections.abc import Callable
from pathlib import PurePath
from types import CellType, FunctionType, MethodType
from typing import Any

from aflow_tune.shipping.reach import BY_NAME, attributes_of, is_by_value, is_class_by_value

_AS_IT_IS = (bytes, bytearray, int, float, complex, type(None))


def move_paths(given: Any, relocated: Callable[[str], str | None]) -> Any:
    """`given` with its paths changed; the same object unless it is a text, a path, a tuple or a
    frozen set.

    Args:
        relocated: from a former path to the one here; None for what did not travel.
    """
    try:
        return _Mover(relocated).moved(given)
    except RecursionError:  # what is nested so deeply keeps its paths
        return given


class _Mover:
    def __init__(self, relocated: Callable[[str], str | None]) -> None:
        self.relocated = relocated
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no id is used twice

    def moved(self, value: Any) -> Any:
        if isinstance(value, _AS_IT_IS):
            return value
        if isinstance(value, (str, PurePath)) and not isinstance(value, enum.Enum):
            here = self.relocated(str(value))
            return value if here is None else type(value)(here)
        if id(value) in self._done:
            return self._done[id(value)]
        self._done[id(value)] = value
        self._kept.append(value)
        self._done[id(value)] = result = self._inside(value)
        return result

    def _inside(self, value: Any) -> Any:
        if isinstance(value, BY_NAME):
            return value
        if isinstance(value, functools.partial):
            bound = {name: self.moved(held) for name, held in value.keywords.items()}
            args = tuple(self.moved(held) for held in value.args)
            partial: Any = value  # in place, so that marks on it and references to it stay
            partial.__setstate__((self.moved(value.func), args, bound, dict(vars(value))))
        elif isinstance(value, MethodType):
            self.moved(value.__func__)
            owner = self.moved(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            if is_class_by_value(value) and not issubclass(value, enum.Enum):
                self._class(value)
        elif isinstance(value, (tuple, frozenset)):
            return self._replaced(value)
        else:
            self.moved(type(value))
            self._container(value)
            self._attributes(value)
        return value

    def _function(self, function: FunctionType) -> None:
        """One that was sent by name has been made here, and knows its place."""
        self.moved(getattr(function, "__wrapped__", None))
        if not is_by_value(function):
            return
        for name, held in list(function.__globals__.items()):
            if name != "__builtins__":
                function.__globals__[name] = self.moved(held)
        for cell in function.__closure__ or ():
            self._cell(cell)
        function.__defaults__ = function.__defaults__ and tuple(
            self.moved(held) for held in function.__defaults__
        )
        keywords = function.__kwdefaults__ or {}
        for name, held in list(keywords.items()):
            keywords[name] = self.moved(held)

    def _cell(self, cell: CellType) -> None:
        with contextlib.suppress(ValueError):  # still empty
            cell.cell_contents = self.moved(cell.cell_contents)

    def _class(self, kind: type) -> None:
        for base in kind.__mro__[1:]:
            self.moved(base)
        for name, held in list(vars(kind).items()):
            if isinstance(held, property):
                for accessor in (held.fget, held.fset, held.fdel):
                    self.moved(accessor)
            elif isinstance(held, (staticmethod, classmethod)):
                self.moved(held.__func__)
            elif not (name.startswith("__") and name.endswith("__")) or callable(held):
                found = self.moved(held)
                if found is not held:
                    setattr(kind, name, found)

    def _replaced(self, value: Any) -> Any:
        found = [self.moved(held) for held in value]
        if all(new is old for new, old in zip(found, value, strict=True)):
            return value
        make = getattr(type(value), "_make", type(value))  # of a named tuple
        return make(found)

    def _container(self, value: Any) -> None:
        if isinstance(value, dict):
            for key, held in list(value.items()):
                found = self.moved(held)
                if found is not held:
                    value[key] = found
            if any(self.moved(key) is not key for key in value):
                items = [(self.moved(key), held) for key, held in value.items()]
                value.clear()
                value.update(items)
        elif isinstance(value, (list, deque)):
            for number, held in enumerate(list(value)):
                value[number] = self.moved(held)
        elif isinstance(value, set):
            found = {self.moved(held) for held in value}
            if found != value:
                value.clear()
                value.update(found)

    def _attributes(self, value: Any) -> None:
        for name, held in attributes_of(value).items():
            found = self.moved(held)
            if found is not held:  # past a `__setattr__` that refuses, as of frozen dataclasses
                with contextlib.suppress(AttributeError, TypeError):
                    object.__setattr__(value, name, found)
