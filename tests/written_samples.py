"""Graphs as a policy writes them, for the tests of the writer's check."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path


def workflow(call: str, init: str = "", rest: str = "", head: str = "") -> str:
    """A graph; `call` is the body of __call__ from line 9 on, `rest` more members of the class."""
    return (
        f"{head}"
        "class Workflow:\n"
        "    def __init__(self, name, llm_config, dataset):\n"
        "        self.llm = create_llm_instance(llm_config)\n"
        "        self.solve = operator.Custom(self.llm)\n"
        "        self.pick = operator.ScEnsemble(self.llm)\n"
        "        self.review = operator.Review(self.llm)\n"
        f"{_indented(init, 8)}"
        "\n"
        "    async def __call__(self, problem):\n"
        f"{_indented(call, 8)}"
        f"{_indented(rest, 4)}"
    )


def _indented(text: str, spaces: int) -> str:
    body = textwrap.dedent(text).strip("\n")
    return textwrap.indent(body, " " * spaces) + "\n" if body else ""


def graphs(file: str) -> dict[str, str]:
    """By name, the graphs of `good_graphs.jsonl` (ordinary ones of language models for AFlow, all
    to pass) or of `frozen/graphs.jsonl` (whose verdicts `test_frozen.py` holds)."""
    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return {held["name"]: held["text"] for held in map(json.loads, lines)}


ASK = "r = await self.solve(input=problem)\n"
DONE = 'return r["response"]'
PLAIN = workflow(f"{ASK}{DONE}, 0.0")
