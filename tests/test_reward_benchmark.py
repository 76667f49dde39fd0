"""The benchmark judge: strict is the reward, both rules are metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aflow_tune.context import RolloutContext
from aflow_tune.contract.plugins import resolve
from aflow_tune.contract.signature import check_judge
from aflow_tune.errors import BadInput
from aflow_tune.scoring.rewards import Unscored
from aflow_tune.sections import RewardsSection

ROOT = Path(__file__).parents[1]
benchmark_judge = resolve(f"{ROOT}/rewards/benchmark.py:benchmark_judge")
ROW = {"question": "?", "answer": "#### 42"}


def test_the_row_names_the_benchmark() -> None:
    verdict = asyncio.run(benchmark_judge({**ROW, "benchmark": "GSM8K"}, "either 41 or 42"))
    assert (verdict.reward, verdict.metrics) == (0.0, {"strict": 0.0, "published": 1.0})


def test_or_the_configuration_does() -> None:
    async def run() -> float:
        with RolloutContext(rewards=RewardsSection(benchmark="gsm8k")).activate():
            return (await benchmark_judge(ROW, "It is 42.")).reward

    assert asyncio.run(run()) == 1.0
    with pytest.raises(BadInput, match="a row without a benchmark"):
        asyncio.run(benchmark_judge(ROW, "42"))


def test_an_unscored_answer_raises() -> None:
    with pytest.raises(Unscored):
        asyncio.run(benchmark_judge({**ROW, "answer": "?", "benchmark": "gsm8k"}, "42"))


@pytest.mark.parametrize("name", ["benchmark", "five_part", "agent"])
def test_the_judges_keep_the_contract(name: str) -> None:
    assert check_judge(resolve(f"{ROOT}/rewards/{name}.py:{name}_judge")).name == f"{name}_judge"
