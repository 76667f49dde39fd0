# ruff: noqa: RUF001 (the characters that answers are written with)
"""MATH's two rules, LaTeX by SymPy's own parser, and texts that would run as code."""

from __future__ import annotations

from pathlib import Path

import pytest

from aflow_tune.scoring import mathematics
from aflow_tune.scoring.asked_process import Undecided
from aflow_tune.scoring.equality import published_equal
from aflow_tune.scoring.expressions import Refused, check_expression


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


# Each pair scores 1 in both directions.
SAME = [
    # spaces of LaTeX
    (r"12\,\text{cm}", "12"),
    (r"12\;\mathrm{cm}", "12"),
    ("12~\\text{cm}", "12"),
    (r"12\quad\text{ cm}^2", "12"),
    (r"6\,\pi", r"6\pi"),
    (r"\frac{1}{2}\:x", r"\frac{x}{2}"),
    (r"\left(\,1\,,\;2\,\right)", "(1,2)"),
    (r"11\!\cdot\!2", "22"),
    (r"5\,\frac{\text{m}}{\text{s}^2}", "5"),
    # thousands, and pairs that look like them
    (r"12{,}345", "12345"),
    (r"1,\!000", r"1\,000"),
    ("1~234~567", "1234567"),
    ("(100,200)", "(100, 200)"),
    # percent
    (r"12\%", "12"),
    (r"12\,\%", "0.12"),
    ("12 percent", "12%"),
    (r"33\frac{1}{3}\%", r"\frac{100}{3}"),
    # lists, sets, names, signs
    ("x=1, x=2", "1,2"),
    (r"x_1=1 \text{ and } x_2=2", "2,1"),
    (r"x=1 \text{ or } x=2", r"\{1,2\}"),
    (r"x \in \{1,2\}", "1,2"),
    (r"x=\pm 2", "2, -2"),
    (r"3\pm\sqrt{2}", r"3-\sqrt{2}, 3+\sqrt{2}"),
    ("1, 2, and 3", "3,1,2"),
    (r"\angle ABC = 60^\circ", "60"),
    ("x=1, y=2", "(1,2)"),
    ("y=2, x=1", "x=1, y=2"),
    ("x = 2", "2 = x"),
    ("2+40=42", "42"),
    # inequalities and intervals
    ("1<x<2", "(1,2)"),
    ("2 > x > 1", "1<x<2"),
    (r"1 \le x < 2", "[1,2)"),
    (r"x \geqslant 3", r"[3,\infty)"),
    (r"3 > x", r"(-\infty,3)"),
    ("x<=3", r"(-\infty,3]"),
    (r"-3 \le f(x) \le 3", "[-3,3]"),
    (r"x<1 \text{ or } x>2", r"(2,+\infty)\cup(-\infty,1)"),
    (r"x>1 \text{ and } x\leq 2", "(1,2]"),
    (r"x \neq 2", r"(-\infty,2)\cup(2,\infty)"),
    (r"\{x \mid x \ge 2\}", r"[2,\infty)"),
    (r"x\in\mathbb{R}", r"(-\infty,\infty)"),
    # repeating decimals
    (r"0.\overline{36}", r"\frac{4}{11}"),
    (r"-0.1\overline{6}", r"-\frac{1}{6}"),
    (r"0.\bar{3}", r"\frac{1}{3}"),
    (r"0.\dot{1}4285\dot{7}", r"\frac{1}{7}"),
    ("0.(3)", r"0.333\ldots"),
    ("0.3̅", r"\frac{1}{3}"),
    # characters
    ("½", "0.5"),
    ("2½", r"\frac{5}{2}"),
    ("7 1/2", "7.5"),
    ("√½", r"\sqrt{\frac{1}{2}}"),
    ("1⁄3", "⅓"),
    ("2√3", r"2\sqrt{3}"),
    ("√(x+1)", r"\sqrt{x+1}"),
    ("3π/4", r"\frac{3\pi}{4}"),
    ("x²+y⁻¹", "x^2+y^{-1}"),
    ("(−∞, 3]", r"(-\infty,3]"),
    ("1≤x≤2", "[1,2]"),
    ("3×4°", "12"),
    ("α+β", r"\alpha+\beta"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_spellings_of_one_answer_score_one(one: str, other: str) -> None:
    for answer, truth in ((one, other), (other, one), (one, one)):
        assert mathematics.score_strict(rf"\boxed{{{answer}}}", truth).value == 1


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        *[("[1,2)", "1<x<2"), (r"1\le x<2", "(1,2)"), ("1<x<3", "(1,2)"), ("x<3", r"(3,\infty)")],
        *[(r"x<1 \text{ and } x>2", r"(-\infty,1)\cup(2,\infty)"), (r"x \ne 2", "2")],
        *[("(1,2)", "(2,1)"), ("(1,2)", r"\{1,2\}"), (r"\{1,2\}", "(1,2)"), ("x=1, y=2", "(2,1)")],
        *[("a=2, b=1", "a=1, b=2"), ("x=2", "y=2"), ("1<x<2", "1<y<2")],
        *[("1,2", "12"), ("12", "1,2"), ("1,2", "1,3"), ("1,2,3", "1,2"), ("1,2", "1,2,3")],
        *[(r"12\%", "0.13"), (r"12\%", "13"), (r"1200\%", r"12\%"), ("12", "0.12")],
        *[(r"0.\overline{36}", "0.36"), (r"\frac{4}{11}", "0.36"), ("2½", "1"), ("√2", "2")],
        *[(r"12\,\text{cm}", "13"), (r"6\,\pi", "6"), ("(12,145)", "(12,144)")],
        *[
            ("", "42"),
            (",", "42"),
            (r"\in", "42"),
            (r"\infty 22", "42"),
            ("x=", "42"),
            ("(,)", "(1,2)"),
            ("<", "1<x"),
        ],
    ],
)
def test_what_is_not_the_answer_scores_zero(answer: str, truth: str) -> None:
    assert mathematics.score_strict(rf"\boxed{{{answer}}}", truth).value == 0


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


@pytest.mark.slow
def test_a_comparison_without_end_is_undecided() -> None:
    with pytest.raises(Undecided, match="SymPy found no verdict within 10 s of processor time"):
        published_equal("9^{9^{9^{9}}}", "8")
    assert published_equal(r"\frac{6}{4}", "1.5")
