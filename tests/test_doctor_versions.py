"""Versions known to break, on fake distributions that `importlib.metadata` really reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_installed import install

from aflow_tune.config.clashes import (
    cure_of,
    installed_versions,
    known_clashes,
    matches,
    missing,
)
from aflow_tune.doctor.lines import State
from aflow_tune.doctor.machine import check_versions

ROOT = Path(__file__).parents[1]
TESTED = {
    "torch": "2.13.0+cpu",
    "ray": "2.60.0",
    "trinity-rft": "0.6.0",
    "transformers": "5.23.0",
    "agentscope": "1.0.21",
    "omegaconf": "2.3.1",
    "verl": "0.8.0",
    "pyarrow": "25.0.1",
    "numpy": "1.26.4",
    "mcp": "1.30.0",
    "SQLAlchemy": "2.0.58",
    "openai": "2.54.0",
}


def test_versions_that_pass() -> None:
    for changes in (
        {},
        {"torch": "2.11.0", "vllm": "0.23.0", "transformers": "5.12.1", "numpy": "2.3.5"},
        {"SQLAlchemy": "2.1.9", "greenlet": "3.5.6", "pyarrow": "26.0.1", "numpy": "2.0.0"},
        {"agentscope": "1.0.19"},
        {"agentscope": "2.0.8"},
        {"agentscope": "2.0.10"},
        {"vllm": "dev", "trinity-rft": "0.6.0+local"},  # what cannot be read is not judged
    ):
        versions = TESTED | changes
        assert known_clashes(versions) == missing(versions) == []


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("trinity-rft", "0.6.1"),
        ("vllm", "0.22.0"),
        ("verl", "0.9.0"),
        ("verl", "0.7.1"),
        ("agentscope", "2.0.11"),
        ("agentscope", "2.0.7"),
        ("agentscope", "1.0.18"),
        ("pyarrow", "26.0.1"),
        ("mcp", "2.3.0"),
        ("SQLAlchemy", "2.1.9"),
        ("omegaconf", "2.4.0"),
        ("transformers", "5.12.0"),
    ],
)
def test_a_version_that_breaks_is_found(name: str, version: str) -> None:
    (found,) = known_clashes({**TESTED, name: version})
    clash, text = found
    assert text.startswith(f"{name} {version}")
    # The cure names versions that do not break.
    wanted = clash.cure.replace("[asyncio]", "")
    bounds = wanted[len(wanted.rstrip("0123456789.,<>=! ")) :]
    tried = {"vllm": "0.23.0", "agentscope": "1.0.21 2.0.10"}
    assert any(matches(version, bounds) for version in (TESTED | tried)[name].split())
    assert cure_of(clash) == f"python -m pip install {clash.cure!r}"


@pytest.mark.parametrize(
    ("torch", "vision", "requires", "breaks"),
    [
        ("2.13.0+cpu", "0.29.2", "torch>=2.14.0", True),  # as the index gives it today
        ("2.13.0+cpu", "0.28.0+cpu", "torch==2.13.0", False),
        ("2.11.0+cu130", "0.26.0+cu130", "torch==2.11.0", False),
        ("2.12.0", "0.26.0", "torch==2.11.0", True),
    ],
)
def test_torchvision_of_another_build(
    torch: str,
    vision: str,
    requires: str,
    breaks: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, [requires], torchvision=vision))
    monkeypatch.syspath_prepend(install(tmp_path / "torch", torch=torch))
    found = known_clashes(installed_versions())
    assert [clash.name for clash, _ in found] == (["torchvision"] if breaks else [])
    if breaks:
        assert found[0][1] == f"torchvision {vision} beside torch {torch}"
        assert cure_of(found[0][0]) == "python -m pip uninstall -y torchvision"


def test_a_clash_that_breaks_the_import_gives_our_sentence(tmp_path: Path) -> None:
    """OmegaConf 2.4, which neither Trinity nor we can be imported with."""
    broken = install(tmp_path / "site", omegaconf="2.4.0")
    (broken / "omegaconf").mkdir()
    (broken / "omegaconf" / "__init__.py").write_text("raise ImportError('torn down')\n")
    (tmp_path / "config.yaml").write_text("name: x\n")
    result = subprocess.run(
        [sys.executable, "-m", "aflow_tune.cli", "config.yaml"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{broken}{os.pathsep}{ROOT}"},
    )
    assert result.returncode == 2, result.stderr
    assert "python -m pip install 'omegaconf>=2.3,<2.4'" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_doctor_sorts_clashes_ranges_and_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = install(tmp_path / "ours", ["nosuchthing>=1"], aflow_sample="1.0")
    monkeypatch.syspath_prepend(ours)
    monkeypatch.syspath_prepend(install(tmp_path, verl="0.9.0", openai="3.54.0", yarl="0.1"))
    lines = check_versions("aflow-sample")
    by_state = {state: [line.found for line in lines if line.state is state] for state in State}
    wrong = by_state[State.FAULT]
    assert [text.split(":")[0].split(";")[0] for text in wrong] == [
        "verl 0.9.0",
        "nosuchthing is not installed",
    ]
    notes = "\n".join(by_state[State.NOTE])
    assert "openai 3.54.0" in notes
    assert "yarl 0.1 (tested 1.25.1)" in notes
    assert "verl 0.9.0 (tested 0.8.0)" in notes
    assert all(line.cure for line in lines if line.state is not State.OK)


def test_the_shipped_versions_are_those_of_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.lower() for line in lines if "==" in line and line[0] != "#"}
    tested = (ROOT / "aflow_tune/doctor/tested_cpu.txt").read_text().lower().split()
    assert {*tested} == pins, (
        "grep -E '^[A-Za-z]' constraints.txt | LC_ALL=C sort -f > aflow_tune/doctor/tested_cpu.txt"
    )
