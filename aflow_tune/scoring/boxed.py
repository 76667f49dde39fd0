r"""Finding `\boxed{...}` in an answer: by balanced braces, and as the published rules do."""

from __future__ import annotations

import re

# One level of braces inside, as in the public AFlow code: deeper ones are not found there.
_SHALLOW = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\boxed 7`) with balanced braces, or None."""
    _, found, rest = text.rpartition("\\boxed")
    return _content(rest) if found else None


def boxed_if_asked(value: str, task: str) -> str:
    r"""The value in a `\boxed{}` where the task asks for one and the value has none."""
    asked = "\\boxed" in task and "\\boxed" not in value
    return f"\\boxed{{{value}}}" if asked else value


def boxed_answers(text: str) -> list[str]:
    r"""The contents of all boxes in order, boxes around boxes and unclosed ones left out."""
    contents = [_content(rest) for rest in text.split("\\boxed")[1:]]
    return [content for content in contents if content is not None]


def shallow_boxed(text: str) -> list[str]:
    """All boxes with at most one level of braces inside, which is what published rules see."""
    return _SHALLOW.findall(text)


def _content(rest: str) -> str | None:
    if not rest.startswith("{"):
        words = rest.split("$")[0].split()
        return words[0] if words else None
    depth = 0
    for position, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:position]
    return None
