"""The check of written graphs. Verdicts on good, broken and hostile ones: `test_frozen.py`."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from written_samples import DONE, graphs, workflow

from aflow_tune.operators import OPERATORS, Operator, Prompt
from aflow_tune.operators.fields import Field
from aflow_tune.writer.check import check_graph_of, check_written
from aflow_tune.writer.form import as_text
from aflow_tune.writer.types import RefusalKind, Verdict, Written

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from generated_graphs import Generator

K = RefusalKind
GOOD = graphs("good_graphs.jsonl")


def check(code: str, operators: Any = OPERATORS) -> Verdict:
    return check_graph_of(Written(code), operators=operators)


@pytest.mark.parametrize("name", GOOD)
def test_ordinary_graphs_pass(name: str) -> None:
    assert check(GOOD[name]).refusals == ()


def test_operators_of_a_user() -> None:
    class Summarise(Operator):
        """Shortens a text."""

        fields = (Field("summary"),)
        asks = {"main": Prompt(needs=("text",), text="Shorten:\n{text}")}  # noqa: RUF012

        async def run(self, text: str) -> Any:
            return await self.ask({"text": text})

    code = workflow(
        's = await self.short(text=problem)\nreturn s["summary"]',
        init="self.short = operator.Summarise(self.llm)",
    )
    assert check(code, {**OPERATORS, "Summarise": Summarise}).ok
    assert [one.kind for one in check(code).refusals] == [K.UNKNOWN_OPERATOR]


def test_no_text_makes_the_check_raise() -> None:
    chance, generator = random.Random(3), Generator(3)
    pieces = ["(", ")", "[", "{", ":", "\n", "    ", "await ", "for x in ", "while True:\n", "*"]
    pieces += ["lambda: ", "self.", "operator.", "if x:\n", "=", ":=", ".", '"', "'", "\\", "\0"]
    for _ in range(250):
        code = generator.graph()[1]
        for _ in range(chance.choice([1, 1, 2, 8])):
            at = chance.randrange(len(code))
            code = code[:at] + chance.choice(pieces) + code[at + chance.randrange(4) :]
        verdict = check_written(chance.choice([code, as_text({}, code)]), operators=OPERATORS)
        assert verdict.ok or verdict.refusals


@pytest.mark.parametrize(
    "body",
    [
        '"{0.__class__}".format(self)',
        'text = "{0.__init__.__globals__}"\ntext.format(self)',
        'kind = type\nkind("A", (), {})',
        'read = getattr\nread(self, "__dict__")',
        '[getattr][0](self, "__dict__")',
        "import typing\n[typing][0].sys",
        "import typing\n(lambda module: module.sys)(typing)",
        "import typing\nself.typing = typing\nself.typing.sys",
        'import logging\nlog = logging.basicConfig\nlog(filename="x")',
        'import logging\nlogging.basicConfig(**{"filename": "x"})',
        'import string\nstring.Formatter().get_field("0.__class__", [self], {})',
        'import functools\nfunctools.partial(getattr, self)("__dict__")',
        'import asyncio\nawait asyncio.create_subprocess_shell("id")',
        "x = open if problem else None",
        "def f(x=eval('1')):\n    return x",
        "try:\n    1 / 0\nexcept Exception as e:\n    e.__traceback__.tb_frame",
        "import copy\ncopy.copyreg",
        "json = 1\nglobal json",
    ],
)
def test_ways_around_the_list_are_refused(body: str) -> None:
    verdict = check(workflow(f"r = await self.solve(problem)\n{body}\n" + DONE))
    assert {refusal.kind for refusal in verdict.refusals} & {K.NOT_ALLOWED, K.SYNTAX}


def test_an_answer_that_is_put_together_without_an_operator_is_refused() -> None:
    body = (
        'text = "The answer is "\ntext = text + problem\nr = await self.solve(problem)\nreturn text'
    )
    assert [refusal.kind for refusal in check(workflow(body)).refusals] == [K.SHAPE]
