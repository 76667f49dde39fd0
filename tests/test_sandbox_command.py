"""`aflow-tune sandbox` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sandbox_outside import WALLS, need

from aflow_tune.cli import main
from aflow_tune.sandbox import walls
from aflow_tune.sandbox.types import Level


@pytest.mark.parametrize("wall", WALLS)
def test_it_shows_the_wall(wall: str, capsys: pytest.CaptureFixture[str]) -> None:
    need(wall)
    assert main(["sandbox", "--policy", wall]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"level: {wall}\n")
    for line in (*walls.COVERS[Level(wall)], *walls.DOES_NOT_COVER[Level(wall)]):
        assert f"  - {line}\n" in shown
    assert main(["sandbox", "--json", "--policy", wall]) == 0
    assert json.loads(capsys.readouterr().out)["level"] == wall


@pytest.mark.parametrize("wall", [*WALLS, "unsafe_subprocess"])
def test_it_runs_one_program(wall: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need(wall)
    program, stdin = tmp_path / "program.py", tmp_path / "stdin"
    program.write_text("print(input()[::-1])")
    stdin.write_text("olleh\n")
    words = ["sandbox", "run", str(program), "--stdin", str(stdin), "--policy", wall, "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.pop("seconds") > 0
    assert told == {
        "outcome": "finished",
        "exit_code": 0,
        "stdout": "hello\n",
        "stderr": "",
        "limits_hit": [],
        "level": wall,
    }


def test_a_terminal_obeys_nothing_that_a_program_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need(WALLS[0])
    file = tmp_path / "program.py"
    file.write_text("print('\\x1b[2Jcleared\\rhidden \\x9b1A ünï')")
    assert main(["sandbox", "run", str(file)]) == 0
    assert "stdout:\n\\x1b[2Jcleared\\rhidden \\x9b1A ünï\n" in capsys.readouterr().out


def test_limits_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("auto")
    program = tmp_path / "program.py"
    program.write_text("while True: pass")
    assert main(["sandbox", "run", str(program), "--time", "0.5"]) == 1
    shown = capsys.readouterr().out
    assert "outcome:    timed_out" in shown
    assert "limits hit: seconds" in shown
    program.write_text("x = bytearray(300_000_000)")
    assert main(["sandbox", "run", str(program), "--memory", "128", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["outcome"] == "out_of_memory"
    assert main(["sandbox", "run", str(program), "--memory", "512"]) == 0


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, binary = tmp_path / "missing.py", tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert main(["sandbox", "run", str(missing), "--stdin", str(binary)]) == 2
    said = capsys.readouterr().err
    assert "missing.py" in said
    assert "binary" in said
    program = tmp_path / "program.py"
    program.write_text("print(1)")
    assert main(["sandbox", "run", str(program), "--time", "0"]) == 2


def test_no_wall_is_said_and_is_no_failure_of_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from aflow_tune.sandbox import engine

    program = tmp_path / "program.py"
    program.write_text("print(1)")
    monkeypatch.setattr(walls, "find_tool", lambda name: None)
    monkeypatch.setattr(engine, "_engine", None)
    assert main(["sandbox", "run", str(program), "--policy", "bubblewrap", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "sudo apt-get install -y bubblewrap" in captured.err
    assert main(["sandbox", "--policy", "bubblewrap"]) == 1
    assert "sudo apt-get install -y bubblewrap" in capsys.readouterr().err
