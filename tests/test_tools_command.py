"""`aflow-tune tools` from files to a measured index, as a user types it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from word_model import asked_of, tools_of_words, write_word_model

from aflow_tune.cli import main


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A catalogue, pairs and a model on disk."""
    tools, pairs = tmp_path / "tools.jsonl", tmp_path / "pairs.jsonl"
    tools.write_text("".join(json.dumps(tool.to_openai()) + "\n" for tool in tools_of_words()))
    rows = [{"query": one.query, "tools": list(one.tools)} for one in asked_of()]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = write_word_model(tmp_path / "model")
    return {"tools": str(tools), "pairs": str(pairs), "model": str(model)}


def tools(*words: str | Path) -> int:
    return main(["tools", *map(str, words)])


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_train_eval_search_and_index(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, more = tmp_path / "found", tmp_path / "more"
    words = [files["tools"], files["pairs"], "--output", found, "--model", files["model"]]
    assert tools("train", *words, "--hold-out", "0.25", "--epochs", "20") == 0
    assert f"tools eval {found} {files['pairs']}" in capsys.readouterr().out

    assert tools("eval", found, files["pairs"], "--json") == 0
    result = told(capsys)
    seen = result["groups"]["tools seen"]
    assert set(seen["means"]["nDCG@10"]) == {"BM25", "untrained", "trained"}
    assert seen["over_bm25"]["nDCG@10"]["trained"][1] > 0
    counts = [group["queries"] for group in result["groups"].values()]
    assert sum(counts) + result["left_out"] == len(asked_of())

    query = json.loads(Path(files["pairs"]).read_text().splitlines()[0])
    assert tools("search", found, query["query"], "-k", "2", "--json") == 0
    first, _ = told(capsys)
    assert first["function"]["name"] == query["tools"][0]

    # New tools, found by what was learned for the others, and by BM25 alone.
    with open(files["tools"], "a") as catalogue:
        catalogue.write('{"name": "get_weather", "description": "Tells the weather."}\n')
    assert tools("index", files["tools"], "--retriever", found, "--output", more) == 0
    assert tools("search", more, query["query"], "-k", "1") == 0
    assert query["tools"][0] in capsys.readouterr().out.splitlines()[-1]
    assert tools("index", files["tools"], "--output", tmp_path / "plain") == 0
    assert tools("search", tmp_path / "plain", "the weather", "-k", "1") == 0
    assert "get_weather  Tells the weather." in capsys.readouterr().out
    assert tools("eval", tmp_path / "plain", files["pairs"]) == 0
    assert "all: 240 queries" in capsys.readouterr().out


def test_what_is_refused(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    train = ["train", files["tools"], files["pairs"], "--model", files["model"]]
    plain = tmp_path / "plain"
    assert tools("index", files["tools"], "--output", plain) == 0
    cases = {
        "there": [*train, "--output", there],
        "no.jsonl": ["index", "no.jsonl", "--output", tmp_path / "new"],
        "BM25 alone": ["index", files["tools"], "--retriever", plain, "--output", tmp_path / "new"],
        "split dev": [*train, "--split", "dev", "--output", tmp_path / "new"],
        "no token embeddings": [*train[:-1], plain, "--output", tmp_path / "new"],
        "0.7": [*train, "--hold-out", "0.7", "--output", tmp_path / "new"],
        "not a checkpoint": ["search", there, "anything"],
    }
    (plain / "config.json").write_text("{}")  # to pass for a model, which it is not
    for expected, words in cases.items():
        capsys.readouterr()
        assert tools(*words) == 2, expected
        assert expected in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(files: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "aflow_tune.cli", "tools", "train", files["tools"]]
    command += [files["pairs"], "--output", str(tmp_path / "found"), "--model", files["model"]]
    process = subprocess.Popen(
        [*command, "--epochs", "1000000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert any(line.startswith("step ") for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, "nothing was written" in errors) == (3, True), errors
    assert {path.name for path in tmp_path.iterdir()} == {"tools.jsonl", "pairs.jsonl", "model"}
