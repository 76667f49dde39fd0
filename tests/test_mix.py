"""Mixing by exact shares: counts of every batch, passes, seeds, going on from any batch."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import pytest

from aflow_tune.data.mix import Mix, apportion, default_shares, exact_shares, kind_of, sample

RECIPE = {"math": Fraction(2, 5), "code": Fraction(3, 10), "qa": Fraction(3, 10)}


def mix(batch_size: int = 10, seed: int = 0, **rows: int) -> Mix:
    return Mix(RECIPE, rows or {"math": 11, "code": 5, "qa": 3}, batch_size, seed)


def counts_of(recipe: Mix, number: int) -> Counter[str]:
    return Counter(source for source, _ in recipe.batch(number))


def test_broken_shares_by_hand() -> None:
    """8 items: 3.2, 2.4 and 2.4. Five batches are 16, 12 and 12; each is 3 or 4, 2 or 3."""
    recipe = mix(8)
    counts, again = (
        [tuple(counts_of(recipe, batch)[name] for name in RECIPE) for batch in batches]
        for batches in (range(5), range(5, 10))
    )
    assert [sum(column) for column in zip(*counts, strict=True)] == [16, 12, 12]
    assert all(sum(count) == 8 for count in counts)
    assert {count[0] for count in counts} == {3, 4}
    assert {number for count in counts for number in count[1:]} == {2, 3}
    assert counts == again


def test_no_source_is_ever_a_whole_item_from_its_share() -> None:
    draw = random.Random(7)
    for _ in range(150):
        weights = [draw.randint(1, 30) for _ in range(draw.randint(1, 9))]
        shares = {str(n): Fraction(w, sum(weights)) for n, w in enumerate(weights)}
        size = draw.randint(1, 25)
        recipe = Mix(shares, dict.fromkeys(shares, 4), size, 0)
        taken = dict.fromkeys(shares, 0)
        for batch in range(40):
            counts = counts_of(recipe, batch)
            assert counts.total() == size
            for source, share in shares.items():
                taken[source] += counts[source]
                assert abs(counts[source] - size * share) < 1
                assert abs(taken[source] - (batch + 1) * size * share) < 1


def test_a_pass_is_over_before_a_row_comes_again_and_each_pass_is_shuffled() -> None:
    recipe = mix(10)  # 4, 3 and 3 a batch, of 11, 5 and 3 rows
    seen: dict[str, list[int]] = {}
    batches = [recipe.batch(number) for number in range(55)]
    # What a batch holds is shuffled, so passes are looked at in whole multiples of batches.
    for source, size, together in (("math", 11, 11), ("code", 5, 5), ("qa", 3, 1)):
        for start in range(0, 55, together):
            rows = [
                r for batch in batches[start : start + together] for n, r in batch if n == source
            ]
            counts = {row: rows.count(row) for row in rows}
            assert len(counts) == size
            assert len(set(counts.values())) == 1
        seen[source] = [row for batch in batches for name, row in batch if name == source]
    assert seen["math"][:11] != seen["math"][44:55]


def test_batches_follow_from_seed_and_number_alone() -> None:
    straight = mix(8)
    batches = [straight.batch(number) for number in range(30)]
    again = mix(8)
    for number in (29, 3, 17, 17, 0):
        assert again.batch(number) == batches[number]
    other = mix(8, seed=1)
    assert other.batch(0) != batches[0]
    assert counts_of(other, 13) == counts_of(straight, 13)
    assert len(other.batch(10**9 + 3)) == 8


def test_shares_as_written() -> None:
    assert exact_shares({"a": 0.4, "b": 0.3, "c": 0.3}) == dict(
        zip("abc", RECIPE.values(), strict=True)
    )
    thirds = exact_shares({"a": 0.333333, "b": 0.333333, "c": 0.333334})
    assert sum(thirds.values()) == 1
    for written in ({"a": 0.5, "b": 0.4}, {"a": 1.2, "b": -0.2}, {"a": float("nan")}):
        with pytest.raises(ValueError, match="share"):
            exact_shares(written)
    with pytest.raises(ValueError, match="no rows: qa"):
        mix(8, math=1, code=1, qa=0)


def test_the_default_recipe() -> None:
    assert default_shares({"math": "math", "code": "code", "qa": "qa"}) == RECIPE
    split = default_shares({"gsm8k": "math", "math": "math", "mbpp": "code", "drop": "qa"})
    assert split["gsm8k"] == split["math"] == Fraction(1, 5)
    assert default_shares({"m": "math", "c": "code"}) == {"m": Fraction(4, 7), "c": Fraction(3, 7)}
    assert [kind_of("x", "gsm8k"), kind_of("drop", None)] == ["math", "qa"]


def test_largest_remainders() -> None:
    assert apportion(1000, RECIPE) == {"math": 400, "code": 300, "qa": 300}
    assert apportion(8, RECIPE) == {"math": 3, "code": 3, "qa": 2}  # 3.2, 2.4, 2.4
    assert apportion(1, {"a": Fraction(1, 2), "b": Fraction(1, 2)}) == {"a": 1, "b": 0}


def test_a_fixed_sample_keeps_the_proportions_of_the_sources() -> None:
    labels = ["math"] * 40 + ["code"] * 30 + ["qa"] * 30
    drawn = sample(labels, 50, seed=0)
    assert [sum(labels[n] == kind for n in drawn) for kind in RECIPE] == [20, 15, 15]
    assert drawn == sorted(set(drawn))
    assert sample(labels, 50, seed=0) == drawn
    assert sample(labels, 50, seed=1) != drawn
    assert sample([None] * 5, 50, seed=0) == [0, 1, 2, 3, 4]
