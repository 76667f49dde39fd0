"""Programs that return or take what is no plain value: the field's verdict, and never a strict 0.

Every case is a right program, what a wrong one does otherwise, and its tests. The published rule
runs both in one process, as the field does, so right is 1 and wrong is 0. The strict rule scores
1 where it can tell from another process, else nothing; what is wrong is 0 by it too.
"""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from aflow_tune.sandbox import run_program_sync
from aflow_tune.sandbox.types import SandboxUnavailable
from aflow_tune.scoring import score_both
from aflow_tune.scoring.code import check_code, check_together


@pytest.fixture(autouse=True, scope="module")
def _sandbox() -> None:
    try:
        run_program_sync("pass")
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox can be built here: {error}")


_CASES = yaml.safe_load(Path(__file__).with_name("unusual_programs.yaml").read_text("utf-8"))
PROGRAMS, LIES = _CASES["programs"], _CASES["lies"]
PLAIN = "assert f(2) == 4\nassert f(3) == 9"


def _scores(answer: str, tests: str) -> dict[str, float | None]:
    check = "def check():\n" + textwrap.indent(tests, "    ") + "\n"
    row: dict[str, Any] = {"prompt": "Do.", "entry_point": "f", "code": "", "test": check}
    return {
        rule: score.value for rule, score in asyncio.run(score_both("mbpp", row, answer)).items()
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs(name: str) -> None:
    case = PROGRAMS[name]
    expected = {"published": 1, "strict": case.get("strict", 1)}
    assert _scores(case["right"], case["tests"]) == expected


@pytest.mark.parametrize("name", PROGRAMS)
def test_wrong_twins(name: str) -> None:
    case = PROGRAMS[name]
    wrong = case["right"].replace(*case["wrong"])
    assert wrong != case["right"]
    assert _scores(wrong, case["tests"]) == {"published": 0, "strict": 0}


def test_depth_of_recursion_is_the_fields() -> None:
    answer = "def f(n): return n and 1 + f(n - 1)\n"
    assert _scores(answer, "assert f(960) == 960")["published"] == 1
    assert _scores(answer, "assert f(1000) == 1000") == {"published": 0, "strict": 0}


def test_names_that_both_use() -> None:
    # What the field lets clash fails there; it is no fault of the function.
    answer = "def check(x): return x > 1\ndef f(x): return check(x)\n"
    assert _scores(answer, "assert f(2)") == {"published": 0, "strict": 1}
    answer = "def len(x): return 0\ndef f(x): return [x, len(x)]\n"
    assert _scores(answer, "assert len(f(1)) == 2") == {"published": 0, "strict": 1}


def test_a_helper_that_the_field_does_not_give() -> None:
    row = {
        "prompt": "def twice(x):\n    return 2 * x\n\ndef f(x):\n    pass\n",
        "entry_point": "f",
        "canonical_solution": "",
        "test": "def check(candidate):\n    assert candidate(2) == 5\n",
    }
    scores = asyncio.run(score_both("humaneval", row, "def f(x): return twice(x) + 1\n"))
    assert (scores["published"].value, scores["strict"].value) == (0, 1)


@pytest.mark.parametrize("name", LIES)
def test_lies_gain_nothing_by_the_strict_rule(name: str) -> None:
    lie = LIES[name]
    expected = {rule: lie[rule] for rule in ("published", "strict")}
    assert _scores(lie["program"], lie.get("tests", PLAIN)) == expected


@pytest.mark.parametrize("rule", ["together", "apart"])
def test_helpers_that_fail_say_nothing(rule: str) -> None:
    check = check_together if rule == "together" else check_code
    done = check("def f(x): return x", "assert f(1) == 1", "f", helpers="import no_such_module")
    assert asyncio.run(done).passed is None


def test_what_needs_more_apart_is_unscored() -> None:
    # A text within the bounds of values that is longer than a message once it is JSON.
    done = check_code("def f(n): return '\u00e9' * n", "assert len(f(3_000_000)) == 3_000_000", "f")
    verdict = asyncio.run(done)
    assert verdict.passed is None
    assert "too_much_output" in verdict.reason
