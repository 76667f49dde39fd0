"""Python values as JSON and back: what arguments and results of a graded function travel as.

A file beside the programs that `code.py` runs in the sandbox: it imports the standard library only
and never unpickles. What JSON has a form for is itself; a container is `[number]`, and its contents
travel once, in a list of their own, as `[tag, item, ...]`, so depth has no bound and both sides
number the containers of a call alike: arguments that were changed in place keep their identity.

    l list  d dict  s set  q deque  C Counter  B bytearray      mutable
    t tuple  z frozenset  I iterator  k, v, n views of a dict   rebuilt of their items
    o object of `_OBJECTS` (class, arguments)  e exception (builtin class, arguments)
    i integer beyond 2**53  f nan, inf  b bytes  T builtin class  m module  h handle: {tag: body}

Subclasses travel as the type that they extend, so no `__eq__` of the sender's arrives. Anything
else stays where it is and travels as a handle. `odd` has what does not arrive exactly as it was.
"""

import base64
import builtins
import hashlib
import importlib
import math
import re
import sys
import types
import typing
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

PRESET = {
    **{"math": math, "hashlib": hashlib, "re": re},
    **{name: getattr(typing, name) for name in ("List", "Dict", "Tuple", "Optional", "Any")},
}
"""What the public AFlow code lets programs and tests use without importing it."""
MAX_ITEMS = 200_000
"""Items of one message, all containers together; 16 characters of text count as one."""
MAX_ITERATED = 100_000
"""Items that are taken of an iterator."""
_SAME: tuple = (bool, str, type(None))
_EXACT = 2**53
_MISSING = object()
# Of subclasses such as an IntEnum: the base's own method gives the base's own value.
_PLAIN: tuple = ((int, int.__pos__), (float, float.__pos__), (str, str.__str__))
# A Counter is a dict, so it comes first.
_MUTABLE: dict = {"C": Counter, "d": dict, "l": list, "s": set, "q": deque, "B": bytearray}
_ADD: dict = {
    **{"C": dict.update, "d": dict.update, "s": set.update},
    **{"l": list.extend, "q": deque.extend, "B": bytearray.extend},
}
_BASES: dict = {**_MUTABLE, "t": tuple, "z": frozenset}
_TAGS: dict = {kind: tag for tag, kind in _BASES.items()}
_VIEWS: dict = {type({}.keys()): "k", type({}.values()): "v", type({}.items()): "n"}
_REBUILT: dict = {
    **{"t": tuple, "z": frozenset, "I": iter},
    "k": lambda items: dict.fromkeys(items).keys(),
    "v": lambda items: dict(enumerate(items)).values(),
    "n": lambda items: dict(items).items(),
    "o": lambda items: _found(items[0])(*items[1:]),
    "e": lambda items: _builtin(items[0], Exception)(*items[1:]),
}


def _clock(value: Any) -> tuple:
    zone = value.tzinfo and sys.modules["datetime"].timezone(value.utcoffset())
    return value.hour, value.minute, value.second, value.microsecond, zone


_OBJECTS: dict = {
    "builtins.complex": lambda v: (v.real, v.imag),
    "builtins.range": lambda v: (v.start, v.stop, v.step),
    "builtins.slice": lambda v: (v.start, v.stop, v.step),
    "builtins.memoryview": lambda v: (v.tobytes(),),
    "array.array": lambda v: (v.typecode, tuple(v)),
    "decimal.Decimal": lambda v: (str(v),),
    "fractions.Fraction": lambda v: (v.numerator, v.denominator),
    "datetime.date": lambda v: (v.year, v.month, v.day),
    "datetime.time": _clock,
    "datetime.datetime": lambda v: (v.year, v.month, v.day, *_clock(v)),
    "datetime.timedelta": lambda v: (v.days, v.seconds, v.microseconds),
    "datetime.timezone": lambda v: (v.utcoffset(None),),
    "uuid.UUID": lambda v: (str(v),),
    "pathlib.PosixPath": lambda v: (str(v),),
    "pathlib.PurePosixPath": lambda v: (str(v),),
}
"""Classes whose objects are called into being again, and with what."""


def _found(name: str) -> Any:
    module, _, kind = name.partition(".")
    return getattr(_module(module), kind) if _OBJECTS[name] else None


def _builtin(name: str, base: type = object) -> Any:
    kind = vars(builtins)[name]
    if not issubclass(kind, base):
        raise ValueError(f"{name} is no {base.__name__}")
    return kind


def _module(name: str) -> Any:
    if name.partition(".")[0] not in sys.stdlib_module_names:
        raise ValueError(f"{name} is not of the standard library")
    return importlib.import_module(name)


def _name(kind: type) -> str:
    """Where a class can be found; empty if it is not there."""
    there = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    return f"{kind.__module__}.{kind.__name__}" if there else ""


_SCALARS: dict = {
    **{"i": lambda body: int(body, 16), "f": float, "b": base64.b64decode},
    **{"T": _builtin, "m": _module},
}


class Crossing:
    """What crosses in one call, there and back, as one side sees it.

    Args:
        keep: stores what cannot travel and gives its number and type, or raises.
        find: gives what a handle of that number and type stands for here.
    """

    def __init__(self, keep: Callable[[Any], tuple], find: Callable[[int, str], Any]) -> None:
        self.keep, self.find = keep, find
        self.objects: list = []
        self.numbers: dict[int, int] = {}
        self.odd: list = []
        self.items = 0

    def send(self, value: Any, given: list | tuple = ()) -> list:
        """`value` as a message, with the containers that are no longer as they were `given`. Raises
        ValueError: it is too large."""
        self.items = 0
        sent = len(self.objects)
        packed = self._pack(value)
        changed: list = []
        bodies: list = []
        for number, before in enumerate(given):
            if before[0] in _MUTABLE and (now := self._body(self.objects[number])) != before:
                changed.append([number, now])
        while sent + len(bodies) < len(self.objects):
            bodies.append(self._body(self.objects[sent + len(bodies)]))
        return [packed, bodies, changed]

    def receive(self, message: Any) -> Any:
        """The value of a message; what was changed is changed in place. Raises ValueError: it is
        none."""
        try:
            return self._receive(*message)
        except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"not a packed value: {error}") from None

    def _receive(self, packed: Any, bodies: list, changed: list) -> Any:
        first = len(self.objects)
        for tag, *body in bodies:
            empty: Any = _MISSING
            if tag in _MUTABLE:
                empty = deque(maxlen=body[0]) if tag == "q" else _MUTABLE[tag]()
            self.objects.append(empty)
        self._bodies, self._first = bodies, first
        # Parts come after the whole, mostly: backwards, little waits for something else.
        for number in reversed(range(first, len(self.objects))):
            self.numbers[id(self._object(number))] = number
        for number, body in [*enumerate(bodies, first), *changed]:
            if body[0] in _MUTABLE:
                self._fill(self.objects[number], body)
        return self._unpack(packed)

    def _pack(self, value: Any) -> Any:
        kind: Any = type(value)
        text = kind is str or kind is bytes or kind is bytearray
        self.items += 1 + (len(value) // 16 if text else 0)
        if self.items > MAX_ITEMS:
            raise ValueError(f"more than {MAX_ITEMS:,} items")
        if kind in _SAME:
            return value
        if kind is int:
            return value if -_EXACT <= value <= _EXACT else {"i": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"f": repr(value)}
        if kind is bytes:
            return {"b": base64.b64encode(value).decode()}
        if kind is types.ModuleType:
            return {"m": value.__name__}
        if isinstance(value, type) and _name(value).startswith("builtins."):
            return {"T": value.__name__}
        if kind not in _TAGS:
            self.odd.append(value)
            for base, plain in _PLAIN:
                if isinstance(value, base):
                    return self._pack(plain(value))
            if kind.__module__ == "numpy" and hasattr(value, "item") and not value.shape:
                return self._pack(value.item())
            if not self._travels(value):
                return {"h": list(self.keep(value))}
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return [number]

    def _travels(self, value: Any) -> bool:
        kind = type(value)
        return (
            isinstance(value, (*_TAGS, *_VIEWS, Exception))
            or _name(kind) in _OBJECTS
            or (hasattr(kind, "__next__") and hasattr(kind, "__iter__"))
        )

    def _body(self, value: Any) -> list:
        kind = type(value)
        tag = _TAGS.get(kind) or next((t for t, k in _BASES.items() if isinstance(value, k)), "")
        if tag == "B":
            return [tag, self._pack(bytes(value))]
        if tag in ("d", "C"):
            return [tag, *(self._pack(part) for pair in dict.items(value) for part in pair)]
        if tag:
            bound = [value.maxlen] if tag == "q" else []
            return [tag, *bound, *map(self._pack, _BASES[tag].__iter__(value))]
        if kind in _VIEWS:
            return [_VIEWS[kind], *map(self._pack, value)]
        if isinstance(value, Exception):
            near = next(k for k in kind.__mro__ if _name(k).startswith("builtins."))
            given = value.args if near is kind else (str(value),)
            return ["e", near.__name__, *map(self._pack, given)]
        name = _name(kind)
        if name in _OBJECTS:
            return ["o", name, *map(self._pack, _OBJECTS[name](value))]
        items = []
        for item in value:
            items.append(self._pack(item))
            if len(items) > MAX_ITERATED:
                raise ValueError(f"an iterator of more than {MAX_ITERATED:,} items")
        return ["I", *items]

    def _object(self, number: int) -> Any:
        if self.objects[number] is _MISSING:
            tag, *body = self._bodies[number - self._first]
            self.objects[number] = _REBUILT[tag]([self._unpack(item) for item in body])
        return self.objects[number]

    def _fill(self, target: Any, body: list) -> None:
        tag, *items = body
        values: Any = [self._unpack(item) for item in items]
        if tag in ("d", "C"):
            values = zip(values[::2], values[1::2], strict=True)
        elif tag == "q":
            values = values[1:]
        elif tag == "B":
            (values,) = values
        _MUTABLE[tag].clear(target)
        _ADD[tag](target, values)

    def _unpack(self, packed: Any) -> Any:
        if packed is None or isinstance(packed, (bool, int, float, str)):
            return packed
        if isinstance(packed, list):
            (number,) = packed
            return self._object(number)
        ((tag, body),) = packed.items()
        if tag == "h":
            number, kind = body
            return self.find(int(number), str(kind))
        return _SCALARS[tag](body)
