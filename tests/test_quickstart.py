"""The quickstart's data and workflow: reproducible, without a leak, each call needed."""

from __future__ import annotations

import asyncio
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aflow_tune.context import RolloutContext
from aflow_tune.contract.plugins import resolve

ROOT = Path(__file__).parents[1]
GENERATOR = runpy.run_path(str(ROOT / "scripts" / "three_terms_data.py"))
normalised, three_term_sums = GENERATOR["normalised"], GENERATOR["three_term_sums"]
DATA = ROOT / "workflows" / "data" / "three_terms"


def _shipped(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def test_the_shipped_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    for name, rows in zip(("train", "held_out"), three_term_sums(), strict=True):
        GENERATOR["write_rows"](tmp_path / name, rows)
        assert (tmp_path / name).read_bytes() == (DATA / f"{name}.jsonl").read_bytes()


def test_every_sum_is_there_once_and_no_held_out_one_is_in_training_in_any_order() -> None:
    train, held_out = _shipped("train"), _shipped("held_out")
    rows = train + held_out
    assert all(sum(row["terms"]) == row["answer"] for row in rows)
    assert len({row["question"] for row in rows}) == len(rows) == 9**3
    questions = [{normalised(row["question"]) for row in of} for of in (train, held_out)]
    assert not questions[0] & questions[1]
    assert len(held_out) >= 100
    assert normalised("3 +4+ 1") == normalised("1 + 3 + 4") != normalised("3 + 4 + 2")


class Calculator:
    """A model that adds perfectly, or answers each call with the next of some fixed replies."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.asked: list[str] = []

    async def __call__(self, messages: list[dict[str, str]]) -> SimpleNamespace:
        question = messages[-1]["content"]
        self.asked.append(question)
        text = self.replies.pop(0) if self.replies else f"<answer>{eval(question)}</answer>"
        return SimpleNamespace(content=[{"type": "text", "text": text}])


def _run(model: Calculator, task: dict[str, Any]) -> tuple[float, dict[str, float]]:
    function = resolve(f"{ROOT / 'workflows' / 'three_terms.py'}:add_three_terms")
    context = RolloutContext()

    async def run() -> float:
        with context.activate():
            return await function(task=task, model=model)

    return asyncio.run(run()), context.metrics


def test_the_gold_answers_score_one_on_every_row() -> None:
    for row in _shipped("train") + _shipped("held_out"):
        reward, metrics = _run(Calculator(), row)
        assert reward == pytest.approx(1.0)
        assert metrics["correct"] == 1.0


def test_the_second_call_works_on_the_first_ones_answer() -> None:
    model = Calculator("<answer>9</answer>")
    reward, metrics = _run(model, {"terms": [3, 4, 5], "answer": 12})
    assert model.asked == ["3 + 4", "9 + 5"]
    assert metrics == {"correct": 0.0, "first_sum_correct": 0.0}
    assert reward == pytest.approx(0.1)
