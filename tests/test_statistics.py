"""Intervals and tests against published tables and hand-computed numbers."""

from __future__ import annotations

import math
import random

import pytest

from aflow_tune.report.statistics import (
    mean,
    mean_interval,
    paired_difference,
    share_interval,
    sign_test,
    standard_error,
    t_quantile,
    wilson_interval,
)

# Critical values of Student's t, as printed in the usual tables.
_TABLE = {
    0.95: {1: 6.314, 2: 2.920, 5: 2.015, 10: 1.812, 30: 1.697, 120: 1.658},
    0.975: {1: 12.706, 2: 4.303, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980, 10**8: 1.960},
    0.995: {1: 63.657, 2: 9.925, 5: 4.032, 10: 3.169, 30: 2.750, 120: 2.617},
}


@pytest.mark.parametrize(
    ("probability", "degrees", "published"),
    [(p, degrees, value) for p, row in _TABLE.items() for degrees, value in row.items()],
)
def test_t_quantiles_match_the_tables(probability: float, degrees: int, published: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(published, abs=6e-4)
    assert t_quantile(1 - probability, degrees) == pytest.approx(-published, abs=6e-4)


def test_t_quantiles_have_closed_forms_for_one_and_two_degrees() -> None:
    assert t_quantile(0.9, 1) == pytest.approx(math.tan(math.pi * 0.4), rel=1e-10)
    assert t_quantile(0.9, 2) == pytest.approx(0.8 * math.sqrt(2 / (1 - 0.64)), rel=1e-10)
    assert t_quantile(0.5, 7) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("probability", "degrees"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_impossible_quantiles_are_refused(probability: float, degrees: int) -> None:
    with pytest.raises(ValueError, match="no t quantile"):
        t_quantile(probability, degrees)


def test_a_mean_with_its_interval_by_hand() -> None:
    # mean 3, s = sqrt(2.5), t(4) = 2.7764451, half width = 2.7764451 * sqrt(2.5 / 5)
    interval = mean_interval([1, 2, 3, 4, 5])
    assert interval.mean == 3
    assert standard_error([1, 2, 3, 4, 5]) == pytest.approx(math.sqrt(0.5))
    assert interval.high == pytest.approx(3 + 2.7764451 * math.sqrt(0.5), abs=1e-6)
    assert interval.low == pytest.approx(3 - 2.7764451 * math.sqrt(0.5), abs=1e-6)


def test_the_paired_interval_on_students_own_data() -> None:
    # Student (1908), hours of sleep gained under two drugs: mean difference 1.58, s = 1.23,
    # t(9) = 2.262, so the interval is 0.70 to 2.46.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    change = paired_difference(first, second)
    assert change.mean == pytest.approx(1.58)
    assert change.low == pytest.approx(0.7001, abs=1e-4)
    assert change.high == pytest.approx(2.4599, abs=1e-4)
    assert change.excludes_zero


def test_pairing_removes_what_items_have_in_common() -> None:
    change = paired_difference([0.0, 0.1, 0.8, 0.9], [0.2, 0.31, 1.0, 1.09])
    assert change.mean == pytest.approx(0.2)
    assert change.low == pytest.approx(0.2 - 3.182446 * 0.01 / math.sqrt(6), abs=1e-6)
    assert change.excludes_zero


def test_the_interval_holds_what_it_promises() -> None:
    draw = random.Random(0)
    hits = 0
    for _ in range(400):
        before = [float(draw.random() < 0.3) for _ in range(100)]
        after = [float(draw.random() < 0.5) for _ in range(100)]
        change = paired_difference(before, after)
        assert change.low is not None
        assert change.high is not None
        hits += change.low <= 0.2 <= change.high
    assert 0.92 <= hits / 400 <= 0.98


def test_no_interval_from_one_value_and_an_error_from_none() -> None:
    alone = mean_interval([0.5])
    assert (alone.low, alone.high, alone.excludes_zero) == (None, None, False)
    assert standard_error([0.5]) is None
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
    with pytest.raises(ValueError, match="no values"):
        mean([])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        paired_difference([1.0], [1.0, 2.0])


def test_an_interval_that_includes_zero_says_so() -> None:
    assert not paired_difference([0, 1, 0, 1], [1, 0, 1, 0]).excludes_zero
    assert not paired_difference([1, 1], [1, 1]).excludes_zero


def test_the_sign_test_counts_what_changed() -> None:
    assert sign_test([1, 1, 1, 0, 0]) == pytest.approx(0.25)  # 2 * (1/2)**3
    assert sign_test([1] * 9 + [-1]) == pytest.approx(2 * 11 / 1024)
    assert sign_test([0.1, -0.1]) == 1.0
    assert sign_test([0, 0]) == 1.0
    assert sign_test([1] * 3000) == pytest.approx(0.0, abs=1e-300)


def test_wilson_interval_against_the_published_example() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    for successes, count, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        found = wilson_interval(successes, count)
        assert found == pytest.approx((low, high), abs=1e-4)
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(10, 10)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert share_interval(81, 263).mean == pytest.approx(81 / 263)
    with pytest.raises(ValueError, match="nothing"):
        share_interval(0, 0)
