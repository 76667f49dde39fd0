"""Loops and comprehensions of a written graph.

A loop of a few turns is followed turn by turn, until a turn changes nothing any more: what it
fills keeps its length. One of many turns, or of nobody knows how many, is followed until all that
grows in it counts as unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace

from aflow_tune.writer.following.expressions import Expressions
from aflow_tune.writer.following.turns import Bounds, touches, turns_of_while
from aflow_tune.writer.following.values import (
    NOTHING,
    NUMBER,
    Obj,
    Ref,
    Text,
    Value,
    interval,
    joined,
)
from aflow_tune.writer.following.walking import End
from aflow_tune.writer.types import RefusalKind

UNROLLED = 32
"""Turns of a loop that are followed one by one, so that what it fills keeps its length."""
SETTLING = 8
"""How often a loop with more turns is followed until nothing in it changes any more."""
_WHILE = (
    "the number of turns of this `while` cannot be told; write `for _ in range(3):` and `break`, "
    "or count with `turns += 1` in the loop itself"
)
_FOR = (
    "the number of turns of this loop cannot be told; run over range(3), or over a list whose "
    "length is known"
)


class Loops(Expressions):
    """The loops of a graph."""

    def block(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements; what cannot be reached is left out."""
        raise NotImplementedError

    def branch(self, bodies: Sequence[Sequence[ast.stmt]]) -> None:
        """Follow each, and go on where they meet."""
        raise NotImplementedError

    def _For(self, node: ast.For) -> None:
        value = self.value(node.iter)
        turns, item = self.run_over(value, node.iter)
        elements = self.here.elements_of(value)
        self.loops += 1
        held = ("loop", str(self.loops))
        self.here.variables[held] = value
        self.running.append(held)

        def begin(turn: int | None) -> None:
            known = turn is not None and elements is not None and turn < len(elements)
            self.assign(node.target, elements[turn] if known else item)  # type: ignore[index]

        distinct = elements is not None and len(set(elements)) > 1
        self.loop(node, turns, begin, lambda: self.block(node.body), _FOR, distinct)
        self.running.pop()
        self._after_loop(node.orelse, held)

    _AsyncFor = _For

    def _While(self, node: ast.While) -> None:
        bounds: Bounds = lambda part: interval(self._quietly(part))  # noqa: E731
        turns = turns_of_while(node, bounds, self.fixed, self._is_alone)
        self.settled(self.value(node.test), node.test)

        def begin(turn: int | None) -> None:
            if turn != 0:
                self.value(node.test)

        if turns is None and isinstance(node.test, ast.Constant) and not node.test.value:
            return
        if turns is None:
            # Without a counter it may turn for ever, whether it calls something or not.
            self.unbounded = True
            self.refuse(RefusalKind.UNBOUNDED, _WHILE, node)
            turns = 1
        self.loop(node, turns, begin, lambda: self.block(node.body), _WHILE)
        if self.state is not None:
            self.value(node.test)
        self._after_loop(node.orelse, None)

    def _is_alone(self, name: str) -> bool:
        """Whether nothing but this variable leads to the list that it holds.

        A list with two names, one in an object, or one that a function of the graph changes may
        be filled or emptied out of sight.
        """
        key = self.key(name)
        variables = self.here.variables
        value = variables.get(key, NOTHING) if key is not None else NOTHING
        if key is None or any(not isinstance(atom, (Ref, Text)) for atom in value):
            return False
        others = self.here.within(*(item for place, item in variables.items() if place != key))
        if any(isinstance(atom, Ref) and atom in others for atom in value):
            return False
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        inner = [item for item in ast.walk(key[0]) if isinstance(item, functions)]  # type: ignore[arg-type]
        return not any(
            touches(item, ast.Name(name, ast.Load()))
            for item in inner
            if item is not key[0] and item is not self.scope
        )

    def _quietly(self, node: ast.expr) -> Value:
        """The value of an expression that changes nothing; NUMBER for any other."""
        quiet = (
            ast.Name,
            ast.Constant,
            ast.BinOp,
            ast.UnaryOp,
            ast.Attribute,
            ast.Load,
            ast.operator,
            ast.unaryop,
        )
        is_length = (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"
        )
        if is_length or all(isinstance(part, quiet) for part in ast.walk(node)):
            return self.value(node)
        return NUMBER

    def _after_loop(self, orelse: Sequence[ast.stmt], held: tuple[object, str] | None) -> None:
        if self.state is None:
            return
        if held is not None:
            self.state.variables.pop(held, None)
        if orelse:
            self.branch([orelse, []])

    def loop(
        self,
        node: ast.AST,
        turns: int | None,
        begin: Callable[[int | None], None],
        body: Callable[[], None],
        why: str,
        distinct: bool = False,
    ) -> None:
        """Follow a loop of at most so many turns. `begin` sets what a turn begins with.

        distinct: whether its turns are not alike even if nothing else changes.
        """
        outer = (self.breaks, self.continues)
        ends: list[End] = []
        if turns is not None and turns <= UNROLLED:
            self._unrolled(turns, begin, body, ends, distinct)
        else:
            self._widened(node, turns, begin, body, ends, why)
        self.breaks, self.continues = outer
        self.meet([*ends, *self.ends()])

    def _turn(
        self, turn: int | None, begin: Callable[[int | None], None], body: Callable[[], None]
    ) -> list[End]:
        """One turn; gives the ends by `break`."""
        self.breaks, self.continues = [], []
        begin(turn)
        body()
        self.meet([*self.ends(), *self.continues])
        return self.breaks

    def _unrolled(
        self,
        turns: int,
        begin: Callable[[int | None], None],
        body: Callable[[], None],
        ends: list[End],
        distinct: bool,
    ) -> None:
        for turn in range(turns):
            before, returned = self.here.copy(), len(self.returns)
            ends.append((before.copy(), self.cost))  # it may have had fewer turns
            part = self.begin_part()
            broken = self._turn(turn, begin, body)
            alike = self.state == before and not distinct
            more = self.end_part(part, turns - turn if alike else 1)
            ends += [(state, cost + more) for state, cost in broken]
            for found in self.returns[returned:]:
                found.cost += more
            if alike or self.state is None:
                return

    def _widened(
        self,
        node: ast.AST,
        turns: int | None,
        begin: Callable[[int | None], None],
        body: Callable[[], None],
        ends: list[End],
        why: str,
    ) -> None:
        start, cost, returned = self.here, self.cost, len(self.returns)
        outer, spent = self.peak, self.spenders.copy()
        for _ in range(SETTLING):
            self.state, self.cost, self.peak = start.copy(), cost, cost
            self.spenders = spent.copy()
            del self.returns[returned:]
            broken = self._turn(None, begin, body)
            wide = start
            for state, _ in (*self.ends(), *broken):
                wide = wide.widened(state)
            if wide == start:
                break
            start = wide
        if self.peak != cost and turns is None:
            self.unbounded = True
            self.refuse(RefusalKind.UNBOUNDED, why, node)
        more = self.end_part((cost, outer, spent), 1 if turns is None else turns)
        ends += [(state, other + more) for state, other in broken]
        for found in self.returns[returned:]:
            found.cost += more
        if self.state is None:
            self.state = start.copy()
        self.state.join(start)
        self.cost = self.cost.or_more(cost)

    def comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, kind: str
    ) -> Value:
        names = [
            item.id
            for part in node.generators
            for item in ast.walk(part.target)
            if isinstance(item, ast.Name)
        ]
        keys = [key for name in names if (key := self.key(name)) is not None]
        kept = {key: self.here.variables[key] for key in keys if key in self.here.variables}
        self.loops += 1
        made = self.new(node, Obj(kind, 0, elements=() if kind in ("list", "lazy") else None))
        # The object is found again through a variable: a later turn may have renamed it.
        held = ("comprehension", str(self.loops))
        self.here.variables[held] = made
        self._generators(node, 0, held)
        made = self.here.variables.pop(held)
        for key in keys:
            self.here.variables.pop(key, None)
        self.here.variables.update(kept)
        return made

    def _generators(
        self,
        node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
        place: int,
        held: tuple[object, str],
    ) -> None:
        if place == len(node.generators):
            self._produce(node, held)
            return
        part = node.generators[place]
        value = self.value(part.iter)
        turns, item = self.run_over(value, part.iter)
        elements = self.here.elements_of(value)
        self.loops += 1
        running = ("loop", str(self.loops))
        self.here.variables[running] = value
        self.running.append(running)

        def begin(turn: int | None) -> None:
            known = turn is not None and elements is not None and turn < len(elements)
            self.assign(part.target, elements[turn] if known else item)  # type: ignore[index]

        def body() -> None:
            passed: list[End] = []
            for test in part.ifs:
                self.settled(self.value(test), test)
                passed.append((self.here.copy(), self.cost))
            self._generators(node, place + 1, held)
            self.meet([*self.ends(), *passed])

        distinct = elements is not None and len(set(elements)) > 1
        self.loop(node, turns, begin, body, _FOR, distinct)
        self.running.pop()
        self.here.variables.pop(running, None)
        if isinstance(node, ast.GeneratorExp):
            for ref, _ in self.here.objects(self.here.variables[held]):
                self.here.change(ref, lambda old: replace(old, over=joined(old.over, value)))

    def _produce(
        self,
        node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
        held: tuple[object, str],
    ) -> None:
        if isinstance(node, ast.DictComp):
            keys, value = self.value(node.key), self.value(node.value)
        else:
            keys, value = NOTHING, self.value(node.elt)
        for ref, obj in self.here.objects(self.here.variables[held]):
            elements = obj.elements
            if elements is not None:
                elements = (*elements, value) if len(elements) < UNROLLED else None
            length = None if obj.length is None else obj.length + 1
            items, all_keys = joined(obj.items, value), joined(obj.keys, keys)
            self.here.change(
                ref,
                lambda old, o=(length, items, all_keys, elements): replace(  # type: ignore[misc]
                    old, length=o[0], items=o[1], keys=o[2], elements=o[3]
                ),
            )
