"""Rows from local files and the hub, and `aflow-tune score` on files of rows and answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aflow_tune.cli import main
from aflow_tune.errors import BadInput
from aflow_tune.scoring.benchmarks import BENCHMARKS
from aflow_tune.scoring.rows import drop_row, hotpotqa_row, mbpp_row, read_jsonl


def test_every_fault_of_a_file_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "x"}\n\n[1]\n{"b": 1}\n{"a": 1}\n{"a"\n')
    with pytest.raises(BadInput) as caught:
        read_jsonl(path, {"a": str})
    assert [fault.where for fault in caught.value.faults] == [f"{path}:{n}" for n in (3, 4, 5, 6)]
    path.write_text('{"a": "x"}\n\n{"a": "y"}\n')
    assert read_jsonl(path, {"a": str}) == [{"a": "x"}, {"a": "y"}]
    for content in (b"", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(BadInput):
            read_jsonl(path, {"a": str})
    path.unlink()
    with pytest.raises(BadInput):
        read_jsonl(path, {"a": str})


def test_mbpp_of_the_hub() -> None:
    row = mbpp_row(
        {
            "prompt": "Find the shared elements.",
            "code": "def helper(x):\n    return x\ndef similar(a, b):\n    return set(a) & set(b)",
            "test_imports": ["import math"],
            "test_list": ["assert set(similar((3, 4), (4, 5))) == set((4,))"],
        }
    )
    assert row["entry_point"] == "similar"
    assert row["prompt"] == "Find the shared elements.\n\ndef similar(a, b):\n"
    assert row["test"] == (
        "def check():\n    import math\n    assert set(similar((3, 4), (4, 5))) == set((4,))\n"
    )
    code = "def add(a, b):\r\n    return a + b"
    full = mbpp_row({"text": "Add.", "code": code, "test_list": ["assert add(1, 2) == 3"]})
    assert (full["entry_point"], full["prompt"]) == ("add", "Add.\n\ndef add(a, b):\n")
    assert mbpp_row(row) == row


def test_hotpotqa_and_drop_of_the_hub() -> None:
    row = hotpotqa_row(
        {
            "id": "5a",
            "question": "Who?",
            "answer": "Ann",
            "supporting_facts": {"title": ["A"], "sent_id": [1]},
            "context": {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]},
        }
    )
    assert row["context"] == [["A", ["One.", " Two."]], ["B", ["Three."]]]
    assert (row["supporting_facts"], row["_id"]) == ([["A", 1]], "5a")
    asked = "Context: One.  Two.\nThree.\n\nQuestion: Who?\n\nAnswer:"
    assert BENCHMARKS["hotpotqa"].question(row) == asked
    assert hotpotqa_row(row) == row
    spans = {"spans": ["3", "three", "3"], "types": ["number", "span", "number"]}
    row = drop_row({"passage": "3 towers.", "question": "How many?", "answers_spans": spans})
    assert row["context"] == "Passage: 3 towers.\nQuestion: How many?\nAnswer:"
    assert (row["ref_text"], drop_row(row)) == ("3|three", row)


# The command


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Options with three rows and their answers: right, wrong, and without a verdict."""
    rows = [{"question": "?", "answer": answer} for answer in ("#### 1", "#### 2", "none")]
    answers = [{"answer": "It is 1."}, {"answer": "1, 2"}, {"answer": "3"}]
    for name, lines in (("rows", rows), ("answers", answers)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data, given = str(tmp_path / "rows.jsonl"), str(tmp_path / "answers.jsonl")
    return ["score", "--benchmark", "gsm8k", "--data", data, "--answers", given]


def test_json_table_and_self_check(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "mean": 0.5,
        "strict": [1.0, 0.0, None],
        "published": [1.0, 1.0, None],
        "unscored": 1,
    }
    assert main(files) == 0
    shown = capsys.readouterr().out
    assert "a list of candidates" in shown
    assert "3 answers, mean strict 0.500, mean published 1.000, unscored 1" in shown
    assert main([*files[:5], "--self-check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["strict"] == [1.0, 1.0, None]
    for path in (files[4], files[6]):
        Path(path).write_text(Path(path).read_text().splitlines()[-1] + "\n")
    assert main([*files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] is None
