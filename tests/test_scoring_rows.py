"""Rows from local files with every fault, and hub rows brought into the local form."""

from __future__ import annotations

from pathlib import Path

import pytest

from aflow_tune.errors import BadInput
from aflow_tune.scoring.benchmarks import BENCHMARKS
from aflow_tune.scoring.rows import drop_row, hotpotqa_row, mbpp_row, read_jsonl


def test_every_fault_of_a_file_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "x"}\n\n[1]\n{"b": 1}\n{"a": 1}\n{"a"\n')
    with pytest.raises(BadInput) as caught:
        read_jsonl(path, {"a": str})
    assert [fault.where for fault in caught.value.faults] == [f"{path}:{n}" for n in (3, 4, 5, 6)]
    found = [fault.found for fault in caught.value.faults]
    assert found[:3] == ["a list", "no a, only 'b'", "int: 1"]
    path.write_text('{"a": "x"}\n\n{"a": "y"}\n')
    assert read_jsonl(path, {"a": str}) == [{"a": "x"}, {"a": "y"}]


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_files_that_hold_no_rows(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput):
        read_jsonl(path, {"a": str})


def test_a_row_of_another_benchmark_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    assert len(BENCHMARKS["gsm8k"].load(path)) == 1
    with pytest.raises(BadInput, match="no problem, solution, only 'question', 'answer'"):
        BENCHMARKS["math"].load(path)


def test_mbpp_of_the_hub() -> None:
    row = mbpp_row(
        {
            "task_id": 2,
            "prompt": "Write a function to find the shared elements of two lists.",
            "code": "import math\ndef helper(x):\n    return x\n"
            "def similar(a, b):\n    return tuple(set(a) & set(b))",
            "test_imports": ["import math"],
            "test_list": ["assert set(similar((3, 4), (4, 5))) == set((4,))"],
        }
    )
    assert row["entry_point"] == "similar"
    assert row["prompt"] == (
        "Write a function to find the shared elements of two lists.\n\ndef similar(a, b):\n"
    )
    assert row["test"] == (
        "def check():\n    import math\n    assert set(similar((3, 4), (4, 5))) == set((4,))\n"
    )
    full = mbpp_row(
        {
            "text": "Add.",
            "code": "def add(a, b):\r\n    return a + b",
            "test_list": ["assert add(1, 2) == 3"],
            "test_setup_code": "",
            "challenge_test_list": [],
        }
    )
    assert (full["entry_point"], full["prompt"]) == ("add", "Add.\n\ndef add(a, b):\n")
    assert mbpp_row(row) == row


def test_hotpotqa_of_the_hub() -> None:
    row = hotpotqa_row(
        {
            "id": "5a",
            "question": "Who?",
            "answer": "Ann",
            "type": "bridge",
            "supporting_facts": {"title": ["A"], "sent_id": [1]},
            "context": {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]},
        }
    )
    assert row["context"] == [["A", ["One.", " Two."]], ["B", ["Three."]]]
    assert (row["supporting_facts"], row["_id"]) == ([["A", 1]], "5a")
    assert BENCHMARKS["hotpotqa"].question(row) == (
        "Context: One.  Two.\nThree.\n\nQuestion: Who?\n\nAnswer:"
    )
    assert hotpotqa_row(row) == row


def test_drop_of_the_hub() -> None:
    row = drop_row(
        {
            "passage": "It had 3 towers.",
            "question": "How many towers?",
            "answers_spans": {"spans": ["3", "three", "3"], "types": ["number", "span", "number"]},
        }
    )
    assert row["context"] == "Passage: It had 3 towers.\nQuestion: How many towers?\nAnswer:"
    assert row["ref_text"] == "3|three"
    assert drop_row(row) == row
