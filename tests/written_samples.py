"""Graphs as a policy writes them, for the tests of the writer's check."""

from __future__ import annotations

import textwrap

LINES_BEFORE_CALL = 8
"""Lines of `workflow(...)` before the first one of `call`, without `head` and `init`."""


def workflow(call: str, init: str = "", rest: str = "", head: str = "") -> str:
    """A graph; `call` is the body of __call__, `rest` further members of the class."""
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


PLAIN = workflow('r = await self.solve(input=problem)\nreturn r["response"], 0.0')
