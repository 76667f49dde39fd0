"""How often a `while` turns, where a counter makes that evident.

Three ways are evident. `while turns < 3:` (also among conditions joined by `and`) and `while
True:` with `if turns >= 3: break`, where `turns += 1` stands in the body itself and nothing else
changes `turns`; and `while len(drafts) < 3:` where `drafts.append(...)` stands in the body itself
and nothing is taken away. Everything else is for a `for`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator

Bounds = Callable[[ast.expr], tuple[int | None, int | None]]
"""Least and most of an expression before the loop; None where it is not known."""
_SHRINKING = frozenset(
    {"clear", "pop", "popleft", "popitem", "remove", "discard", "difference_update"}
)
_FLIPPED = {ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Lt: ast.Gt, ast.LtE: ast.GtE}
_NEGATED = {ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Lt: ast.GtE, ast.LtE: ast.Gt}


def turns_of_while(
    node: ast.While,
    bounds: Bounds,
    fixed: Collection[str] = (),
    alone: Callable[[str], bool] = lambda name: True,
) -> int | None:
    """Turns at most, or None where that is not evident.

    Args:
        fixed: attributes of the workflow that only its constructor sets.
        alone: whether nothing but this variable leads to the list that it holds.
    """
    found = [
        turns
        for test, place in _conditions(node)
        if (turns := _turns(node, test, place, bounds, fixed)) is not None
        and all(alone(name) for name in _measured(test))
    ]
    return min(found, default=None)


Comparison = tuple[ast.expr, type, ast.expr]


def _measured(test: Comparison) -> list[str]:
    """The lists whose length a comparison asks for."""
    calls = [item for side in (test[0], test[2]) for item in ast.walk(side) if _is_length(item)]
    return [call.args[0].id for call in calls]  # type: ignore[attr-defined]


def _conditions(node: ast.While) -> Iterator[tuple[Comparison, int | None]]:
    """Comparisons that must hold for another turn, with their place in the body.

    The place is None for the loop's own condition.
    """
    for test in _conjuncts(node.test):
        yield from ((comparison, None) for comparison in _comparisons(test, negated=False))
    for place, statement in enumerate(node.body):
        if isinstance(statement, ast.If) and _leaves(statement.body):
            for test in _disjuncts(statement.test):
                yield from ((comparison, place) for comparison in _comparisons(test, negated=True))
        if any(isinstance(item, ast.Continue) for item in ast.walk(statement)):
            return  # what follows may be passed over


def _conjuncts(test: ast.expr) -> list[ast.expr]:
    both = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
    return [part for item in test.values for part in _conjuncts(item)] if both else [test]  # type: ignore[attr-defined]


def _disjuncts(test: ast.expr) -> list[ast.expr]:
    either = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or)
    return [part for item in test.values for part in _disjuncts(item)] if either else [test]  # type: ignore[attr-defined]


def _comparisons(test: ast.expr, negated: bool) -> Iterator[Comparison]:
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return
    op: type | None = type(test.ops[0])
    if negated:
        op = _NEGATED.get(op)  # type: ignore[arg-type]
    if op in _FLIPPED:
        yield test.left, op, test.comparators[0]
        yield test.comparators[0], _FLIPPED[op], test.left


def _leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Break, ast.Return, ast.Raise))


def _turns(
    node: ast.While,
    test: Comparison,
    place: int | None,
    bounds: Bounds,
    fixed: Collection[str],
) -> int | None:
    counter, op, limit = test
    start: tuple[int | None, int | None]
    if isinstance(counter, ast.Name):
        step, start = _step(node, counter.id), bounds(counter)
    elif isinstance(counter, ast.Call) and _is_length(counter):
        step, start = _appended(node, counter.args[0].id), (0, None)  # type: ignore[attr-defined]
    else:
        return None
    if step is None or _changes(node, limit, fixed):
        return None
    least, most = bounds(limit)
    if step > 0 and op in (ast.Lt, ast.LtE) and most is not None and start[0] is not None:
        distance = most - start[0] + (1 if op is ast.LtE else 0)
    elif step < 0 and op in (ast.Gt, ast.GtE) and least is not None and start[1] is not None:
        distance = start[1] - least + (1 if op is ast.GtE else 0)
    else:
        return None
    turns = max(0, -(-distance // abs(step)))
    if place is None:
        return turns
    # A condition in the body ends the turn in which it meets the limit, or begins another one.
    steps_before = any(_moves(statement, counter) for statement in node.body[:place])
    return max(1, turns) if steps_before else turns + 1


def _moves(statement: ast.stmt, counter: ast.expr) -> bool:
    if isinstance(counter, ast.Name):
        return _own_step(statement, counter.id) is not None
    return isinstance(counter, ast.Call) and _appends(statement, counter.args[0])


def _step(node: ast.While, name: str) -> int | None:
    """By how much the body itself changes a counter in every turn, or None."""
    steps = []
    for statement in node.body:
        step = _own_step(statement, name)
        if step is not None:
            steps.append(step)
        elif _stores(statement, name):
            return None
        if not steps and any(isinstance(item, ast.Continue) for item in ast.walk(statement)):
            return None
    if any(_stores(statement, name) for statement in node.orelse):
        return None
    positive = all(step > 0 for step in steps)
    if not steps or not (positive or all(step < 0 for step in steps)):
        return None
    return min(steps) if positive else max(steps)


def _own_step(statement: ast.stmt, name: str) -> int | None:
    """`name += 2`, `name = name + 2`, and the same with a minus."""
    value: ast.expr
    if isinstance(statement, ast.AugAssign) and _is_name(statement.target, name):
        op, value = statement.op, statement.value
    elif (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and _is_name(statement.targets[0], name)
        and isinstance(statement.value, ast.BinOp)
        and _is_name(statement.value.left, name)
    ):
        op, value = statement.value.op, statement.value.right
    else:
        return None
    if not isinstance(value, ast.Constant) or type(value.value) is not int or value.value < 1:
        return None
    if isinstance(op, ast.Add):
        return value.value
    return -value.value if isinstance(op, ast.Sub) else None


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _stores(node: ast.AST, name: str) -> bool:
    """Whether anything in a piece of code may give a name another value."""
    for item in ast.walk(node):
        if isinstance(item, ast.Name):
            if item.id == name and not isinstance(item.ctx, ast.Load):
                return True
        elif isinstance(item, ast.alias):
            if name in (item.asname, item.name.partition(".")[0]):
                return True
        elif name in (getattr(item, "name", None), getattr(item, "rest", None)):
            return True  # a handler, a pattern, a function
    return False


def _changes(node: ast.While, limit: ast.expr, fixed: Collection[str]) -> bool:
    """Whether the loop may move its own limit."""
    for part in ast.walk(limit):
        if isinstance(part, ast.Name):
            if part.id not in ("len", "self") and _stores(node, part.id):
                return True
        elif isinstance(part, ast.Attribute):
            if not _is_name(part.value, "self") or part.attr not in fixed:
                return True
        elif isinstance(part, ast.Call):
            if not _is_length(part) or touches(node, part.args[0]):
                return True
        elif isinstance(part, ast.Subscript):
            return True
    return False


def _is_outside(call: ast.AST) -> bool:
    """Whether a call can be no function of the graph: Python's own, or of a module."""
    name = getattr(call, "func", None)
    return isinstance(name, ast.Name) and name.id in (
        "len",
        "range",
        "str",
        "int",
        "print",
        "min",
        "max",
    )


def _is_read(value: ast.expr) -> bool:
    """Whether an expression on a list gives no second name to it."""
    return isinstance(value, (ast.Call, ast.Subscript, ast.BinOp, ast.Compare, ast.FormattedValue))


def _is_length(call: ast.AST) -> bool:
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "len"
        and len(call.args) == 1
        and isinstance(call.args[0], ast.Name)
    )


def touches(node: ast.AST, owner: ast.expr) -> bool:
    """Whether a loop or a function does more with a list than to read it."""
    name = owner.id if isinstance(owner, ast.Name) else ""
    reading = set()
    for item in ast.walk(node):
        if isinstance(item, ast.Subscript) and isinstance(item.ctx, ast.Load):
            reading.add(id(item.value))
        elif isinstance(item, ast.Call) and _is_length(item):
            reading.add(id(item.args[0]))
        elif isinstance(item, (ast.For, ast.comprehension)):
            reading.add(id(item.iter))
    return any(
        isinstance(item, ast.Name) and item.id == name and id(item) not in reading
        for item in ast.walk(node)
    )


def _appended(node: ast.While, name: str) -> int | None:
    """How many items the body itself puts into a list in every turn, or None."""
    for item in ast.walk(node):
        if isinstance(item, (ast.Delete, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        if isinstance(item, ast.Attribute) and item.attr in _SHRINKING:
            return None
        if isinstance(item, ast.Subscript) and isinstance(item.ctx, ast.Store):
            return None
        if isinstance(item, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and item.value is not None:
            parts = (item.value, *ast.iter_child_nodes(item.value))
            if not _is_read(item.value) and any(_is_name(part, name) for part in parts):  # type: ignore[arg-type]
                return None
        handed_over = isinstance(item, ast.Call) and any(_is_name(part, name) for part in item.args)
        if handed_over and not _is_outside(item):
            return None
    if _stores(node, name):
        return None
    appended = 0
    for statement in node.body:
        if _appends(statement, ast.Name(name, ast.Load())):
            appended += 1
        elif not appended and any(isinstance(item, ast.Continue) for item in ast.walk(statement)):
            return None
    return appended or None


def _appends(statement: ast.stmt, owner: ast.expr) -> bool:
    """Whether a statement is `owner.append(...)`."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == "append"
        and isinstance(owner, ast.Name)
        and _is_name(value.func.value, owner.id)
    )
