"""A catalogue of tools, and queries with the tools that answer them, from the files that there are.

A catalogue may be a list of tools as JSON or JSON lines, or an object from names to descriptions.
Each row is one tool: OpenAI's `{"type": "function", "function": {...}}`, a plain `{name,
description, parameters}` (BFCL, xLAM), SAGE's (`tool_id`, `capabilities`, `inputs`), Seal-Tools'
(`api_name`) or a plugin manifest (`name_for_model`); or it has a list of them under `tools`,
`functions` or `function`, as dialogues and BFCL's questions do. Types and parameters become a JSON
schema. Faults name file and line; all first ones are reported together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from aflow_tune.data.rows import Table, file_format, read_table
from aflow_tune.errors import BadInput, Fault

_SHOWN_FAULTS = 5
_NAMES = ("tool_id", "api_name", "name_for_model", "name")
_DESCRIPTIONS = ("description", "api_description", "description_for_model")
_MORE = ("category", "field", "capabilities", "name_for_human", "description_for_human")
"""Keys of texts by which a tool is found, beside its name and description."""
_PARAMETERS = ("parameters", "inputs", "arguments", "inputSchema", "input_schema")
_LISTS = ("tools", "functions", "function")
_QUERIES = ("query", "question", "instruction", "goal")
_TOOLS = ("tools", "tool", "target_tools", "calling", "ground_truth")
_TYPES = {"str": "string", "text": "string", "int": "integer", "long": "integer"}
_TYPES |= {"float": "number", "double": "number", "bool": "boolean", "dict": "object"}
_TYPES |= {"list": "array", "tuple": "array"}
_SCHEMA_TYPES = {"string", "integer", "number", "boolean", "object", "array", "null"}
_NOTHING = {"type": "object", "properties": {}}
_WORD = re.compile(r"[a-z]+")
_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[_\W]+")
_UNREADABLE = "A file cannot be read."
_CURE = 'one tool is {"name": ..., "description": ..., "parameters": {...}}; see docs/tools.md'


@dataclass(frozen=True)
class Tool:
    """One tool. `parameters`: a JSON schema of an object; `more`: further words to find it by."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: dict(_NOTHING))
    more: str = ""

    @cached_property
    def text(self) -> str:
        """What a query is compared with: name, description, further words, names of parameters."""
        inputs = " ".join(self.parameters.get("properties", ()))
        parts = (words_of(self.name), self.description, words_of(self.more), words_of(inputs))
        return ". ".join(part for part in parts if part)

    def to_openai(self) -> dict[str, Any]:
        """An entry of `tools` in a chat request."""
        inner = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": inner}

    def to_json(self) -> dict[str, Any]:
        """A row of a catalogue, which `tools_of` reads."""
        row = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return row | ({"capabilities": self.more} if self.more else {})


@dataclass(frozen=True)
class Asked:
    """A query and the names of the tools that answer it. `place`: `file:line`."""

    query: str
    tools: tuple[str, ...]
    place: str = ""


def words_of(text: str) -> str:
    """`getFilmInfo_v2` as `get Film Info v2`."""
    return " ".join(part for part in _BOUNDARY.split(text) if part)


# -- catalogues ----------------------------------------------------------------------------


def read_catalogue(path: Path) -> list[Tool]:
    """The tools of a file, each name once: of several with one name the first counts.

    Raises BadInput: the file cannot be read, has faulty rows, or no tool."""
    tools: dict[str, Tool] = {}
    faults: list[Fault] = []
    for place, row in _rows_of_catalogue(path):
        try:
            for tool in tools_of(row):
                tools.setdefault(tool.name, tool)
        except ValueError as error:
            faults.append(Fault(place, "a tool", str(error), _CURE))
    _refuse("The catalogue cannot be used.", faults)
    if not tools:
        raise BadInput.of("The catalogue is empty.", str(path), "tools", "none", _CURE)
    return list(tools.values())


def _rows_of_catalogue(path: Path) -> Iterable[tuple[str, Any]]:
    """Rows with their places; an object over the whole file is taken apart."""
    if path.is_file() and path.suffix == ".json":
        whole: Any = None
        try:
            whole = json.loads(path.read_text(encoding="utf-8-sig"))
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # which JSON lines under this name are
                where, found = f"{path}:{error.lineno}", f"{error.msg} at column {error.colno}"
                cure = "correct it; for JSON lines name the file .jsonl"
                raise BadInput.of(_UNREADABLE, where, "JSON", found, cure) from None
        except (OSError, UnicodeDecodeError):
            pass  # `read_table` says what is wrong
        if _is_map(whole):
            if any(isinstance(whole.get(key), list | str) for key in (*_LISTS, *_NAMES)):
                return [(str(path), whole)]
            return [
                (
                    f"{path}: {name}",
                    {"name": name, **(one if _is_map(one) else {"description": one})},
                )
                for name, one in whole.items()
            ]
    table = _table(path)
    return zip(table.places, table.rows, strict=True)


def tools_of(row: Any) -> Iterator[Tool]:
    """The tools of one row of a catalogue, or of a row that carries its tools. Raises ValueError,
    which tells what was found instead."""
    if isinstance(row, str):
        row = json.loads(row)
    if isinstance(row, list):
        for part in row:
            yield from tools_of(part)
        return
    if not _is_map(row):
        raise ValueError(f"a {type(row).__name__}: {row!s:.60}")
    inner = next((row[key] for key in _LISTS if row.get(key) is not None), None)
    if inner is not None:
        yield from tools_of(inner)
        return
    name = next((row[key] for key in _NAMES if row.get(key) is not None), None)
    described = next((row[key] for key in _DESCRIPTIONS if row.get(key) is not None), "")
    if not isinstance(name, str) or not name.strip():
        keys = ", ".join(map(str, row)) or "no key"
        raise ValueError(f"no name ({keys})" if name is None else f"the name {name!r:.60}")
    if not isinstance(described, str):
        raise ValueError(f"{name}: a description that is a {type(described).__name__}")
    title = row["name"] if name != row.get("name") and isinstance(row.get("name"), str) else ""
    more = [title, *(text for key in _MORE for text in _texts(row.get(key)))]
    try:
        parameters = _schema(row)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{name}: parameters of an unknown form ({error})") from None
    yield Tool(name, described.strip(), parameters, " ".join(part for part in more if part))


def _schema(row: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's parameters: a schema, a map of parameters, or SAGE's list."""
    given: Any = next((row[key] for key in _PARAMETERS if row.get(key)), {})
    if isinstance(given, str):
        given = json.loads(given)
    if isinstance(given, list):
        given = {item["name"]: {k: v for k, v in item.items() if k != "name"} for item in given}
    if not _is_map(given):
        raise ValueError(f"{given!r:.60}")
    inner = given.get("properties")
    if not isinstance(given.get("type"), str) and not (
        _is_map(inner) and all(part is None or _is_map(part) for part in inner.values())
    ):
        needed = [name for name, part in given.items() if _is_map(part) and part.get("required")]
        given = {"properties": given, "required": row.get("required") or needed}
    schema = _plain(given)
    if not _is_map(schema.setdefault("properties", {})):
        raise ValueError(f"{schema['properties']!r:.60}")
    if not schema.get("required"):
        schema.pop("required", None)
    return {**schema, "type": "object"}


def _plain(schema: Any) -> Any:
    """A schema with JSON schema's names of types. Nulls, which tables fill in, are left out, and
    so is a `required` of a single parameter, which belongs to the object around it."""
    if not _is_map(schema):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            word = _WORD.match(value.strip().lower())
            value = _TYPES.get(word[0], word[0]) if word else ""
            if value not in _SCHEMA_TYPES:
                continue  # `any`: a schema without a type takes anything
        elif key == "properties" and _is_map(value):
            parts = {str(name): part for name, part in value.items() if part is not None}
            if odd := [part for part in parts.values() if not isinstance(part, str | dict | bool)]:
                raise ValueError(f"{odd[0]!r:.60}")
            value = {
                name: _plain({"type": part} if isinstance(part, str) else part)
                for name, part in parts.items()
            }
        elif key == "items":
            value = _plain(value)
        elif value is None or (key == "required" and not isinstance(value, list)):
            continue
        made[key] = value
    return made


# -- queries with their tools --------------------------------------------------------------


def read_asked(path: Path, known: Iterable[str], split: str = "") -> list[Asked]:
    """The queries of a file with the tools that answer them, in the order of the file. A query that
    stands there several times is one, with the tools of all.

    Args:
        known: the catalogue's names.
        split: only rows whose `split` is this one.

    Raises BadInput: the file cannot be read, rows are faulty or name tools that are not known, or
    no row is left.
    """
    names, table = set(known), _table(path)
    found: dict[str, Asked] = {}
    faults: list[Fault] = []
    for place, row in zip(table.places, table.rows, strict=True):
        if split and row.get("split") != split:
            continue
        row = {str(key).lower(): value for key, value in row.items()}
        query = next((row[key] for key in _QUERIES if row.get(key)), None)
        try:
            tools = next((tuple(_named(row[key])) for key in _TOOLS if row.get(key)), ())
        except ValueError:  # a list as text that is none
            tools = ()
        if not isinstance(query, str) or not query.strip() or not tools:
            expected = 'a query and its tools, such as {"query": ..., "tools": [NAME]}'
            keys = ", ".join(row) or "nothing"
            faults.append(Fault(place, expected, keys, "correct or remove this row"))
        elif odd := [tool for tool in tools if tool not in names]:
            cure = "name tools as the catalogue does, or give the catalogue that has them"
            faults.append(Fault(place, "a tool of the catalogue", f"{odd[0]!r:.80}", cure))
        else:
            before = found.get(query) or Asked(query, (), place)
            found[query] = replace(before, tools=tuple(dict.fromkeys((*before.tools, *tools))))
    _refuse("The queries cannot be used.", faults)
    if not found:
        where, expected = str(path), f"rows of the split {split}" if split else "rows"
        raise BadInput.of("There are no queries.", where, expected, "none", "add rows")
    return list(found.values())


def _named(value: Any) -> Iterator[str]:
    """The names of tools in a cell: a name, a list, Seal-Tools' calls, SAGE's ground truth."""
    if isinstance(value, str) and value.startswith("["):
        value = json.loads(value)
    if isinstance(value, str):
        yield value
    elif _is_map(value):
        keys = ("api", "name", "tool_id", "function", "top_k", "tool_sequence")
        yield from _named(next((value[key] for key in keys if value.get(key)), ()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _named(part)


# -- shared --------------------------------------------------------------------------------


def _table(path: Path) -> Table:
    expected = "a file of rows: .jsonl, .json, .csv or .parquet"
    if not path.is_file() or file_format(path) in (None, "text"):
        found = "a file of another format" if path.is_file() else "no such file"
        raise BadInput.of(_UNREADABLE, str(path), expected, found, "name another file")
    table = read_table(str(path), [path], whole=True)
    _refuse(_UNREADABLE, table.faults)
    return table


def _refuse(title: str, faults: Sequence[Fault]) -> None:
    if faults:
        more = f" ({len(faults)} rows; the first {_SHOWN_FAULTS})"
        raise BadInput(title + more * (len(faults) > _SHOWN_FAULTS), faults[:_SHOWN_FAULTS])


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(part) for part in value] if isinstance(value, list) else []
