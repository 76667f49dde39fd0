"""A graph written back as a `round_N` folder that AFlow runs: graph.py, prompt.py, __init__.py.

The code keeps its text; only the import lines that AFlow's files begin with are written anew,
for the data set and round that the folder is meant for. Changed prompt constants are written
into prompt.py. AFlow reads prompts of operators from its own template and nowhere else: such
prompts are kept beside it in prompts.json, which we read and AFlow does not, and are named in
what `save_round` returns. Instructions become constants: see `save_instructions.py`. Calls are made
to fit the operators of AFlow's template, or refused: see `save_calls.py`.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aflow_tune.errors import BadInput, Fault
from aflow_tune.graph import inside
from aflow_tune.graph.aflow_template import template_of
from aflow_tune.graph.files import PROMPTS_FILE
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.save_calls import fit
from aflow_tune.graph.save_instructions import Edit, instructed, outermost
from aflow_tune.graph.shape import parse

AFLOW, METAGPT = "aflow", "metagpt"

_HEADERS = {
    AFLOW: """\
from typing import Literal
import workspace.{dataset}.workflows.template.operator as operator
import workspace.{dataset}.workflows.round_{round}.prompt as prompt_custom
from scripts.async_llm import create_llm_instance
from scripts.evaluator import DatasetType
""",
    METAGPT: """\
from typing import Literal
import metagpt.ext.aflow.scripts.optimized.{dataset}.workflows.template.operator as operator
import metagpt.ext.aflow.scripts.optimized.{dataset}.workflows.round_{round}.prompt as prompt_custom
from metagpt.provider.llm_provider_registry import create_llm_instance
from metagpt.utils.cost_manager import CostManager

DatasetType = Literal["HumanEval", "MBPP", "GSM8K", "MATH", "HotpotQA", "DROP", "{dataset}"]
""",
}
_USUAL = {"operator": "operator", "prompt": "prompt_custom"}
"""What AFlow's files call these modules."""


@dataclass(frozen=True)
class SavedRound:
    """What was written."""

    folder: Path
    files: tuple[Path, ...]
    only_here: tuple[str, ...]
    """Prompts and instructions of operators, by name, that AFlow does not read."""
    notes: tuple[str, ...] = ()
    """What AFlow does differently, or may fail on, with the lines of the graph that was read."""


def save_round(
    graph: Graph,
    folder: str | Path,
    *,
    dataset: str | None = None,
    round_number: int | None = None,
) -> SavedRound:
    """Write a graph as a round of AFlow, in the form (AFlow's or MetaGPT's) that it has.

    Args:
        folder: to be made; AFlow finds it at `workspace/DATASET/workflows/round_N`.
        dataset: None for the one of that path, or else the graph's own.
        round_number: None for the one of the folder's name, or else the graph's own.

    Raises:
        BadInput: the folder holds a graph already, data set or round cannot be told, or AFlow's
            template of the data set does not take the graph's calls.
    """
    folder = Path(folder)
    place = re.fullmatch(r"round_(\d+)", folder.resolve().name)
    if place:
        round_number = int(place[1]) if round_number is None else round_number
        if folder.resolve().parent.name.startswith("workflows"):
            dataset = dataset or folder.resolve().parent.parent.name
    dataset = dataset or graph.dataset
    round_number = graph.round if round_number is None else round_number
    _refuse(folder, dataset, round_number)
    assert dataset is not None
    source = graph.sources[inside.GRAPH_FILE]
    form = METAGPT if re.search(r"^\s*(from|import)\s+metagpt\.", source, re.M) else AFLOW
    header = _HEADERS[form].format(dataset=dataset, round=round_number)
    tree = _tree(source, folder)
    given = instructed(graph, tree, _USUAL["prompt"])
    template = template_of(dataset, folder.resolve().parent)
    fitted = fit(graph, tree, template, form == METAGPT)
    if fitted.faults:
        raise BadInput(f"AFlow would fail on this round of {dataset}.", fitted.faults)
    notes = fitted.notes
    if template is None:
        notes = [*notes, f"{dataset} has no template of AFlow's that is known here or lies at "
                 f"{folder.parent / 'template'}: its calls were not checked"]  # fmt: skip
    changed = outermost(tree, given.changed | fitted.changed)
    body, future = _body(source, folder, [*given.edits, *fitted.edits, *changed])
    texts = {
        inside.GRAPH_FILE: f"{future}{header}\n{body}",
        inside.PROMPT_FILE: _prompt_source(
            graph.sources.get(inside.PROMPT_FILE, ""), {**given.constants, **graph.constants}
        ),
        "__init__.py": "",
    }
    own = {**given.prompts, **graph.operator_prompts}
    if own:
        texts[PROMPTS_FILE] = json.dumps(own, ensure_ascii=False, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in texts.items():
        path = folder / name
        partial = folder / f".{name}.{os.getpid()}"
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
        written.append(path)
    only_here = tuple(sorted({*own, *given.lost}))
    return SavedRound(folder, tuple(written), only_here, tuple(dict.fromkeys(notes)))


def _refuse(folder: Path, dataset: str | None, round_number: int | None) -> None:
    faults = []
    if (folder / inside.GRAPH_FILE).exists():
        found = f"{folder / inside.GRAPH_FILE} exists"
        faults.append(Fault(str(folder), "a folder without a graph", found, "name another round"))
    if dataset is None or not re.fullmatch(r"[A-Za-z_]\w*", dataset):
        cure = "write to .../DATASET/workflows/round_N, or name the data set"
        faults.append(Fault(str(folder), "the name of a data set", repr(dataset), cure))
    if round_number is None:
        cure = "name the folder round_N, or give the round"
        faults.append(Fault(str(folder), "the number of the round", "none", cure))
    if faults:
        raise BadInput("The graph cannot be written there.", faults)


def _body(source: str, folder: Path, edits: Sequence[Edit]) -> tuple[str, str]:
    """graph.py with these edits and without what the header brings, and the `__future__` lines
    that go before it."""
    tree, edits = _tree(source, folder), list(edits)
    future = []
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in imports:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            future.append(ast.unparse(node))
            edits.append((node, ""))
        elif ast.unparse(node) == "from typing import Literal":
            edits.append((node, ""))
        elif (names := _rebound(node)) is not None:
            edits.append((node, "; ".join(names)))
    for statement in tree.body:
        if _assigns_dataset_type(statement):
            edits.append((statement, ""))
    body = re.sub(r"\n{4,}", "\n\n\n", _edited(source, edits))
    return body.strip("\n") + "\n", "".join(f"{line}\n" for line in future)


def _tree(source: str, folder: Path) -> ast.Module:
    tree, faults = parse(source, inside.GRAPH_FILE)
    if tree is None:
        raise BadInput(f"The graph for {folder} cannot be read.", faults)
    return tree


def _rebound(node: ast.Import | ast.ImportFrom) -> list[str] | None:
    """What an import of AFlow's becomes under the header; None to keep it."""
    statements = []
    if isinstance(node, ast.Import):
        for alias in node.names:
            usual = _USUAL.get(inside.shim_of(alias.name) or "")
            if usual is None or alias.asname is None:
                return None
            statements.append((alias.asname, usual))
    else:
        module = inside.absolute(node.module or "", node.level)
        kind = inside.shim_of(module)
        for alias in node.names:
            inner = inside.shim_of(f"{module}.{alias.name}") if kind is None else None
            if kind in ("model", "dataset", "cost") and alias.asname is None:
                usual = alias.name  # the header imports it
            elif kind in _USUAL and alias.name != "*":
                usual = f"{_USUAL[kind]}.{alias.name}"
            elif inner in _USUAL:
                usual = _USUAL[inner]
            else:
                return None
            statements.append((alias.asname or alias.name, usual))
    return [f"{name} = {usual}" for name, usual in statements if name != usual]


def _assigns_dataset_type(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "DatasetType"
    )


def _edited(source: str, edits: Sequence[Edit]) -> str:
    """The source with other texts in the places of these nodes."""
    # Columns of the parser count bytes, and only these ends of lines are ends for it.
    lines = source.encode().splitlines(keepends=True)
    for node, text in sorted(edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset))[::-1]:
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        if not text and (before.strip() or after.partition(b"#")[0].strip()):
            text = "pass"  # it stood in a line or a block with others
        elif not text and before:
            text = "pass"
        lines[first : last + 1] = [before + text.encode() + after]
    return b"".join(lines).decode()


def _prompt_source(source: str, constants: Mapping[str, str]) -> str:
    """prompt.py with these constants in place of what it has, further ones at its end."""
    tree, faults = parse(source, inside.PROMPT_FILE)
    if tree is None:
        raise BadInput("prompt.py cannot be read.", faults)
    left = dict(constants)
    edits: list[Edit] = []
    for node in reversed(tree.body):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id in left:
            edits.append((node.value, literal(left.pop(target.id))))
    text = _edited(source, edits)
    if left and text and not text.endswith("\n"):
        text += "\n"
    return text + "".join(f"\n{name} = {literal(value)}\n" for name, value in left.items())


def literal(text: str) -> str:
    """A Python literal of the text, over several lines where it has several."""
    if "\n" not in text or not text.replace("\n", "").replace("\t", "").isprintable():
        return repr(text)
    escaped = text.replace("\\", "\\\\")
    if '"""' in text or text.endswith('"'):
        escaped = escaped.replace('"', '\\"')
    return f'"""{escaped}"""'
