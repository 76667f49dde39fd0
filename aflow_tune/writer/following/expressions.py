"""What the expressions of a written graph may be: names, attributes, displays, operators, await."""

from __future__ import annotations

import ast
from dataclasses import replace

from aflow_tune.writer.allowed import BUILTINS, NAME
from aflow_tune.writer.following.items import Items
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
    Module,
    Named,
    Nothing,
    Number,
    Obj,
    Plain,
    Prompts,
    Ref,
    Result,
    Self,
    Text,
    Value,
    interval,
    joined,
    number,
    total,
)
from aflow_tune.writer.following.walking import SELF
from aflow_tune.writer.names import GIVEN
from aflow_tune.writer.refusals import shown
from aflow_tune.writer.types import RefusalKind

_GIVEN_VALUES: dict[str, Value] = {
    "operator": frozenset({Module("operator", shim=True)}),
    "prompt_custom": frozenset({Module("prompt", shim=True)}),
    "create_llm_instance": frozenset({Named("model.create_llm_instance")}),
    "DatasetType": PLAIN,
}
assert set(_GIVEN_VALUES) == set(GIVEN)


class Expressions(Items):
    """The expressions of a graph."""

    def value(self, node: ast.expr) -> Value:
        """What an expression may be; what it spends is counted."""
        self.step()
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is not None:
            found: Value = method(node)
            return found
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return PLAIN

    def _Constant(self, node: ast.Constant) -> Value:
        value = node.value
        if isinstance(value, str):
            return frozenset({Text(len(value))})
        if type(value) is int:
            return number(value, value)
        if isinstance(value, float):
            return NUMBER
        return NONE if value is None else SCALAR

    def _Name(self, node: ast.Name) -> Value:
        key = self.key(node.id)
        if key is not None:
            found = self.here.variables.get(key)
            if found is None:
                self.valueless.setdefault(node, True)
                return PLAIN
            self.valueless[node] = False
            return found
        if node.id == NAME:
            return TEXT
        if node.id in _GIVEN_VALUES:
            return _GIVEN_VALUES[node.id]
        if node.id in BUILTINS:
            return frozenset({Named(node.id)})
        everything = self.shape.tree is not None and "*" in self.scopes.bound[self.shape.tree]
        return self.operator_named(node, node.id) if everything else BROKEN

    def _NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self.value(node.value)
        self.assign(node.target, value)
        return value

    def _Lambda(self, node: ast.Lambda) -> Value:
        return frozenset({Function(node)})

    def _Await(self, node: ast.Await) -> Value:
        value = self.value(node.value)
        pending = [atom for atom, _ in self.pending_in(value)]
        if pending:
            results = [obj.items for _, obj in self.pending_in(value)]
            return joined(*results, value & {Broken(), Plain()})
        if not value or value & {Broken(), Plain()}:
            return value & BROKEN or PLAIN
        handle = next((atom for atom in value if isinstance(atom, Handle)), None)
        if handle is not None:
            message = f"`{shown(node.value)}` is not called; write `await {shown(node.value)}(...)`"
        else:
            message = f"`{shown(node.value)}` is nothing to wait for; leave out `await`"
        return self.refuse(RefusalKind.ARGUMENTS, message, node)

    def _Call(self, node: ast.Call) -> Value:
        return self.call(node)

    # Texts, numbers, conditions

    def _JoinedStr(self, node: ast.JoinedStr) -> Value:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.settled(self.value(part.value), part.value)
                if part.format_spec is not None:
                    self.value(part.format_spec)
        return TEXT

    def _BinOp(self, node: ast.BinOp) -> Value:
        left = self.settled(self.value(node.left), node.left)
        right = self.settled(self.value(node.right), node.right)
        return self.combined(node, left, node.op, right)

    def combined(self, node: ast.AST, left: Value, op: ast.operator, right: Value) -> Value:
        """`left op right`."""
        if Broken() in left or Broken() in right:
            return BROKEN
        results: list[Value] = []
        lists = [obj for _, obj in (*self.here.objects(left), *self.here.objects(right))]
        if lists:
            results.append(self._combined_lists(node, left, op, right, lists))
        texts = [atom for atom in (*left, *right) if isinstance(atom, Text)]
        if texts and isinstance(op, ast.Add):
            sides = [[a.length for a in side if isinstance(a, Text)] for side in (left, right)]
            known = all(len(side) == 1 for side in sides)
            results.append(frozenset({Text(total(side[0] for side in sides) if known else None)}))
        elif texts:
            results.append(self._times_text(texts, op, left, right))
        if interval(left) != (None, None) or interval(right) != (None, None):
            results.append(self._arithmetic(op, interval(left), interval(right)))
        elif not results:
            results.append(NUMBER if left == right == NUMBER else PLAIN)
        if any(isinstance(atom, Result) for atom in left | right) and isinstance(op, ast.BitOr):
            results.append(left | right)
        return joined(*results)

    def _times_text(self, texts: list[Text], op: ast.operator, left: Value, right: Value) -> Value:
        """`"-" * 3`; a `%` fills a text in."""
        factor = interval(frozenset(atom for atom in left | right if isinstance(atom, Number)))[1]
        length = texts[0].length
        if isinstance(op, ast.Mult) and factor is not None and length is not None:
            return frozenset({Text(max(0, length * factor))})
        return TEXT

    def _combined_lists(
        self, node: ast.AST, left: Value, op: ast.operator, right: Value, lists: list[Obj]
    ) -> Value:
        items = joined(NOTHING, *(obj.items for obj in lists))
        keys = joined(NOTHING, *(obj.keys for obj in lists))
        kind = lists[0].kind if lists[0].kind != "lazy" else "list"
        if isinstance(op, ast.Mult):
            _, times = interval(right if self.here.objects(left) else left)
            length = lists[0].length
            length = None if length is None or times is None else max(0, length * times)
            return self.new(node, Obj(kind, length, items, keys))
        sides = [self.here.objects(side) for side in (left, right)]
        lengths = [
            None if not side else max_or_none([obj.length for _, obj in side]) for side in sides
        ]
        elements = None
        if isinstance(op, ast.Add) and all(len(side) == 1 for side in sides):
            one, other = (side[0][1].elements for side in sides)
            elements = None if one is None or other is None else (*one, *other)
        return self.new(node, Obj(kind, total(lengths), items, keys, elements))

    def _arithmetic(
        self,
        op: ast.operator,
        left: tuple[int | None, int | None],
        right: tuple[int | None, int | None],
    ) -> Value:
        (a, b), (c, d) = left, right
        if isinstance(op, ast.Add):
            return number(total_or_none(a, c), total_or_none(b, d))
        if isinstance(op, ast.Sub):
            low = None if a is None or d is None else a - d
            return number(low, None if b is None or c is None else b - c)
        if a is None or c is None or a < 0 or c < 0:
            return NUMBER
        if isinstance(op, ast.Mult):
            return number(a * c, None if b is None or d is None else b * d)
        if isinstance(op, ast.FloorDiv) and c > 0:
            return number(0 if d is None else a // d, None if b is None else b // c)
        if isinstance(op, ast.Mod) and c > 0:
            return number(0, None if d is None else d - 1)
        return NUMBER

    def _UnaryOp(self, node: ast.UnaryOp) -> Value:
        value = self.settled(self.value(node.operand), node.operand)
        if isinstance(node.op, ast.USub):
            low, high = interval(value)
            return number(None if high is None else -high, None if low is None else -low)
        if isinstance(node.op, ast.Not):
            return SCALAR
        return value if isinstance(node.op, ast.UAdd) else NUMBER

    def _Compare(self, node: ast.Compare) -> Value:
        for part in (node.left, *node.comparators):
            self.settled(self.value(part), part)
        return SCALAR

    def _BoolOp(self, node: ast.BoolOp) -> Value:
        values = [self.settled(self.value(part), part) for part in node.values]
        return joined(*values)

    def _IfExp(self, node: ast.IfExp) -> Value:
        self.settled(self.value(node.test), node.test)
        before, cost = self.here.copy(), self.cost
        one = self.value(node.body)
        ends = self.ends()
        self.state, self.cost = before, cost
        other = self.value(node.orelse)
        self.meet([*ends, *self.ends()])
        return joined(one, other)

    # Displays and comprehensions

    def _display(self, node: ast.List | ast.Tuple | ast.Set, kind: str) -> Value:
        elements: list[Value] | None = []
        lengths: list[int | None] = []
        items: list[Value] = []
        for part in node.elts:
            if isinstance(part, ast.Starred):
                turns, item = self.run_over(self.value(part.value), part)
                lengths.append(turns)
                items.append(item)
                elements = None
                continue
            value = self.value(part)
            items.append(value)
            lengths.append(1)
            if elements is not None:
                elements.append(value)
        known = tuple(elements) if elements is not None and kind != "set" else None
        return self.new(node, Obj(kind, total(lengths), joined(NOTHING, *items), elements=known))

    def _List(self, node: ast.List) -> Value:
        return self._display(node, "list")

    def _Tuple(self, node: ast.Tuple) -> Value:
        return self._display(node, "tuple")

    def _Set(self, node: ast.Set) -> Value:
        return self._display(node, "set")

    def _Dict(self, node: ast.Dict) -> Value:
        keys: list[Value] = []
        items: list[Value] = []
        lengths: list[int | None] = []
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item)
            if key is not None:
                keys.append(self.settled(self.value(key), key))
                items.append(value)
                lengths.append(1)
                continue
            found = [obj for _, obj in self.here.objects(value)]
            items += [obj.items for obj in found] or [PLAIN]
            keys += [obj.keys for obj in found] or [PLAIN]
            lengths += [obj.length for obj in found] or [None]
        made = Obj("dict", total(lengths), joined(NOTHING, *items), joined(NOTHING, *keys))
        names = tuple(key.value for key in node.keys if isinstance(key, ast.Constant))
        texts = tuple(name for name in names if isinstance(name, str))
        if len(set(texts)) == len(node.keys):
            made = replace(made, elements=tuple(items), names=texts)
        return self.new(node, made)

    def _ListComp(self, node: ast.ListComp) -> Value:
        return self.comprehension(node, "list")

    def _SetComp(self, node: ast.SetComp) -> Value:
        return self.comprehension(node, "set")

    def _GeneratorExp(self, node: ast.GeneratorExp) -> Value:
        return self.comprehension(node, "lazy")

    def _DictComp(self, node: ast.DictComp) -> Value:
        return self.comprehension(node, "dict")

    def comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, kind: str
    ) -> Value:
        """A comprehension, as the loops that it is."""
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Value) -> None:
        """Put a value where a target says."""
        if isinstance(target, ast.Name):
            key = self.key(target.id)
            if key is not None:
                self.here.variables[key] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target, value)
        elif isinstance(target, ast.Starred):
            turns, item = self.run_over(value, target)
            self.assign(target.value, self.new(target, Obj("list", turns, item)))
        elif isinstance(target, ast.Attribute):
            if Self() in self.value(target.value):
                self.set_on_self(target.attr, value)
        elif isinstance(target, ast.Subscript):
            owner = self.value(target.value)
            index = NOTHING if isinstance(target.slice, ast.Slice) else self.value(target.slice)
            if Prompts() in owner:
                self._add_prompts(target.slice)
            if any(not isinstance(atom, (Ref, Result)) for atom in owner):
                self.here.let_go(value)
            for ref, obj in self.here.objects(owner):
                if obj.kind == "dict":
                    self.put(ref, value, 1, index)
                elif isinstance(target.slice, ast.Slice):
                    turns, item = self.run_over(value, target)
                    self.check_growth(target, ref)
                    self.put(ref, item, turns)
                else:
                    self.here.change(
                        ref, lambda old: replace(old, items=joined(old.items, value), elements=None)
                    )

    def set_on_self(self, name: str, value: Value) -> None:
        """`self.name = value`. Texts for `self.prompts` are told apart by their names alone."""
        objects = self.here.objects(value)
        items = joined(NOTHING, *(obj.items for _, obj in objects))
        texts = all(isinstance(atom, (Text, Plain, Nothing)) for atom in items)
        if name != "prompts" or len(objects) != len(value) or not texts:
            self.here.variables[(SELF, name)] = value
            return
        for _, obj in objects:
            self.own_prompts.update(obj.names or ())
            self.any_prompt = self.any_prompt or (obj.names is None and obj.length != 0)

    def _add_prompts(self, key: ast.expr) -> None:
        if isinstance(key, ast.Constant):
            self.own_prompts.add(str(key.value))
        else:
            self.any_prompt = True

    def _unpack(self, target: ast.Tuple | ast.List, value: Value) -> None:
        value = self.settled(value, target)
        elements = self.here.elements_of(value)
        starred = any(isinstance(part, ast.Starred) for part in target.elts)
        if elements is not None and not starred:
            if len(elements) != len(target.elts):
                message = (
                    f"{len(elements)} values are put into {len(target.elts)} names; "
                    f"`{shown(target)}` needs as many as there are"
                )
                self.refuse(RefusalKind.ARGUMENTS, message, target)
                elements = None
            else:
                for part, element in zip(target.elts, elements, strict=True):
                    self.assign(part, element)
                return
        turns, item = self.run_over(value, target)
        for part in target.elts:
            inner = (
                self.new(part, Obj("list", turns, item)) if isinstance(part, ast.Starred) else item
            )
            self.assign(part.value if isinstance(part, ast.Starred) else part, inner or PLAIN)


def max_or_none(lengths: list[int | None]) -> int | None:
    """The largest; None if one is not known."""
    return (
        None if None in lengths else max((item for item in lengths if item is not None), default=0)
    )


def total_or_none(one: int | None, other: int | None) -> int | None:
    """The sum of two bounds, if both are known."""
    return None if one is None or other is None else one + other
