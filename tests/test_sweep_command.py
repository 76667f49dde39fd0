"""`aflow-tune sweep` as it is typed, and two real trials on a tiny model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from project import write_project

from aflow_tune import cli
from aflow_tune.commands.options import seeds as _seeds
from aflow_tune.runs.listing import State, describe
from aflow_tune.runs.process import last_words


def test_seeds() -> None:
    assert _seeds("0,1,12") == (0, 1, 12)
    for text in ("", "1,", "a", "1,1"):
        with pytest.raises(argparse.ArgumentTypeError):
            _seeds(text)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["sweep", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for told in ("log:1e-6..1e-4", "int:2..16", "--seeds", "exit codes", "goes on"):
        assert told in text


def test_a_space_that_cannot_be_read_is_bad_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["sweep", str(tmp_path / "no.yaml"), "--space", "a.b=5..1"]) == 2
    assert "LOW..HIGH with LOW below HIGH" in capsys.readouterr().err


def test_what_a_command_ended_with(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    assert last_words(path) == ""
    path.write_text("step 1\nValueError: no\n\n")
    assert last_words(path) == "ValueError: no"
    path.write_text("step 1\naflow-tune: refused\n1. here\n    do: this\n")
    assert last_words(path) == "refused 1. here do: this"


@pytest.mark.slow
def test_two_real_trials(
    tmp_path: Path, tiny_model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_project(tmp_path, tiny_model_dir)
    command = ["sweep", str(config), "inline=true", "--json", "--space"]
    command += ["algorithm.optimizer.lr=0.003,0.0003", "--sampler", "grid"]
    assert cli.main(command) == 0
    content = json.loads(capfd.readouterr().out)
    trials = content["trials"]
    assert [trial["state"] for trial in trials] == ["complete", "complete"]
    assert {trial["values"]["algorithm.optimizer.lr"] for trial in trials} == {"0.003", "0.0003"}
    assert trials[0]["score"] >= trials[1]["score"]
    for trial in trials:
        run = describe(Path(trial["runs"][0]))
        assert (run.state, run.step, run.score) == (State.FINISHED, 2, "letters")
        assert trial["step"] == 2  # before training does not count
        assert trial["low"] <= trial["score"] <= trial["high"]
        assert run.command is not None
        lr = f"algorithm.optimizer.lr={trial['values']['algorithm.optimizer.lr']}"
        assert lr in run.command["overrides"]
    assert (tmp_path / "runs" / "tests" / "tiny-sweep" / "sweep.html").is_file()
    assert cli.main(command) == 5
