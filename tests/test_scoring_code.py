"""Grading programs in the sandbox: right ones pass, and no attack does."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from aflow_tune.sandbox import run_program_sync
from aflow_tune.sandbox.types import Limits, SandboxUnavailable
from aflow_tune.scoring import code, score_both
from aflow_tune.scoring.code import CodeVerdict, check_code, check_together

TESTS = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n"


@pytest.fixture(autouse=True, scope="module")
def _sandbox() -> None:
    try:
        run_program_sync("pass")
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox can be built here: {error}")


def _check(
    solution: str,
    tests: str | list[str] = TESTS,
    entry_point: str = "f",
    seconds: float = 60,
    **settings: Any,
) -> CodeVerdict:
    limits = Limits(seconds=seconds)
    return asyncio.run(check_code(solution, tests, entry_point, limits=limits, **settings))


_FOLDER = Path(__file__).parent
HOSTILE = yaml.safe_load((_FOLDER / "hostile_programs.yaml").read_text("utf-8"))
ATTACKS, FORGED, RAW = HOSTILE["attacks"], HOSTILE["forged"], HOSTILE["forging"]
UNUSUAL = yaml.safe_load((_FOLDER / "unusual_programs.yaml").read_text("utf-8"))
PROGRAMS, LIES = UNUSUAL["programs"], UNUSUAL["lies"]
PLAIN = "assert f(2) == 4\nassert f(3) == 9"
ENDLESS = ("closes the channel", "endless")
"""Those that only their time ends."""
SWALLOWS = (
    "def check(candidate):\n    assert True\n    try:\n        assert candidate(1) == 2\n"
    "    except Exception:\n        pass"
)


async def _passes(*_: Any, **__: Any) -> CodeVerdict:
    """In the place of `check_together`: as if a program had won over the tests in its process."""
    return CodeVerdict(True, "")


@pytest.mark.parametrize("name", FORGED)
def test_what_a_program_forges_is_wrong_and_not_unscored(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = TESTS + "    assert candidate(limit) == 4\n"
    assert _check(RAW + FORGED[name], tests).passed is False
    monkeypatch.setattr(code, "check_together", _passes)
    assert _check(RAW + FORGED[name], tests, seconds=15).passed is not True


@pytest.mark.parametrize(
    "reply",
    [
        '"result": [{"no": 1}, [], []], "raised": []',
        '"result": [1, [], []], "raised": ["ValueError"]',
        '"result": [[3], [["e", "SystemExit"]], []], "raised": ["ValueError"]',
        '"result": [[3], [["t", [3]]], []], "raised": []',
        '"result": [1, [], [[7, ["l"]]]], "raised": []',
        '"result": 5',
    ],
)
def test_a_forged_reply_is_no_exception_that_tests_can_swallow(
    reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "check_together", _passes)
    forges = f"def f(x):\n    raw('{{\"turn\": 2, {reply}}}')\n    time.sleep(9)"
    verdict = _check(RAW + forges, SWALLOWS)
    assert (verdict.passed, verdict.reason[:20]) == (False, "a call gave no value")


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_passes(attack: str) -> None:
    verdict = _check(ATTACKS[attack], seconds=10 if attack in ENDLESS else 60)
    assert verdict.passed is False
    assert verdict.reason


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name not in ENDLESS])
def test_no_attack_passes_apart_from_the_tests(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "check_together", _passes)
    assert _check(ATTACKS[attack]).passed is not True


def test_expected_exceptions_pass_and_swallowed_ones_do_not() -> None:
    expects = (
        "def check(candidate):\n    try:\n        candidate(-1)\n        assert False, 'no error'\n"
        "    except ValueError as error:\n        assert 'neg' in str(error)"
    )
    assert _check("def f(x): raise ValueError('neg')", expects).passed is True
    assert _check("def f(x): raise KeyError('neg')", expects).passed is False
    assert _check("def f(x): return 1", expects).passed is False
    verdict = _check("def f(x): raise KeyError", SWALLOWS)
    assert verdict == CodeVerdict(False, "a call raised KeyError, which no test names")


@pytest.mark.parametrize(
    "tests",
    [
        *("", "assert True", "this is no python assert", "assert f(object()) == 1"),
        *("def check(candidate):\n    pass", "def check(candidate):\n    candidate(1)"),
    ],
)
def test_tests_that_say_nothing_leave_it_unscored(tests: str) -> None:
    assert _check("def f(x): return 1", tests).passed is None


# Programs that return or take what is no plain value: a right program, what a wrong one does
# otherwise, and its tests. The published rule gives the field's verdict; the strict one scores
# 1 where it can tell from another process, else nothing; what is wrong is 0 by it too.


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
