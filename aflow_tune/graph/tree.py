"""Going through a syntax tree, without what says nothing about a graph.

`ast.walk` also visits the contexts of names and the signs of operators, which are half of a tree.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

_PASSED_OVER = frozenset({"ctx", "op", "ops", "type_ignores", "type_comment", "kind"})


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes directly below one, in the order of the source."""
    found: list[ast.AST] = []
    for name in node._fields:
        if name in _PASSED_OVER:
            continue
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            found.append(value)
        elif type(value) is list:
            found += [item for item in value if isinstance(item, ast.AST)]
    return found


def walk(tree: ast.AST) -> list[ast.AST]:
    """All nodes, level by level, as `ast.walk` has them."""
    nodes = [tree]
    for node in nodes:
        nodes += children(node)
    return nodes


def levels(tree: ast.AST, most_nodes: int, most_depth: int) -> tuple[list[ast.AST], int]:
    """As `walk`, and how many levels; ends early past one of the limits."""
    nodes: list[ast.AST] = []
    level: Sequence[ast.AST] = [tree]
    depth = 0
    while level:
        nodes += level
        depth += 1
        if len(nodes) > most_nodes or depth > most_depth:
            break
        level = [child for node in level for child in children(node)]
    return nodes, depth


def parameters(arguments: ast.arguments) -> list[ast.arg]:
    """Every parameter of a function, those that take the rest last."""
    rest = [item for item in (arguments.vararg, arguments.kwarg) if item is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest]


def without_main(tree: ast.Module) -> ast.Module:
    """The tree as a module runs that is imported, which a graph always is.

    The body of `if __name__ == "__main__":` is left out, and that of functions that nothing but
    it calls: their defaults and decorators are evaluated all the same.
    """
    left_out: list[ast.AST] = []
    body: list[ast.stmt] = []
    for node in tree.body:
        is_main = isinstance(node, ast.If) and _asks_for_main(node.test)
        left_out += node.body if is_main else []  # type: ignore[attr-defined]
        body += node.orelse if is_main else [node]  # type: ignore[attr-defined]
    tree.body = body
    while left_out:
        named = {item.id for part in left_out for item in walk(part) if isinstance(item, ast.Name)}
        functions = [
            node
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in named
        ]
        if not functions:
            break
        read = {item.id for item in walk(tree) if isinstance(item, ast.Name)}
        left_out = []
        for function in functions:
            if function.name not in read:
                first = function.body[0]
                left_out += [item for item in function.body if not isinstance(item, ast.Pass)]
                function.body = [ast.copy_location(ast.Pass(), first)]
    return tree


def _asks_for_main(test: ast.expr) -> bool:
    return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")


_LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)


def certain(tree: ast.Module) -> set[ast.AST]:
    """The nodes that every run of a graph reaches that does not fail before.

    Not those of branches, of what follows a branch that may leave, of `try`, of `while`, nor of
    functions that only such places call.
    """
    functions = {
        node.name: node
        for node in walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    found: set[ast.AST] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            pending += _reached(functions[name].body) if name in functions else []
        pending += _always_in(node)
    return found


def _always_in(node: ast.AST) -> Sequence[ast.AST]:
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return [node.test]
    if isinstance(node, ast.Try):
        return node.finalbody
    if isinstance(node, ast.Match):
        return [node.subject]
    if isinstance(node, ast.BoolOp):
        return node.values[:1]
    if isinstance(node, ast.Lambda):
        return [node.args]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        run = node.name in ("__init__", "__call__")
        return [*node.decorator_list, node.args, *(_reached(node.body) if run else ())]
    body = getattr(node, "body", None)
    if isinstance(body, list):
        others = [part for part in children(node) if part not in body]
        return [*others, *_reached(body)]
    return children(node)


def _reached(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements up to the first one that may leave the others out."""
    for statement in body:
        yield statement
        if any(isinstance(part, _LEAVING) for part in walk(statement)):
            return
