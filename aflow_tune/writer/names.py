"""Which names of a written graph mean what: its scopes, and every name that nothing stands for.

Python's rules, without `global` and `nonlocal`, which graphs do not have: a name belongs to the
innermost function that binds it, then to the module. Names of a comprehension count as those of
the function around it.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator

from aflow_tune.graph.tree import children, parameters
from aflow_tune.writer.allowed import BUILTINS, MODULES, why_forbidden
from aflow_tune.writer.refusals import MAX_REFUSALS, Refusals, did_you_mean
from aflow_tune.writer.types import RefusalKind

GIVEN = ("operator", "prompt_custom", "create_llm_instance", "DatasetType")
"""Names that a graph has without importing them."""

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Scopes:
    """The scopes of a graph: which names each binds, and which scope is around it."""

    def __init__(self, tree: ast.Module, workflow: ast.ClassDef | None) -> None:
        self.bound: dict[Scope, set[str]] = {}
        self.around: dict[Scope, Scope] = {}
        self.of_class = {
            name
            for member in (workflow.body if workflow is not None else ())
            for name in _binds(member)
        }
        self._loads: list[tuple[ast.Name, Scope]] = []
        self._annotated = not _postponed(tree)
        self._read(tree, None)
        self._imports_all = "*" in self.bound[tree]

    def owner(self, scope: Scope, name: str) -> Scope | None:
        """The scope in which a name of this scope lives; None for Python's and the given ones."""
        here: Scope | None = scope
        while here is not None:
            if name in self.bound[here]:
                return here
            here = self.around.get(here)
        return None

    def check(self, refusals: Refusals) -> None:
        """Refuse every name that nothing stands for."""
        for node, scope in self._loads:
            if len(refusals.in_order()) >= MAX_REFUSALS:
                return
            if node.id.startswith("__") or node.id in GIVEN or node.id in BUILTINS:
                continue
            if self.owner(scope, node.id) is not None or self._imports_all:
                continue
            why = why_forbidden(node.id)
            if why is not None:
                refusals.add(RefusalKind.NOT_ALLOWED, why, node)
                continue
            if node.id in self.of_class:
                message = f"`{node.id}` belongs to the class; write self.{node.id}"
            elif (line := _import_of(node.id)) is not None:
                message = f"`{node.id}` is not defined; write `{line}`"
            else:
                known = [*self._visible(scope), *GIVEN, *BUILTINS]
                near = did_you_mean(node.id, known)
                message = f"`{node.id}` is not defined{near}; assign it before you use it"
            refusals.add(RefusalKind.UNKNOWN_NAME, message, node)

    def _visible(self, scope: Scope) -> Iterator[str]:
        here: Scope | None = scope
        while here is not None:
            yield from sorted(self.bound[here])
            here = self.around.get(here)

    def _read(self, scope: Scope, around: Scope | None) -> None:
        """Read the names of a scope and of those in it."""
        names: set[str] = set()
        self.bound[scope] = names
        if around is not None:
            self.around[scope] = around
        if isinstance(scope, _FUNCTIONS):
            names |= {item.arg for item in parameters(scope.args)}
        inner: list[Scope] = []
        body = scope.body if isinstance(scope.body, list) else [scope.body]
        pending: list[ast.AST] = list(reversed(body))
        while pending:
            node = pending.pop()
            if isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Load):
                    self._loads.append((node, scope))
                else:
                    names.add(node.id)
                continue
            if isinstance(node, ast.Constant):
                continue
            if isinstance(node, ast.ClassDef):
                # What a class binds is not visible in its methods.
                names.add(node.name)
                pending += reversed([*node.bases, *node.decorator_list])
                for member in node.body:
                    if isinstance(member, _FUNCTIONS):
                        pending += reversed(self._outside(member))
                        inner.append(member)
                    elif isinstance(member, (ast.Assign, ast.AnnAssign)) and member.value:
                        pending.append(member.value)
                continue
            else:
                names.update(_binds(node))
            if isinstance(node, _FUNCTIONS):
                inner.append(node)
                pending += reversed(self._outside(node))
            elif isinstance(node, ast.AnnAssign):
                pending += [item for item in (node.value, node.target) if item is not None]
            else:
                pending += reversed(children(node))
        for item in inner:
            self._read(item, scope)

    def _outside(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    ) -> list[ast.AST]:
        """What of a function is evaluated where it stands."""
        parts: list[ast.AST | None] = [*function.args.defaults, *function.args.kw_defaults]
        if not isinstance(function, ast.Lambda):
            parts += function.decorator_list
            if self._annotated:
                parts += [item.annotation for item in parameters(function.args)]
                parts.append(function.returns)
        return [item for item in parts if item is not None]


def _postponed(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body
    )


def _binds(node: ast.AST) -> Iterator[str]:
    """The names that a node itself binds."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif (isinstance(node, ast.ExceptHandler) and node.name) or (
        isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name
    ):
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id


def _import_of(name: str) -> str | None:
    """The line that brings a name of Python's modules; None for any other name."""
    if name in MODULES:
        return f"import {name}"
    homes = [module for module, names in MODULES.items() if names and name in names]
    if not homes and name in typing.__all__:
        homes = ["typing"]
    return f"from {homes[0]} import {name}" if homes else None
