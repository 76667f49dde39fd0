"""The user's functions on their way through the configuration.

Trinity hands the whole configuration to every process of a run. A function in it would have each
of them import the user's modules, and with them agent frameworks that take seconds, where only
the runners call it. So it travels as bytes, which are read where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray import cloudpickle

Function = Callable[..., Any]


class SentFunction:
    """A function that is read when it is first asked for; `send` makes them."""

    def __init__(self, together: _Together, place: int) -> None:
        self._together = together
        self._place = place

    def function(self) -> Function:
        """The user's own function, or what became of it in this process.

        Raises:
            Exception: whatever the user's modules raise when they are imported.
        """
        return self._together.functions()[self._place]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function()(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> SentFunction:
        """Itself, as a function is."""
        return self


class _Together:
    """Functions that share what they refer to, so they have to be read together."""

    def __init__(self, functions: tuple[Function, ...]) -> None:
        self._functions: tuple[Function, ...] | None = functions
        self._content = b""

    def functions(self) -> tuple[Function, ...]:
        if self._functions is None:
            self._functions = cloudpickle.loads(self._content)
        return self._functions

    def __getstate__(self) -> bytes:
        return self._content or cloudpickle.dumps(self._functions)

    def __setstate__(self, content: bytes) -> None:
        self._functions, self._content = None, content


def send(*functions: Function | None) -> list[SentFunction | None]:
    """The functions as they are put into a configuration, None where there is none."""
    together = _Together(tuple(function for function in functions if function is not None))
    places = iter(range(len(functions)))
    return [None if it is None else SentFunction(together, next(places)) for it in functions]


def received(given: Any) -> Any:
    """The function that was sent; what is none of these as it is."""
    return given.function() if isinstance(given, SentFunction) else given
