"""A graph on disk, in our own form or in AFlow's, as texts.

Our form is a folder with `graph.py` and `prompts.json`, an object from the name of a prompt
constant, of an operator's instance or of an operator to its text (for an operator with several
prompts, to an object of texts). AFlow's form is a `round_N` folder with `graph.py` and
`prompt.py`, beside a `template` folder whose `op_prompt.py` holds its operators' prompts. Both
may be mixed; prompts.json wins. A graph.py in ScoreFlow's form is put into AFlow's
(`scoreflow.py`).

Only reads. What the texts mean is for `shape.py`; nothing is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.graph import inside
from aflow_tune.graph.scoreflow import translated
from aflow_tune.graph.shape import MAX_SOURCE_CHARS

PROMPTS_FILE = "prompts.json"

PromptText = str | Mapping[str, str]


@dataclass(frozen=True)
class GraphFiles:
    """The texts of a graph's files, and what its place on disk says."""

    label: str
    """The folder as the user named it, for messages."""
    sources: dict[str, str]
    """graph.py; prompt.py and op_prompt.py where there are any."""
    prompts: dict[str, PromptText] = field(default_factory=dict)
    """Of prompts.json."""
    dataset: str | None = None
    """Of a path `.../DATASET/workflows/round_N`."""
    round: int | None = None


def read_files(path: str | Path) -> GraphFiles:
    """Read a graph's folder, or the folder of a graph.py.

    Raises:
        BadInput: there is no graph, or a file cannot be read.
    """
    folder = Path(path)
    if folder.name == inside.GRAPH_FILE and not folder.is_dir():
        folder = folder.parent
    label = str(folder)
    faults: list[Fault] = []
    if not (folder / inside.GRAPH_FILE).is_file():
        found = "no such folder" if not folder.is_dir() else f"a folder without {inside.GRAPH_FILE}"
        cure = "name a folder with graph.py and prompts.json, or a round_N folder of AFlow"
        raise BadInput(f"There is no graph at {path}.", [Fault(label, "a graph", found, cure)])
    places = {
        inside.GRAPH_FILE: folder / inside.GRAPH_FILE,
        inside.PROMPT_FILE: folder / inside.PROMPT_FILE,
        inside.TEMPLATE_PROMPT_FILE: _template(folder) / inside.TEMPLATE_PROMPT_FILE,
    }
    sources = {
        name: text
        for name, place in places.items()
        if (text := _text(place, f"{label}/{name}", faults)) is not None
    }
    sources |= {inside.GRAPH_FILE: translated(sources.get(inside.GRAPH_FILE, ""))}
    prompts = _prompts(folder / PROMPTS_FILE, f"{label}/{PROMPTS_FILE}", faults)
    if faults:
        raise BadInput(f"The graph at {path} cannot be read.", faults)
    return GraphFiles(label, sources, prompts, *_place(folder, sources[inside.GRAPH_FILE]))


def check_prompts(given: Any, where: str) -> tuple[dict[str, PromptText], list[Fault]]:
    """Prompts as a mapping of names to texts, or what is wrong with them."""
    expected = "an object from names to texts, or to objects of texts"
    cure = 'write {"NAME": "text"}'
    if not isinstance(given, Mapping):
        return {}, [Fault(where, expected, type(given).__name__, cure)]
    prompts: dict[str, PromptText] = {}
    faults = []
    for name, value in given.items():
        texts = value.values() if isinstance(value, Mapping) else [value]
        if isinstance(name, str) and all(isinstance(text, str) for text in texts):
            prompts[name] = dict(value) if isinstance(value, Mapping) else value
        else:
            found = f"{name!r:.40}: {value!r:.80}"
            faults.append(Fault(where, expected, found, cure))
    return prompts, faults


def _template(folder: Path) -> Path:
    beside = folder.resolve().parent / "template"
    return folder / "template" if (folder / "template").is_dir() else beside


def _text(path: Path, label: str, faults: list[Fault]) -> str | None:
    if not path.is_file():
        return None
    if path.is_symlink():
        # A graph from elsewhere could point at a file of yours and have it sent to a model.
        cure = "put the file itself there"
        faults.append(Fault(label, "a file", f"a link to {path.readlink()}", cure))
        return None
    if path.stat().st_size > 4 * MAX_SOURCE_CHARS:
        found = f"{path.stat().st_size} bytes"
        expected = f"a file of at most {MAX_SOURCE_CHARS} characters"
        faults.append(Fault(label, expected, found, "shorten it"))
        return None
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        faults.append(Fault(label, "a readable file in UTF-8", str(error), "correct the file"))
        return None


def _prompts(path: Path, label: str, faults: list[Fault]) -> dict[str, PromptText]:
    text = _text(path, label, faults)
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        faults.append(Fault(label, "a JSON object", str(error), "correct the file"))
        return {}
    prompts, wrong = check_prompts(given, label)
    faults += wrong
    return prompts


def _place(folder: Path, source: str) -> tuple[str | None, int | None]:
    """Data set and round, by the folder's place or else by the imports of graph.py."""
    resolved = folder.resolve()
    number = re.fullmatch(r"round_(\d+)", resolved.name)
    if number and resolved.parent.name.startswith("workflows"):
        return resolved.parent.parent.name, int(number[1])
    named = re.search(r"import\s+[\w.]*?(\w+)\.workflows\w*\.", source)
    numbered = re.search(r"\.round_(\d+)\.prompt\b", source)
    return named[1] if named else None, int(numbered[1]) if numbered else None
