"""Rewards on hand-written answers, from a thread, and on the gold answers of the benchmarks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from aflow_tune.contract.plugins import resolve
from aflow_tune.scoring.math_equality import Undecided, equal_answers

ROOT = Path(__file__).parents[1]
gsm8k_reward = resolve(f"{ROOT}/rewards/gsm8k.py:gsm8k_reward")
last_number = resolve(f"{ROOT}/rewards/gsm8k.py:last_number")
math_boxed_reward = resolve(f"{ROOT}/rewards/math_boxed.py:math_boxed_reward")
boxed = resolve(f"{ROOT}/rewards/math_boxed.py:boxed")
math_judge = resolve(f"{ROOT}/rewards/math_boxed.py:math_judge")
gsm8k_judge = resolve(f"{ROOT}/rewards/gsm8k.py:gsm8k_judge")


def _rows(name: str) -> list[dict[str, Any]]:
    """Rows of a benchmark file, which are never part of the project."""
    folder = os.environ.get("AFLOW_TUNE_BENCHMARKS", ROOT.parent / "shared/data/benchmarks")
    path = Path(folder) / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there; point AFLOW_TUNE_BENCHMARKS to the benchmark files")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 1,234.5.", 1234.5),
        ("3 then -7", -7.0),
        ("none", None),
        ("#### 12", 12.0),
        ("", None),
        ("1,234,567", 1234567.0),
        ("the pairs 3,4", 4.0),  # no separator: two numbers
        ("pages 10-12", 12.0),  # a range, no sign
        ("x-5", 5.0),
        ("it costs $-5", -5.0),
        ("about .5", 0.5),
        ("12345,678", 678.0),
    ],
)
def test_the_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_gsm8k_by_hand() -> None:
    assert gsm8k_reward("It is 42.", "6 x 7 = 42\n#### 42") == 1.0
    assert gsm8k_reward("It is 41.", "#### 42") == 0.0
    assert gsm8k_reward("no idea", "#### 42") == 0.0
    assert gsm8k_reward("1,000", "#### 1000") == 1.0
    assert gsm8k_reward(r"\boxed{42}, found in 2 steps", "#### 42") == 1.0
    assert gsm8k_reward(r"\boxed{41}, or 42", "#### 42") == 0.0
    assert gsm8k_reward(r"\boxed{\text{1{,}000 apples}}", "#### 1,000") == 1.0


def test_a_reference_that_cannot_score_is_no_wrong_answer() -> None:
    with pytest.raises(ValueError, match="without a number: 'nothing'"):
        gsm8k_reward("42", "nothing")


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{2x + 2}", "2(x+1)", 1.0),
        (r"\boxed{7} or \boxed{8}", "8", 0.0),  # keeps both open
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


def test_from_many_threads_at_once() -> None:
    questions = [(f"\\frac{{{n}}}{{4}}", str(n / 4)) for n in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        verdicts = pool.map(lambda q: math_boxed_reward(f"\\boxed{{{q[0]}}}", q[1]), questions)
    assert list(verdicts) == [1.0] * 8


def test_an_answer_that_computes_for_ever_is_undecided_and_the_next_one_is_scored() -> None:
    with pytest.raises(Undecided, match=r"no verdict within 3 s of processor time"):
        equal_answers("9^{9^{9^{9}}}", "8")
    assert math_boxed_reward(r"\boxed{\frac{6}{4}}", "1.5") == 1.0


def test_the_comparing_process_ends_with_its_parent() -> None:
    code = (
        "from aflow_tune.scoring.math_equality import _CHILD, equal_answers\n"
        "assert equal_answers('0.5', '\\\\frac12')\n"
        "print(_CHILD._process.pid, flush=True)\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    child = int(done.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(timeout=120)


@pytest.mark.parametrize("wrap", [str, lambda text: SimpleNamespace(get_text_content=lambda: text)])
def test_judges_take_texts_and_messages(wrap: Any) -> None:
    verdict = asyncio.run(gsm8k_judge({"answer": "#### 4"}, wrap("It is 4.")))
    assert (verdict.reward, verdict.metrics) == (1.0, {"correct": 1.0})
    verdict = asyncio.run(math_judge({"solution": r"so \boxed{4}"}, wrap(r"\boxed{5}")))
    assert (verdict.reward, verdict.metrics) == (0.0, {"correct": 0.0})


def test_every_gold_answer_of_gsm8k_scores_one() -> None:
    for row in _rows("gsm8k_validate"):
        assert gsm8k_reward(row["answer"], row["answer"]) == 1.0


def test_every_gold_answer_of_math_scores_one() -> None:
    for row in _rows("math_validate"):
        assert math_boxed_reward(row["solution"], row["solution"]) == 1.0, row["problem"]
