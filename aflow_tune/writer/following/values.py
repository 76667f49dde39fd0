"""What an expression of a written graph may hold, as far as the bound needs to know it.

A value is a set of atoms: everything that the expression could be on any path. Containers and
pending calls are kept in a heap by the place where they were made, so that what is appended in
one place is seen in another. A place that is passed again in a loop keeps two objects: the newest,
and one that stands for all the earlier ones.

Numbers and lengths are bounds, never exact; None is 'not known'. Nothing is computed here that
could be large.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

MOST_NUMBER = 10**9
"""Beyond this a number counts as unknown."""


@dataclass(frozen=True, slots=True)
class Atom:
    """One thing that a value may be."""


@dataclass(frozen=True, slots=True)
class Text(Atom):
    length: int | None = None
    """At most."""


@dataclass(frozen=True, slots=True)
class Number(Atom):
    least: int | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Scalar(Atom):
    """True, False, and other values that can be neither called nor run over."""


@dataclass(frozen=True, slots=True)
class Nothing(Atom):
    """None."""


@dataclass(frozen=True, slots=True)
class Plain(Atom):
    """Data of which nothing is known but that no operator is in it."""


@dataclass(frozen=True, slots=True)
class Broken(Atom):
    """What a refused expression gives: nothing more is said about it."""


@dataclass(frozen=True, slots=True)
class Self(Atom):
    """The workflow."""


@dataclass(frozen=True, slots=True)
class Config(Atom):
    """A model's configuration."""


@dataclass(frozen=True, slots=True)
class Model(Atom):
    """The graph's model."""


@dataclass(frozen=True, slots=True)
class Prompts(Atom):
    """`self.prompts`."""


@dataclass(frozen=True, slots=True)
class Module(Atom):
    """A module: a shim's kind such as 'operator', or the dotted name of one of Python's."""

    name: str
    shim: bool = False


@dataclass(frozen=True, slots=True)
class Named(Atom):
    """A function or a class of Python by its dotted name, such as 'asyncio.gather' or 'len'."""

    name: str


@dataclass(frozen=True, slots=True)
class OperatorClass(Atom):
    operator: str


@dataclass(frozen=True, slots=True)
class Handle(Atom):
    """An operator that was built."""

    instance: str
    operator: str
    options: tuple[tuple[str, object], ...] = ()
    """The numbers among its options."""


@dataclass(frozen=True, slots=True)
class Result(Atom):
    """What a call of an operator returned."""

    operator: str
    of: frozenset[str] = frozenset()
    """Of an ensemble that was given whole results: whose. It hands one of them back as it is."""


@dataclass(frozen=True, slots=True)
class Function(Atom):
    """A function of the graph."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    bound: bool = False
    """Whether its first parameter is the workflow already."""


@dataclass(frozen=True, slots=True)
class Method(Atom):
    """An attribute of data, to be called or to be read."""

    owner: frozenset[Atom]
    name: str


@dataclass(frozen=True, slots=True)
class Ref(Atom):
    """An object of the heap: the newest of its place, or all the earlier ones."""

    site: tuple[object, ...]
    earlier: bool = False


Value = frozenset[Atom]
NOTHING: Value = frozenset()
PLAIN: Value = frozenset({Plain()})
BROKEN: Value = frozenset({Broken()})
TEXT: Value = frozenset({Text()})
NUMBER: Value = frozenset({Number()})
SCALAR: Value = frozenset({Scalar()})
NONE: Value = frozenset({Nothing()})


def number(least: int | None, most: int | None) -> Value:
    """A number between these, unknown where it is large."""
    low = None if least is None or abs(least) > MOST_NUMBER else least
    high = None if most is None or abs(most) > MOST_NUMBER else most
    return frozenset({Number(low, high)})


def joined(*values: Value) -> Value:
    """What may be any of these."""
    if len(values) == 1:
        return values[0]
    merged = NOTHING.union(*values)
    texts = [atom for atom in merged if isinstance(atom, Text)]
    numbers = [atom for atom in merged if isinstance(atom, Number)]
    if len(texts) > 1:
        merged = merged - set(texts) | {Text(most(atom.length for atom in texts))}
    if len(numbers) > 1:
        lows = [atom.least for atom in numbers]
        low = None if None in lows else min(item for item in lows if item is not None)
        merged = merged - set(numbers) | {Number(low, most(atom.most for atom in numbers))}
    return merged


def most(counts: Iterable[int | None]) -> int | None:
    """The largest; None if one is not known, 0 without any."""
    largest = 0
    for count in counts:
        if count is None:
            return None
        largest = max(largest, count)
    return largest


def interval(value: Value) -> tuple[int | None, int | None]:
    """Least and most of a number; None where it is not known."""
    if len(value) == 1:
        (atom,) = value
        if isinstance(atom, Number):
            return atom.least, atom.most
    return None, None


def total(counts: Iterable[int | None]) -> int | None:
    """The sum; None if one is not known, or if it is large."""
    amount = 0
    for count in counts:
        if count is None:
            return None
        amount += count
    return amount if amount <= MOST_NUMBER else None


@dataclass(frozen=True, slots=True)
class Obj:
    """A container, or something pending, in the heap."""

    kind: str
    """list, tuple, set, dict, lazy; pending or task (something to wait for); group."""
    length: int | None = 0
    """At most."""
    items: Value = NOTHING
    """What may be in it; of a dict the values; of something pending its result."""
    keys: Value = NOTHING
    elements: tuple[Value, ...] | None = None
    """One by one, where that is known."""
    names: tuple[str, ...] | None = None
    """Of a dict the keys of its elements, in the same order."""
    over: Value = NOTHING
    """Of something lazy the lists that it will run over."""


def joined_objects(one: Obj, other: Obj) -> Obj:
    """What may be either."""
    if one == other:
        return one
    elements = None
    mine, others = one.elements, other.elements
    if mine is not None and others is not None and len(mine) == len(others):
        elements = tuple(joined(*pair) for pair in zip(mine, others, strict=True))
    same = elements is not None and one.names == other.names
    if one.names != other.names:
        elements = None
    return Obj(
        one.kind if one.kind == other.kind else "list",
        most((one.length, other.length)),
        joined(one.items, other.items),
        joined(one.keys, other.keys),
        elements,
        one.names if same else None,
        joined(one.over, other.over),
    )


Key = tuple[object, str]


@dataclass(slots=True)
class State:
    """Variables, by scope and name, and the heap."""

    variables: dict[Key, Value] = field(default_factory=dict)
    heap: dict[Ref, Obj] = field(default_factory=dict)

    def copy(self) -> State:
        return State(dict(self.variables), dict(self.heap))

    def join(self, other: State) -> None:
        """Become what may be either."""
        _join_into(self.variables, other.variables, joined)
        _join_into(self.heap, other.heap, joined_objects)

    def widened(self, later: State) -> State:
        """Both, where everything that grew from this to the later one counts as unknown."""
        wide = self.copy()
        wide.join(later)
        for key, value in wide.variables.items():
            if key in self.variables and value != self.variables[key]:
                wide.variables[key] = _without_bounds(value, self.variables[key])
        for ref, obj in wide.heap.items():
            before = self.heap.get(ref)
            if before is None or obj == before:
                continue
            wide.heap[ref] = replace(
                obj,
                length=obj.length if obj.length == before.length else None,
                items=_without_bounds(obj.items, before.items),
                elements=obj.elements if obj.elements == before.elements else None,
            )
        return wide

    def new(self, site: tuple[object, ...], obj: Obj) -> Value:
        """A new object made at a place."""
        ref = Ref(site)
        if ref in self.heap:
            old = Ref(site, earlier=True)
            previous = self.heap[ref]
            summary = self.heap.get(old)
            self.heap[old] = previous if summary is None else joined_objects(summary, previous)
            self._rename(ref, old)
            obj = _renamed(obj, ref, old)
        self.heap[ref] = obj
        return frozenset({ref})

    def _rename(self, ref: Ref, old: Ref) -> None:
        for key, value in self.variables.items():
            if ref in value:
                self.variables[key] = value - {ref} | {old}
        for place, obj in self.heap.items():
            if ref in obj.items or ref in obj.keys or ref in obj.over:
                self.heap[place] = _renamed(obj, ref, old)

    def objects(self, value: Value) -> list[tuple[Ref, Obj]]:
        """The objects among the atoms of a value."""
        return [
            (atom, self.heap[atom]) for atom in value if isinstance(atom, Ref) and atom in self.heap
        ]

    def change(self, ref: Ref, change: Callable[[Obj], Obj]) -> None:
        """Change an object. One that stands for several becomes what may be either."""
        before = self.heap[ref]
        after = change(before)
        self.heap[ref] = joined_objects(before, after) if ref.earlier else after

    def within(self, *values: Value) -> Value:
        """All atoms of some values and of what is in them, the objects among them included."""
        atoms: set[Atom] = set()
        pending = list(values)
        while pending:
            for atom in pending.pop():
                if atom in atoms:
                    continue
                atoms.add(atom)
                if isinstance(atom, Ref) and atom in self.heap:
                    obj = self.heap[atom]
                    pending += (obj.items, obj.keys, obj.over)
                elif isinstance(atom, Method):
                    pending.append(atom.owner)
        return joined(frozenset(atoms))

    def let_go(self, *values: Value) -> None:
        """Something unknown holds these from now on: it may put anything into their lists."""
        for atom in self.within(*values):
            if isinstance(atom, Ref) and atom in self.heap:
                obj = self.heap[atom]
                if obj.kind not in ("pending", "task", "tuple", "range"):
                    self.heap[atom] = replace(
                        obj,
                        length=None,
                        items=joined(obj.items, PLAIN),
                        elements=None,
                        names=None,
                    )

    def elements_of(self, value: Value) -> tuple[Value, ...] | None:
        """What a value gives if it is run over, one by one, where that is known."""
        objects = self.objects(value)
        if len(objects) != 1 or len(value) != 1:
            return None
        obj = objects[0][1]
        return None if obj.kind == "dict" else obj.elements


K = TypeVar("K")
V = TypeVar("V")


def _join_into(into: dict[K, V], other: dict[K, V], join: Callable[[V, V], V]) -> None:
    for key, item in other.items():
        mine = into.get(key)
        if mine is None:
            into[key] = item
        elif mine is not item and mine != item:
            into[key] = join(mine, item)


def _renamed(obj: Obj, ref: Ref, old: Ref) -> Obj:
    def one(value: Value) -> Value:
        return value - {ref} | {old} if ref in value else value

    elements = None if obj.elements is None else tuple(map(one, obj.elements))
    return replace(
        obj, items=one(obj.items), keys=one(obj.keys), elements=elements, over=one(obj.over)
    )


def _without_bounds(value: Value, before: Value) -> Value:
    """The value, with the bounds that differ from those before taken off."""
    changed: set[Atom] = set()
    for atom in value:
        if isinstance(atom, Text) and atom not in before:
            changed.add(Text())
        elif isinstance(atom, Number) and atom not in before:
            changed.add(Number())
        else:
            changed.add(atom)
    return joined(frozenset(changed))
