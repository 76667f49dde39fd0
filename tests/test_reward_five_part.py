"""The five-part reward: each part and the sum computed by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aflow_tune.context import RolloutContext
from aflow_tune.contract.plugins import resolve
from aflow_tune.errors import BadInput
from aflow_tune.scoring.five_part import (
    Usage,
    correctness_part,
    efficiency_part,
    five_part,
    format_part,
    repetition_part,
    simplicity_part,
)
from aflow_tune.scoring.rewards import Unscored, reward_faults, weighted
from aflow_tune.sections import FivePartSection, RewardsSection
from aflow_tune.trace import ModelCall, OperatorCall, Trace

ROOT = Path(__file__).parents[1]
five_part_judge = resolve(f"{ROOT}/rewards/five_part.py:five_part_judge")
NOTHING = Usage(usd=0.0, tokens=0, seconds=0.0, operators=0)


def test_parts_by_hand() -> None:
    assert [correctness_part(value) for value in (-1, 0.4, 2)] == [0.0, 0.4, 1.0]
    usage = Usage(usd=0.004, tokens=2048, seconds=15.0, operators=4)
    assert efficiency_part(usage, 0.01, 8192) == pytest.approx(0.6)
    # (1 - 15/60 + 1 - 4/10) / 2
    assert simplicity_part(usage, 60.0, 10) == pytest.approx(0.675)
    assert simplicity_part(Usage(0.0, 0, 600.0, 100), 60.0, 10) == 0
    assert format_part("the answer", r"\\boxed") == 0
    assert format_part(r"so \boxed{1}", r"\\boxed") == 1
    assert format_part(" \n") == 0
    # a b c d, b c d a, c d a b, d a b c, a b c d: one of five is a repeat
    assert repetition_part("a b c d a b c D") == pytest.approx(0.8)
    assert repetition_part("a b c") == 1


def test_cost_that_is_not_known_is_never_zero() -> None:
    assert efficiency_part(Usage(None, 2048, 0, 0), 0.01, 8192) == pytest.approx(0.75)
    assert efficiency_part(Usage(None, None, 0, 0), 0.01, 8192) is None
    unknown = five_part(1.0, "42", Usage(None, None, 0, 0))
    assert unknown.parts["efficiency"] is None
    assert "five_part/efficiency" not in unknown.metrics()
    assert unknown.reward == pytest.approx(10)  # the other weights are all that count


def test_the_sum_by_hand() -> None:
    assert five_part(1.0, "42", NOTHING).reward == pytest.approx(10)
    # 0.15 + 0.10 + 0.05 + 0.05 = 0.35; 20 * 0.35 - 10
    assert five_part(0.0, "42", NOTHING).reward == pytest.approx(-3)
    usage = Usage(usd=0.004, tokens=2048, seconds=15.0, operators=4)
    # 0.65 + 0.15 * 0.6 + 0.10 * 0.675 + 0 + 0.05 * 0.8 = 0.8475; 20 * 0.8475 - 10
    result = five_part(1.0, "a b c d a b c d", usage, form=r"\d")
    assert result.reward == pytest.approx(6.95)
    assert result.metrics() == {
        "five_part/correctness": 1.0,
        "five_part/efficiency": pytest.approx(0.6),
        "five_part/simplicity": pytest.approx(0.675),
        "five_part/format": 0.0,
        "five_part/repetition": pytest.approx(0.8),
    }


def test_weights_and_scale_are_settings() -> None:
    settings = FivePartSection(
        correctness=1.0, efficiency=0, simplicity=0, format=0, repetition=0, lowest=0, highest=1
    )
    assert five_part(0.25, "", NOTHING, settings).reward == pytest.approx(0.25)


def test_what_a_run_used_is_read_from_its_trace() -> None:
    call = {"role": "policy", "model": "m", "prompt_tokens": 10, "completion_tokens": 5}
    trace = Trace(
        [
            ModelCall(**call, cost=0.25, started=100.0, seconds=1.0),
            ModelCall(**call, cost=0.5, started=101.0, seconds=3.0),
            ModelCall(role="policy", model="m", failure="timed_out", started=102.0, seconds=1.0),
            OperatorCall(operator="Custom", instance="c", outcome="answered", started=100.0),
        ]
    )
    assert Usage.of(trace) == Usage(usd=0.75, tokens=30, seconds=4.0, operators=1)
    trace.events.append(ModelCall(**call, cost=None, started=100.0))
    assert Usage.of(trace).usd is None
    assert Usage.of(Trace()) == Usage(None, None, 0.0, 0)


def test_the_judge_logs_every_part_and_both_rules() -> None:
    row = {"question": "?", "answer": "#### 42", "benchmark": "gsm8k"}
    call = ModelCall(role="policy", model="m", cost=0.005, started=0.0, seconds=6.0)
    with Trace([call]).activate():
        verdict = asyncio.run(five_part_judge(row, "either 41 or 42"))
    # 0.15 * 0.5 + 0.10 * (0.9 + 1) / 2 + 0.05 + 0.05 = 0.27; 20 * 0.27 - 10
    assert verdict.reward == pytest.approx(-4.6)
    assert verdict.metrics["strict"] == 0.0
    assert verdict.metrics["published"] == 1.0
    assert verdict.metrics["five_part/efficiency"] == pytest.approx(0.5)


def test_the_judge_takes_the_runs_settings() -> None:
    settings = RewardsSection(benchmark="gsm8k", five_part=FivePartSection(lowest=0, highest=1))
    row = {"question": "?", "answer": "#### 42"}
    with pytest.raises(BadInput, match=r"set `rewards: \{benchmark: gsm8k\}`"):
        asyncio.run(five_part_judge(row, "42"))

    async def run() -> float:
        with RolloutContext(rewards=settings).activate():
            return (await five_part_judge(row, "42")).reward

    # No call, so the cost is not known and all that is known is perfect.
    assert asyncio.run(run()) == pytest.approx(1)


def test_an_unscored_answer_has_no_reward() -> None:
    row = {"question": "?", "answer": "no number", "benchmark": "gsm8k"}
    with pytest.raises(Unscored, match="could not be scored: CannotScore"):
        asyncio.run(five_part_judge(row, "42"))
    with pytest.raises(Unscored):
        weighted({"a": None}, {"a": 1.0})


def test_faulty_settings_are_named() -> None:
    assert list(reward_faults(RewardsSection())) == []
    settings = RewardsSection(benchmark="gsm9k")
    settings.five_part.correctness = 0.9
    settings.five_part.lowest = 10
    settings.five_part.usd_limit = 0
    settings.agent.time_out = -1
    assert {fault.where for fault in reward_faults(settings)} == {
        "rewards.five_part",
        "rewards.five_part.usd_limit",
        "rewards.agent.time_out",
        "rewards.benchmark",
    }
