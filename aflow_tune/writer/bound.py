"""The worst-case cost of a written graph, as far as its source determines it.

Calls add up, the most expensive branch counts, helpers count per call, and a loop multiplies its
body by its iterations: known for ranges up to a constant (also through names), and for literals,
comprehensions and the like in its head. An operator call counts `Operator.most_calls`. Any other
loop, such as `while`, counts as infinite, so a graph may have no bound; then the meter
(`aflow_tune.graph.run`) stops it at the limits. Only loops that plainly never end are refused.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from aflow_tune.graph.shape import Function, children
from aflow_tune.operators import Operator
from aflow_tune.writer.source import FUNCTIONS, Source
from aflow_tune.writer.types import Bound, CheckLimits, RefusalKind, Refusals

MAX_STEPS = 20_000  # statements and expressions visited, helpers anew at each call
MAX_TURNS = 10**18  # iterations; more count as unknown
_SAME_LENGTH = frozenset(
    ("list", "tuple", "sorted", "reversed", "set", "enumerate", "iter", "asyncio.as_completed")
)
"""Functions whose result has at most as many items as their first argument."""
_CHOICES = (
    ast.If, ast.IfExp, ast.While, ast.For, ast.Try, ast.Match, ast.BoolOp, ast.comprehension
)  # fmt: skip
"""Nodes that can end a recursion."""


class Cost(NamedTuple):
    """Calls of operators and of the model by the graph, and model calls in total, at worst."""

    calls: float = 0
    model_calls: float = 0

    def plus(self, *others: Cost) -> Cost:
        parts = (self, *others)
        return Cost(sum(one.calls for one in parts), sum(one.model_calls for one in parts))

    def times(self, turns: float) -> Cost:
        return Cost(_product(self.calls, turns), _product(self.model_calls, turns))


_NOTHING = Cost()


def _product(count: float, turns: float) -> float:
    """The product, with 0 * inf = 0."""
    return count * turns if count and turns else 0


def _larger(costs: Iterable[Cost]) -> Cost:
    return Cost(*map(max, *costs, Cost()))


class _TooLong(Exception):
    """Counting took more than MAX_STEPS."""


class WorstCase:
    """What a graph may use at worst: `bound`, None if the source does not determine it, and
    `spenders`, model calls by line, column and operator of the call."""

    def __init__(self, source: Source, limits: CheckLimits, refusals: Refusals) -> None:
        self.source, self.limits, self.refusals = source, limits, refusals
        self.spenders: Counter[tuple[int, int, str]] = Counter()
        self.bound: Bound | None = None
        self._stack: list[ast.AST] = []
        self._asked: set[ast.AST] = set()
        self._turns: list[float] = []
        self._steps = 0
        methods = [source.methods.get(name) for name in ("__init__", "__call__")]
        try:
            cost = Cost().plus(*(self._function(one) for one in methods if one is not None))
        except _TooLong:
            return
        if not all(map(math.isfinite, cost)):
            return
        calls, model_calls = map(int, cost)
        prompt = model_calls * limits.call_prompt_tokens
        completion = model_calls * limits.call_completion_tokens
        prices = (limits.usd_per_prompt_token, limits.usd_per_completion_token)
        usd = 0.0 if model_calls == 0 else None
        if model_calls and prices[0] is not None and prices[1] is not None:
            usd = prompt * prices[0] + completion * prices[1]
        self.bound = Bound(calls, model_calls, prompt, completion, usd)

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _TooLong

    # Statements

    def _function(self, function: Function | ast.Lambda) -> Cost:
        self._stack.append(function)
        if isinstance(function, ast.Lambda):
            cost = self._expression(function.body)
        else:
            cost = self._block(function.body)
        self._stack.pop()
        return cost

    def _block(self, statements: Sequence[ast.stmt], rest: Cost = _NOTHING) -> Cost:
        """The cost of statements and of `rest`, which follows unless a statement leaves."""
        for statement in reversed(statements):
            rest = self._statement(statement, rest)
        return rest

    def _statement(self, node: ast.stmt, rest: Cost) -> Cost:
        self._step()
        if isinstance(node, ast.If):
            ways = [self._block(node.body, rest), self._block(node.orelse, rest)]
            return self._expression(node.test).plus(_larger(ways))
        if isinstance(node, ast.Match):
            ways = [rest, *(self._block(case.body, rest) for case in node.cases)]
            return self._parts(node).plus(_larger(ways))
        if isinstance(node, (ast.For, ast.AsyncFor)):
            turns = self._turning(self._length(node.iter), node.body)
            return self._expression(node.iter).plus(turns, self._after(node, rest))
        if isinstance(node, ast.While):
            if _never_ends(node):
                message = "this `while` never ends; write a `for`, or a `break` that is reached"
                self.refusals.add(RefusalKind.UNBOUNDED, message, node)
            turns = self._turning(math.inf, [ast.Expr(node.test), *node.body])
            return turns.plus(self._after(node, rest))
        if isinstance(node, (ast.Try, ast.TryStar)):
            ways = [self._block(handler.body, rest) for handler in node.handlers]
            ways.append(self._block(node.orelse, rest))
            return self._block(node.body).plus(_larger(ways), self._block(node.finalbody))
        if isinstance(node, (ast.With, ast.AsyncWith)):
            before = [self._expression(item.context_expr) for item in node.items]
            return self._block(node.body, rest).plus(*before)
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            return rest
        leaves = isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue))
        return self._parts(node) if leaves else self._parts(node).plus(rest)

    def _after(self, loop: ast.For | ast.AsyncFor | ast.While, rest: Cost) -> Cost:
        """After a loop: its `else` and `rest`, or only `rest` after a `break`."""
        return _larger([self._block(loop.orelse, rest), rest])

    def _turning(self, turns: float, body: Sequence[ast.stmt]) -> Cost:
        self._turns.append(turns)
        cost = self._block(body).times(turns)
        self._turns.pop()
        return cost

    # Expressions

    def _parts(self, node: ast.AST) -> Cost:
        parts = [part for part in children(node) if isinstance(part, (ast.expr, ast.keyword))]
        return Cost().plus(*(self._expression(part) for part in parts))

    def _expression(self, node: ast.AST) -> Cost:
        self._step()
        own = self.source.function(node)
        if own is not None:  # passed as a value: it may be called any number of times
            self._turns.append(math.inf)
            cost = Cost(1, 1) if own in self._stack else self._function(own)
            self._turns.pop()
            return cost.times(math.inf)
        if isinstance(node, (ast.Constant, ast.Name)):
            return Cost()
        if isinstance(node, ast.IfExp):
            ways = _larger([self._expression(node.body), self._expression(node.orelse)])
            return self._expression(node.test).plus(ways)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            return self._comprehension(node, 0)
        return self._call(node) if isinstance(node, ast.Call) else self._parts(node)

    def _comprehension(self, node: Any, place: int) -> Cost:
        if place == len(node.generators):
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return Cost().plus(*map(self._expression, parts))
        part = node.generators[place]
        turns = self._length(part.iter)
        self._turns.append(turns)
        inner = self._comprehension(node, place + 1).plus(*map(self._expression, part.ifs))
        self._turns.pop()
        return self._expression(part.iter).plus(inner.times(turns))

    def _call(self, node: ast.Call) -> Cost:
        source = self.source
        function, handles = source.function(node.func), sorted(source.handles(node))
        given = [*node.args, *(word.value for word in node.keywords)]
        cost = Cost() if function is not None else self._expression(node.func)
        cost = cost.plus(*map(self._expression, given))
        if handles:
            each = [self._operator(node, instance, name) for instance, name in handles]
            return cost.plus(_larger(each))
        if function is not None:
            return cost.plus(self._helper(node, function))
        handed_on = any(getattr(item, "attr", "") in source.shape.instances for item in given)
        return cost.plus(Cost(math.inf, math.inf)) if handed_on else cost

    def _operator(self, node: ast.Call, instance: str, name: str) -> Cost:
        kind = self.source.operators.get(name)
        most = 1
        if kind is not None:
            options = dict(self.source.options.get(instance, {}))
            given = options.pop("retries", self.limits.retries)
            given = self._most(given) if isinstance(given, ast.expr) else given
            fewer = isinstance(given, (int, float)) and given < self.limits.retries
            retries = max(0, int(given)) if fewer else self.limits.retries
            names = list(inspect.signature(kind.__call__).parameters)[1:]
            options |= dict(zip((n for n in names if n != "mode"), node.args, strict=False))
            options |= {word.arg: word.value for word in node.keywords if word.arg}
            told = {}
            for key, value in options.items():
                known = self._most(value) if isinstance(value, ast.expr) else value
                told[key] = None if known in (math.inf, -math.inf) else known
            try:
                most = max(0, int(kind.most_calls(retries=retries, **told)))
            except Exception:  # a user's operator may not accept these settings
                most = Operator.most_calls(retries=retries)
        turns = math.prod(self._turns)
        place = (node.lineno, node.col_offset + 1, name or "llm")
        self.spenders[place] += most * int(turns) if math.isfinite(turns) else most
        return Cost(1, most)

    def _helper(self, node: ast.Call, function: Function | ast.Lambda) -> Cost:
        if function not in self._stack:
            return self._function(function)
        around = self._stack[self._stack.index(function) :]
        inside = [item for one in around for item in ast.walk(one)]
        if not any(isinstance(item, _CHOICES) for item in inside):
            name = getattr(function, "name", "the lambda")
            message = f"{name} calls itself for ever; write a `for` over range(...) instead"
            self.refusals.add(RefusalKind.UNBOUNDED, message, node)
        return Cost(math.inf, math.inf)

    def _most(self, node: ast.expr) -> float:
        """An upper bound of an integer expression; infinite if unknown."""
        self._step()
        if isinstance(node, ast.Constant):
            return node.value if type(node.value) is int else math.inf
        if isinstance(node, ast.BinOp):
            left, right = self._most(node.left), self._most(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub) and isinstance(node.right, ast.Constant):
                return left - right if right < math.inf else math.inf
            if isinstance(node.op, ast.Mult) and left >= 0 and right >= 0:
                return _product(left, right)
            powers = isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant)
            if isinstance(node.op, ast.Pow) and powers and 0 <= left <= 10 and 0 <= right <= 18:
                return left**right
        if isinstance(node, ast.Call):
            name, args = self.source.python_name(node.func), node.args
            if name == "len" and args:
                return self._length(args[0])
            if name in ("min", "max") and len(args) > 1:
                return (min if name == "min" else max)(map(self._most, args))
        # For a name or an attribute of self, the largest value ever assigned.
        values = self.source.values(node)
        if not values or node in self._asked:
            return math.inf
        self._asked.add(node)
        found: float = max(map(self._most, values))
        self._asked.discard(node)
        return found

    def _length(self, node: ast.expr) -> float:
        """An upper bound on the number of items of an expression; infinite if unknown."""
        self._step()
        if isinstance(node, ast.Constant):
            return len(node.value) if isinstance(node.value, str) else math.inf
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            starred = [item.value for item in node.elts if isinstance(item, ast.Starred)]
            return len(node.elts) - len(starred) + sum(map(self._length, starred))
        if isinstance(node, ast.Dict):
            return len(node.keys) if None not in node.keys else math.inf
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            lengths = [self._length(part.iter) for part in node.generators]
            return 0 if 0 in lengths else math.prod(lengths)
        if isinstance(node, ast.Await):
            return self._length(node.value)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            stop = self._most(node.slice.upper) if node.slice.upper is not None else math.inf
            return min(self._length(node.value), stop if stop >= 0 else math.inf)
        if not isinstance(node, ast.Call):
            return math.inf
        name, args = self.source.python_name(node.func), node.args
        if name == "range" and 1 <= len(args) <= 3:
            whole = [_whole(item) for item in args]
            start = 0 if len(args) == 1 else whole[0]
            turns = math.inf
            if None not in whole and 0 not in whole[2:]:
                turns = len(range(*whole))  # type: ignore[arg-type]
            elif len(args) < 3 and start is not None:
                turns = max(0, self._most(args[-1]) - start)
            return turns if turns <= MAX_TURNS else math.inf
        if name in _SAME_LENGTH and args:
            return self._length(args[0])
        if name == "zip":
            return min(map(self._length, args), default=0)
        if name == "asyncio.gather":
            return self._length(ast.List(args))
        items = getattr(node.func, "attr", "") in ("items", "keys", "values")
        return self._length(node.func.value) if items else math.inf  # type: ignore[attr-defined]


def _whole(node: ast.expr) -> int | None:
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    number = node.operand if negative else node  # type: ignore[attr-defined]
    if not isinstance(number, ast.Constant) or type(number.value) is not int:
        return None
    return -number.value if negative else number.value


def _never_ends(node: ast.While) -> bool:
    """Whether nothing can end a loop: no statement leaves it and its test never changes."""
    inside = [item for statement in node.body for item in ast.walk(statement)]
    if any(isinstance(item, (ast.Break, ast.Return, ast.Raise, ast.Try)) for item in inside):
        return False
    asked = [item for item in ast.walk(node.test) if isinstance(item, ast.expr)]
    used = {item.id for item in inside if isinstance(item, ast.Name)}
    plain = (ast.Constant, ast.Name, ast.Compare, ast.BoolOp, ast.UnaryOp)
    fixed = isinstance(node.test, ast.Constant) and not node.test.value
    return not fixed and all(
        isinstance(item, plain) and getattr(item, "id", "") not in used for item in asked
    )
