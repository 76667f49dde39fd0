"""Leaks between training and held-out rows: equal inputs, near-duplicates, and neither."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from aflow_tune.data.checks import check_overlap
from aflow_tune.data.leaks import NEAR, find_leaks, input_text, near_pairs, words
from aflow_tune.data.rows import read_table

PROBLEM = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips did Natalia sell altogether in April and May?"
)


def question(text: str, **more: object) -> dict[str, object]:
    return {"question": text, "answer": "x", **more}


def kinds(training: list[str], held_out: list[str]) -> list[tuple[int, int, bool]]:
    leaks = find_leaks([question(t) for t in training], [question(t) for t in held_out])
    return [(leak.held_out, leak.trained, leak.exact) for leak in leaks]


def test_the_similarity_by_hand() -> None:
    """'a b c d e f' and 'a b c d e g' share 3 of 5 phrases of three words; threshold inclusive."""
    assert near_pairs(["a b c d e f"], ["a b c d e g"], 0.6) == [(0, 0, 0.6)]
    assert near_pairs(["a b c d e f"], ["a b c d e g"], 0.61) == []
    assert near_pairs(["x y"], ["X  y!"]) == [(0, 0, 1.0)]
    assert near_pairs([""], [""]) == []


def test_the_search_misses_no_pair() -> None:
    draw = random.Random(3)
    texts = [" ".join(draw.choice("abcd") for _ in range(draw.randint(1, 14))) for _ in range(60)]

    def phrases(text: str) -> set[tuple[str, ...]]:
        split = text.split()
        return {tuple(split[at : at + 3]) for at in range(max(1, len(split) - 2))}

    for threshold in (0.3, 0.5, NEAR, 1.0):
        # Few texts: no phrase is so common that it is left out.
        for start in range(0, 60, 20):
            left, right = texts[start : start + 10], texts[start + 10 : start + 20]
            wanted = {
                (i, j)
                for i, a in enumerate(left)
                for j, b in enumerate(right)
                if len(phrases(a) & phrases(b)) >= threshold * len(phrases(a) | phrases(b))
            }
            assert {(i, j) for i, j, _ in near_pairs(left, right, threshold)} == wanted


@pytest.mark.parametrize(
    ("changed", "exact"),
    [
        (PROBLEM.upper().replace(" ", "  "), True),
        (PROBLEM.replace(",", "").replace("?", " ?!"), False),
        (PROBLEM.replace("Natalia sold", "Natalie sold"), False),
        (PROBLEM + " Explain your answer.", False),
        (PROBLEM.replace("of her friends", "of her best friends"), False),
    ],
)
def test_variants_of_one_problem_are_found(changed: str, exact: bool) -> None:
    others = [f"What is the sum of {n} and {n * n}?" for n in range(40)]
    assert kinds([*others, PROBLEM], [others[0] + " Or not?", changed]) == [(1, 40, exact)]


def test_other_problems_are_none() -> None:
    assert kinds(["What is 3 + 4 + 5?"], ["What is 3 + 4 + 6?", "What is 3 - 4 + 5?"]) == []
    assert kinds(["Who wrote Faust?"], ["Who wrote Emma?"]) == []


def test_a_template_does_not_make_its_tasks_the_same() -> None:
    task = (
        "Using each of the numbers {} and {} exactly once and only the four basic operations, "
        "write an expression that equals {}. Show your work and put the expression in tags."
    )
    training = [task.format(n, n + 3, 7 * n) for n in range(60)]
    held_out = [task.format(n, n + 5, 3 * n) for n in range(100, 130)]
    assert kinds(training, held_out) == []
    assert kinds(training, [training[7].replace(".", " .")]) == [(0, 7, False)]


def test_what_makes_an_item_what_it_is() -> None:
    mbpp = {"prompt": "def f(x):", "code": "return x", "test": "assert f(1)", "task_id": 3}
    other = {"prompt": "def f(x):", "code": "y = x", "test": "assert f(2)", "task_id": 4}
    assert input_text(mbpp) == "def f(x):"
    assert [leak.exact for leak in find_leaks([mbpp], [other])] == [True]
    # Without tests beside it, code is what is asked about.
    bug = {"instruction": "Find the bug.", "code": "a = 1 / 0"}
    assert find_leaks([bug], [{**bug, "code": "import nothing"}]) == []
    drop = {"context": "Passage: ...", "ref_text": "12", "completion": "12", "id": 1}
    assert input_text(drop) == "Passage: ..."
    # One column under two names is the same question.
    (leak,) = find_leaks([{"question": "Who?", "answer": "I"}], [{"problem": "who?"}])
    assert leak.exact
    prepared = {"question": "Who?", "source": "a", "benchmark": "b"}
    assert find_leaks([prepared], [{"question": "Who?"}])[0].exact


def test_words_of_other_scripts() -> None:
    assert words("小明有3个苹果。") == ["小", "明", "有", "3", "个", "苹", "果"]
    assert words("Ⅷ + Straße") == ["viii", "+", "strasse"]
    assert kinds(["小明有三个苹果。小红有五个苹果。"], ["小明有三个苹果,小红有五个苹果"]) == [
        (0, 0, False)
    ]


def test_near_duplicates_are_warned_of_with_both_places(tmp_path: Path) -> None:
    tables = {}
    for name, texts in (("train", ["Something else.", PROBLEM]), ("test", [PROBLEM + " Well?"])):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(question(text)) + "\n" for text in texts))
        tables[name] = read_table(f"{name}.jsonl", [file])
    found = check_overlap([tables["train"]], [tables["test"]])
    assert found.faults == []
    (warning,) = found.warnings
    assert warning.startswith("test.jsonl: 1 of 1 held-out items are nearly the same")
    assert f"{tmp_path}/test.jsonl:1 ~ {tmp_path}/train.jsonl:2" in warning
