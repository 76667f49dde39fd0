"""`aflow-tune doctor` as it is typed, on projects that are sound and broken."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_installed import install
from models_server import GOOD, ModelsServer
from project import write_project

from aflow_tune.cli import main
from aflow_tune.doctor.doctor import examination
from aflow_tune.doctor.lines import State

MODELS = """
models:
  judge: {{model: gpt-small, api_key_env: DOCTOR_TEST_KEY, base_url: {url}/v1}}
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No check is given up because the machine is busy; one that hangs ends the process."""
    for name in ("CONFIG_SECONDS", "MACHINE_SECONDS"):
        monkeypatch.setattr(f"aflow_tune.doctor.doctor.{name}", 240.0)
    monkeypatch.setattr("aflow_tune.doctor.services.SECONDS", 60.0)
    monkeypatch.setattr("aflow_tune.commands.doctor._LAST_SECONDS", 60.0)


@pytest.fixture
def project(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("AFLOW_TUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCTOR_TEST_KEY", GOOD)
    config = write_project(tmp_path, tiny_model_dir)
    with ModelsServer() as server:
        config.write_text(config.read_text() + MODELS.format(url=server.url))
        yield config


def _doctor(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def _about(told: dict[str, Any], check: str) -> list[dict[str, Any]]:
    return [line for line in told["lines"] if line["check"] == check]


def test_a_sound_project(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = _doctor(capsys, project, "inline=true")
    wrong = [line for line in told["lines"] if line["state"] == "fault"]
    assert [line for line in wrong if line["check"] not in ("sandbox", "versions")] == []
    assert code == (1 if wrong else 0)
    assert told["ok"] is (not wrong)
    assert _about(told, "ray")[0]["found"] == "not used: the run is one process (inline)"
    assert [line["found"].rpartition(": ")[2] for line in _about(told, "data")] == [
        "12 rows",
        "4 rows",
    ]
    (key,) = _about(told, "keys")
    assert "takes the key in DOCTOR_TEST_KEY" in key["found"]
    assert GOOD not in json.dumps(told)
    assert str(project.parent) in _about(told, "disk")[0]["found"]
    assert not (project.parent / "runs").exists()
    assert not (project.parent / "cache").exists()


def test_everything_that_is_broken_is_told_at_once(
    project: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DOCTOR_TEST_KEY")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    (tmp_path / "train.jsonl").unlink()
    words = (
        f"model.model_path={tmp_path}/gone",
        "algorithm.repeat_times=0",
        "engine=trinity",
        "cluster.ray_address=127.0.0.1:9",
        f"checkpoint_root_dir={tmp_path}/flow.py/runs",
    )
    code, told = _doctor(capsys, project, *words)
    assert code == 2
    assert not told["ok"]
    wrong = {line["check"]: line for line in told["lines"] if line["state"] == "fault"}
    assert {"ray", "disk", "config", "model", "data", "keys"} <= set(wrong)
    assert all(line["cure"] for line in wrong.values())
    assert "train.jsonl" in wrong["data"]["found"]
    assert f"{tmp_path}/gone" in wrong["model"]["found"]
    assert "a file, where a folder is needed" in wrong["disk"]["found"]
    assert wrong["keys"]["cure"] == "export DOCTOR_TEST_KEY=..."
    assert not wrong["ray"]["given"]
    assert wrong["keys"]["given"]


def test_a_configuration_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = _doctor(capsys, tmp_path / "none.yaml", "--offline")
    assert code == 2
    assert "o such file" in _about(told, "config")[0]["found"]
    assert _about(told, "python")[0]["state"] == "ok"
    assert main(["doctor", "seed=1"]) == 2  # an override where the file belongs


def test_a_clash_keeps_the_configuration_from_being_imported(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "site", vllm="0.20.0"))
    checks = {check.name: check.look for check in examination(project)}
    (line,) = checks["config"]()
    assert line.state is State.NOTE
    assert "not examined" in line.found
    assert [*checks["model"](), *checks["data"](), *checks["keys"]()] == []


@pytest.mark.slow
def test_only_json_is_written_whatever_the_workflow_writes(project: Path, tmp_path: Path) -> None:
    flow = tmp_path / "flow.py"
    noise = "import os, sys\nos.write(1, b'raw')\nsys.__stdout__.write('late')\n"
    flow.write_text(noise + flow.read_text())
    words = ["doctor", str(project), "inline=true", "--offline", "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "aflow_tune.cli", *words], capture_output=True, text=True
    )
    assert json.loads(result.stdout)["lines"]
    assert "raw" in result.stderr
    assert "late" in result.stderr
