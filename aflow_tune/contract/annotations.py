"""What an annotation means, whether it is an object or a text, and whether it can be resolved.

`read` takes an annotation apart into the members of its union. Objects and texts give the same
answer: a text is parsed, each of its names is looked up where the function was defined, and a
name that exists only for type checkers keeps its spelling. Nothing is evaluated but names and
attributes. Which meanings are acceptable is decided elsewhere.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class Meaning:
    """One member of an annotation's union.

    `name` is the last part of its name: 'dict', 'TrinityChatModel', 'None', 'Any'. `type` is
    the object behind it, or None where only the spelling is known. `args` are the members of
    each of its type arguments.
    """

    name: str
    type: Any = None
    args: tuple[tuple[Meaning, ...], ...] = ()


@dataclass(frozen=True)
class Names:
    """Where the names of a function's annotations are looked up."""

    namespace: Mapping[str, Any]
    for_type_checkers: Mapping[str, str]
    """Name -> what it stands for, of the names that exist under `if TYPE_CHECKING:` only."""

    def find(self, name: str) -> Any:
        """The object with this name, or `_MISSING`."""
        return self.namespace.get(name, getattr(builtins, name, _MISSING))


def read(annotation: Any, names: Names) -> tuple[Meaning, ...]:
    """The members of an annotation's union; `Optional[X]` has `X` and 'None'."""
    try:
        return _read(annotation, names)
    except RecursionError:  # an alias of itself
        return (Meaning(annotation if isinstance(annotation, str) else _name(annotation)),)


def _read(annotation: Any, names: Names) -> tuple[Meaning, ...]:
    if isinstance(annotation, str):
        return _read_text(annotation, names)
    if isinstance(annotation, typing.ForwardRef):
        return _read_text(annotation.__forward_arg__, names)
    if annotation is None or annotation is type(None):
        return (Meaning("None", type(None)),)
    if annotation is Any:
        return (Meaning("Any", Any),)
    if isinstance(annotation, typing.TypeVar):
        bounds = annotation.__constraints__ or (annotation.__bound__ or Any,)
        return tuple(member for bound in bounds for member in _read(bound, names))
    for attribute in ("__supertype__", "__value__"):  # NewType, the `type` statement
        if hasattr(annotation, attribute) and not isinstance(annotation, type):
            return _read(getattr(annotation, attribute), names)
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _read(annotation.__origin__, names)
    if origin in (typing.Union, types.UnionType):
        return tuple(
            member for argument in annotation.__args__ for member in _read(argument, names)
        )
    if origin is not None:
        args = tuple(_read(argument, names) for argument in typing.get_args(annotation))
        return (Meaning(_name(origin), origin, args),)
    return (Meaning(_name(annotation), annotation),)


def names_for_type_checkers(module: ast.Module) -> dict[str, str]:
    """What the names that a module defines under `if TYPE_CHECKING:` stand for."""
    found: dict[str, str] = {}
    for block in ast.walk(module):
        if not isinstance(block, ast.If) or _last_name(block.test) != "TYPE_CHECKING":
            continue
        for statement in block.body:
            if isinstance(statement, ast.ImportFrom):
                found.update({name.asname or name.name: name.name for name in statement.names})
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    found[_last_name(target) or ""] = ast.unparse(statement.value)
    return found


def _read_text(text: str, names: Names) -> tuple[Meaning, ...]:
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return (Meaning(text),)
    return _read_node(node, names)


def _read_node(node: ast.expr, names: Names) -> tuple[Meaning, ...]:
    if isinstance(node, ast.Constant):
        return _read(node.value, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _read_node(node.left, names) + _read_node(node.right, names)
    if isinstance(node, ast.Subscript):
        return _read_subscript(node, names)
    found = _look_up(node, names)
    if found is not _MISSING:
        return _read(found, names)
    if isinstance(node, ast.Name) and node.id in names.for_type_checkers:
        meaning = names.for_type_checkers[node.id]
        return _read_text(meaning, names) if meaning != node.id else (Meaning(node.id),)
    return (Meaning(_last_name(node) or ast.unparse(node)),)


def _read_subscript(node: ast.Subscript, names: Names) -> tuple[Meaning, ...]:
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    found = _look_up(node.value, names)
    head = _last_name(node.value) if found is _MISSING else _name(found)
    if head in ("Optional", "Union"):
        members = tuple(member for part in inner for member in _read_node(part, names))
        return (*members, Meaning("None", type(None))) if head == "Optional" else members
    if head == "Annotated":
        return _read_node(inner[0], names)
    args = () if head == "Literal" else tuple(_read_node(part, names) for part in inner)
    (first, *_) = _read_node(node.value, names)
    return (Meaning(first.name, first.type, args),)


def _look_up(node: ast.expr, names: Names) -> Any:
    if isinstance(node, ast.Name):
        return names.find(node.id)
    if isinstance(node, ast.Attribute):
        owner = _look_up(node.value, names)
        return _MISSING if owner is _MISSING else getattr(owner, node.attr, _MISSING)
    return _MISSING


def _last_name(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _name(annotation: Any) -> str:
    name = getattr(annotation, "__name__", None) or getattr(annotation, "_name", None)
    return str(name or inspect.formatannotation(annotation))
