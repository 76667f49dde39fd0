"""The rules for numbers, mathematics and short texts, on the answers of `scored_answers.yaml`."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from aflow_tune.scoring import mathematics, numbers, qa
from aflow_tune.scoring.asked_process import Undecided
from aflow_tune.scoring.mathematics import published_equal

_FILE = Path(__file__).with_name("scored_answers.yaml")
SCORED: dict[str, list[list[Any]]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("answer", "truth", "value"), SCORED["gsm8k published"])
def test_gsm8k_published(answer: str, truth: str, value: float) -> None:
    assert numbers.score_published(answer, truth).value == value


@pytest.mark.parametrize(("answer", "truth", "value", "reason"), SCORED["gsm8k strict"])
def test_gsm8k_strict(answer: str, truth: str, value: float, reason: str) -> None:
    score = numbers.score_strict(answer, truth)
    assert (score.value, score.reason) == (value, reason)


@pytest.mark.parametrize(
    "text", ["answer" + ":" * 200_000, "answer is 3 " * 50_000, "3 or " * 50_000]
)
def test_hostile_lengths_are_read_in_time(text: str) -> None:
    """With steps that grow as the square of the length each would take longer than a test may."""
    assert numbers.score_strict(text, "#### 9").value == 0.0


@pytest.mark.parametrize("name", ["hotpotqa", "drop"])
def test_question_answering(name: str) -> None:
    published, strict = (getattr(qa, f"{name}_{rule}") for rule in ("published", "strict"))
    for answer, reference, *scores in SCORED[name]:
        found = [published(answer, reference).value, strict(answer, reference).value]
        assert found == pytest.approx(scores), (answer, reference)


def test_f1_by_hand() -> None:
    # given: big brown dog; expected: brown dog: 2 shared, P = 2/3, R = 1, F1 = 0.8
    assert qa.token_f1("the big brown dog", "A brown dog") == pytest.approx(0.8)
    assert qa.token_f1("dog dog", "dog") == pytest.approx(2 / 3)
    assert qa.token_f1("cat", "dog") == qa.token_f1("", "dog") == 0


JOINED = [" ", ", ", "; ", " / ", "/", " or ", ", or ", " and ", " & ", " + ", " | ", "|", "\n"]
JOINED += [". ", " - ", " \u2013 ", "? ", " vs ", " or maybe ", " (or {})", " ({})", " [{}]"]
JOINED += [", not ", " but "]


@pytest.mark.parametrize("joined", JOINED)
@pytest.mark.parametrize("score", [qa.hotpotqa_strict, qa.drop_strict])
def test_hedging_earns_no_more_than_the_best_guess(score: Any, joined: str) -> None:
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


# Mathematics


@pytest.mark.parametrize(("answer", "truth", "equal"), SCORED["math equal by the published rule"])
def test_mathematics_published(answer: str, truth: str, equal: bool) -> None:
    assert published_equal(answer, truth) is equal


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{ 7 } and \boxed{8}", "8"),
        # Two levels of braces are not found, and the last sentence counts.
        (r"We are done. So it is $\boxed{\frac{\sqrt{2}}{2}}$.", None),
        ("First. Then 3.5 m. The answer is 5", "The answer is 5"),
        ("It is 5. ", "It is 5."),  # no sentence ends after a digit
    ],
)
def test_what_the_published_rule_takes_for_the_answer(text: str, answer: str | None) -> None:
    expected = r"So it is $\boxed{\frac{\sqrt{2}}{2}}$." if answer is None else answer
    assert mathematics.final_answer(text) == expected


@pytest.mark.parametrize(("answer", "truth", "value"), SCORED["math strict"])
def test_mathematics_strict(answer: str, truth: str, value: float) -> None:
    assert mathematics.score_strict(answer, truth).value == value


@pytest.mark.parametrize(("one", "other"), SCORED["math spellings"])
def test_spellings_of_one_answer_score_one(one: str, other: str) -> None:
    for answer, truth in ((one, other), (other, one), (one, one)):
        assert mathematics.score_strict(rf"\boxed{{{answer}}}", truth).value == 1


@pytest.mark.parametrize(("answer", "reason"), SCORED["math open"])
def test_the_strict_rule_refuses_open_answers(answer: str, reason: str) -> None:
    score = mathematics.score_strict(answer, r"So it is $\boxed{42}$.")
    assert (score.value, score.reason) == (0.0, reason)


@pytest.mark.parametrize(
    "between",
    [
        *[",", ";", r"\,\,", r"\;", "~", r"\ ", r"\quad ", r"\qquad ", r"\text{ and }", " or "],
        *[r"\text{ or }", r"\lor ", r"\cup ", r"\pm ", "=", r"\approx ", r"\to ", "<", "|", "/"],
        *[r"\text{ but perhaps }", r"\mid ", r", x=", r"\text{, not }", r"\\", r"\hspace{1cm}"],
    ],
)
def test_no_way_to_write_two_candidates_scores(between: str) -> None:
    for first, second in (("41", "42"), ("42", "41"), ("x=41", "42")):
        for form in ("{}", r"\{{{}\}}", "({})"):
            answer = rf"\boxed{{{form.format(first + between + second)}}}"
            assert mathematics.score_strict(answer, "42").value == 0


def test_an_answer_that_is_code_is_no_mathematics(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for text in (
        f"__import__('os').system('touch {mark}')",
        f"open('{mark}', 'w')",
        f'S(\'__import__("os").system("touch {mark}")\')',
        f"sympify(\"open('{mark}', 'w')\")",
        f"[c for c in ().__class__.__base__.__subclasses__()] and open('{mark}', 'w')",
        f"lambdify(x, \"open('{mark}', 'w')\")(1)",
        f"preview(Symbol('x').subs(1, open('{mark}', 'w')))",
    ):
        assert mathematics.score_published(rf"\boxed{{{text}}}", r"\boxed{7}").value == 0
    assert not mark.exists()


@pytest.mark.slow
def test_a_comparison_without_end_is_undecided() -> None:
    with pytest.raises(Undecided, match="SymPy found no verdict within 10 s of processor time"):
        published_equal("9^{9^{9^{9}}}", "8")
    assert published_equal(r"\frac{6}{4}", "1.5")
