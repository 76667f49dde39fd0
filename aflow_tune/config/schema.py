"""The schema check of the YAML: finds every fault, and suggests the key that was meant.

OmegaConf does the actual merge, but stops at the first fault and knows no lines. `note_lines` keeps
the line of every key; `Check` reports unknown keys and values of a wrong type and drops them, so
that the rest can still be merged and checked. Values with `${...}` are left to OmegaConf.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, Union

import yaml

from aflow_tune.errors import Fault
from aflow_tune.sections import KeyPositions, display

_MERGE = "tag:yaml.org,2002:merge"
_MAY_HOLD_A_KEY = re.compile(r"(key|token|secret|passw\w*|credentials?|authorization)$", re.I)
"""Names of unknown settings whose value may be an API key, and is not shown."""
_TRUTH = ("true", "false", "yes", "no", "on", "off", "y", "n", "1", "0")
_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def note_lines(
    node: yaml.Node, positions: KeyPositions, path: str = "", above: tuple[int, ...] = ()
) -> Iterator[Fault]:
    """Record the line of every key below a YAML node. Yields a fault for each duplicate key, and
    removes the first of the two from the node."""
    if id(node) in above:  # an alias that contains itself
        return
    above = (*above, id(node))
    pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            positions.lines[f"{path}.{number}"] = item.start_mark.line + 1
            yield from note_lines(item, positions, f"{path}.{number}", above)
    elif isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            if key_node.tag == _MERGE:
                merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for one in merged:
                    yield from note_lines(one, positions, path, above)
                pairs[f"<< {len(pairs)}"] = key_node, value
                continue
            name = str(key_node.value)
            key = f"{path}.{name}".lstrip(".")
            positions.lines[key] = key_node.start_mark.line + 1
            if name in pairs:
                first = pairs.pop(name)[0].start_mark.line + 1
                found = f"`{name}` again (first in line {first})"
                yield Fault(positions.where(key), "every key once", found, "remove one of the two")
            pairs[name] = key_node, value
            yield from note_lines(value, positions, key, above)
        node.value = list(pairs.values())


WRONG = object()
"""Returned by `Check.check` for a value of which nothing is valid."""


class Check:
    """One check of values read from YAML against the dataclass `schema`.

    Args:
        where: maps a key path to its place, for faults.
        raw: receives values with an interpolation, by key path.
        numbered: accept a mapping with numbers as keys for items of a list.
    """

    def __init__(
        self,
        schema: type,
        where: Callable[[str], str],
        raw: dict[str, str],
        *,
        numbered: bool = False,
    ) -> None:
        self.schema, self.where, self.raw, self.numbered = schema, where, raw, numbered
        self.faults: list[Fault] = []
        self._above: list[int] = []

    def check(self, value: Any, kind: Any, path: str = "", choices: Sequence[str] = ()) -> Any:
        """The value without its faulty parts, or `WRONG`."""
        expected, optional = strip_optional(kind)
        if isinstance(value, str) and "${" in value:
            self.raw[path] = value
            return value
        if value is None and optional:
            return None
        if not isinstance(value, (dict, list)):
            return self._scalar(value, expected, path, choices)
        if id(value) in self._above:
            return self._fault(path, "a finite value", "an alias that contains itself")
        self._above.append(id(value))
        kept = self._container(value, expected, path)
        self._above.pop()
        return kept

    def _container(self, value: Any, expected: Any, path: str) -> Any:
        known: dict[str, Any] | None = None
        if dataclasses.is_dataclass(expected):
            known = dict(fields_of(typing.cast(type, expected)))
        origin, arguments = typing.get_origin(expected) or expected, typing.get_args(expected)
        is_list = isinstance(value, list)
        entries = list(enumerate(value) if is_list else value.items())
        if self.numbered and origin is list:
            is_list = all(str(name).isdigit() for name, _ in entries)
        if is_list and origin in (list, Any):
            inner = arguments[0] if arguments else Any
            checked = [self.check(item, inner, f"{path}.{name}") for name, item in entries]
            return [item for item in checked if item is not WRONG]
        if is_list or (known is None and origin not in (dict, Any)):
            fix = "begin each item with `- `" if origin is list else None
            return self._fault(path, describe(expected), kind_of(value), fix)
        kept = {}
        for name, item in entries:
            key = f"{path}.{name}".lstrip(".")
            kind: Any = arguments[1] if len(arguments) == 2 else Any
            choices: Sequence[str] = ()
            if known is not None:
                name = as_field(key).rpartition(".")[2] if name == "from" else name
            if known is not None and name not in known:
                self._unknown(path, str(name), item, known)
                continue
            if known is not None:
                kind, choices = known[name]
            checked = self.check(item, kind, key, choices)
            if checked is not WRONG:
                kept[name] = checked
        return kept

    def _scalar(self, value: Any, expected: Any, path: str, choices: Sequence[str]) -> Any:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        good = value is not None and value != "???" and not isinstance(value, bytes)
        origin = typing.get_origin(expected) or expected
        if isinstance(expected, type) and issubclass(expected, Enum):
            try:  # Trinity's enums also accept former names of their values
                expected[str(value)]
            except KeyError:
                good, choices = False, [member.value for member in expected]
        elif dataclasses.is_dataclass(expected) or origin in (list, dict):
            good = False
        elif expected is bool:
            good = isinstance(value, int) or str(value).lower() in _TRUTH
        elif expected is int:
            good = (number and isinstance(value, int)) or _parses(int, value)
        elif expected is float:
            good = number or _parses(float, value)
        elif choices:
            good = value in choices
        if good or expected is Any:
            return value
        told, fix = describe(expected), "begin each item with `- `" if origin is list else None
        if choices:
            told = "one of " + ", ".join(choices)
            fix = f"{path.rpartition('.')[2]}: {nearest(str(value), choices) or choices[0]}"
        return self._fault(path, told, kind_of(value), fix)

    def _unknown(self, parent: str, name: str, value: Any, known: dict[str, Any]) -> None:
        expected, fix = suggest(self.schema, parent, name, known)
        key = f"{parent}.{name}".lstrip(".")
        kind = kind_of(value)
        if not isinstance(value, (dict, list)) and _MAY_HOLD_A_KEY.search(name):
            kind = "its value is not shown since it may be a key"
        found = f"`{display(key)}`, which is no setting ({kind})"
        self.faults.append(Fault(self.where(key), expected, found, fix))

    def _fault(self, path: str, expected: str, found: str, fix: str | None = None) -> Any:
        fix = fix or f"give `{display(path)}` {expected}, or remove it to take the default"
        fault = Fault(self.where(path), f"{display(path)}: {expected}", found, fix)
        self.faults.append(fault)
        return WRONG


def as_field(key: str) -> str:
    """The key path with the names that fields have: `from` is a word of Python's own."""
    return re.sub(r"((?:^|\.)replay)\.from(?=\.|$)", r"\1.rounds", key)


def suggest(schema: type, parent: str, name: str, known: dict[str, Any]) -> tuple[str, str]:
    """For an unknown `name` under `parent`: the expected keys, and what to write instead."""
    section = re.sub(r"\.\d+(?=\.|$)", "[]", parent)
    target = elsewhere(name, section, list(known), index(schema))
    if target is None:
        words = ", ".join(sorted(known))
        fix = "remove it; docs/training_yaml.md has what other libraries call the settings"
        return f"a key of `{display(parent) or 'the top level'}`: {words}", fix
    home, _, leaf = target.rpartition(".")
    # Sections with names from the user (`models.judge`) are not in the index.
    kind = describe(known[leaf][0] if home == section else index(schema)[target])
    return f"`{target}` ({kind})", f"did you mean `{target}`?"


@lru_cache(maxsize=64)
def fields_of(section: Any) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Name to type and choices of a dataclass's fields."""
    hints = typing.get_type_hints(section)
    return {
        item.name: (hints[item.name], tuple(item.metadata.get("choices", ())))
        for item in dataclasses.fields(section)
    }


@lru_cache(maxsize=2)
def index(schema: type) -> dict[str, Any]:
    """Every key path of the schema with its type; items of a list are `name[]`."""
    found: dict[str, Any] = {}

    def visit(section: Any, prefix: str) -> None:
        for name, (kind, _) in fields_of(section).items():
            path = f"{prefix}{name}"
            found[path] = kind
            inner, _optional = strip_optional(kind)
            if typing.get_origin(inner) is list:
                inner, path = (typing.get_args(inner) or (Any,))[0], path + "[]"
            if dataclasses.is_dataclass(inner):
                visit(inner, path + ".")

    visit(schema, "")
    return found


def strip_optional(kind: Any) -> tuple[Any, bool]:
    """(X, True) for `X | None`; (Any, True) for other unions and Any; else (kind, False)."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        rest = [argument for argument in typing.get_args(kind) if argument is not type(None)]
        return (rest[0] if len(rest) == 1 else Any), True
    return kind, kind is Any


def describe(kind: Any) -> str:
    """A type in words."""
    kind, optional = strip_optional(kind)
    origin = typing.get_origin(kind) or kind
    if kind is Any:
        return "any value"
    if dataclasses.is_dataclass(kind):
        text = "a section (indented keys below it)"
    elif isinstance(kind, type) and issubclass(kind, Enum):
        text = "one of " + ", ".join(member.value for member in kind)
    elif origin is list:
        inner = (typing.get_args(kind) or (Any,))[0]
        text = "a list of sections" if dataclasses.is_dataclass(inner) else "a list"
    elif origin is dict:
        text = "a mapping (indented keys below it)"
    else:
        text = _SCALARS.get(kind, str(kind))
    return f"{text}, or null" if optional else text


def kind_of(value: Any) -> str:
    """A value of the YAML in words."""
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else f"a list of {len(value)}"
    if value is None:
        return "nothing (null)"
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{shown} ({_SCALARS.get(type(value), type(value).__name__)})"


def _parses(kind: type, value: Any) -> bool:
    try:
        return isinstance(value, str) and kind(value) is not None
    except ValueError:
        return False


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, or None."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def elsewhere(name: str, parent: str, siblings: list[str], index: Mapping[str, Any]) -> str | None:
    """The key path most likely meant by an unknown `name` under `parent`, or None. In this order: a
    sibling of nearly the same spelling, the same name elsewhere (the least deep), a less similar
    sibling, a key of nearly the same spelling anywhere."""
    prefix = f"{parent}." if parent else ""
    bare = name.rpartition(".")[2]
    if prefix + name in index and name != bare:
        return prefix + name
    if close := nearest(name, siblings, 0.75):
        return prefix + close
    top, leaves = parent.partition(".")[0] + ".", dict[str, str]()
    for path in sorted(index, key=lambda p: (p.count("."), "[]" in p, not p.startswith(top), p)):
        leaves.setdefault(path.rpartition(".")[2], path)
    if bare in leaves:
        return leaves[bare]
    if close := nearest(name, siblings):
        return prefix + close
    return leaves.get(nearest(bare, leaves, 0.8) or "")
