"""Whether the answer of a written graph may come from what an operator gave.

A graph is refused only where that is plainly not so, so everything that may carry a result counts
as carrying it: names are taken together over all scopes and all of the code, a list holds what
anything puts into it, a function gives to its arguments what it was given, and what is set or
returned under a condition comes from what the condition asks.

Left to others: which calls go to operators (`following/`), and the edges that are drawn
(`aflow_tune.graph.flow`), which are fewer.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from aflow_tune.graph.tree import parameters, walk

Place = tuple[int, int]
"""Line and column of a call, both from 1."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_MOST_PASSES = 12
"""Over the code. What takes more is not refused."""
_READING = frozenset({"print", "len", "str", "int", "float", "isinstance", "range"})
"""Functions that put nothing into what they are given."""


def answer_may_come_from(
    tree: ast.AST, call: ast.FunctionDef | ast.AsyncFunctionDef, calls: Collection[Place]
) -> bool:
    """Whether what `call` returns may hold, or hang on, a result of the calls at these places."""
    carrying = _Carrying(tree, frozenset(calls))
    return not carrying.settled or any(carrying.returned(item) for item in _returns(call))


class _Carrying:
    """Names that may hold a result: variables, and `.name` for attributes of the workflow."""

    def __init__(self, tree: ast.AST, calls: frozenset[Place]) -> None:
        self.calls = calls
        self.nodes = walk(tree)
        self.functions = {item.name: item for item in self.nodes if isinstance(item, _FUNCTIONS)}
        self.names: set[str] = set()
        self.decided: set[ast.AST] = set()
        """Statements that are reached, or not, by what an operator gave."""
        self.settled = any(self._settles() for _ in range(_MOST_PASSES))

    def _settles(self) -> bool:
        """One pass over the code; whether it found nothing new."""
        before = len(self.names) + len(self.decided)
        for node in self.nodes:
            self._pass_on(node)
        return before == len(self.names) + len(self.decided)

    def returned(self, node: ast.Return) -> bool:
        value: ast.expr | None = node.value
        if isinstance(value, ast.Tuple) and len(value.elts) == 2:
            value = value.elts[0]  # the other one is the cost
        return value is not None and (node in self.decided or self.holds(value))

    def holds(self, node: ast.AST) -> bool:
        """Whether an expression may hold a result."""
        return any(self._is_carrier(item) for item in ast.walk(node))

    def _is_carrier(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return (node.lineno, node.col_offset + 1) in self.calls
        if isinstance(node, ast.Name):
            return node.id in self.names
        return isinstance(node, ast.Attribute) and f".{node.attr}" in self.names

    def _pass_on(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            keys = [part.slice for target in targets for part in _subscripts(target)]
            value = [] if node.value is None else [node.value]
            if node in self.decided or any(map(self.holds, [*value, *keys])):
                self._put(targets)
            if any(map(self.holds, targets)):
                self._put(value)  # both may be the same list
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            if self.holds(node.iter) or self.holds(node.target) or self._is_left(node):
                self._put([node.target, node.iter])
                self._decide([*getattr(node, "body", []), *getattr(node, "orelse", [])])
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                if item.optional_vars is not None and self.holds(item.context_expr):
                    self._put([item.optional_vars])
        elif isinstance(node, (ast.If, ast.While)):
            if self.holds(node.test):
                self._decide([*node.body, *node.orelse])
        elif isinstance(node, ast.Match):
            if self.holds(node.subject) or any(
                case.guard is not None and self.holds(case.guard) for case in node.cases
            ):
                self._decide([statement for case in node.cases for statement in case.body])
                for part in (part for case in node.cases for part in walk(case.pattern)):
                    name = getattr(part, "name", None) or getattr(part, "rest", None)
                    self.names.update([name] if name else [])
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, _FUNCTIONS) and any(map(self.returned, _returns(node))):
            self.names |= {node.name, f".{node.name}"}

    def _is_left(self, loop: ast.AST) -> bool:
        """Whether what an operator gave ends a loop, or one of its turns."""
        leaving = (ast.Break, ast.Continue)
        return any(isinstance(item, leaving) and item in self.decided for item in walk(loop))

    def _call(self, node: ast.Call) -> None:
        """What a call is given may end up in its owner, and in what else it is given."""
        name = _called(node)
        if self._is_carrier(node) or name in _READING:
            return
        given = [*node.args, *(word.value for word in node.keywords)]
        function = self.functions.get(name)
        taken = [] if function is None else [item.arg for item in parameters(function.args)]
        carried = any(map(self.holds, given))
        if carried:
            self.names.update(item for item in taken if item != "self")
        if carried or node in self.decided or not self.names.isdisjoint(taken):
            owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            self._put([*owner, *given])

    def _put(self, targets: Sequence[ast.AST]) -> None:
        """These hold a result from now on."""
        for target in targets:
            if isinstance(target, (ast.Tuple, ast.List)):
                self._put(target.elts)
            else:
                name = _root(target)
                if name is not None and name not in ("self", "operator"):
                    self.names.add(name)

    def _decide(self, statements: Sequence[ast.AST]) -> None:
        for statement in statements:
            if statement not in self.decided:
                self.decided.update(walk(statement))


def _returns(function: ast.AST) -> Iterator[ast.Return]:
    return (item for item in walk(function) if isinstance(item, ast.Return))


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Name):
        return node.func.id
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _subscripts(target: ast.AST) -> list[ast.Subscript]:
    return [item for item in walk(target) if isinstance(item, ast.Subscript)]


def _root(node: ast.AST) -> str | None:
    """The name behind `groups[key].append`, `state.setdefault(...)`; `.name` behind `self.name`."""
    while True:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                return f".{node.attr}"
            node = node.value
        elif isinstance(node, (ast.Subscript, ast.Starred)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None
