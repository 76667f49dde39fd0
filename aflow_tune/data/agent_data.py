"""Finds dialogues, catalogue and benchmark in a folder of data for an agent, by their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aflow_tune.data.catalogue import Tool, read_catalogue
from aflow_tune.data.dialogues import HELD_OUT, as_dialogue
from aflow_tune.data.rows import file_format, read_table
from aflow_tune.errors import BadInput

_FIRST = 50
"""Rows of a file by which it is known."""


@dataclass
class AgentData:
    """Files of dialogues to learn from, of tools, and of dialogues to evaluate on. A file whose
    rows name their split may be both."""

    dialogues: list[Path] = field(default_factory=list)
    catalogue: Path | None = None
    benchmark: list[Path] = field(default_factory=list)


def find_agent_data(path: Path) -> AgentData:
    """The data in a folder, or of one file of dialogues.

    A catalogue has rows that are tools. A benchmark has rows with a `ground_truth` or `gold`, lies
    beside `possible_answer/`, or is named after a held-out split or `benchmark`; other dialogues
    are learned from. Raises BadInput: nothing to learn from, or several catalogues.
    """
    title = "This is no data for an agent."
    expected = "a file of dialogues, or a folder with dialogues and perhaps a catalogue of tools"
    fix = "see docs/agents.md for the forms of rows"
    if not path.exists():
        raise BadInput.of(title, str(path), expected, "no such file or folder", fix)
    found = AgentData()
    catalogues: list[Path] = []
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    for file in files:
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if hidden or not file.is_file() or file_format(file) in (None, "text", "csv"):
            continue
        if file.parent.name == "possible_answer":
            continue
        table = read_table(str(file), [file])
        rows = table.rows[:_FIRST]
        if _dialogues(rows):
            held_out = _held_out(file, rows, path)
            (found.benchmark if held_out else found.dialogues).append(file)
            splits = {str(row["split"]) for row in table.rows if row.get("split")}
            if held_out and "train" in splits:
                found.dialogues.append(file)
            elif not held_out and splits & set(HELD_OUT):
                found.benchmark.append(file)
        elif _tools(file):
            catalogues.append(file)
    if len(catalogues) > 1:
        told = ", ".join(map(str, catalogues))
        raise BadInput.of(title, str(path), "one catalogue of tools", told, "keep one of them")
    found.catalogue = catalogues[0] if catalogues else None
    if not found.dialogues and not found.benchmark:
        told = ", ".join(file.name for file in files if file.is_file()) or "no files"
        raise BadInput.of(title, str(path), expected, told, fix)
    return found


def _dialogues(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the first row that can be read is a dialogue. Of tools that a row only names nothing
    is known yet."""
    for row in rows:
        names = _Any()
        try:
            as_dialogue(row, names)
        except ValueError:
            continue
        return True
    return False


class _Any(dict[str, Tool]):
    """A catalogue in which every name is a tool."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Tool:
        return Tool(name, "")


def _tools(file: Path) -> bool:
    try:
        read_catalogue(file)
    except BadInput:
        return False
    return True


def _held_out(file: Path, rows: Sequence[Mapping[str, Any]], top: Path) -> bool:
    if any("ground_truth" in row or "gold" in row for row in rows):
        return True
    if (file.parent / "possible_answer" / file.name).is_file():
        return True
    names = [file.stem, *file.relative_to(top).parts[:-1]] if top.is_dir() else [file.stem]
    words = {word for name in names for word in name.lower().replace("-", "_").split("_")}
    return bool(words & {*HELD_OUT, "benchmark", "eval", "evaluation"})
