"""The check of written graphs: good ones pass, each other one is refused for its own reason."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from good_graphs import GRAPHS
from graph_samples import CODE as CODE_GRAPH
from graph_samples import MATH, QA
from written_corpus import BAD, DONE, GOOD
from written_samples import PLAIN, workflow

from aflow_tune.operators import OPERATORS, Operator, Prompt
from aflow_tune.operators.fields import Field
from aflow_tune.writer.allowed import BUILTINS, MODULES
from aflow_tune.writer.check import check_graph_of, check_written
from aflow_tune.writer.form import as_text
from aflow_tune.writer.types import CheckLimits, RefusalKind, Verdict, Written, WrittenForm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from generated_graphs import FAULTS, Generator

K = RefusalKind
WIDE = CheckLimits(model_calls=200)


def check(code: str, prompts: dict[str, str] | None = None, **settings: Any) -> Verdict:
    settings = {"operators": OPERATORS, "limits": WIDE, **settings}
    return check_graph_of(Written(code, prompts or {}), **settings)


def refused(verdict: Verdict) -> list[tuple[RefusalKind, int]]:
    return [(refusal.kind, refusal.line) for refusal in verdict.refusals]


@pytest.mark.parametrize("name", GRAPHS)
def test_ordinary_graphs_pass(name: str) -> None:
    verdict = check(GRAPHS[name], limits=CheckLimits())
    assert verdict.refusals == ()


@pytest.mark.parametrize("name", GOOD)
def test_good_graphs_pass(name: str) -> None:
    verdict = check(GOOD[name])
    assert verdict.refusals == ()
    assert verdict.ok
    assert verdict.bound is None or verdict.bound.model_calls >= 1


def test_graphs_of_aflow_and_metagpt_pass_with_their_prompts() -> None:
    math = {"DRAFT_PROMPT": "Solve it.", "AGAIN_PROMPT": "Again."}
    assert check(MATH, math, problem_type="math").refusals == ()
    code = check(CODE_GRAPH, {"CODE_PROMPT": "Write it."}, problem_type="code")
    assert code.refusals == ()
    assert check(QA, problem_type="qa").ok


@pytest.mark.parametrize("name", BAD)
def test_bad_graphs_are_refused_for_their_reason(name: str) -> None:
    code, expected = BAD[name]
    verdict = check(code)
    assert refused(verdict) == expected, [str(refusal) for refusal in verdict.refusals]
    assert not verdict.ok
    assert all(len(refusal.message) > 15 for refusal in verdict.refusals)
    assert all(bool(refusal.line) == bool(refusal.column) for refusal in verdict.refusals)


def test_all_of_it_is_said_at_once_in_reading_order() -> None:
    code = workflow(
        "r = self.solve(problem)\nq = await self.pick(wrong=[r])\n"
        'print(r["response"])\nreturn q["respons"], nothing',
        init="self.x = operator.Nope(self.llm)",
        head="import os\n",
    )
    assert refused(check(code)) == [
        (K.NOT_ALLOWED, 1),
        (K.UNKNOWN_OPERATOR, 8),
        (K.ARGUMENTS, 11),
        (K.ARGUMENTS, 12),
        (K.UNKNOWN_NAME, 14),
        (K.UNKNOWN_NAME, 14),
    ]


def test_what_follows_from_a_refusal_is_not_refused_again() -> None:
    code = workflow(
        'r = await self.x(problem)\nfor part in r["parts"]:\n'
        "    y = await self.x(part)\nreturn y.z",
        init="self.x = operator.Nope(self.llm)",
    )
    assert refused(check(code)) == [(K.UNKNOWN_OPERATOR, 7)]


def test_only_the_operators_of_the_run() -> None:
    few = {"Custom": OPERATORS["Custom"]}
    verdict = check(PLAIN, operators=few)
    assert refused(verdict) == [(K.UNKNOWN_OPERATOR, 5), (K.UNKNOWN_OPERATOR, 6)]
    assert "a graph may use Custom" in verdict.refusals[0].message
    starred = "from workspace.GSM8K.workflows.template.operator import *\n" + PLAIN.replace(
        "operator.", ""
    )
    assert check(starred).ok
    assert {kind for kind, _ in refused(check(starred, operators=few))} == {K.UNKNOWN_OPERATOR}


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
    assert check(code, operators={**OPERATORS, "Summarise": Summarise}).ok
    assert refused(check(code)) == [(K.UNKNOWN_OPERATOR, 7)]


def test_the_problem_type() -> None:
    code = PLAIN.replace("(self, problem)", "(self, problem, entry_point)")
    assert check(code, problem_type="code").ok
    assert refused(check(code, problem_type="math")) == [(K.SHAPE, 8)]
    optional = PLAIN.replace("(self, problem)", "(self, problem, entry_point=None)")
    assert check(optional, problem_type="math").ok
    assert check(PLAIN, problem_type="code").ok


def test_prompts_are_held_against_the_graph() -> None:
    code = workflow(
        'r = await self.solve(problem, self.prompts["solve"] + prompt_custom.extra)\n'
        'q = await self.solve(problem, self.prompts.get("more", ""))\n' + DONE
    )
    assert check(code, {"solve": "a", "extra": "b", "pick": "c", "more": "d"}).ok
    verdict = check(code, {"solvee": "a", "review": ""})
    assert refused(verdict) == [(K.PROMPT, 9), (K.PROMPT, 9), (K.PROMPT, 0)]
    assert 'self.prompts["solve"] has no text' in verdict.refusals[0].message
    assert "'solvee' belongs to no operator of the graph (did you mean solve?)" in (
        verdict.refusals[2].message
    )
    assert not verdict.ok
    assert verdict.code_ok
    long = check(PLAIN, {"solve": "x" * 20_001})
    assert refused(long) == [(K.PROMPT, 0)]


def test_a_text_is_read_and_checked() -> None:
    verdict = check_written(as_text({"solve": "a"}, PLAIN), operators=OPERATORS)
    assert verdict.ok
    assert verdict.written is not None
    assert verdict.written.form is WrittenForm.HYBRID
    assert verdict.graph is not None
    assert dict(verdict.graph.instructions) == {"solve": "a"}
    assert refused(check_written("hello", operators=OPERATORS)) == [(K.UNREADABLE, 0)]
    wrong = '{"prompts": {"solve": 3}, "graph_code": ' + as_text({}, PLAIN).partition(": ")[2]
    wrong = as_text({"solve": "a"}, PLAIN).replace('"a"', "3")
    verdict = check_written(wrong, operators=OPERATORS)
    assert refused(verdict) == [(K.PROMPT, 0)]
    assert verdict.code_ok


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{kind}-{new}" for kind, _, new in FAULTS])
def test_generated_graphs_and_a_mistake_in_each(fault: tuple[str, str, str]) -> None:
    kind, old, new = fault
    generator = Generator(7)
    for _ in range(15):
        prompts, code = generator.graph()
        assert check(code, prompts, limits=CheckLimits(10_000)).refusals == ()
        if old in code:
            verdict = check(code.replace(old, new), prompts, limits=CheckLimits(10_000))
            assert kind in {refusal.kind.value for refusal in verdict.refusals}


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


def test_the_tables_of_names_exist() -> None:
    import builtins

    assert all(hasattr(builtins, name) for name in BUILTINS)
    for module, names in MODULES.items():
        loaded = __import__(module, fromlist=["_"])
        assert all(hasattr(loaded, name) for name in names or ())


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
