"""Name resolution in a written graph: scopes, functions, modules, operators.

As in Python, a name belongs to the innermost function that binds it, then to the module; names of a
comprehension belong to the function around it. Which calls reach operators comes from the data
flow (`aflow_tune.graph.flow`). Nothing is refused here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from aflow_tune.graph import inside
from aflow_tune.graph.flow import place_of
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.shape import Function, children, parameters, walk, workflow_methods
from aflow_tune.operators import Operator
from aflow_tune.writer.allowed import BUILTINS, MODULES

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NAMED = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs,
    ast.MatchStar,
)  # fmt: skip


class Source:
    """A graph's syntax tree with resolved names. Parts that are never evaluated, like annotations
    under `from __future__ import annotations`, are in `nodes` but not in `scope_of`."""

    def __init__(self, graph: Graph, operators: Mapping[str, type[Operator]]) -> None:
        shape = graph.shape
        assert shape.tree is not None
        self.graph, self.shape, self.operators = graph, shape, operators
        self.nodes = walk(shape.tree)
        self.methods = dict(workflow_methods(shape))
        self.bound: dict[Scope, set[str]] = {}
        self.around: dict[Scope, Scope] = {}
        self.scope_of: dict[ast.AST, Scope] = {}
        self.parent: dict[ast.AST, ast.AST] = {}
        self._annotated = not any(
            isinstance(item, ast.ImportFrom) and item.module == "__future__"
            for item in shape.tree.body
        )
        self._read(shape.tree, None)
        self.imports_all = "*" in self.bound[shape.tree]
        # By scope and name: nodes that bind it, nodes that read it, its dotted name if imported
        # (`json.loads`), and the functions of the graph with that name.
        self.stores: dict[tuple[Scope | None, str], list[ast.AST]] = {}
        self.loads: dict[tuple[Scope | None, str], list[ast.Name]] = {}
        self.imported: dict[tuple[Scope | None, str], str] = {}
        self.defined: dict[tuple[Scope | None, str], list[Function]] = {}
        # By attribute, what is assigned to it; None if not by a plain assignment.
        self.set_on_self: dict[str, list[ast.expr | None]] = {}
        self.built: dict[tuple[int, int], ast.Call] = {}  # where operators are built
        for node in self.nodes:
            self._note(node)
        for member in shape.workflow.body if shape.workflow is not None else ():
            for name in () if isinstance(member, Function) else binds(member):
                self.set_on_self.setdefault(name, []).append(getattr(member, "value", None))
        self.options = {
            place.instance: options_of(self.built[place.line, place.column])
            for place in shape.operators
            if (place.line, place.column) in self.built
        }

    def _read(self, scope: Scope, around: Scope | None) -> None:
        """Find the names that a scope and its inner scopes bind."""
        names = self.bound[scope] = set()
        if around is not None:
            self.around[scope] = around
        if isinstance(scope, FUNCTIONS):
            names.update(item.arg for item in parameters(scope.args))
        inner: list[Scope] = []
        outer: set[str] = set()
        body: list[Any] = scope.body if isinstance(scope.body, list) else [scope.body]
        pending: list[tuple[ast.AST, ast.AST]] = [(node, scope) for node in reversed(body)]
        while pending:
            node, parent = pending.pop()
            self.scope_of[node], self.parent[node] = scope, parent
            names.update(binds(node))
            parts = [(part, node) for part in children(node)]
            if isinstance(node, ast.Nonlocal):
                outer.update(node.names)
            elif isinstance(node, FUNCTIONS):
                inner.append(node)
                parts = [(part, node) for part in self._outside(node)]
            elif isinstance(node, ast.AnnAssign):
                parts = [(part, node) for part in (node.value, node.target) if part is not None]
            elif isinstance(node, ast.ClassDef):
                # Names bound in a class are not visible in its methods.
                parts = [(part, node) for part in (*node.bases, *node.decorator_list)]
                for member in node.body:
                    self.scope_of[member], self.parent[member] = scope, node
                    if isinstance(member, FUNCTIONS):
                        inner.append(member)
                        parts += [(part, member) for part in self._outside(member)]
                    elif isinstance(member, (ast.Assign, ast.AnnAssign)) and member.value:
                        parts.append((member.value, member))
            pending += reversed(parts)
        names -= outer
        for item in inner:
            self._read(item, scope)

    def _outside(self, function: Function | ast.Lambda) -> list[ast.AST]:
        """The parts of a function that are evaluated in the scope around it."""
        parts: list[ast.AST | None] = [*function.args.defaults, *function.args.kw_defaults]
        if not isinstance(function, ast.Lambda):
            parts += function.decorator_list
            if self._annotated:
                parts += [item.annotation for item in parameters(function.args)]
                parts.append(function.returns)
        return [part for part in parts if part is not None]

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            self.set_on_self.setdefault(node.attr, []).append(self.value_of(node))
        elif isinstance(node, ast.Call) and self.shape.operator_class(node.func) in self.operators:
            self.built[node.lineno, node.col_offset] = node
        scope = self.scope_of.get(node)
        if scope is None:
            return
        if isinstance(node, ast.Name):
            key = self.owner(node), node.id
            if isinstance(node.ctx, ast.Load):
                self.loads.setdefault(key, []).append(node)
            else:
                self.stores.setdefault(key, []).append(node)
        elif isinstance(node, (ast.ExceptHandler, ast.pattern)):
            for name in binds(node):
                self.stores.setdefault((scope, name), []).append(node)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                name = alias.asname or alias.name
                self.imported[scope, name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if inside.shim_of(alias.name) is None:
                    bound = alias.name if alias.asname else alias.name.partition(".")[0]
                    self.imported[scope, alias.asname or bound] = bound
        elif isinstance(node, Function) and node not in self.methods.values():
            self.defined.setdefault((scope, node.name), []).append(node)

    def owner(self, node: ast.Name) -> Scope | None:
        """The scope that binds a name; None for builtins and predefined names."""
        here: Scope | None = self.scope_of[node]
        while here is not None and node.id not in self.bound[here]:
            here = self.around.get(here)
        return here

    def python_name(self, node: ast.AST) -> str:
        """The dotted name (`json.loads`) of an import or builtin; empty for anything else."""
        if isinstance(node, ast.Attribute):
            owner = self.python_name(node.value)
            return f"{owner}.{node.attr}" if owner in MODULES else ""
        if not isinstance(node, ast.Name) or node not in self.scope_of:
            return ""
        if (scope := self.owner(node)) is None:
            return node.id if node.id in BUILTINS else ""
        return self.imported.get((scope, node.id), "")

    def handles(self, node: ast.AST | None) -> frozenset[tuple[str, str]]:
        """(instance, operator) of each operator that a call may reach."""
        if not isinstance(node, ast.Call):
            return frozenset()
        return self.graph.flow.calls.get(place_of(node), frozenset())

    def function(self, node: ast.AST) -> Function | ast.Lambda | None:
        """The function of the graph that an expression certainly refers to, or None."""
        if isinstance(node, ast.Lambda):
            return node
        if isinstance(node, ast.Attribute) and is_self(node.value):
            return self.methods.get(node.attr) if node.attr not in self.set_on_self else None
        if isinstance(node, ast.Name) and node in self.scope_of:
            key = self.owner(node), node.id
            found = self.defined.get(key, [])
            if len(found) == 1 and key not in self.stores:
                return found[0]
        return None

    def values(self, node: ast.AST) -> list[ast.expr] | None:
        """All values assigned to a name or an attribute of self; None if one is unknown."""
        found: list[Any] = []
        if isinstance(node, ast.Attribute) and is_self(node.value):
            found = self.set_on_self.get(node.attr, [])
        elif isinstance(node, ast.Name) and node in self.scope_of:
            found = [self.value_of(store) for store in self.stores_of(node)]
        return None if not found or None in found else found

    def stores_of(self, node: ast.Name) -> list[ast.AST]:
        """The nodes that bind a name; empty for a parameter, whose value is unknown."""
        owner = self.owner(node)
        if isinstance(owner, FUNCTIONS) and node.id in {p.arg for p in parameters(owner.args)}:
            return []
        return self.stores.get((owner, node.id), [])

    def value_of(self, store: ast.AST) -> ast.expr | None:
        """The value assigned at a binding node; None if not by a plain assignment."""
        parent = self.parent.get(store)
        if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            return parent.value
        around = self.parent.get(parent) if isinstance(parent, ast.Tuple) else None
        value = around.value if isinstance(around, ast.Assign) else None
        if not isinstance(value, ast.Tuple) or not isinstance(parent, ast.Tuple):
            return None
        fits = len(value.elts) == len(parent.elts)
        return value.elts[parent.elts.index(store)] if fits else None  # type: ignore[arg-type]

    def results(self, node: ast.AST, depth: int = 4) -> frozenset[str]:
        """The operators whose whole result an expression is; empty if it may be anything else."""
        if isinstance(node, ast.Await):
            found = frozenset(name for _, name in self.handles(node.value))
            return found if found <= set(self.operators) else frozenset()
        values = self.values(node) if depth and isinstance(node, ast.Name) else None
        all_found = [self.results(value, depth - 1) for value in values or ()]
        return frozenset().union(*all_found) if all(all_found) else frozenset()


def binds(node: ast.AST) -> Iterator[str]:
    """The names that a node itself binds."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    elif isinstance(node, _NAMED) and node.name:
        yield node.name


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def returns_of(function: ast.AST) -> list[ast.Return]:
    """The returns with a value of a function, without those of nested functions."""
    found, pending = [], list(getattr(function, "body", ()))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return) and node.value is not None:
            found.append(node)
        if not isinstance(node, FUNCTIONS):
            pending += ast.iter_child_nodes(node)
    return found


def options_of(node: ast.Call) -> dict[str, Any]:
    """Options at the construction of an operator; the expression for those that are no literal."""
    options = {}
    for word in node.keywords:
        if word.arg and word.arg not in ("llm", "name"):
            try:
                options[word.arg] = ast.literal_eval(word.value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                options[word.arg] = word.value
    return options
