"""HotpotQA's and DROP's two rules, with F1 computed by hand."""

from __future__ import annotations

from random import Random

import pytest

from aflow_tune.scoring.qa import (
    drop_published,
    drop_strict,
    hotpotqa_published,
    hotpotqa_strict,
    token_f1,
)


def test_f1_by_hand() -> None:
    # given: big brown dog; expected: brown dog: 2 shared, P = 2/3, R = 1, F1 = 0.8
    assert token_f1("the big brown dog", "A brown dog") == pytest.approx(0.8)
    assert token_f1("dog dog", "dog") == pytest.approx(2 / 3)
    assert token_f1("cat", "dog") == 0
    assert token_f1("", "dog") == 0


@pytest.mark.parametrize(
    ("answer", "reference", "published", "strict"),
    [
        ("Bath, Maine", "Bath Maine", 1, 1),
        ("yes", "yes", 1, 1),
        ("Yes.", "yes", 1, 1),
        ("yes no", "yes", 2 / 3, 0),
        ("no", "yes", 0, 0),
        ("the a", "The A", 0, 0),
        ("The A", "The A", 0, 1),  # nothing is left of it, yet it is the reference
        ("in 1983", "1983", 2 / 3, 2 / 3),
        ("1983 1984", "1983", 2 / 3, 0),
        ("Paris or London", "Paris", 0.5, 0),
        (".5", "5", 1, 0),
        ("-5", "5", 1, 0),
        ("40,000 men", "40000 men", 1, 1),
        # What honest answers keep.
        ("the Lima", "Lima", 1, 1),
        ("in Lima", "Lima", 2 / 3, 2 / 3),
        ("20 years", "20", 2 / 3, 2 / 3),
        ("Lima, Peru", "Lima, Peru", 1, 1),
        ("Lima", "Lima, Peru", 2 / 3, 2 / 3),
        ("Bath (Maine)", "Bath, Maine", 1, 1),
        ("Spanish and English", "English and Spanish", 1, 1),
        ("English", "English and Spanish", 0.5, 0.5),
        ("Hungarian Rhapsody 2", "Hungarian Rhapsody No. 2", 6 / 7, 6 / 7),
        # By hand: a share of the words that name something, times 2R / (1 + R).
        ("Barack Hussein Obama", "Barack Obama", 0.8, 2 / 3),
        ("Lima Paris", "Lima", 2 / 3, 0.5),
        ("Lima Lima", "Lima", 2 / 3, 0.5),
        ("English, French", "English and Spanish", 0.4, 1 / 3),
        ("English, Spanish, French", "English and Spanish", 2 / 3, 0),
        ("Lima, Lima", "Lima", 2 / 3, 0),
        ("not Lima", "Lima", 2 / 3, 0),
        ("guilty", "not guilty", 2 / 3, 0),
    ],
)
def test_hotpotqa(answer: str, reference: str, published: float, strict: float) -> None:
    assert hotpotqa_published(answer, reference).value == pytest.approx(published)
    assert hotpotqa_strict(answer, reference).value == pytest.approx(strict)


@pytest.mark.parametrize(
    ("answer", "references", "published", "strict"),
    [
        ("20", "20|20 years", 1, 1),
        ("20 years", "20|20 years", 1, 1),
        ("20|20 years", "20|20 years", 1, 1),
        ("1|2|3|20", "20", 1, 0),
        ("20 | ", "20", 1, 1),
        ("21", "20|", 0, 0),
        ("English", "English and Spanish", 0.5, 0.5),
        ("", "20", 0, 0),
        ("Colts and Bears", "Bears|Colts", 0.5, 1),
        ("Colts, Bears", "Bears|Colts", 2 / 3, 1),
        ("Colts, Jets", "Bears|Colts", 2 / 3, 0),
        ("Colts|Colts|Colts", "Bears|Colts", 1, 0),
        ("yes, it was", "yes", 0.5, 0),
    ],
)
def test_drop(answer: str, references: str, published: float, strict: float) -> None:
    assert drop_published(answer, references).value == pytest.approx(published)
    assert drop_strict(answer, references).value == pytest.approx(strict)


JOINED = [
    *[" ", ", ", "; ", " / ", "/", " or ", ", or ", " and ", " & ", " + ", " | ", "|", "\n", ". "],
    *[
        " - ",
        " \u2013 ",
        "? ",
        " vs ",
        " or maybe ",
        " (or {})",
        " ({})",
        " [{}]",
        ", not ",
        " but ",
    ],
]


@pytest.mark.parametrize("joined", JOINED)
@pytest.mark.parametrize("score", [hotpotqa_strict, drop_strict])
def test_hedging_earns_no_more_than_the_best_guess(score, joined: str) -> None:
    """On average over what is right, whatever the candidates, their chances and the way in which
    they are written at once."""
    random = Random(0)
    for words in (["lima", "paris", "rome", "oslo"], ["new", "york", "city", "state", "old"]):
        for _ in range(40):
            count = random.randint(2, 4)
            guesses = {" ".join(random.sample(words, random.randint(1, 2))) for _ in range(count)}
            candidates = sorted(guesses)
            chances = [random.random() for _ in candidates]

            def expected(answer: str, right=tuple(candidates), chances=tuple(chances)) -> float:
                earned = [score(answer, one).value for one in right]
                return sum(c * e for c, e in zip(chances, earned, strict=True)) / sum(chances)

            hedge = candidates[0]
            for one in candidates[1:]:
                hedge += joined.format(one) if "{}" in joined else joined + one
            assert expected(hedge) <= max(map(expected, candidates)) + 1e-9
