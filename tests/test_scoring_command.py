"""`aflow-tune score` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aflow_tune.cli import main


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Options with three rows and their answers: right, wrong, and without a verdict."""
    rows = [{"question": "?", "answer": f"#### {n}"} for n in (1, 2)]
    rows.append({"question": "?", "answer": "none"})
    answers = [{"answer": "It is 1."}, {"answer": "1, 2"}, {"answer": "3"}]
    for name, lines in (("rows", rows), ("answers", answers)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data, given = str(tmp_path / "rows.jsonl"), str(tmp_path / "answers.jsonl")
    return ["score", "--benchmark", "gsm8k", "--data", data, "--answers", given]


def test_json(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "mean": 0.5,
        "strict": [1.0, 0.0, None],
        "published": [1.0, 1.0, None],
        "unscored": 1,
    }


def test_table(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(files) == 0
    shown = capsys.readouterr().out
    assert "a list of candidates" in shown
    assert "3 answers, mean strict 0.500, mean published 1.000, unscored 1" in shown


def test_self_check(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files[:5], "--self-check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["strict"] == [1.0, 1.0, None]


def test_nothing_scored_has_no_mean(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for path in (files[4], files[6]):
        last = Path(path).read_text().splitlines()[-1]
        Path(path).write_text(last + "\n")
    assert main([*files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] is None


def test_bad_answers(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(files[6])
    path.write_text('{"answer": "1"}\n{"answer": 2}\n{"text": "3"}\n')
    assert main(files) == 2
    shown = capsys.readouterr().err
    assert f"{path}:2" in shown
    assert f"{path}:3" in shown
    path.write_text('{"answer": "1"}\n')
    assert main(files) == 2
    assert "1 answers" in capsys.readouterr().err


def test_answers_and_rows_that_a_terminal_or_json_could_stumble_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, answers = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows.write_text(json.dumps({"question": "q", "answer": "#### 3"}) + "\n")
    answers.write_text(json.dumps({"answer": "[/red] 7"}) + "\n")
    command = ["score", "--benchmark", "gsm8k", "--data", str(rows), "--answers", str(answers)]
    assert main(command) == 0
    assert "7 is not 3" in capsys.readouterr().out
    answers.write_text('{"answer": ' + "9" * 5000 + "}\n")
    assert main(command) == 2
    assert f"{answers}:1" in capsys.readouterr().err
