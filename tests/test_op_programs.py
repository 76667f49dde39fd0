"""Programmer and Test: model-written programs, run in the real sandbox."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from aflow_tune.errors import BadInput
from aflow_tune.models import ScriptedModel
from aflow_tune.operators import OperatorResult, Programmer, Test, TestCases
from aflow_tune.sandbox import detect
from aflow_tune.sandbox.types import Limits
from aflow_tune.trace import ProgramRun, Trace

pytestmark = pytest.mark.skipif(detect().level is None, reason="no sandbox can be built here")


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def program(*codes: str, **settings: Any) -> tuple[OperatorResult, ScriptedModel, Trace]:
    model, trace = ScriptedModel([fenced(code) for code in codes]), Trace()

    async def work() -> OperatorResult:
        with trace.activate():
            return await Programmer(model, **settings)("a problem")

    return asyncio.run(work()), model, trace


ANSWERS = [
    ("def solve():\n    return 6 * 7", "42"), ("def solve():\n    return [1, 'a']", "[1, 'a']"),
    ("def solve():\n    print('x =', 3)", "x = 3"),
    ("import math\n\n\nsolve = lambda: math.comb(5, 2)", "10"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "output"), ANSWERS)
def test_the_answer_is_what_solve_returns_or_else_prints(code: str, output: str) -> None:
    result, _, trace = program(code)
    assert result == {"code": code, "output": output}
    assert result.outcome == "answered"
    assert [run.outcome for run in trace.of(ProgramRun)] == ["finished"]
    broken = "def solve():\n    return [][7]"
    result, _, trace = program(*[broken] * 9, programs=2)
    assert result == {"code": broken, "output": "Error: IndexError: list index out of range"}
    assert (result.outcome, result.attempts) == ("program_failed", 2)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("def solve():\n    return 1 / 0", "ZeroDivisionError: division by zero"),
        ("def solve(x):\n    return x", "missing 1 required positional argument: 'x'"),
        ("import numpy_of_nowhere\ndef solve(): return 1", "ModuleNotFoundError"),
        ("def solve():\n    pass", "returned None and printed nothing"),
        ("import sys\ndef solve():\n    sys.exit(0)", "ended the program"),
        ("solve = 3", "not callable"),
        ("def solve():\n    while True: pass", "timed_out"),
        ("def solve():\n    return 'x' * 10**10", "out_of_memory"),
        ("def solve():\n    return 'x' * 10**7", "too_much_output"),
        ("def solve():\n    return open('/etc/shadow').read()", "Error"),
    ],
)
def test_failures_are_fed_back_and_mended(broken: str, told: str) -> None:
    good = "def solve():\n    return 'mended'"
    limits = Limits(seconds=60, cpu_seconds=2, memory_mb=256)
    result, model, trace = program(broken, good, limits=limits)
    assert result == {"code": good, "output": "mended"}
    assert result.outcome == "repaired"
    asked = str(model.asked[1].messages[0]["content"])
    assert broken in asked
    error = asked.partition("this happened:")[2]
    assert told in error
    assert "_solve_program" not in error  # of our own frames the model learns nothing
    assert len(error) < 3_000
    assert [run.outcome == "finished" for run in trace.of(ProgramRun)][-1]


@pytest.mark.parametrize("kind", [Programmer, Test])
def test_whoever_builds_an_operator_cannot_choose_the_wall_nor_unbounded_work(kind: Any) -> None:
    """A graph that a model wrote builds operators, too."""
    model = ScriptedModel([])
    for name, value in (("policy", "unsafe_subprocess"), ("sandbox", "unsafe_subprocess")):
        with pytest.raises(TypeError, match=name):
            kind(model, **{name: value})
    for name, value in (("limits", {"seconds": 1e9}), ("retries", 10**9), ("retries", 2.0)):
        with pytest.raises(BadInput, match=name):
            kind(model, **{name: value})
    with pytest.raises(BadInput, match="programs"):
        Programmer(model, programs=10**9)


CASES = {"add": ["assert candidate(1, 2) == 3", "assert candidate(-1, 1) == 0"]}
RIGHT = "def add(a, b):\n    return a + b"
WRONG = "def add(a, b):\n    return a - b"


@pytest.mark.parametrize(
    ("solution", "replies", "cases", "expected", "outcome", "calls"),
    [
        (RIGHT, [], CASES, RIGHT, "answered", 0),
        (fenced(RIGHT), [], CASES, fenced(RIGHT), "answered", 0),
        (WRONG, [WRONG + "  # again", RIGHT], CASES, RIGHT, "repaired", 2),
        (WRONG, [WRONG] * 9, CASES, WRONG, "tests_failed", 3),
        (RIGHT, [], {}, RIGHT, "no_tests", 0),
        (RIGHT, [], {"add": [" "]}, RIGHT, "no_tests", 0),
        (RIGHT, [], None, RIGHT, "no_tests", 0),
        (RIGHT, [], {"add": ["assert candidate("]}, RIGHT, "undecided", 0),
        (RIGHT, [], {"add": ["x = candidate(1, 2)"]}, RIGHT, "undecided", 0),
        (RIGHT, [], {"add": ["assert 1 == 1"]}, RIGHT, "undecided", 0),
    ],
)
def test_a_solution_passes_only_by_its_tests(
    solution: str, replies: list[str], cases: Any, expected: str, outcome: str, calls: int
) -> None:
    model = ScriptedModel([fenced(reply) for reply in replies])
    operator = Test(model, tests=cases, limits=Limits(seconds=60))
    result = asyncio.run(operator("Add.", solution, "add"))
    assert result == {"result": outcome in ("answered", "repaired"), "solution": expected}
    assert (result.outcome, result.attempts, len(model.asked)) == (outcome, calls, calls)
    if calls:
        asked = str(model.asked[0].messages[0]["content"])
        assert "assert candidate(1, 2) == 3" in asked
        assert "the left side is -1" in asked


def test_a_file_of_test_cases_is_read_with_its_faults(tmp_path: Path) -> None:
    path = tmp_path / "tests.jsonl"
    path.write_text(json.dumps({"entry_point": "f", "test": "assert candidate(1) == 1"}) + "\n\n")
    assert TestCases.load(path).of("f") == (("assert candidate(1) == 1",), "")
    path.write_text('{"entry_point": "f", "test": ["assert 1"]}\nno json\n{"a": 1}\n')
    with pytest.raises(BadInput) as caught:
        TestCases.load(path)
    assert [fault.where for fault in caught.value.faults] == [f"{path}:2", f"{path}:3"]
    with pytest.raises(BadInput, match="cannot be read"):
        TestCases.load(tmp_path / "nothing.jsonl")


def test_problems_with_one_entry_point_are_told_apart_by_their_text() -> None:
    rows = [
        {"entry_point": "area", "test": ["assert candidate(5, 3) == 7.5"]},
        {"entry_point": "area", "test": ["assert candidate(3, 4, 5) == 6.0"]},
        {"entry_point": "area", "test": ["assert candidate(3, 4, 5) == 6.0"]},
        {"entry_point": "square", "test": ["assert candidate(2) == 20"]},
        {"entry_point": "square", "test": ["assert candidate(2) == 10"]},
    ]
    cases = TestCases.of_rows(rows)
    assert cases.of("area", ">>> area(5, 3)") == (("assert candidate(5, 3) == 7.5",), "")
    assert cases.of("area", "area(3,4, 5) is 6") == (("assert candidate(3, 4, 5) == 6.0",), "")
    tests, reason = cases.of("area", "an area")
    assert tests == ()
    assert "2 problems" in reason
    assert cases.of("square", "square(2)")[0] == ()
