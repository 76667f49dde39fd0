"""How much a written graph can cost at worst, where its source tells.

Calls add up, of branches the dearer one counts, helpers count where they are called, and a loop
multiplies its body by its turns. Turns are told of ranges, of lists and texts that are written
out, of what comprehensions and `append` make of such, and of `while` loops with a plain counter.
What one call of an operator may ask of models is the operator's own figure
(`Operator.most_calls`).

Where something that costs may happen nobody knows how often, a graph has no bound that can be
told. That is no fault: the meter of the run (`aflow_tune.graph.broker`) stops every graph at its
limits. Refused is only what plainly never ends.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from aflow_tune.graph.shape import Function, children
from aflow_tune.operators import Operator
from aflow_tune.writer.allowed import FUNCTIONS
from aflow_tune.writer.calls import Calls
from aflow_tune.writer.types import Bound, CheckLimits, RefusalKind, Refusals

MAX_STEPS = 20_000
"""Statements and expressions that are counted, helpers wherever they are called."""
MAX_TURNS = 10**18
"""Of a loop, and as a number. Beyond this they count as unknown."""
_UNKNOWN = (-math.inf, math.inf)
_LEAVING = (ast.Break, ast.Return)
_SAME = {
    "list": 0, "tuple": 0, "sorted": 0, "reversed": 0, "set": 0, "frozenset": 0, "enumerate": 0,
    "iter": 0, "collections.deque": 0, "collections.Counter": 0, "copy.copy": 0,
    "copy.deepcopy": 0, "dict": 0, "asyncio.as_completed": 0, "filter": 1, "map": 1,
    "itertools.takewhile": 1, "itertools.dropwhile": 1, "itertools.pairwise": 0,
}  # fmt: skip
"""Python's functions that give at most as many items as one of their arguments has."""
_READING = frozenset(
    [*_SAME, "len", "zip", "sum", "min", "max", "any", "all", "str", "print", "isinstance",
     "bool", "repr", "random.choice", "random.sample", "itertools.product", "asyncio.gather",
     "itertools.combinations", "itertools.permutations", "json.dumps"]
)  # fmt: skip
_READING_METHODS = frozenset(
    ["index", "count", "items", "keys", "values", "get", "copy", "join", "most_common"]
)


class Cost(NamedTuple):
    """Calls of operators and direct calls of the model, and what these ask of models at worst."""

    calls: float = 0
    model_calls: float = 0

    def plus(self, *others: Cost) -> Cost:
        parts = (self, *others)
        return Cost(sum(one.calls for one in parts), sum(one.model_calls for one in parts))

    def times(self, turns: float) -> Cost:
        """So many times; what costs nothing costs nothing however often."""
        return Cost(_product([self.calls, turns]), _product([self.model_calls, turns]))


class _Ends(NamedTuple):
    """What a block has cost where it goes on, where it ends a turn or the loop, and at most."""

    through: Cost | None
    turn: Cost | None = None
    loop: Cost | None = None
    most: Cost = Cost()


def _product(factors: Iterable[float]) -> float:
    """As `math.prod`, but nothing, however often, is nothing."""
    many = list(factors)
    return 0 if 0 in many else math.prod(many)


def _larger(costs: Iterable[Cost | None]) -> Cost | None:
    """The larger of both figures; None where there is none."""
    known = [cost for cost in costs if cost is not None]
    if not known:
        return None
    return Cost(max(one.calls for one in known), max(one.model_calls for one in known))


class _TooLong(Exception):
    """The graph takes more steps to count than it may."""


class WorstCase:
    """What a graph may use at worst. What never ends is put to `refusals`.

    `bound` is None where the source does not tell it; `spenders` has the model calls of each call
    by line, column and operator, as far as they are known.
    """

    def __init__(self, calls: Calls, limits: CheckLimits, refusals: Refusals) -> None:
        self.calls, self.limits, self.refusals = calls, limits, refusals
        self.scopes = calls.scopes
        self.spenders: Counter[tuple[int, int, str]] = Counter()
        self._known: dict[tuple[ast.AST, str], tuple[Any, Any]] = {}
        """Number and length of parameters, in the calls that are being counted."""
        self._stack: list[ast.AST] = []
        self._asked: set[ast.AST] = set()
        self._turns: list[float] = []
        self._steps = 0
        cost = Cost(math.inf, math.inf)
        try:
            parts = [
                calls.methods[name] for name in ("__init__", "__call__") if name in calls.methods
            ]
            cost = Cost().plus(*(self._function(part) for part in parts))
        except _TooLong:
            pass
        self.bound = bound_of(cost, limits) if all(map(math.isfinite, cost)) else None

    # What things cost

    def _function(self, function: Function | ast.Lambda) -> Cost:
        self._stack.append(function)
        if isinstance(function, ast.Lambda):
            cost = self._expression(function.body)
        else:
            cost = self._block(function.body).most
        self._stack.pop()
        return cost

    def _block(self, statements: Sequence[ast.stmt]) -> _Ends:
        cost = Cost()
        turn = loop = None
        most = Cost()
        for statement in statements:
            ends = self._statement(statement)
            turn = _larger([turn, None if ends.turn is None else cost.plus(ends.turn)])
            loop = _larger([loop, None if ends.loop is None else cost.plus(ends.loop)])
            most = _larger([most, cost.plus(ends.most)]) or most
            if ends.through is None:
                return _Ends(None, turn, loop, most)
            cost = cost.plus(ends.through)
        return _Ends(cost, turn, loop, most)

    def _statement(self, node: ast.stmt) -> _Ends:
        if isinstance(node, ast.If):
            return self._branch(self._expression(node.test), [node.body, node.orelse])
        if isinstance(node, ast.Match):
            return self._branch(self._expressions(node), [*(case.body for case in node.cases), []])
        if isinstance(node, (ast.For, ast.AsyncFor)):
            turns = self._length(node.iter)
            return self._loop(node, self._expression(node.iter), Cost(), turns)
        if isinstance(node, ast.While):
            turns = self._turns_of(node)
            if turns == math.inf and self._never_ends(node):
                message = (
                    "this `while` never ends; write `for _ in range(3):`, or a `break` that is "
                    "reached"
                )
                self.refusals.add(RefusalKind.UNBOUNDED, message, node)
            test = self._expression(node.test)
            return self._loop(node, test, test, turns)
        if isinstance(node, (ast.Try, ast.TryStar)):
            return self._try(node)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            before = Cost().plus(*(self._expression(item.context_expr) for item in node.items))
            return self._branch(before, [node.body])
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            return _Ends(Cost())
        cost = self._expressions(node)
        if isinstance(node, (ast.Return, ast.Raise)):
            return _Ends(None, most=cost)
        if isinstance(node, ast.Break):
            return _Ends(None, loop=cost)
        if isinstance(node, ast.Continue):
            return _Ends(None, turn=cost)
        return _Ends(cost, most=cost)

    def _branch(self, before: Cost, bodies: Sequence[Sequence[ast.stmt]]) -> _Ends:
        ends = [self._block(body) for body in bodies]
        found = [_larger(one[place] for one in ends) for place in range(4)]
        return _Ends(*(None if cost is None else before.plus(cost) for cost in found))  # type: ignore[arg-type]

    def _loop(self, node: Any, before: Cost, each: Cost, turns: float) -> _Ends:
        self._turns.append(turns)
        body = self._block(node.body)
        self._turns.pop()
        again = _larger([body.through, body.turn])
        ended = before if again is None else before.plus(again.plus(each).times(turns))
        earlier = Cost() if again is None else again.plus(each).times(max(0, turns - 1))
        earlier = earlier.plus(before)
        rest = self._block(node.orelse)
        through = None if rest.through is None else ended.plus(rest.through)
        left = None if body.loop is None else earlier.plus(body.loop)
        most = _larger([earlier.plus(body.most), ended.plus(rest.most)]) or Cost()
        if turns == 0:
            return _Ends(before.plus(rest.through or Cost()), rest.turn, rest.loop, before)
        return _Ends(_larger([through, left]), rest.turn, rest.loop, most)

    def _try(self, node: ast.Try | ast.TryStar) -> _Ends:
        body, last = self._block(node.body), self._block(node.finalbody)
        ways = [self._block(handler.body) for handler in node.handlers]
        after = [_Ends(*(c and body.most.plus(c) for c in one)) for one in ways]  # type: ignore[arg-type]
        rest = self._block(node.orelse)
        goes_on = body.through is not None and rest.through is not None
        through = body.through.plus(rest.through) if goes_on else None  # type: ignore[union-attr, arg-type]
        most = body.most if body.through is None else body.through.plus(rest.most)
        after.append(_Ends(through, body.turn, body.loop, _larger([most, body.most]) or Cost()))
        found = [_larger(one[place] for one in after) for place in range(4)]
        more = last.through or last.most
        return _Ends(*(None if cost is None else cost.plus(more) for cost in found))  # type: ignore[arg-type]

    def _expressions(self, node: ast.AST) -> Cost:
        """Of everything directly in a statement or an expression."""
        parts = [part for part in children(node) if isinstance(part, (ast.expr, ast.keyword))]
        return Cost().plus(*(self._expression(part) for part in parts))

    def _step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise _TooLong

    def _expression(self, node: ast.AST) -> Cost:
        self._step()
        own = self.calls.function(node)  # type: ignore[arg-type]
        if own is not None:  # handed on: nobody knows how often it is called
            return self._applied(own, math.inf)
        if isinstance(node, (ast.Constant, ast.Name)):
            return Cost()
        if isinstance(node, ast.IfExp):
            ways = [self._expression(node.body), self._expression(node.orelse)]
            return self._expression(node.test).plus(_larger(ways) or Cost())
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            return self._comprehension(node, 0)
        return self._call(node) if isinstance(node, ast.Call) else self._expressions(node)

    def _comprehension(self, node: Any, place: int) -> Cost:
        if place == len(node.generators):
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return Cost().plus(*(self._expression(part) for part in parts))
        part = node.generators[place]
        before, turns = self._expression(part.iter), self._length(part.iter)
        self._turns.append(turns)
        tests = [self._expression(test) for test in part.ifs]
        inner = self._comprehension(node, place + 1).plus(*tests).times(turns)
        self._turns.pop()
        return before.plus(inner)

    def _call(self, node: ast.Call) -> Cost:
        function, name = self.calls.function(node.func), self.calls.python_name(node.func)
        handles = self.calls.handles(node)
        cost = Cost() if function is not None else self._expression(node.func)
        given = [*node.args, *(word.value for word in node.keywords)]
        turns = max([self._length(item) for item in node.args if not self._is_called(item)] or [1])
        turns = turns if name in ("map", "filter", "min", "max", "sorted") else math.inf
        for item in given:
            own = self.calls.function(item) if name else None
            instance = getattr(item, "attr", "") if not handles and function is None else ""
            if own is not None:
                cost = cost.plus(self._applied(own, turns))
                continue
            cost = cost.plus(self._expression(item))
            if instance in self.calls.shape.instances:
                self._turns.append(turns)
                operator = self.calls.shape.instances[instance]
                cost = cost.plus(self._operator(node, instance, operator).times(turns))
                self._turns.pop()
        if handles:
            each = [self._operator(node, instance, name) for instance, name in sorted(handles)]
            return cost.plus(_larger(each) or Cost())
        return cost if function is None else cost.plus(self._helper(node, function))

    def _is_called(self, node: ast.expr) -> bool:
        """Whether an argument is what Python's function is to call."""
        instances = self.calls.shape.instances
        return self.calls.function(node) is not None or getattr(node, "attr", "") in instances

    def _applied(self, function: Function | ast.Lambda, turns: float) -> Cost:
        if function in self._stack:
            return Cost(math.inf, math.inf)
        self._turns.append(turns)
        cost = self._function(function).times(turns)
        self._turns.pop()
        return cost

    def _operator(self, node: ast.Call, instance: str, name: str) -> Cost:
        kind = self.calls.operators.get(name)
        most = 1
        if kind is not None:
            options = dict(self.calls.options.get(instance, {}))
            given = options.pop("retries", self.limits.retries)
            retries = min(given, self.limits.retries) if isinstance(given, int) else 0
            names = self.calls.parameters(name)
            options |= dict(zip(names, node.args, strict=False))
            options |= {word.arg: word.value for word in node.keywords if word.arg}
            most = _most_calls(kind, retries, {k: self._told(v) for k, v in options.items()})
        place = (node.lineno, node.col_offset + 1, name or "llm")
        turns = _product(self._turns)
        self.spenders[place] += most * int(turns) if turns < math.inf else most
        return Cost(1, most)

    def _told(self, value: Any) -> Any:
        """An option or argument of an operator, the most of a number; None if it is not known."""
        if not isinstance(value, ast.expr):
            return value
        most = self._number(value)[1]
        return most if abs(most) < math.inf else None

    def _helper(self, node: ast.Call, function: Function | ast.Lambda) -> Cost:
        """A function of the graph, with what is known of its arguments here."""
        if function in self._stack:
            around = self._stack[self._stack.index(function) :]
            inside = [item for one in around for item in ast.walk(one)]
            if not any(isinstance(item, _CHOICES) for item in inside):
                name = getattr(function, "name", "the lambda")
                message = f"{name} calls itself for ever; write a `for` over range(...) instead"
                self.refusals.add(RefusalKind.UNBOUNDED, message, node)
            return Cost(math.inf, math.inf)
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        if function in self.calls.methods.values() and not getattr(function, "decorator_list", []):
            positional = positional[1:]
        given: dict[str, ast.expr] = {}
        pairs = zip(reversed(positional), reversed(arguments.defaults), strict=False)
        given |= {item.arg: default for item, default in pairs}
        given |= {
            item.arg: default
            for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is not None
        }
        if not any(isinstance(item, ast.Starred) for item in node.args):
            given |= {item.arg: value for item, value in zip(positional, node.args, strict=False)}
        given |= {word.arg: word.value for word in node.keywords if word.arg}
        found: dict[tuple[ast.AST, str], tuple[Any, Any]] = {
            (function, name): (self._number(value), self._length(value))
            for name, value in given.items()
        }
        before = self._known
        self._known = {**before, **found}
        cost = self._function(function)
        self._known = before
        return cost

    # How often, how many

    def _number(self, node: ast.expr) -> tuple[float, float]:
        """Least and most of an expression, infinite where it is not known."""
        self._step()
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value, node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            low, high = self._number(node.operand)
            return -high, -low
        if isinstance(node, ast.BinOp):
            return _arithmetic(node.op, self._number(node.left), self._number(node.right))
        if isinstance(node, ast.Call):
            return self._number_of_call(node)
        if isinstance(node, (ast.Name, ast.Attribute)) and node not in self._asked:
            if isinstance(node, ast.Name) and (known := self._parameter(node)) is not None:
                return known[0]
            values = self.calls.values(node)
            self._asked.add(node)
            found = [self._number(value) for value in values or ()]
            self._asked.discard(node)
            if found:
                return min(low for low, _ in found), max(high for _, high in found)
        return _UNKNOWN

    def _number_of_call(self, node: ast.Call) -> tuple[float, float]:
        name = self.calls.python_name(node.func)
        if name == "len" and node.args:
            return 0, self._length(node.args[0])
        bounds = [self._number(item) for item in node.args]
        if name in ("min", "max") and len(bounds) > 1:
            chosen = min if name == "min" else max
            return chosen(low for low, _ in bounds), chosen(high for _, high in bounds)
        if name in ("int", "round") and len(bounds) == 1:
            return bounds[0]
        if name == "random.randint" and len(bounds) == 2:
            return bounds[0][0], bounds[1][1]
        return _UNKNOWN

    def _parameter(self, node: ast.Name) -> tuple[Any, Any] | None:
        """What is known of a parameter that nothing else is put into."""
        owner = self.scopes.owner(self.scopes.scope_of[node], node.id)
        if owner is None or (owner, node.id) in self.scopes.stores:
            return None
        return self._known.get((owner, node.id))

    def _length(self, node: ast.expr) -> float:
        """How many items an expression has at most; infinite where it is not known."""
        self._step()
        if isinstance(node, ast.Constant):
            return len(node.value) if isinstance(node.value, str) else math.inf
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return sum(
                self._length(item.value) if isinstance(item, ast.Starred) else 1
                for item in node.elts
            )
        if isinstance(node, ast.Dict):
            return len(node.keys) if None not in node.keys else math.inf
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            return _product(self._length(part.iter) for part in node.generators)
        if isinstance(node, ast.Await):
            return self._length(node.value)
        if isinstance(node, ast.IfExp):
            return max(self._length(node.body), self._length(node.orelse))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._length(node.left) + self._length(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            length, times = self._length(node.left), self._number(node.right)[1]
            return _product([length, max(0, times)])
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            stop = self._number(node.slice.upper) if node.slice.upper is not None else _UNKNOWN
            length = self._length(node.value)
            return min(length, stop[1]) if stop[0] >= 0 else length
        if isinstance(node, ast.Call):
            return self._length_of_call(node)
        if isinstance(node, (ast.Name, ast.Attribute)) and node not in self._asked:
            return self._length_of_name(node)
        return math.inf

    def _length_of_call(self, node: ast.Call) -> float:
        name = self.calls.python_name(node.func)
        args = node.args
        if name == "range":
            return self._length_of_range([self._number(item) for item in args])
        if name in _SAME:
            return self._length(args[_SAME[name]]) if len(args) > _SAME[name] else 0.0
        if any(word.arg == "repeat" for word in node.keywords):
            return math.inf
        lengths = [
            self._length(item.value if isinstance(item, ast.Starred) else item) for item in args
        ]
        if name == "zip":
            return min(lengths, default=0)
        if name == "itertools.product":
            return _product(lengths)
        if name == "itertools.chain":
            return sum(lengths)
        if name == "asyncio.gather":
            parts = zip(args, lengths, strict=True)
            return sum(length if isinstance(item, ast.Starred) else 1 for item, length in parts)
        if name in ("itertools.islice", "random.sample") and len(args) == 2:
            return min(lengths[0], self._number(args[1])[1])
        if name in ("itertools.combinations", "itertools.permutations") and len(args) == 2:
            size, chosen = lengths[0], self._number(args[1])[1]
            if size <= 20 and chosen <= 20:
                return math.perm(int(size), max(0, int(chosen)))
        method = node.func if isinstance(node.func, ast.Attribute) and not name else None
        if method is not None and method.attr in ("items", "keys", "values", "copy"):
            return self._length(method.value)
        if method is not None and method.attr == "most_common" and args:
            return max(0.0, self._number(args[0])[1])
        if method is not None and method.attr in ("split", "rsplit") and len(args) == 2:
            low, high = self._number(args[1])
            return high + 1 if low >= 0 else math.inf
        return math.inf

    def _length_of_range(self, bounds: list[tuple[float, float]]) -> float:
        if not 1 <= len(bounds) <= 3:
            return math.inf
        start, stop = ((0.0, 0.0), bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
        step = bounds[2] if len(bounds) == 3 else (1, 1)
        if step[0] > 0:
            turns = (stop[1] - start[0]) / step[0]
        elif step[1] < 0:
            turns = (start[1] - stop[0]) / -step[1]
        else:
            return math.inf
        return max(0, math.ceil(turns)) if turns <= MAX_TURNS else math.inf

    def _length_of_name(self, node: ast.Name | ast.Attribute) -> float:
        """Of a variable: the longest of what it is given, and what is put into it besides."""
        if isinstance(node, ast.Name) and (known := self._parameter(node)) is not None:
            return known[1] if self._grown(node) == 0 else math.inf
        values = self.calls.values(node)
        if values is None:
            return math.inf
        uses = self.calls.uses(node)
        self._step(len(uses))
        self._asked.update(uses)
        longest = max(self._length(value) for value in values)
        grown = self._grown(node) if longest < math.inf else math.inf
        self._asked.difference_update(uses)
        return longest + grown

    def _grown(self, node: ast.Name | ast.Attribute) -> float:
        """How many items are put into a variable at most; infinite where it has another name."""
        grown = 0.0
        for use in self.calls.uses(node):
            around = self.scopes.parent.get(use)
            call = self.scopes.parent.get(around) if around is not None else None
            if isinstance(around, ast.Attribute) and isinstance(call, ast.Call):
                if around.attr in _READING_METHODS:
                    continue
                if around.attr not in ("append", "add") or call.func is not around:
                    return math.inf
                grown += self._turns_around(use)
            elif not self._is_read(use, around):
                return math.inf
        return grown

    def _turns_around(self, use: ast.expr) -> float:
        """How often a line of a function is passed."""
        turns = 1.0
        for node in self.scopes.outward(use):
            if isinstance(node, FUNCTIONS):
                own = self.scopes.owner(self.scopes.scope_of[use], getattr(use, "id", ""))
                return turns if node is own else math.inf
            if isinstance(node, ast.For):
                turns = _product([turns, self._length(node.iter)])
            elif isinstance(node, ast.While):
                turns = _product([turns, self._turns_of(node)])
            elif isinstance(node, ast.comprehension):
                return math.inf
        return turns

    def _is_read(self, use: ast.expr, around: ast.AST | None) -> bool:
        """Whether a use of a list gives it no second name and puts nothing into it."""
        if isinstance(around, ast.keyword):
            around = self.scopes.parent.get(around)
        if isinstance(around, ast.Call):
            return bool(self.calls.handles(around)) or (
                self.calls.python_name(around.func) in _READING
                or getattr(around.func, "attr", "") == "join"
            )
        if isinstance(around, ast.Subscript):
            return around.value is not use or isinstance(around.ctx, ast.Load)
        reading = (ast.For, ast.comprehension, ast.Compare, ast.FormattedValue, ast.Starred)
        return isinstance(
            around, (*reading, ast.If, ast.While, ast.UnaryOp, ast.BinOp, ast.Return, ast.Expr)
        )

    def _turns_of(self, node: ast.While) -> float:
        """Of a `while`: where `turns < 3` must hold, and its body itself counts `turns += 1`."""
        if isinstance(node.test, ast.Constant) and not node.test.value:
            return 0
        both = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        tests = node.test.values if both else [node.test]  # type: ignore[attr-defined]
        found = [self._turns_while(node, test, (ast.Lt, ast.LtE))[0] for test in tests]
        for place, statement in enumerate(node.body):
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], _LEAVING):
                turns, first = self._turns_while(node, statement.test, (ast.GtE, ast.Gt))
                # Counted before it is asked, the turn that meets the limit is the last one.
                found.append(turns + 1 if first >= place else max(1, turns))
        return min(found)

    def _turns_while(
        self, node: ast.While, test: ast.expr, signs: tuple[type, type]
    ) -> tuple[float, int]:
        """`counter < limit`, or its opposite that ends a loop: turns, and where its body counts."""
        unknown = (math.inf, 0)
        if not isinstance(test, ast.Compare) or type(test.ops[-1]) not in signs:
            return unknown
        counter, limit = test.left, test.comparators[0]
        if not isinstance(counter, ast.Name) or len(test.ops) > 1:
            return unknown
        owner = self.scopes.owner(self.scopes.scope_of[counter], counter.id)
        stores = self.scopes.stores.get((owner, counter.id), []) if owner is not None else []
        inside = {item for item in ast.walk(node) if isinstance(item, ast.Name)}
        self._step(len(inside) + len(stores))
        start, step, first = math.inf, math.inf, len(node.body)
        for store in stores:
            parent = self.scopes.parent.get(store)
            if store not in inside:
                value = self.calls.value_of(store)
                start = min(start, -math.inf if value is None else self._number(value)[0])
            elif isinstance(parent, ast.AugAssign) and parent in node.body:
                place = node.body.index(parent)
                first = min(first, place)
                before = [item for part in node.body[:place] for item in ast.walk(part)]
                skipped = any(isinstance(item, ast.Continue) for item in before)
                adds = isinstance(parent.op, ast.Add) and not skipped
                step = min(step, self._number(parent.value)[0] if adds else 0)
            else:
                return unknown
        moved = {item.id for item in inside if isinstance(item.ctx, ast.Store)}
        if any(isinstance(item, ast.Name) and item.id in moved for item in ast.walk(limit)):
            return unknown
        distance = self._number(limit)[1] - start + (type(test.ops[0]) in (ast.LtE, ast.Gt))
        if not 0 < step < math.inf or not abs(distance) < math.inf:
            return unknown
        return max(0, math.ceil(distance / step)), first

    def _never_ends(self, node: ast.While) -> bool:
        """Whether nothing in a loop can end it."""
        inside = [item for statement in node.body for item in ast.walk(statement)]
        leaving = (ast.Break, ast.Return, ast.Raise, ast.Try)
        if any(isinstance(item, leaving) for item in inside):
            return False
        asked = [item for item in ast.walk(node.test) if not isinstance(item, ast.expr_context)]
        moved = {item.id for item in inside if isinstance(item, ast.Name)}
        plain = (ast.Constant, ast.Name, ast.Compare, ast.BoolOp, ast.UnaryOp)
        signs = (ast.cmpop, ast.boolop, ast.unaryop)
        return all(isinstance(item, (*plain, *signs)) for item in asked) and not any(
            isinstance(item, ast.Name) and item.id in moved for item in asked
        )


_CHOICES = (
    ast.If, ast.IfExp, ast.While, ast.For, ast.Try, ast.Match, ast.BoolOp, ast.comprehension
)  # fmt: skip
"""What may keep a function from calling itself again."""


def _arithmetic(
    op: ast.operator, left: tuple[float, float], right: tuple[float, float]
) -> tuple[float, float]:
    (a, b), (c, d) = left, right
    if isinstance(op, ast.Add):
        return a + c, b + d
    if isinstance(op, ast.Sub):
        return a - d, b - c
    if a < 0 or c < 0 or math.inf in (b, d) or max(b, d) > MAX_TURNS:
        return _UNKNOWN
    if isinstance(op, ast.Mult):
        return a * c, b * d
    if isinstance(op, ast.Pow) and (b <= 1 or d * math.log10(b) <= 18):
        return a**c, b**d
    if isinstance(op, ast.FloorDiv) and c > 0:
        return a // d, b // c
    if isinstance(op, ast.Mod) and c > 0:
        return 0, d - 1
    return _UNKNOWN


def _most_calls(kind: type[Operator], retries: int, settings: dict[str, Any]) -> int:
    """What one call of an operator may ask of models."""
    try:
        most = kind.most_calls(retries=retries, **settings)
    except Exception:  # a user's operator that does not take what it is told
        most = Operator.most_calls(retries=retries)
    return max(0, most) if isinstance(most, int) else 1 + retries


def bound_of(cost: Cost, limits: CheckLimits) -> Bound:
    """The bound that a cost means, with the most tokens that each call may have."""
    model_calls = int(cost.model_calls)
    prompt = model_calls * limits.call_prompt_tokens
    completion = model_calls * limits.call_completion_tokens
    prices = (limits.usd_per_prompt_token, limits.usd_per_completion_token)
    usd = 0.0 if model_calls == 0 else None
    if model_calls and prices[0] is not None and prices[1] is not None:
        usd = prompt * prices[0] + completion * prices[1]
    return Bound(int(cost.calls), model_calls, prompt, completion, usd)
