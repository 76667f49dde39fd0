"""Static analysis of a workflow function: the task fields it reads and its calls of the model.

Only the function's own body is read. An alias of the task, a computed field name or a helper
function is not followed and yields no finding.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LOOPS = (ast.For, ast.AsyncFor, ast.While, *_COMPREHENSIONS, ast.Lambda, *_FUNCTIONS)


@dataclass(frozen=True)
class FieldRead:
    """One place where a function reads a field of its task."""

    name: str
    where: str
    """`file:line`."""
    tolerant: bool
    """The function handles a missing field: it uses `.get`, or tests for the field with `in`."""


def task_reads(function: Callable[..., Any]) -> list[FieldRead]:
    """The fields that `function` reads from its parameter `task`, else its first one, by line."""
    source = _source(function)
    if source is None:
        return []
    tree, file, task = source
    if task is None or _rebound(tree, task):
        return []
    tested = {
        node.left.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Constant)
        and any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops)
        and any(_is_name(side, task) for side in node.comparators)
    }
    reads = []
    for node in _own_nodes(tree, task):
        name = _field_of(node, task)
        if name is not None:
            tolerant = isinstance(node, ast.Call) or name in tested
            reads.append(FieldRead(name, f"{file}:{node.lineno}", tolerant))
    return sorted(reads, key=lambda read: int(read.where.rpartition(":")[2]))


def most_calls(function: Callable[..., Any]) -> int | None:
    """Upper bound on the model calls of one rollout of `function`; None unless its parameter
    `model` is only called directly, outside of loops and inner functions."""
    source = _source(function)
    if source is None:
        return None
    tree = source[0]
    names = [argument.arg for argument in _arguments(tree)]
    if "model" not in names or _rebound(tree, "model"):
        return None
    uses = [node for node in ast.walk(tree) if _is_name(node, "model")]
    loops = (node for node in ast.walk(tree) if node is not tree and isinstance(node, _LOOPS))
    looped = {id(inner) for loop in loops for inner in ast.walk(loop)}
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    once = [node for node in called if _is_name(node, "model") and id(node) not in looped]
    return len(once) if len(once) == len(uses) else None


def _source(function: Callable[..., Any]) -> tuple[_Function, str, str | None] | None:
    """The function's syntax tree with true line numbers, its file, its task parameter."""
    bound = 0
    while isinstance(function, functools.partial):
        bound += len(function.args)
        function = function.func
    function = inspect.unwrap(function)
    if not inspect.isfunction(function) and not inspect.ismethod(function):
        function = inspect.unwrap(type(function).__call__)
    if inspect.ismethod(function):
        function = function.__func__
    try:
        lines, first = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function)
        module = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    tree = next((node for node in module.body if isinstance(node, _FUNCTIONS)), None)
    if tree is None or file is None:
        return None
    ast.increment_lineno(tree, first - 1)
    names = [argument.arg for argument in _arguments(tree)]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    names = names[bound:]
    task = "task" if "task" in names else (names[0] if names else None)
    return tree, file, task


def _arguments(tree: _Function) -> list[ast.arg]:
    return [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]


def _own_nodes(tree: Any, task: str) -> Iterator[Any]:
    """Every node below `tree`, except inner functions with a parameter of the same name."""
    child: Any
    for child in ast.iter_child_nodes(tree):
        inner = isinstance(child, (*_FUNCTIONS, ast.Lambda))
        if inner and task in [one.arg for one in (*child.args.posonlyargs, *child.args.args)]:
            continue
        yield child
        yield from _own_nodes(child, task)


def _field_of(node: ast.AST, task: str) -> str | None:
    key: ast.AST | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        key = node.slice if _is_name(node.value, task) else None
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        takes = node.func.attr == "get" and _is_name(node.func.value, task)
        key = node.args[0] if takes else None
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    return None


def _rebound(tree: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
        for node in ast.walk(tree)
    )


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
