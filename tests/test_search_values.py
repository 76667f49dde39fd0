"""The arithmetic of a search, with numbers computed by hand, and what texts of problems show."""

from __future__ import annotations

from collections import Counter

import pytest

from aflow_tune.search.problems import MOST_SHOWN, examples, joints, telling_words, varied
from aflow_tune.search.values import (
    aflow_probabilities,
    learned_value,
    puct,
    race_difference,
    race_order,
    rank_priors,
    stages,
)

SCORES, BEST_CHILDREN, VISITS = [0.2, 0.5, 0.4], [0.5, 0.3, None], [2, 1, 0]
LN_2 = 0.69314718


def test_aflows_rule() -> None:
    found = aflow_probabilities([0.60, 0.55, 0.50, 0.40])
    assert found == pytest.approx([0.53506, 0.24425, 0.13726, 0.08343], abs=5e-6)
    assert sum(found) == pytest.approx(1)
    # Scores of a thousand do not overflow, and equal ones share.
    assert aflow_probabilities([1000.0, 1000.0]) == [0.5, 0.5]


def test_the_upper_bound_is_of_quality_spread_prior_and_visits() -> None:
    # Priors 1/6, 3/6, 2/6; D = 0.3, sqrt(1 + 3) = 2: bonuses 0.1 / 3, 0.3 / 2 and 0.2.
    found = puct(SCORES, BEST_CHILDREN, VISITS)
    assert found == pytest.approx([0.5 + 0.1 / 3, 0.65, 0.6])
    assert puct(SCORES, BEST_CHILDREN, VISITS, exploration=0.0) == [0.5, 0.5, 0.4]


def test_learned_values_move_the_prior() -> None:
    # V / temperature = 0, 0, ln 2, so their shares are 1/4, 1/4, 1/2; with e = 1/2 the priors are
    # 5/24, 9/24 and 10/24, and 0.6 times these by 3, 2 and 1 the bonuses.
    learned = [0.0, 0.0, LN_2 / 10]
    found = puct(SCORES, BEST_CHILDREN, VISITS, learned, mixed=0.5)
    assert found == pytest.approx([0.5 + 1 / 24, 0.5 + 0.1125, 0.4 + 0.25])
    assert puct(SCORES, BEST_CHILDREN, VISITS, learned) == puct(SCORES, BEST_CHILDREN, VISITS)


def test_priors_are_ranks_and_the_earlier_of_equals_is_better() -> None:
    assert rank_priors([0.1, 0.7, 0.4]) == pytest.approx([1 / 6, 3 / 6, 2 / 6])
    assert rank_priors([0.5, 0.5]) == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("failing", "fixed", "of_failed", "broken", "of_passed", "gain"),
    [
        (0.6, 1, 3, 0, 3, 0.2),
        (0.6, 1, 3, 1, 2, 0.2 - 0.4 / 2),
        (0.6, 0, 3, 1.5, 3, -0.2),
        (0.6, 2, 3, 0, 0, 0.4),
        (1.0, 0, 0, 0, 0, 0.0),
    ],
)
def test_a_race_is_weighed_by_how_much_the_parent_fails(
    failing: float, fixed: float, of_failed: int, broken: float, of_passed: int, gain: float
) -> None:
    assert race_difference(failing, fixed, of_failed, broken, of_passed) == pytest.approx(gain)


def test_a_race_alternates_failed_and_passed_problems_and_leaves_out_unscored_ones() -> None:
    assert race_order([0.0, 1.0, None, 1.0, 0.0, 0.5]) == [0, 1, 4, 3, 5]
    assert race_order([1.0, 1.0, 0.0]) == [2, 0, 1]
    assert race_order([None, None]) == []


def test_stages_end_with_all_problems() -> None:
    assert [stages(count) for count in (5, 6, 7, 24, 40)] == [
        [5], [6], [6, 7], [6, 12, 24], [6, 12, 24, 40]
    ]  # fmt: skip


def test_values_are_shrunk() -> None:
    assert learned_value([0.1, 0.3, 0.2, 0.2]) == pytest.approx(4 / (4 + 4) * 0.2)
    assert learned_value([]) == 0


# What problems show

NAMES = ["Oslo", "Lima", "Rome", "Bern", "Riga", "Doha", "Cairo", "Paris"]
CAPITALS = [f"Of which country is {name} the capital?" for name in NAMES]
SUMS = [f"What is {17 * number} + {23 * number}?" for number in range(1, 9)]
RHYMES = [f"Write a line that rhymes with the word {word}" for word in ("sea", "top", "red", "up")]


def test_every_prefix_covers_the_kinds() -> None:
    texts = [*CAPITALS, *SUMS, *RHYMES]
    kinds = ["capital"] * 8 + ["sum"] * 8 + ["rhyme"] * 4
    order = varied(texts)
    assert sorted(order) == list(range(20))
    for size in (3, 6, 12):
        assert Counter(kinds[place] for place in order[:size]) == {
            "capital": size // 3,
            "sum": size // 3,
            "rhyme": size // 3,
        }
    assert (varied([]), varied(["same", "same", "same"])) == ([], [0, 1, 2])


def test_telling_words_part_the_problems() -> None:
    words = telling_words([*CAPITALS, *SUMS])
    assert words
    for word in words:
        there = [word in text.lower() for text in (*CAPITALS, *SUMS)]
        assert there in ([True] * 8 + [False] * 8, [False] * 8 + [True] * 8)
    # Words of the same texts are one; the longest stands for them. One that all hold tells nothing.
    assert "capital" in words or "country" in words
    assert len({*words}) == len(words) == 2
    assert telling_words(CAPITALS) == []
    assert telling_words([]) == []


def test_joints_are_where_several_texts_can_be_cut() -> None:
    asked = [f"What is 1 + {number} and what is 2 + {number}?" for number in range(6)]
    assert joints(asked) == [" and "]
    assert joints([*asked, *(f"{text}\nAnd then?" for text in asked)])[:2] == [" and ", "\n"]
    assert joints(["This ends here. ", *SUMS]) == []


def test_examples_are_short_solved_problems() -> None:
    pairs = [(f"What is {number} + 1?", str(number + 1)) for number in range(10)]
    long = [("word " * MOST_SHOWN, "none")] * 10
    found = examples([*long, *pairs])
    names = ["one example", "two alike", "three unlike"]
    assert {*found} == {f"{name}, {draw}" for name in names for draw in (1, 2)}
    shown = {f"Question: {question}\nAnswer: {answer}" for question, answer in pairs}
    for name, text in found.items():
        parts = text.split("\nQuestion: ")
        whole = {parts[0], *(f"Question: {part}" for part in parts[1:])}
        assert whole <= shown
        assert len(whole) == {"one": 1, "two": 2, "three": 3}[name.split()[0]]
    assert found == examples([*long, *pairs])
    assert examples([]) == {}
    assert set(examples(pairs[:1])) == {"one example, 1"}
    alike = examples([("A b c?", "1"), ("A b d?", "2"), ("x y z u v", "3")], draws=1)[
        "two alike, 1"
    ]
    assert ("A b c?" in alike, "A b d?" in alike) == (True, True)
