"""Checks of the data: rows with their lines, fields of a workflow, leaks between splits."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from data_project import write_rows

from aflow_tune.cli import main
from aflow_tune.data.checks import check_fields, check_overlap, check_rows
from aflow_tune.data.fields import most_calls, task_reads
from aflow_tune.data.leaks import NEAR, find_leaks, input_text, near_pairs, shared_dialogues
from aflow_tune.data.rows import Table, file_format, read_table

ROWS = [{"question": f"What is {n}?", "answer": str(n)} for n in range(5)]
PROBLEM = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips did Natalia sell altogether in April and May?"
)


def table(tmp_path: Path, name: str, rows: list[Any]) -> Table:
    return read_table(name, [write_rows(tmp_path / name, rows)])


def test_formats_give_equal_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    for name, cell in (("a.csv", ","), ("a.tsv", "\t")):
        cells = "\n".join(f"{row['question']}{cell}{row['answer']}" for row in ROWS)
        (tmp_path / name).write_text(f"question{cell}answer\n{cells}\n")
    rows = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), rows.schema) as writer:
        writer.write_table(rows)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write((tmp_path / "a.jsonl").read_text())
    for path in sorted(tmp_path.iterdir()):
        found = read_table(path.name, [path])
        assert found.rows == ROWS, path.name
        assert (found.total, found.faults, found.complete) == (5, [], True), path.name
    assert file_format(Path("model.bin.gz")) is None


@pytest.mark.parametrize(
    ("name", "content", "places"),
    [
        ("a.jsonl", b'{"q": "a"}\n\n{"q": "b"\n[1, 2]\n{"q": "c"}\n', [":3", ":4"]),
        ("a.jsonl", b'{"question": "\xff\xfe"}\n', [""]),
        ("a.csv", b"q,a\nx,1\ny\n", [":3"]),
        ("a.parquet", b"no parquet", [""]),
        (
            "a.jsonl",
            b'{"q": "a", "n": 1}\n{"q": "b", "n": 2.5}\n{"q": "c", "n": null}\n'
            b'{"q": ["d"], "n": "3"}\n',
            [":4", ":4"],
        ),
    ],
)
def test_broken_rows_and_files_are_named_by_line(
    tmp_path: Path, name: str, content: bytes, places: list[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    faults = check_rows(read_table(str(path), [path])).faults
    assert [fault.where for fault in faults] == [f"{path}{place}" for place in places]


def test_a_long_file_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aflow_tune.data.rows.ROW_LIMIT", 3)
    long = table(tmp_path, "a.jsonl", ROWS)
    assert (len(long.rows), long.total, long.complete) == (3, 5, False)
    assert "3 of 5 rows" in check_rows(long).warnings[0]
    assert read_table("a", [tmp_path / "a.jsonl"], whole=True).complete


async def reads_fields(task: dict, model: Any) -> float:
    first = await model([task["question"]])
    hint = task.get("hint", "")
    level = 0
    if "level" in task and task["level"] > 0:
        level = 1

    def helper(task: dict) -> str:
        return task["unrelated"]

    task["made"] = 1
    name = "computed"
    return float(task["answer"] == first + hint + level + task[name] + helper({}))


class Callable:
    async def __call__(self, row: dict, model: Any) -> float:
        return float(row["question"])


async def rebinds(task: dict, model: Any) -> float:
    task = dict(task)
    return task["nothing_is_claimed"]


def test_fields_that_a_function_reads(tmp_path: Path) -> None:
    place = f"{__file__}:{reads_fields.__code__.co_firstlineno + 1}"
    reads = task_reads(reads_fields)
    assert [read.name for read in reads] == ["question", "hint", "level", "answer"]
    assert [read.tolerant for read in reads] == [False, True, True, False]
    assert reads[0].where == place
    assert [read.name for read in task_reads(Callable())] == ["question"]
    assert task_reads(rebinds) == task_reads(len) == []

    rows = [{"qestion": "a", "answer": "1", "hint": "h"}, {"qestion": "b", "hint": "h"}]
    found = check_fields(reads, table(tmp_path, "a.jsonl", rows))
    question, answer = found.faults
    assert (question.where, question.cure) == (place, "task['qestion']")
    assert "a.jsonl:2" in answer.found
    (warning,) = found.warnings
    assert "'level'" in warning


async def two_calls(task: dict, model: Any) -> float:
    await model([task["a"]])
    return float(len((await model([task["b"]])).content))


async def call_in_loop(task: dict, model: Any) -> float:
    for _ in range(3):
        await model([task["a"]])
    return 1.0


def test_how_often_a_function_calls_its_model() -> None:
    functions = (two_calls, rebinds, Callable(), call_in_loop)
    assert [most_calls(function) for function in functions] == [2, 0, 0, None]


def test_a_leak_is_told_with_both_places(tmp_path: Path) -> None:
    rows = [{"id": n, **row} for n, row in enumerate([*ROWS, {"question": PROBLEM}])]
    training = table(tmp_path, "train.jsonl", rows)
    asked = ("what  IS 3?", "What is 30?", "What is 30?", PROBLEM + " Well?")
    rows = [{"id": 90 + n, "question": text} for n, text in enumerate(asked)]
    held_out = table(tmp_path, "test.jsonl", rows)
    found = check_overlap([training], [held_out])
    (fault,) = found.faults
    assert fault.where == "test.jsonl"
    assert f"1 of 4: {tmp_path}/test.jsonl:1 = {tmp_path}/train.jsonl:4" in fault.found
    near, repeated = found.warnings
    assert f"{tmp_path}/test.jsonl:4 ~ {tmp_path}/train.jsonl:6" in near
    assert "1 of 4 held-out items repeat" in repeated


def kinds(training: list[str], held_out: list[str]) -> list[tuple[int, int, bool]]:
    rows = [[{"question": text, "answer": "x"} for text in texts] for texts in (training, held_out)]
    return [(leak.held_out, leak.trained, leak.exact) for leak in find_leaks(*rows)]


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
        for start in range(0, 60, 20):  # few texts: no phrase is too common
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
        (PROBLEM + " Explain your answer.", False),
        (PROBLEM.replace("of her friends", "of her best friends"), False),
    ],
)
def test_variants_of_one_problem_are_found(changed: str, exact: bool) -> None:
    others = [f"What is the sum of {n} and {n * n}?" for n in range(40)]
    assert kinds([*others, PROBLEM], [others[0] + " Or not?", changed]) == [(1, 40, exact)]


def test_other_problems_and_tasks_of_one_template_are_not_the_same() -> None:
    assert kinds(["What is 3 + 4 + 5?"], ["What is 3 + 4 + 6?", "What is 3 - 4 + 5?"]) == []
    task = (
        "Using each of the numbers {} and {} exactly once and only the four basic operations, "
        "write an expression that equals {}. Show your work and put the expression in tags."
    )
    training = [task.format(n, n + 3, 7 * n) for n in range(60)]
    held_out = [task.format(n, n + 5, 3 * n) for n in range(100, 130)]
    assert kinds(training, held_out) == []


def test_what_makes_an_item_what_it_is() -> None:
    def leaks(trained: dict[str, Any], held_out: dict[str, Any]) -> list[bool]:
        return [leak.exact for leak in find_leaks([trained], [held_out])]

    mbpp = {"prompt": "def f(x):", "code": "return x", "test": "assert f(1)", "task_id": 3}
    other = {"prompt": "def f(x):", "code": "y = x", "test": "assert f(2)", "task_id": 4}
    assert input_text(mbpp) == "def f(x):"
    assert leaks(mbpp, other) == [True]
    # Without tests beside it, code is what is asked about.
    bug = {"instruction": "Find the bug.", "code": "a = 1 / 0"}
    assert leaks(bug, {**bug, "code": "import nothing"}) == []
    # One column under two names is the same question, and where it is from says nothing.
    prepared = {"question": "Who?", "source": "a", "benchmark": "b", "answer": "I"}
    assert leaks(prepared, {"problem": "who?"}) == [True]


def _dialogue(question: str, tool: str, **more: Any) -> dict[str, Any]:
    call = {"function": {"name": tool, "arguments": "{}"}}
    messages = [{"role": "user", "content": question}, {"role": "assistant", "tool_calls": [call]}]
    return {"messages": messages, "tools": [{"name": tool, "description": ""}], **more}


def test_dialogues_are_compared_by_dialogue_scenario_and_tool(tmp_path: Path) -> None:
    train = [_dialogue("a", "x", metadata={"scenario": "one"}), _dialogue("b", "y", id="d1")]
    held_out = [
        _dialogue("a", "x"),
        _dialogue("c", "z", id="d1"),
        _dialogue("d", "w", metadata={"scenario": "one"}),
        _dialogue("e", "y"),
        _dialogue("f", "v"),
    ]
    tables = [table(tmp_path, "train.jsonl", train), table(tmp_path, "test.jsonl", held_out)]
    shared = shared_dialogues(tables[:1], tables[1])
    assert shared is not None
    lines = {name: [int(place.rpartition(":")[2]) for place in getattr(shared, name)]
             for name in ("dialogues", "scenarios", "tools")}  # fmt: skip
    assert lines == {"dialogues": [1, 2], "scenarios": [3], "tools": [1, 4]}
    paths = [str(tmp_path / name) for name in ("train.jsonl", "test.jsonl")]
    assert main(["data", "check", *paths]) == 2


def test_show_marks_what_is_learned(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfit = _dialogue("b", "y")
    unfit["tools"] = [{"name": "z", "description": ""}]
    path = write_rows(tmp_path / "rows.jsonl", [_dialogue("find a", "x"), unfit])
    assert main(["data", "show", str(path), "--model", str(tiny_model_dir)]) == 0
    printed = capsys.readouterr().out
    shown = re.findall(r"⟦(.*?)⟧", printed, re.DOTALL)
    assert [text.endswith("</tool_call><|im_end|>") for text in shown] == [True]
    assert f"{path}:2: a call of 'y'" in printed
    assert "1 rows: retrieval 1" in printed
