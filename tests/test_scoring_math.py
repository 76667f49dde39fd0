"""MATH's two rules, LaTeX by SymPy's own parser, and texts that would run as code."""

from __future__ import annotations

from pathlib import Path

import pytest

from aflow_tune.asked_process import Undecided
from aflow_tune.scoring import mathematics
from aflow_tune.scoring.boxed import boxed, boxed_answers, shallow_boxed
from aflow_tune.scoring.expressions import Refused, check_expression, evaluate_literal
from aflow_tune.scoring.symbolic import as_number, published_equal


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    # Every line was given to the public AFlow code with ANTLR 4.11, with the same verdict.
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac12", r"\dfrac{1}{2}", True),
        ("x^2-1", "(x-1)(x+1)", True),
        (r"14+7\sqrt{2}", r"7(2+\sqrt{2})", True),
        (r"14+7\sqrt{2}", r"7(2+\sqrt2)", False),  # no LaTeX to SymPy
        ("28%", r"28\%", True),
        ("28%", "0.28", True),
        ("1,000", "1000", True),
        ("5.0005", "5", True),
        ("5.002", "5", False),
        ("2**3", "8", False),  # parse_latex takes it for 2*3
        ("[2*(3+1)]", "8", True),  # brackets group
        ("2^3", "8", True),
        ("sqrt(4)", "2", False),  # parse_latex reads s*q*r*t*4
        (r"\text{A}", "A", False),
        ("(1,2)", "(1, 2)", False),
        ("x", "y", False),
        ("nan", "nan", True),  # as texts
        ("nan", "NaN", False),
        (r"\binom{4}{2}", "6", True),
        ("5!", "120", True),
        ("x=5", "5", False),
        (r"120^\circ", "120", False),
        ("", "0", False),
    ],
)
def test_published_equality(answer: str, truth: str, equal: bool) -> None:
    assert published_equal(answer, truth) is equal


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,000", 1000.0), ("50%", 0.5), ("50\\%", 0.5), ("%", None), ("1_0", 10.0), ("x", None)],
)
def test_what_the_published_rule_takes_for_a_number(text: str, number: float | None) -> None:
    assert as_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{ 7 } and \boxed{8}", "8"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        # Two levels of braces are not found, and the last sentence counts.
        (r"We are done. So it is $\boxed{\frac{\sqrt{2}}{2}}$.", None),
        ("First. Then 3.5 m. The answer is 5", "The answer is 5"),
        ("It is 5. ", "It is 5."),  # no sentence ends after a digit
        ("", ""),
    ],
)
def test_what_the_published_rule_takes_for_the_answer(text: str, answer: str | None) -> None:
    expected = r"So it is $\boxed{\frac{\sqrt{2}}{2}}$." if answer is None else answer
    assert mathematics.final_answer(text) == expected


def test_an_answer_that_is_code_is_no_mathematics(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for text in (
        f"__import__('os').system('touch {mark}')",
        f"open('{mark}', 'w')",
        f'S(\'__import__("os").system("touch {mark}")\')',
        f"sympify(\"open('{mark}', 'w')\")",
        f"[c for c in ().__class__.__base__.__subclasses__()] and open('{mark}', 'w')",
        f"lambdify(x, \"open('{mark}', 'w')\")(1)",
    ):
        assert mathematics.score_published(rf"\boxed{{{text}}}", r"\boxed{7}").value == 0
    assert not mark.exists()


@pytest.mark.parametrize(
    "code",
    [
        *("().__class__", "S('1')", "getattr(x, 'y')", "lambda: 1", "Symbol('x').subs(1, 2)"),
        *("f(x)(y)", "preview(Integer(1))", "'text'", "[i for i in x]", "f'{x}'"),
        "sympify (Symbol ('x' ))",
    ],
)
def test_refused_expressions(code: str) -> None:
    with pytest.raises(Refused):
        check_expression(code)


def test_allowed_expressions_and_literals() -> None:
    check_expression("sqrt (Integer (4 ))+Symbol ('x' )**Float ('0.5' )")
    assert evaluate_literal("[[1, 2], [3, 2 + 2]]") == [[1, 2], [3, 4]]
    for text in ("open('x')", "x", "().__class__", "[i for i in (1,)]"):
        with pytest.raises(Refused):
            evaluate_literal(text)


@pytest.mark.parametrize(
    ("answer", "truth", "value"),
    [
        (r"\boxed{\frac{84}{2}}", "42", 1),
        (r"\boxed{42} as said: $\boxed{42.0}$", "42", 1),
        (r"\boxed{x = 42}", "42", 1),
        (r"\boxed{42.}", "42", 1),
        (r"\boxed{1,000}", "1000", 1),
        (r"\boxed{1{,}000}", "1000", 1),
        (r"\boxed{1\,000}", "1000", 1),
        (r"\boxed{3 \frac{1}{2}}", "3.5", 1),
        (r"\boxed{(p,q) = (1,2)}", "(1,2)", 1),
        (r"\boxed{[0,1] \cup (2,3]}", r"[0,1]\cup(2,3]", 1),
        (r"\boxed{1112112}", "1112112_3", 1),
        (r"\boxed{1112112_4}", "1112112_3", 0),
        # math-verify reads the numbers of a tuple out of what it cannot parse.
        (r"\boxed{17 + q^3 + (\frac{1}{3}, \frac{2}{3})}", r"(\frac{1}{3}, \frac{2}{3})", 0),
        (r"\boxed{42\text{ apples}}", "42", 1),
        (r"\boxed{(1,2)}", "(1,2)", 1),
        (r"\boxed{2,1}", "1,2", 1),
        (r"\boxed{\text{E or C}}", r"\text{C or E}", 0),
        (r"\boxed{x \in \{1,2\}}", r"x \in \{1,2\}", 1),
        (r"\boxed{-1} and \boxed{2}", r"$a=\boxed{-1}$ and $a=\boxed{2}$", 1),
        (r"\boxed{-1, 2}", r"$a=\boxed{-1}$ and $a=\boxed{2}$", 1),
        (r"\boxed{2}", r"$a=\boxed{-1}$ and $a=\boxed{2}$", 0),
    ],
)
def test_the_strict_rule(answer: str, truth: str, value: float) -> None:
    assert mathematics.score_strict(answer, truth).value == value


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("42", "no boxed answer"),
        (r"\boxed{41} or \boxed{42}", "several boxed answers that differ"),
        (r"\boxed{41, 42}", "a list of candidates"),
        (r"\boxed{41; 42}", "a list of candidates"),
        (r"\boxed{\text{41, 42}}", "a list of candidates"),
        (r"\boxed{42 \text{ or } 41}", "a choice of candidates"),
        (r"\boxed{\text{either 41 or 42}}", "a choice of candidates"),
        (r"\boxed{\pm 42}", "two signs"),
        (r"\boxed{20 \quad 22}", "numbers side by side"),
        (r"\boxed{41 = 42}", "a relation where a value is asked for"),
        (r"\boxed{x = 41 = 42}", "a relation where a value is asked for"),
        (r"\boxed{41 \approx 42}", "a relation where a value is asked for"),
        (r"\boxed{" + "4" * 500 + "}", "too long for a final answer"),
        (r"\boxed{43}", "'43' is not '42'"),
    ],
)
def test_the_strict_rule_refuses_open_answers(answer: str, reason: str) -> None:
    score = mathematics.score_strict(answer, r"So it is $\boxed{42}$.")
    assert (score.value, score.reason) == (0.0, reason)


def test_boxes() -> None:
    text = r"\boxed{1} \boxed{\boxed{2}} \boxed 3 \boxed{\sqrt{\frac{1}{2}}} \boxed{open"
    assert boxed_answers(text) == ["1", "2", "3", r"\sqrt{\frac{1}{2}}"]
    assert boxed(text) is None
    assert shallow_boxed(text) == ["1", r"\boxed{2}"]


def test_a_comparison_without_end_is_undecided() -> None:
    with pytest.raises(Undecided, match="SymPy found no verdict within 10 s of processor time"):
        published_equal("9^{9^{9^{9}}}", "8")
    assert published_equal(r"\frac{6}{4}", "1.5")


def test_many_boxes_are_refused_without_comparing_them_all() -> None:
    boxes = " ".join(f"\\boxed{{x_{{{n}}}+1}}" for n in range(100_000))
    scored = mathematics.score_strict(boxes, "\\boxed{7}")
    assert (scored.value, scored.reason) == (0.0, "several boxed answers that differ")
