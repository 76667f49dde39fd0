"""Exact values of the learning-rate schedules."""

from __future__ import annotations

import math

import pytest

from aflow_tune.engines.local.trainer import Schedule


def factors(schedule: Schedule, steps: int) -> list[float]:
    return [schedule.factor(i) for i in range(steps)]


def test_constant_with_warmup() -> None:
    assert factors(Schedule("constant", 1.0, warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(Schedule("constant"), 2) == [1, 1]


def test_linear_falls_to_its_floor() -> None:
    schedule = Schedule("linear", 2.0, warmup_steps=2, total_steps=6, floor=0.2)
    # After the warm-up p = 0, 1/4, 2/4, 3/4, 1: 0.2 + 0.8 (1 - p).
    assert factors(schedule, 7) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert schedule.factor(100) == pytest.approx(0.2)
    assert schedule.rate(3) == pytest.approx(1.6)


def test_cosine_is_half_way_in_the_middle() -> None:
    schedule = Schedule("cosine", 1.0, total_steps=4)
    quarter = 0.5 * (1 + math.cos(math.pi / 4))
    assert factors(schedule, 5) == pytest.approx([1.0, quarter, 0.5, 1 - quarter, 0.0])
    floored = Schedule("cosine", 1.0, total_steps=4, floor=0.1)
    assert floored.factor(2) == pytest.approx(0.1 + 0.9 * 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "polynomial"}, "constant, linear, cosine"),
        ({"kind": "cosine"}, "total number of steps"),
        ({"floor": 1.5}, "min_lr_ratio"),
        ({"warmup_steps": -1}, "lr_warmup_steps"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**settings)
