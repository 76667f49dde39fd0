"""GSM8K's two rules on answers scored by hand, and by the public AFlow code."""

from __future__ import annotations

import pytest

from aflow_tune.scoring.numbers import score_published, score_strict

# What the public code gives: any sign before a digit, any text, the last number only.
PUBLISHED = [
    ("It is 42.", "#### 42", 1),
    ("#### 1,234", "#### 1234", 1),
    ("x-5", "5", 0),  # reads -5
    ("x-5", "-5", 1),
    ("+5", "5", 1),
    ("12,34", "34", 1),
    ("1,2345", "1", 0),
    ("5.", "5", 1),
    (".5", "5", 1),
    ("3.0000009", "3", 1),
    ("3.0000011", "3", 0),
    ("no number", "3", 0),
    ("", "3", 0),
    ("either 3 or 42", "42", 1),
    ("\\boxed{42} in 2 steps", "42", 0),
    ("42%", "42", 1),
    ("٤٢", "42", 1),
]


@pytest.mark.parametrize(("answer", "truth", "value"), PUBLISHED)
def test_the_published_rule(answer: str, truth: str, value: float) -> None:
    assert score_published(answer, truth).value == value


@pytest.mark.parametrize(
    "answer",
    [
        "It is 42.",
        "20 + 22 = 42",
        "She buys 3 apples and 4 pears for $42",
        r"\boxed{42}, found in 2 steps",
        r"\boxed{42} so the answer is 42.",
        r"\boxed{\text{42 apples}} \boxed{42.0}",
        "**Answer:** 42",
        "The answer is 6 * 7 = 42",
        "1. 5 apples\n2. 37 pears\n42",
        "In 3 weeks she needs 42 signatures.",
        "He has 12 or more. So it is 42.",
        "\N{MINUS SIGN}1 + 43 = 42",
        "maybe 42",
        "14 + 14 + 14\n#### 42",
    ],
)
def test_the_strict_rule_takes_one_answer(answer: str) -> None:
    assert score_strict(answer, "#### 42").value == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("either 3 or 42", "several candidates in doubt"),
        ("x = 3 or x = 42", "several candidates in doubt"),
        ("It could be 10. It might be 42.", "several candidates in doubt"),
        ("The answer is 41 (or 42)", "several candidates in doubt"),
        ("1, 2, 3, 42", "a list of candidates"),
        ("1\n2\n3\n42", "a list of candidates"),
        ("- 41\n- 43\n- 42", "a list of candidates"),
        ("40 41 42", "a list of candidates"),
        ("41/42", "a list of candidates"),
        ("The answer is 41. The answer is 42.", "several declared answers that differ"),
        ("#### 3\n#### 42", "several declared answers that differ"),
        ("The answer is not 42", "the last number is denied"),
        (r"\boxed{41} \boxed{42}", "several boxed answers that differ"),
        (r"\boxed{41, 42}", "several boxed answers that differ"),
        (r"The answer is 41: \boxed{42}", "an answer in words differs from the boxed one"),
        ("It is 41.", "41 is not 42"),
        ("It is forty-two.", "no number in the answer"),
        ("", "no number in the answer"),
    ],
)
def test_the_strict_rule_refuses_open_answers(answer: str, reason: str) -> None:
    score = score_strict(answer, "#### 42")
    assert (score.value, score.reason) == (0.0, reason)


@pytest.mark.parametrize(
    "text",
    [
        "answer" + ":" * 200_000,
        "answer is 3 " * 50_000,
        "1" + " " * 200_000 + "2",
        "3 or " * 50_000,
    ],
    ids=["colons", "declarations", "blanks", "choices"],
)
def test_hostile_lengths_are_read_in_time(text: str) -> None:
    """With steps that grow as the square of the length each would take longer than a test may."""
    assert score_strict(text, "#### 9").value == 0.0
