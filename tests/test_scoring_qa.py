"""HotpotQA's and DROP's two rules, with F1 computed by hand."""

from __future__ import annotations

import pytest

from aflow_tune.scoring.qa import (
    drop_published,
    drop_strict,
    hotpotqa_published,
    hotpotqa_strict,
    normalised,
    token_f1,
)
from aflow_tune.scoring.types import CannotScore


def test_squad_normalisation() -> None:
    assert normalised("The  Bear's, a U.S. team!") == "bears us team"
    assert normalised("An the a") == ""


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
    ],
)
def test_drop(answer: str, references: str, published: float, strict: float) -> None:
    assert drop_published(answer, references).value == pytest.approx(published)
    assert drop_strict(answer, references).value == pytest.approx(strict)


@pytest.mark.parametrize("score", [drop_published, drop_strict, hotpotqa_strict])
def test_an_empty_reference_scores_nothing(score) -> None:
    with pytest.raises(CannotScore):
        score("20", " ")
