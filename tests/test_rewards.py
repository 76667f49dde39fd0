"""Rewards on hand-written answers, from a thread, and on the gold answers of the benchmarks."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from aflow_tune.plugins import resolve

ROOT = Path(__file__).parents[1]
gsm8k_reward = resolve(f"{ROOT}/rewards/gsm8k.py:gsm8k_reward")
last_number = resolve(f"{ROOT}/rewards/gsm8k.py:last_number")
math_boxed_reward = resolve(f"{ROOT}/rewards/math_boxed.py:math_boxed_reward")
boxed = resolve(f"{ROOT}/rewards/math_boxed.py:boxed")


def _rows(name: str) -> list[dict[str, Any]]:
    """Rows of a benchmark file, which are never part of the project."""
    folder = os.environ.get("AFLOW_TUNE_BENCHMARKS", ROOT.parent / "shared/data/benchmarks")
    path = Path(folder) / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there; point AFLOW_TUNE_BENCHMARKS to the benchmark files")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "number"),
    [("so 1,234.5.", 1234.5), ("3 then -7", -7.0), ("none", None), ("#### 12", 12.0), ("", None)],
)
def test_the_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_gsm8k_by_hand() -> None:
    assert gsm8k_reward("It is 42.", "6 x 7 = 42\n#### 42") == 1.0
    assert gsm8k_reward("It is 41.", "#### 42") == 0.0
    assert gsm8k_reward("no idea", "#### 42") == 0.0
    assert gsm8k_reward("1,000", "#### 1000") == 1.0


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{2x + 2}", "2(x+1)", 1.0),
        (r"\boxed{7} or \boxed{8}", "8", 1.0),
        (r"\boxed{7}", r"we get $\boxed{8}$", 0.0),
        ("8", "8", 0.0),
        (r"\boxed{8", "8", 0.0),
        (r"\boxed{" + "9" * 1000 + "}", "8", 0.0),
    ],
)
def test_boxed_answers(response: str, truth: str, reward: float) -> None:
    assert math_boxed_reward(response, truth) == reward


def test_nested_braces() -> None:
    assert boxed(r"\boxed{\sqrt{\frac{1}{2}}} done") == r"\sqrt{\frac{1}{2}}"


def test_math_verify_works_outside_of_the_main_thread() -> None:
    found: list[float] = []
    thread = threading.Thread(
        target=lambda: found.append(math_boxed_reward(r"\boxed{\frac{2}{4}}", "0.5"))
    )
    thread.start()
    thread.join()
    assert found == [1.0]


def test_every_gold_answer_of_gsm8k_scores_one() -> None:
    for row in _rows("gsm8k_validate"):
        assert gsm8k_reward(row["answer"], row["answer"]) == 1.0


def test_every_gold_answer_of_math_scores_one() -> None:
    for row in _rows("math_validate"):
        assert math_boxed_reward(row["solution"], row["solution"]) == 1.0, row["problem"]
