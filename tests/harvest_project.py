"""A project to harvest in: sums, an executor over HTTP, and templates of known worth.

Problem n is 'What is n + 10?'. The executor does what the instruction says: ALWAYS answers
rightly, EVEN only even sums, WRONG never. So of the templates `even` solves the even problems
with one call, `always` solves all with two, `wrong` none; `raising` cannot run to an answer and
`refused` may not run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from faulty_server import Request, Step
from writer_samples import graph

EVEN = graph('found = await self.solve(input=problem)\nreturn found["response"]')
ALWAYS = graph(
    "await self.solve(input=problem)\n"
    "again = await self.solve(input=problem)\n"
    'return again["response"]'
)
WRONG = graph(
    "await self.solve(input=problem)\n"
    "await self.solve(input=problem)\n"
    "third = await self.solve(input=problem)\n"
    'return third["response"]'
)
RAISING = graph('found = await self.solve(input=problem)\nreturn int(found["response"] + "x")')
REFUSED = graph("import os\nreturn os.getcwd()")
KNOWN = graph('await self.solve(input=problem)\nreturn "It is 10"')
TEMPLATES: dict[str, tuple[str, str]] = {
    "even": ("EVEN", EVEN),
    "always": ("ALWAYS", ALWAYS),
    "wrong": ("WRONG", WRONG),
    "raising": ("ALWAYS", RAISING),
    "refused": ("ALWAYS", REFUSED),
}


def sums(number: int, request: Request) -> Step:
    """The executor."""
    text = request.body["messages"][-1]["content"]
    found = re.search(r"What is (\d+) \+ (\d+)", text)
    assert found, text
    right = int(found[1]) + int(found[2])
    if "WRONG" in text or ("EVEN" in text and right % 2):
        return Step(text=f"It is {right + 1}")
    return Step(text=f"It is {right}")


def rows(numbers: range) -> list[dict[str, str]]:
    """Rows of GSM8K's form."""
    return [{"question": f"What is {n} + 10?", "answer": f"Sum.\n#### {n + 10}"} for n in numbers]


def write_rows(path: Path, content: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))


def write_templates(folder: Path, names: list[str]) -> Path:
    """The templates of these names, as a user writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        word, code = TEMPLATES[name]
        held = {"problem_types": ["math"], "prompts": {"solve": word}, "graph_code": code}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(held))
    return folder


CONFIG = """
project: tests
name: warm
checkpoint_root_dir: {root}/runs
seed: 3
local: {{max_batch: 4}}
model: {{model_path: nobody/no-such-model, max_model_len: 4096, max_response_tokens: 512}}
writer: {{executor: executor, operators: [Custom, Programmer], benchmark: gsm8k, timeout: 120}}
harvest: {{templates: {root}/templates, per_structure: null}}
models:
  executor:
    {{model: frozen, base_url: {executor}, retries: 0, prices: {{input: 0.0, output: 0.0}}}}
buffer:
  explorer_input:
    taskset: {{name: train, path: {root}/train.jsonl}}
    eval_tasksets: [{{name: held_out, path: {root}/held_out.jsonl}}]
"""


def write_project(
    root: Path,
    executor: str,
    *,
    templates: list[str] | None = None,
    change: Callable[[dict[str, Any]], None] | None = None,
    problems: int = 8,
) -> Path:
    """The project in `root`; returns the configuration's path. `executor` is the address of an
    OpenAI-compatible API, `change` edits the configuration before it is written."""
    root.mkdir(parents=True, exist_ok=True)
    write_rows(root / "train.jsonl", rows(range(problems)))
    write_rows(root / "held_out.jsonl", rows(range(100, 103)))
    write_templates(root / "templates", list(TEMPLATES) if templates is None else templates)
    content = yaml.safe_load(CONFIG.format(root=root, executor=executor))
    if change is not None:
        change(content)
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def folder(root: Path) -> Path:
    """Where the command keeps the harvest."""
    return root / "runs" / "tests" / "warm" / "harvested"


def pairs(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of pairs."""
    return [json.loads(line) for line in path.read_text().splitlines()]
