"""Every benchmark on its own rows: gold answers score 1, altered ones do not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from benchmark_rows import rows_of

from aflow_tune.errors import BadInput
from aflow_tune.sandbox import run_program_sync
from aflow_tune.sandbox.types import SandboxUnavailable
from aflow_tune.scoring import BENCHMARKS, find, score_answer, score_both
from aflow_tune.scoring.benchmarks import Scores, score_all
from aflow_tune.scoring.types import RULES, Score

Row = dict[str, Any]


def _need_sandbox() -> None:
    try:
        run_program_sync("pass")
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox can be built here: {error}")


def _gold(name: str, rows: Sequence[Row]) -> Scores:
    return asyncio.run(score_all(BENCHMARKS[name], rows))


def _altered(name: str, rows: Sequence[Row], alter: Callable[[str], str]) -> Scores:
    benchmark = BENCHMARKS[name]
    answers = [alter(benchmark.gold(row)) for row in rows]
    return asyncio.run(score_all(benchmark, rows, answers))


FILES = ("gsm8k_validate", "gsm8k_train", "math_validate", "hotpotqa_validate", "drop_validate")


@pytest.mark.parametrize("file", FILES)
def test_every_gold_answer_scores_one(file: str) -> None:
    scores = _gold(file.partition("_")[0], rows_of(file))
    for rule in RULES:
        assert [n for n, value in enumerate(scores.values(rule)) if value != 1] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_every_gold_program_scores_one_and_a_broken_one_zero(name: str) -> None:
    rows = rows_of(f"{name}_validate")
    _need_sandbox()
    gold = _gold(name, rows)
    # A function that does all the work and returns something else.
    answers = [
        f"{BENCHMARKS[name].gold(row)}\n_right = {row['entry_point']}\n"
        f"def {row['entry_point']}(*args, **kwargs):\n    return [_right(*args, **kwargs)]\n"
        for row in rows
    ]
    broken = asyncio.run(score_all(BENCHMARKS[name], rows, answers))
    for rule in RULES:
        assert set(gold.values(rule)) == {1.0}
        assert set(broken.values(rule)) == {0.0}


def _next_number(answer: str) -> str:
    head, mark, tail = answer.rpartition("####")
    return head + mark + re.sub(r"\d(?=\D*$)", lambda m: str((int(m[0]) + 1) % 10), tail)


def test_altered_numbers_score_zero() -> None:
    scores = _altered("gsm8k", rows_of("gsm8k_validate"), _next_number)
    for rule in RULES:
        assert set(scores.values(rule)) == {0.0}


@pytest.mark.parametrize("name", ["hotpotqa", "drop"])
def test_altered_answers_score_below_one(name: str) -> None:
    rows = rows_of(f"{name}_validate")
    for alter in (lambda gold: gold + " zebra", lambda gold: "zebra", lambda gold: ""):
        scores = _altered(name, rows, alter)
        for rule in RULES:
            assert max(scores.values(rule)) < 1


@pytest.mark.slow
def test_what_cannot_be_scored_is_unscored_and_never_zero() -> None:
    def score(name: str, row: Row, answer: str, rule: str) -> Score:
        return asyncio.run(score_answer(name, row, answer, rule))

    empty = {"question": "?", "answer": "no number"}
    endless = {"problem": "?", "solution": r"\boxed{8}"}
    code = {"prompt": "Do.", "entry_point": "f", "code": "", "test": "def check():\n    pass"}
    for rule in RULES:
        assert score("gsm8k", empty, "42", rule).value is None
        assert score("drop", {"context": "?", "ref_text": "|"}, "42", rule).value is None
        undecided = score("math", endless, r"\boxed{9^{9^{9^{9}}}}", rule)
        assert undecided.value is None
        assert undecided.reason.startswith("Undecided")
        assert score("mbpp", code, "def f(): pass", rule).value is None
    with pytest.raises(BadInput, match="no answer, only 'question'"):
        score("gsm8k", {"question": "?"}, "42", "strict")


def test_programs_by_both_rules() -> None:
    _need_sandbox()
    row = {
        "prompt": "Square a number.\n\ndef square(x):",
        "entry_point": "square",
        "code": "def square(x): return x * x",
        "test": "def check():\n    assert square(3) == 9\n",
    }

    def both(answer: str) -> tuple[float | None, float | None]:
        scores = asyncio.run(score_both("mbpp", row, answer))
        return scores["strict"].value, scores["published"].value

    assert both(row["code"]) == (1, 1)
    assert both("So:\n```python\ndef square(x):\n    return x * x\n```\n") == (1, 1)
    # The published rule looks for runs of two lines or more.
    assert both(f"So:\n```python\n{row['code']}\n```\n") == (1, 0)
    # The published rule drops statements, even those that the function needs.
    assert both("if True:\n    k = 2\ndef square(x): return x ** k") == (1, 0)
    # Two programs in one answer: the published rule takes the longer one.
    two = (
        "```\ndef square(x):\n    return x * x\n```\n"
        "or\n```\ndef square(x):\n    y = x\n    return y * y\n```"
    )
    assert both(two) == (0, 1)
    assert both("I would multiply it by itself.") == (0, 0)


def test_reasoning_gym() -> None:
    gym = pytest.importorskip("aflow_tune.scoring.gym")
    pytest.importorskip("reasoning_gym")
    benchmark = find("reasoning_gym:leg_counting")
    rows = gym.make_rows("leg_counting", 3, seed=1)
    assert rows == gym.make_rows("leg_counting", 3, seed=1)
    assert set(asyncio.run(score_all(benchmark, rows)).values("strict")) == {1.0}
    scores = asyncio.run(score_both(benchmark, rows[0], f"{rows[0]['answer']} or 12"))
    assert scores["strict"].value == 0
    assert 0 < scores["published"].value < 1


def test_reasoning_gyms_verifiers_run_no_answer_as_code(tmp_path) -> None:
    pytest.importorskip("reasoning_gym")
    from aflow_tune.scoring.gym import make_rows

    mark = tmp_path / "ran"
    code = f"__import__('os').system('touch {mark}')"
    for task in ("countdown", "spiral_matrix", "n_queens", "puzzle24", "simple_integration"):
        row = make_rows(task, 1, seed=1)[0]
        asyncio.run(score_both(f"reasoning_gym:{task}", row, code))
    assert not mark.exists()
