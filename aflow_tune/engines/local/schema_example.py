"""The smallest example of a JSON schema: what a scripted model answers where JSON is asked for.

Covers what pydantic writes (objects, arrays, numbers, texts, enums, constants, alternatives,
references within the schema, lengths and bounds). A `pattern`, a `format` and conditions between
fields are not looked at: such an example may be refused by whoever asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEEPEST = 12
"""References may go round in a circle; what is deeper than this becomes null."""


def example_of(schema: Mapping[str, Any]) -> Any:
    """A value that fits `schema`, with required properties only."""
    return _example(schema, schema, 0)


def _example(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None
    if "$ref" in schema:
        return _example(_referenced(str(schema["$ref"]), root), root, depth + 1)
    for key, pick in (("const", lambda value: value), ("enum", lambda values: values[0])):
        if key in schema:
            return pick(schema[key])
    if "default" in schema:
        return schema["default"]
    if parts := schema.get("allOf"):
        merged = [_example(part, root, depth + 1) for part in parts]
        if all(isinstance(part, dict) for part in merged):
            return {key: value for part in merged for key, value in part.items()}
        return merged[0]
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return _example(schema[key][0], root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    return _of_type(kind[0] if isinstance(kind, list) else kind, schema, root, depth)


def _of_type(kind: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    if kind == "object":
        properties = schema.get("properties") or {}
        return {
            name: _example(properties.get(name, {}), root, depth + 1)
            for name in schema.get("required", ())
        }
    if kind == "array":
        given = list(schema.get("prefixItems") or ())
        while len(given) < int(schema.get("minItems", 0)):
            given.append(schema.get("items", {}))
        return [_example(item, root, depth + 1) for item in given]
    if kind in ("integer", "number"):
        return _number(schema, whole=kind == "integer")
    if kind == "boolean":
        return False
    if kind == "null":
        return None
    text = "words" + "." * max(0, int(schema.get("minLength", 0)) - len("words"))
    return text[: int(schema.get("maxLength", len(text)))]


def _number(schema: Mapping[str, Any], *, whole: bool) -> int | float:
    """Zero, or the bound that is nearest to it."""
    step = 1 if whole else 0.5
    low = schema.get("minimum")
    if low is None and "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + step
    high = schema.get("maximum")
    if high is None and "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - step
    value = 0
    if low is not None and value < low:
        value = low
    if high is not None and value > high:
        value = high
    return int(value) if whole else value


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """What `#/a/b` leads to in the schema; None where it leads nowhere."""
    found: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if not part:
            continue
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
