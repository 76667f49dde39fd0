"""The user's functions as bytes that are unpickled on first use.

Trinity hands the whole configuration to every process of a run, but only the runners call the
user's functions. Pickled, they do not import the user's modules everywhere else. Functions of
modules are sent by name, others by value, as Ray's cloudpickle does.
"""

from __future__ import annotations

import functools
import inspect
import io
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from ray import cloudpickle

from aflow_tune.errors import BadInput, Fault
from aflow_tune.shipping import MAIN, arrived, gather, path_here

Function = Callable[..., Any]


class _Pickler(cloudpickle.CloudPickler):
    """Records the modules that pickled objects refer to. Paths into the user's code become those
    of the copy there; an `lru_cache` on a function sent by value arrives empty."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def reducer_override(self, given: Any) -> Any:
        home = getattr(given, "__module__", None)
        if isinstance(given, ModuleType):
            self.modules.add(given.__name__)
        elif isinstance(home, str):
            self.modules.add(home)
        if isinstance(given, Path):
            return path_here, (str(given),)
        by_value = home == MAIN or "<locals>" in getattr(given, "__qualname__", "")
        if isinstance(given, functools._lru_cache_wrapper) and by_value:
            kept = given.cache_parameters()
            return _cached, (given.__wrapped__, kept["maxsize"], kept["typed"])
        return super().reducer_override(given)


def _cached(function: Function, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def dumps(given: Any) -> bytes:
    """Pickle an object for processes that have this package and the user's modules."""
    return _dumped(given)[0]


def _dumped(given: Any) -> tuple[bytes, set[str]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(given)
    return file.getvalue(), pickler.modules


def pack(functions: Iterable[Function | None]) -> tuple[bytes, set[str]]:
    """The functions as bytes, and the modules that they refer to. BadInput: a function holds
    something that cannot be pickled; names the function, and the global if it is one."""
    given = [function for function in functions if function is not None]
    try:
        return _dumped(given)
    except Exception as error:  # whatever the objects' own __reduce__ raises
        faults = [_culprit(function, error) for function in given]
        raise BadInput("A function cannot be sent to the workers.", faults) from error


def _culprit(function: Function, error: Exception) -> Fault:
    plain = getattr(function, "func", function)
    scope, code = getattr(plain, "__globals__", {}), getattr(plain, "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
    name = "what it holds"
    for used in code.co_names if code else ():
        try:
            cloudpickle.dumps(scope.get(used))
        except Exception as cause:  # as above
            name, error = f"`{used}`", cause
    expected = f"{name} in a form that can be sent to another process"
    cure = f"make {name} (a file, a client, a lock) inside the function, or in a module of yours"
    return Fault(where, expected, f"{type(error).__name__}: {error}", cure)


class SentFunction:
    """A user's function that is unpickled on first use; made by `send`."""

    def __init__(self, together: _Together, place: int) -> None:
        self._together = together
        self._place = place

    def function(self) -> Function:
        """The user's own function. BadInput: a module of the user's has the name of one that this
        process had already loaded. Also raises whatever importing the user's modules raises."""
        return self._together.functions()[self._place]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function()(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> SentFunction:
        """Itself, as for a plain function."""
        return self


class _Together:
    """Functions pickled together, so that objects they share stay shared."""

    def __init__(self, functions: tuple[Function, ...]) -> None:
        self._functions: tuple[Function, ...] | None = functions
        self._content = b""

    def functions(self) -> tuple[Function, ...]:
        if self._functions is None:
            arrived()
            self._functions = cloudpickle.loads(self._content)
        return self._functions

    def __getstate__(self) -> bytes:
        return self._content or dumps(self._functions)

    def __setstate__(self, content: bytes) -> None:
        self._functions, self._content = None, content


def send(*functions: Function | None) -> list[SentFunction | None]:
    """The functions as a configuration holds them; None stays None."""
    together = _Together(tuple(function for function in functions if function is not None))
    places = iter(range(len(functions)))
    return [None if it is None else SentFunction(together, next(places)) for it in functions]


def received(given: Any) -> Any:
    """The function that was sent; anything else is returned unchanged."""
    return given.function() if isinstance(given, SentFunction) else given


def user_modules(functions: Iterable[Function | None]) -> list[str]:
    """Names of the loaded user modules that the functions refer to, and of the user modules that
    those imported."""
    given = [function for function in functions if function is not None]
    try:
        modules = pack(given)[1]
    except BadInput:  # it cannot be sent, but can be called in this process
        modules = {str(inspect.unwrap(getattr(it, "func", it)).__module__) for it in given}
    return sorted(name for name in gather(modules).modules if name in sys.modules)
