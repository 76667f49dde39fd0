"""Intervals against published and hand-computed numbers."""

from __future__ import annotations

import math

import pytest

from aflow_tune.report.statistics import (
    mean_interval,
    paired_difference,
    t_quantile,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("degrees", "published"),
    [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980), (10**8, 1.960)],
)
def test_t_quantiles_match_the_tables(degrees: int, published: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(published, abs=5e-4)
    assert t_quantile(0.025, degrees) == pytest.approx(-published, abs=5e-4)


def test_a_mean_with_its_interval_by_hand() -> None:
    # mean 3, s = sqrt(2.5), t(4) = 2.7764451, half width = 2.7764451 * sqrt(2.5 / 5)
    interval = mean_interval([1, 2, 3, 4, 5])
    assert interval.mean == 3
    assert interval.high == pytest.approx(3 + 2.7764451 * math.sqrt(0.5), abs=1e-6)
    assert interval.low == pytest.approx(3 - 2.7764451 * math.sqrt(0.5), abs=1e-6)


def test_pairing_removes_what_items_have_in_common() -> None:
    before = [0.0, 0.1, 0.8, 0.9]
    after = [0.2, 0.3, 1.0, 1.1]
    change = paired_difference(before, after)
    assert change.mean == pytest.approx(0.2)
    assert change.low == pytest.approx(0.2)
    assert change.excludes_zero


def test_no_interval_from_one_value_and_an_error_from_none() -> None:
    alone = mean_interval([0.5])
    assert (alone.low, alone.high, alone.excludes_zero) == (None, None, False)
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
    with pytest.raises(ValueError, match="shorter|longer"):
        paired_difference([1.0], [1.0, 2.0])


def test_an_interval_that_includes_zero_says_so() -> None:
    assert not paired_difference([0, 1, 0, 1], [1, 0, 1, 0]).excludes_zero


def test_wilson_interval_against_the_published_example() -> None:
    low, high = wilson_interval(81, 263)  # Newcombe 1998, table I: 0.2553 to 0.3662
    assert low == pytest.approx(0.2553, abs=1e-4)
    assert high == pytest.approx(0.3662, abs=1e-4)
    assert wilson_interval(0, 10)[0] == 0.0
