"""Going through a syntax tree, without what says nothing about a graph.

`ast.walk` also visits the contexts of names and the signs of operators, which are half of a tree.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

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
