"""Data checks: reading rows with their lines, fields of a workflow, leaks between splits."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from aflow_tune.data.checks import check_fields, check_overlap, check_rows
from aflow_tune.data.fields import most_calls, task_reads
from aflow_tune.data.rows import file_format, read_table

ROWS = [{"question": f"What is {n}?", "answer": str(n)} for n in range(5)]


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(tmp_path: Path, name: str, rows: list[Any]) -> Any:
    return read_table(name, [lines(tmp_path / name, rows)])


def test_formats_give_equal_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    lines(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    cells = "\n".join(f"{row['question']},{row['answer']}" for row in ROWS)
    (tmp_path / "a.csv").write_text(f"question,answer\n{cells}\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write((tmp_path / "a.jsonl").read_text())
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz"):
        found = read_table(name, [tmp_path / name])
        assert found.rows == ROWS, name
        assert (found.total, found.faults, found.complete) == (5, [], True), name
    assert file_format(Path("notes.md")) is None
    assert file_format(Path("model.bin.gz")) is None


def test_broken_rows_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "a"}\n\n{"question": "b"\n[1, 2]\n{"question": "c"}\n')
    found = read_table("a.jsonl", [path])
    assert [fault.where for fault in found.faults] == [f"{path}:3", f"{path}:4"]
    assert "a list" in found.faults[1].found
    assert [row["question"] for row in found.rows] == ["a", "c"]
    assert found.total == 4


@pytest.mark.parametrize(
    ("name", "content", "where", "expected"),
    [
        ("a.json", '[{"a": 1},\n{"a": }]', ":2", "a JSON list of objects"),
        ("a.csv", "q,a\nx,1\ny\n", ":3", "2 cells"),
        ("a.csv", "q,a\nx,1,2\n", ":2", "2 cells"),
        ("a.parquet", "no parquet", "", "a Parquet file"),
        ("a.jsonl", "", "", None),
    ],
)
def test_broken_files(
    tmp_path: Path, name: str, content: str, where: str, expected: str | None
) -> None:
    path = tmp_path / name
    path.write_text(content)
    found = check_rows(read_table(str(path), [path]))
    (fault,) = found.faults
    assert fault.where == f"{path}{where}"
    assert expected is None or expected in fault.expected


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"question": "\xff\xfe"}\n')
    (fault,) = read_table("a.jsonl", [path]).faults
    assert "UTF-8" in fault.expected


def test_rows_of_different_kinds(tmp_path: Path) -> None:
    rows = [{"q": "a", "n": 1}, {"q": "b", "n": 2.5}, {"q": "c", "n": None}, {"q": ["d"], "n": "3"}]
    faults = check_rows(table(tmp_path, "a.jsonl", rows)).faults
    assert [(fault.where.rpartition(":")[2], fault.expected.split(",")[0]) for fault in faults] == [
        ("4", "`q`: text"),
        ("4", "`n`: a number"),
    ]


def test_uneven_columns_are_a_warning(tmp_path: Path) -> None:
    found = check_rows(table(tmp_path, "a.jsonl", [*ROWS, {"question": "x"}]))
    assert found.faults == []
    assert "'answer' (5)" in found.warnings[0]


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


async def extra_first(scale: float, task: dict, model: Any) -> float:
    return scale * task["value"]


async def rebinds(task: dict, model: Any) -> float:
    task = dict(task)
    return task["nothing_is_claimed"]


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    async def inner(*args: Any) -> Any:
        return await function(*args)

    return inner


def test_fields_that_a_function_reads() -> None:
    first = reads_fields.__code__.co_firstlineno
    assert [(read.name, read.tolerant) for read in task_reads(reads_fields)] == [
        ("question", False),
        ("hint", True),
        ("level", True),
        ("answer", False),
    ]
    assert task_reads(reads_fields)[0].where == f"{__file__}:{first + 1}"
    assert task_reads(wrapped(reads_fields)) == task_reads(reads_fields)
    assert [read.name for read in task_reads(Callable())] == ["question"]
    assert [read.name for read in task_reads(functools.partial(extra_first, 2.0))] == ["value"]
    assert task_reads(rebinds) == []
    assert task_reads(len) == []


def test_fields_that_the_rows_lack(tmp_path: Path) -> None:
    rows = [{"qestion": "a", "answer": "1", "hint": "h"}, {"qestion": "b", "hint": "h"}]
    found = check_fields(task_reads(reads_fields), table(tmp_path, "a.jsonl", rows))
    first = reads_fields.__code__.co_firstlineno
    question, answer = found.faults
    assert question.where == f"{__file__}:{first + 1}"
    assert question.found.startswith("'qestion', 'answer', 'hint' in ")
    assert question.cure == "task['qestion']"
    assert answer.found.endswith("a.jsonl:2 (1 of the first 2)")
    (warning,) = found.warnings
    assert "'level'" in warning


async def two_calls(task: dict, model: Any) -> float:
    await model([task["a"]])
    return float(len((await model([task["b"]])).content))


async def call_in_loop(task: dict, model: Any) -> float:
    for _ in range(3):
        await model([task["a"]])
    return 1.0


async def hands_on(task: dict, model: Any) -> float:
    await model([])
    return float(hash(model))


def test_how_often_a_function_calls_its_model() -> None:
    assert most_calls(two_calls) == 2
    assert most_calls(rebinds) == 0
    assert most_calls(call_in_loop) is None
    assert most_calls(hands_on) is None
    assert most_calls(Callable()) == 0


def test_a_leak_is_found_through_case_space_and_marks(tmp_path: Path) -> None:
    training = table(tmp_path, "train.jsonl", [{"id": n, **row} for n, row in enumerate(ROWS)])
    held_out = table(
        tmp_path,
        "test.jsonl",
        [
            {"id": 90, "question": "what  IS 3?", "answer": "three"},
            {"id": 91, "question": "What is 30?", "answer": "30"},
            {"id": 92, "question": "What is 30?", "answer": "30"},
        ],
    )
    found = check_overlap([training], [held_out])
    (fault,) = found.faults
    assert fault.where == "test.jsonl"
    assert fault.found.startswith("1 of 3 items are in both: ")
    assert f"{tmp_path}/test.jsonl:1 = {tmp_path}/train.jsonl:4" in fault.found
    (warning,) = found.warnings
    assert "1 of 3 held-out items repeat" in warning


def test_what_distinguishes_items(tmp_path: Path) -> None:
    """Without a column that asks, a target is part of the task; a context always is."""
    games = table(tmp_path, "a.jsonl", [{"numbers": [1, 2, 3], "target": 6}])
    other_game = table(tmp_path, "b.jsonl", [{"numbers": [1, 2, 3], "target": 5}])
    assert check_overlap([games], [other_game]).faults == []
    passage = table(tmp_path, "c.jsonl", [{"question": "Who?", "context": "Ann did."}])
    other_passage = table(tmp_path, "d.jsonl", [{"question": "Who?", "context": "Bob did."}])
    assert check_overlap([passage], [other_passage]).faults == []
    signs = table(tmp_path, "e.jsonl", [{"question": "3 - 4"}])
    other_sign = table(tmp_path, "f.jsonl", [{"question": "3 + 4"}])
    assert check_overlap([signs], [other_sign]).faults == []


def test_a_long_file_is_counted_but_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aflow_tune.data.rows.ROW_LIMIT", 3)
    found = table(tmp_path, "a.jsonl", ROWS)
    assert (len(found.rows), found.total, found.complete) == (3, 5, False)
    assert "looked at 3 of 5 rows" in check_rows(found).warnings[0]
