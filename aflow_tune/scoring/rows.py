"""Reads rows of the benchmarks from a local file or the hub. Hub data sets are mapped to the form
of AFlow's data."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault

Row = Mapping[str, Any]
MAX_FAULTS = 20  # listed for one file


@dataclass(frozen=True)
class HubSource:
    """Where a benchmark is on the hub. `to_row` maps one of its rows to our form."""

    path: str
    config: str | None
    split: str
    to_row: Callable[[Row], dict[str, Any]] = dict


def read_jsonl(path: Path, fields: Mapping[str, type]) -> list[dict[str, Any]]:
    """All rows of a file with one JSON object per line; blank lines are skipped. Raises BadInput:
    it cannot be read, has no rows, or a row is not an object with `fields` of these types."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        title, fix = f"{path} cannot be read", "check the path and that it is a text file in UTF-8"
        raise BadInput.of(title, str(path), "a file of JSON lines", str(error), fix) from None
    rows: list[dict[str, Any]] = []
    faults: list[Fault] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__}")
            fault = field_fault(place, row, fields)
        except (ValueError, RecursionError) as error:  # ValueError: also a number too long
            told = "one JSON object in a line", str(error), "correct or remove this line"
            fault = Fault(place, *told)
        if fault is None:
            rows.append(row)
        else:
            faults.append(fault)
    if not rows and not faults:
        faults.append(Fault(str(path), "at least one row", "no rows", "write rows into the file"))
    if faults:
        shown = faults[:MAX_FAULTS]
        raise BadInput(f"{path} cannot be used: {len(faults)} faults", shown)
    return rows


def field_fault(place: str, row: Row, fields: Mapping[str, type]) -> Fault | None:
    """The first of `fields` that a row lacks or has in another type, as a fault."""
    lacking = [name for name in fields if row.get(name) is None]
    if lacking:
        found = f"no {', '.join(lacking)}, only {', '.join(map(repr, row)) or 'nothing'}"
        fix = "add the field, or name the benchmark that this row belongs to"
        return Fault(place, f"the fields {', '.join(fields)}", found, fix)
    for name, kind in fields.items():
        if not isinstance(row[name], kind):
            found = f"{type(row[name]).__name__}: {row[name]!r:.80}"
            return Fault(place, f"{_KINDS[kind]} in `{name}`", found, "correct this row")
    return None


_KINDS: dict[type, str] = {str: "a text in quotes", list: "a list", dict: "an object"}


def read_hub(source: HubSource, split: str | None = None) -> list[dict[str, Any]]:
    """All rows of a hub data set, mapped to the local form; downloaded unless cached. Raises
    BadInput: it cannot be loaded."""
    import datasets

    try:
        data = datasets.load_dataset(source.path, source.config, split=split or source.split)
    except Exception as error:  # the library raises whatever its transport raises
        found = f"{type(error).__name__}: {str(error)[:300]}"
        fix = "check network, HF_HOME and HF_TOKEN, or give a local file of rows"
        title, where = f"{source.path} cannot be loaded", f"hub data set {source.path}"
        raise BadInput.of(title, where, "rows of the data set", found, fix) from error
    return [source.to_row(row) for row in data]


def mbpp_row(row: Row) -> dict[str, Any]:
    """google-research-datasets/mbpp, both configurations. The entry point is the first function of
    the program that the tests call; its `def` line is added to the prompt, which lacks its name."""
    if "entry_point" in row:
        return dict(row)
    imports = [*row.get("test_imports", ()), *filter(None, [row.get("test_setup_code")])]
    tree = ast.parse(row["code"])
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    tested = [node for test in row["test_list"] for node in ast.walk(ast.parse(test))]
    called = [getattr(node.func, "id", "") for node in tested if isinstance(node, ast.Call)]
    name = next((name for name in called if name in defined), "")
    body = [line for text in (*imports, *row["test_list"]) for line in text.splitlines()]
    signature = next(
        (line for line in row["code"].splitlines() if line.lstrip().startswith(f"def {name}")), ""
    )
    prompt = row["prompt"] if "prompt" in row else row["text"]
    return {
        **row,
        "prompt": f"{prompt}\n\n{signature}".rstrip() + "\n",
        "entry_point": name,
        "test": "def check():\n" + "".join(f"    {line}\n" for line in body),
    }


def hotpotqa_row(row: Row) -> dict[str, Any]:
    """hotpotqa/hotpot_qa, which has parallel columns where the local form has pairs."""
    context, facts = row["context"], row["supporting_facts"]
    if not isinstance(context, Mapping):
        return dict(row)
    pairs = zip(context["title"], context["sentences"], strict=True)
    return {
        **row,
        "_id": row.get("id", row.get("_id")),
        "context": [[title, list(sentences)] for title, sentences in pairs],
        "supporting_facts": [
            [title, number] for title, number in zip(facts["title"], facts["sent_id"], strict=True)
        ],
    }


def drop_row(row: Row) -> dict[str, Any]:
    """ucinlp/drop: passage, question and spans. Every distinct span counts as a reference."""
    if "ref_text" in row:
        return dict(row)
    spans = dict.fromkeys(span.strip() for span in row["answers_spans"]["spans"])
    return {
        **row,
        "context": f"Passage: {row['passage']}\nQuestion: {row['question']}\nAnswer:",
        "ref_text": "|".join(filter(None, spans)),
    }
