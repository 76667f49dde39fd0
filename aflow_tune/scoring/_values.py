"""Python values as JSON and back: what arguments and results of a graded function travel as.

Part of both programs that `code.py` runs in the sandbox, as a file beside them: it imports the
standard library only and never unpickles. Plain JSON is itself; what JSON has no form for is
an object with one short key:

    i integer beyond 2**53 (hex)   f nan, inf            c complex        b bytes   B bytearray
    t tuple    s set    z frozenset    d dict (pairs)    C Counter        q deque (items, maxlen)
    x range    k dict keys    I iterator    D Decimal    F Fraction       h handle (number, type)

Subclasses travel as the type that they extend, so no behaviour of the sender's arrives: no
`__eq__` that is always true. Anything else stays where it is and travels as a handle, which
equals nothing but itself and has no truth value.
"""

import base64
import fractions
import hashlib
import math
import re
import typing
from collections import Counter, deque
from collections.abc import Callable
from decimal import Decimal
from typing import Any

PRESET = {
    **{"math": math, "hashlib": hashlib, "re": re},
    **{name: getattr(typing, name) for name in ("List", "Dict", "Tuple", "Optional", "Any")},
}
"""What the public AFlow code lets programs and tests use without importing it."""
MAX_DEPTH = 200
MAX_ITEMS = 200_000
"""Items of one value, all levels together; 16 characters of text count as one."""
MAX_ITERATED = 100_000
"""Items that are taken of an iterator."""
MUTABLE = (list, dict, set, bytearray, deque, tuple)
"""Arguments that a call may change, or whose contents it may change."""
_EXACT = 2**53


class Handle:
    """Something that stayed in the other process."""

    def __init__(self, number: int, kind: str) -> None:
        self.number = number
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __bool__(self) -> bool:
        raise TypeError(f"a {self.kind} has no plain value")

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class _Budget:
    def __init__(self) -> None:
        self.items = 0

    def spend(self, depth: int, value: Any) -> None:
        self.items += 1 + (len(value) // 16 if isinstance(value, (str, bytes, bytearray)) else 0)
        if self.items > MAX_ITEMS:
            raise ValueError(f"a value of more than {MAX_ITEMS:,} items")
        if depth > MAX_DEPTH:
            raise ValueError(f"a value nested deeper than {MAX_DEPTH} levels")


def encode(value: Any, keep: Callable[[Any], tuple[int, str]]) -> Any:
    """`value` as JSON; `keep` stores what cannot travel and gives its number and type.

    Raises:
        ValueError: the value is too large, too deep, or contains itself.
    """
    return _encode(value, keep, _Budget(), 0)


def _encode(value: Any, keep: Any, budget: _Budget, depth: int) -> Any:
    budget.spend(depth, value)
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_EXACT <= value <= _EXACT else {"i": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"f": repr(value)}

    def all_of(items: Any) -> list:
        return [_encode(item, keep, budget, depth + 1) for item in items]

    if kind is list:
        return all_of(value)
    if kind is tuple:
        return {"t": all_of(value)}
    if kind is dict:
        return {"d": [all_of(pair) for pair in value.items()]}
    for base, tag, form in _FORMS:
        if isinstance(value, base):
            return {tag: form(value, all_of)}
    for base, plain in _SCALARS:
        if isinstance(value, base):
            return _encode(plain(value), keep, budget, depth)
    for base, items_of in _CONTAINERS:
        if isinstance(value, base):
            return _encode(base(items_of(value)), keep, budget, depth)
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "item") and not value.shape:
        return _encode(value.item(), keep, budget, depth)
    if hasattr(kind, "__next__") and hasattr(kind, "__iter__"):
        items = []
        for item in value:
            items.append(item)
            if len(items) > MAX_ITERATED:
                raise ValueError(f"an iterator of more than {MAX_ITERATED:,} items")
        return {"I": all_of(items)}
    if kind is Handle:
        return {"h": [value.number, value.kind]}
    return {"h": list(keep(value))}


# Subclasses such as an IntEnum: the base's own method gives the base's own value.
_SCALARS: list = [(int, int.__pos__), (float, float.__pos__), (str, str.__str__)]
# Named tuples, OrderedDict, defaultdict.
_CONTAINERS: list = [(list, list.__iter__), (tuple, tuple.__iter__), (dict, dict.items)]
_FORMS: list = [
    (complex, "c", lambda v, _: [repr(v.real), repr(v.imag)]),
    (bytes, "b", lambda v, _: base64.b64encode(bytes(v)).decode()),
    (bytearray, "B", lambda v, _: base64.b64encode(bytes(v)).decode()),
    (set, "s", lambda v, each: each(set.__iter__(v))),
    (frozenset, "z", lambda v, each: each(frozenset.__iter__(v))),
    (Counter, "C", lambda v, each: [each(pair) for pair in dict.items(v)]),
    (deque, "q", lambda v, each: [each(deque.__iter__(v)), v.maxlen]),
    (range, "x", lambda v, _: [hex(v.start), hex(v.stop), hex(v.step)]),
    (type({}.keys()), "k", lambda v, each: each(v)),
    (Decimal, "D", lambda v, _: Decimal.__str__(v)),
    (fractions.Fraction, "F", lambda v, _: [hex(v.numerator), hex(v.denominator)]),
]


def decode(data: Any, find: Callable[[int, str], Any]) -> Any:
    """The value of `encode`'s JSON; `find` gives what a handle stands for here.

    Raises:
        ValueError: the JSON is not of that form.
    """
    try:
        return _decode(data, find, _Budget(), 0)
    except (TypeError, KeyError, ArithmeticError) as error:
        raise ValueError(f"not an encoded value: {error}") from None


def _decode(data: Any, find: Any, budget: _Budget, depth: int) -> Any:
    budget.spend(depth, data)
    if data is None or isinstance(data, (bool, int, float, str)):
        return data

    def all_of(items: Any) -> list:
        return [_decode(item, find, budget, depth + 1) for item in items]

    if isinstance(data, list):
        return all_of(data)
    ((tag, body),) = data.items()
    if tag == "h":
        number, kind = body
        return find(int(number), str(kind))
    return _BUILD[tag](body, all_of)


_BUILD: dict = {
    "i": lambda body, _: int(body, 16),
    "f": lambda body, _: float(body),
    "c": lambda body, _: complex(float(body[0]), float(body[1])),
    "b": lambda body, _: base64.b64decode(body),
    "B": lambda body, _: bytearray(base64.b64decode(body)),
    "t": lambda body, each: tuple(each(body)),
    "s": lambda body, each: set(each(body)),
    "z": lambda body, each: frozenset(each(body)),
    "d": lambda body, each: dict(each(pair) for pair in body),
    "C": lambda body, each: Counter(dict(each(pair) for pair in body)),
    "q": lambda body, each: deque(each(body[0]), body[1]),
    "x": lambda body, _: range(*(int(bound, 16) for bound in body)),
    "k": lambda body, each: dict.fromkeys(each(body)).keys(),
    "I": lambda body, each: iter(each(body)),
    "D": lambda body, _: Decimal(body),
    "F": lambda body, _: fractions.Fraction(int(body[0], 16), int(body[1], 16)),
}


def overwrite(original: Any, changed: Any) -> Any:
    """Give `original` the contents of `changed`, keeping its identity where it is mutable.

    Returns what should stand in the place of `original`.
    """
    if type(original) is not type(changed):
        return changed
    if isinstance(original, list):
        original[:] = _kept(original, changed)
    elif isinstance(original, (bytearray, deque)):
        original.clear()
        original.extend(changed)
    elif isinstance(original, set):
        original.clear()
        original.update(changed)
    elif isinstance(original, dict):
        merged = {k: overwrite(original[k], v) if k in original else v for k, v in changed.items()}
        original.clear()
        original.update(merged)
    elif isinstance(original, tuple):
        return tuple(_kept(list(original), list(changed)))
    else:
        return changed
    return original


def _kept(original: list, changed: list) -> list:
    paired = [overwrite(old, new) for old, new in zip(original, changed, strict=False)]
    return paired + list(changed[len(original) :])
