"""What methods of data give back in a written graph: of lists, objects, texts and results.

Told apart is only what matters to the bound: how long a list becomes, and what is in it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

from aflow_tune.writer.following.using import Given, Using
from aflow_tune.writer.following.values import (
    BROKEN,
    NONE,
    NOTHING,
    NUMBER,
    PLAIN,
    SCALAR,
    TEXT,
    Broken,
    Function,
    Handle,
    Method,
    Model,
    Named,
    Nothing,
    Number,
    Obj,
    Plain,
    Prompts,
    Ref,
    Result,
    Scalar,
    Text,
    Value,
    joined,
    most,
    total,
)
from aflow_tune.writer.types import RefusalKind

_GROWING = frozenset({"append", "appendleft", "extend", "extendleft", "insert"})
_LISTS_OF_TEXTS = frozenset({"split", "rsplit", "splitlines", "partition", "rpartition"})


class Methods(Using):
    """What methods of data do, and what a value holds if it is run over."""

    def method(self, node: ast.Call, owner: Value, name: str, given: Given) -> Value:
        """A method of a value that is no operator."""
        if Model() in owner:
            return self.ask_model(node, given) if name == "aask" else PLAIN
        if Prompts() in owner:
            return self._of_prompts(node, name, given)
        if name == "create_task":
            return self._task(node, given)
        if name == "fromkeys" and owner == frozenset({Named("dict")}):
            turns, keys = self.run_over(given.at(0) or NOTHING, node)
            return self.new(node, Obj("dict", turns, given.at(1) or NONE, keys))
        for ref, obj in self.pending_in(owner, "task"):
            if name == "result":
                return obj.items
            if name in ("done", "cancel", "cancelled", "exception"):
                return PLAIN if ref else NONE
        owner = self.settled(owner, node)
        values = given.all()
        types = [atom for atom in owner if isinstance(atom, Named)]
        if types and given.values:  # list.append(found, one) is found.append(one)
            rest = Given(given.values[1:], given.named, given.open)
            self.method(node, given.values[0], name, rest)
        called = frozenset(atom for value in values for atom in value if isinstance(atom, Function))
        objects = self.here.objects(owner)
        results = [
            _METHODS_OF_RESULTS.get(name, _any)(self, node, atom, given)
            for atom in owner
            if isinstance(atom, Result)
        ]
        if called and name != "append":
            turns = most(obj.length for _, obj in objects) if objects else None
            self.apply(node, called, [self.anything([owner, *values])], turns)
        if any(isinstance(atom, (Plain, Method)) for atom in owner):
            self.here.let_go(*values)
        self.let_go_methods(values)
        for ref, obj in objects:
            results.append(self._of_object(node, ref, obj, name, given))
        if any(isinstance(atom, Text) for atom in owner):
            results.append(self._of_text(node, name, given))
        if (
            any(isinstance(atom, (Plain, Number, Scalar, Nothing, Named)) for atom in owner)
            or not results
        ):
            results.append(self.anything([owner, *values]))
        return joined(*results)

    def _of_prompts(self, node: ast.Call, name: str, given: Given) -> Value:
        """`self.prompts.get("solve")` and its like."""
        key = node.args[0] if node.args else None
        if name == "get" and isinstance(key, ast.Constant) and isinstance(key.value, str):
            if len(given.all()) > 1:
                self.used_prompts.add(key.value)
                return joined(TEXT, *given.all()[1:])
            return self.prompt_named(key, key.value, f'self.prompts["{key.value:.40}"]')
        length = None if self.any_prompt else len({*self.prompts, *self.own_prompts})
        self.any_prompt = self.any_prompt or name in ("update", "setdefault")
        if name in ("keys", "values"):
            return self.new(node, Obj("list", length, TEXT))
        if name == "items":
            pair = self.new(node, Obj("tuple", 2, TEXT, elements=(TEXT, TEXT)), "pair")
            return self.new(node, Obj("list", length, pair))
        return TEXT

    def _task(self, node: ast.Call, given: Given) -> Value:
        value = given.at(0, "coro") or NOTHING
        items = joined(NOTHING, *(obj.items for _, obj in self.pending_in(value)))
        if value and not items and not value & {Broken(), Plain()}:
            message = "create_task takes a call that is not awaited: create_task(self.solve(...))"
            return self.refuse(RefusalKind.ARGUMENTS, message, node)
        return self.new(node, Obj("task", None, items or PLAIN))

    def _of_text(self, node: ast.Call, name: str, given: Given) -> Value:
        for value in given.all():
            self.no_calls_in(value, node)
        if name in _LISTS_OF_TEXTS:
            length: int | None = 3 if name.endswith("partition") else None
            limit = given.at(1, "maxsplit")
            if limit and name.endswith("split") and len(limit) == 1:
                (atom,) = limit
                if isinstance(atom, Number) and atom.most is not None and (atom.least or 0) >= 0:
                    length = atom.most + 1
            return self.new(node, Obj("list", length, TEXT))
        if name in ("count", "find", "index", "rfind", "rindex"):
            return NUMBER
        if name.startswith(("is", "startswith", "endswith")):
            return SCALAR
        return PLAIN if name == "encode" else TEXT

    def no_calls_in(self, value: Value, node: ast.AST) -> None:
        """`", ".join(drafts)` with calls that nobody awaited."""
        self.settled(value, node)
        for _, obj in self.here.objects(value):
            if obj.items:
                self.settled(obj.items, node)

    def _of_object(self, node: ast.Call, ref: Ref, obj: Obj, name: str, given: Given) -> Value:
        first = given.at(0) or NOTHING
        if name in _GROWING:
            return self.grow(node, ref, name, given.values[-1] if given.values else NOTHING)
        if obj.kind == "dict":
            return self._of_dict(node, ref, obj, name, given)
        if name in ("add", "update"):
            items = first if name == "add" else self.run_over(first, node)[1]
            length = 1 if name == "add" else self.run_over(first, node)[0]
            self.put(ref, items, length)
            return NONE
        if name in ("pop", "popleft", "remove", "clear", "sort", "reverse", "discard", "rotate"):
            self.here.change(ref, lambda old: replace(old, elements=None))
            return obj.items if name.startswith("pop") else NONE
        if name in ("copy", "union", "intersection", "difference"):
            other = [self.run_over(value, node) for value in given.values]
            length = total([obj.length, *(turns for turns, _ in other)])
            return self.new(node, Obj(obj.kind, length, joined(obj.items, *(i for _, i in other))))
        if name in ("index", "count"):
            return NUMBER
        return self.anything([frozenset({ref}), *given.all()])

    def _of_dict(self, node: ast.Call, ref: Ref, obj: Obj, name: str, given: Given) -> Value:
        first, second = given.at(0) or NOTHING, given.at(1) or NOTHING
        if name == "keys":
            return self.new(node, Obj("list", obj.length, obj.keys))
        if name == "values":
            return self.new(node, Obj("list", obj.length, obj.items))
        if name in ("items", "most_common"):
            pair = self.new(
                node,
                Obj(
                    "tuple",
                    2,
                    joined(obj.keys, obj.items),
                    NOTHING,
                    (obj.keys or TEXT, obj.items or PLAIN),
                ),
                "pair",
            )
            length, (atom, *_) = obj.length, (*first, None)
            if isinstance(atom, Number) and atom.most is not None:
                length = atom.most if length is None else min(length, max(0, atom.most))
            return self.new(node, Obj("list", length, pair))
        if name in ("get", "pop"):
            key = node.args[0] if node.args else None
            found = joined(obj.items, second or NONE)
            known = obj.elements is not None and isinstance(key, ast.Constant)
            if known and obj.names is not None and key.value in obj.names:  # type: ignore[union-attr]
                found = (obj.elements or ())[obj.names.index(key.value)]  # type: ignore[union-attr]
            if name == "pop":
                self.here.change(ref, lambda old: replace(old, elements=None, names=None))
            return found
        if name == "setdefault":
            self.put(ref, second or NONE, 1, first)
            return joined(obj.items, second or NONE)
        if name in ("update", "subtract"):
            for value in given.all():
                for _, other in self.here.objects(value):
                    self.put(ref, other.items, other.length, other.keys)
                if not self.here.objects(value):
                    self.put(ref, joined(PLAIN, value), None, PLAIN)
            return NONE
        if name == "copy":
            return self.new(node, obj)
        return NONE if name == "clear" else self.anything([frozenset({ref}), *given.all()])

    def grow(self, node: ast.AST, ref: Ref, name: str, value: Value) -> Value:
        """`append`, `extend` and their like."""
        self.check_growth(node, ref)
        if name.startswith("extend"):
            length, items = self.run_over(value, node)
        else:
            length, items = 1, value
        if name == "append":

            def appended(old: Obj) -> Obj:
                known = old.elements is not None and len(old.elements) < 64 and old.names is None
                elements = (*(old.elements or ()), value) if known else None
                return Obj(
                    old.kind, total((old.length, 1)), joined(old.items, value), old.keys, elements
                )

            self.here.change(ref, appended)
        else:
            self.put(ref, items, length)
        return NONE

    def check_growth(self, node: ast.AST, ref: Ref) -> None:
        """Refuse to put something into a list that a loop, here or to come, runs over."""
        variables = self.here.variables
        running = any(ref in variables.get(key, NOTHING) for key in self.running)
        if not running:
            lazy = [
                one for one, obj in self.here.heap.items() if obj.kind == "lazy" and ref in obj.over
            ]
            if not lazy:
                return
            held = self.here.within(*variables.values())
            running = any(one in held for one in lazy)
        if running:
            self.unbounded = True
            message = "this puts items into the list that the loop runs over; use a second list"
            self.refuse(RefusalKind.UNBOUNDED, message, node)

    def let_go_methods(self, values: list[Value]) -> None:
        """`map(found.append, many)`: methods that something else calls, nobody knows how often."""
        for value in values:
            for atom in value:
                if isinstance(atom, Method):
                    self.here.let_go(atom.owner)

    def put(self, ref: Ref, items: Value, length: int | None, keys: Value = NOTHING) -> None:
        """Put items into a container."""
        self.here.change(
            ref,
            lambda old: Obj(
                old.kind,
                total((old.length, length)),
                joined(old.items, items),
                joined(old.keys, keys),
            ),
        )

    def run_over(self, value: Value, node: ast.AST) -> tuple[int | None, Value]:
        """How many items a value has at most, and what each may be."""
        value = self.settled(value, node)
        counts: list[int | None] = []
        items: list[Value] = [NOTHING]
        for atom in value:
            if isinstance(atom, Ref):
                obj = self.here.heap.get(atom)
                if obj is not None:
                    counts.append(obj.length)
                    items.append(obj.keys if obj.kind == "dict" else obj.items)
            elif isinstance(atom, Text):
                counts.append(atom.length)
                items.append(frozenset({Text(1)}))
            elif isinstance(atom, Result):
                counts.append(self.size_of(atom))
                items.append(TEXT)
            elif isinstance(atom, Broken):
                items.append(BROKEN)
                counts.append(1)
            elif isinstance(atom, (Number, Handle)):
                kind = "a number" if isinstance(atom, Number) else "an operator"
                if len(value) == 1:
                    message = f"{kind} cannot be run over; write range(...) or a list"
                    self.refuse(RefusalKind.ARGUMENTS, message, node)
            elif not isinstance(atom, (Nothing, Scalar)):
                counts.append(None)
                items.append(PLAIN)
        if Plain() in value:  # what an unknown function made of a list of operators
            items.append(value)
        return most(counts), joined(*items)

    def anything(self, values: list[Value]) -> Value:
        """Unknown data that may hold what was given."""
        return joined(PLAIN, self.here.within(*values))


# Methods of an operator's result, which is a mapping


def _get(walk: Methods, node: ast.Call, result: Result, given: Given) -> Value:
    key = node.args[0] if node.args else None
    if not isinstance(key, ast.Constant):
        return PLAIN
    default = given.at(1)
    if default is not None:  # whatever lacks is provided for
        return joined(walk.facts(result.operator).keys.get(str(key.value), NOTHING), default)
    return joined(NOTHING, *walk.keys_of_results(key, frozenset({result}), key.value))


def _all_values(walk: Methods, node: ast.Call, result: Result, given: Given) -> Value:
    return walk.new(node, Obj("list", walk.size_of(result), PLAIN))


def _all_pairs(walk: Methods, node: ast.Call, result: Result, given: Given) -> Value:
    pair = walk.new(node, Obj("tuple", 2, PLAIN, elements=(TEXT, PLAIN)), "pair")
    return walk.new(node, Obj("list", walk.size_of(result), pair))


def _any(walk: Methods, node: ast.Call, result: Result, given: Given) -> Value:
    return PLAIN


_METHODS_OF_RESULTS: dict[str, Callable[[Methods, ast.Call, Result, Given], Value]] = {
    "get": _get,
    "keys": _all_values,
    "values": _all_values,
    "items": _all_pairs,
    "copy": lambda walk, node, result, given: frozenset({result}),
    "pop": _get,
    "setdefault": _any,
    "update": _any,
}
RESULT_METHODS = frozenset(_METHODS_OF_RESULTS)
