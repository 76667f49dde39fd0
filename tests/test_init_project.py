"""What `aflow-tune init` writes validates, passes its own test, and overwrites nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from aflow_tune.cli import main
from aflow_tune.init_project import write_project


def test_the_project_validates_and_its_test_passes(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert main(["init", str(folder)]) == 0
    validation = subprocess.run(
        [sys.executable, "-m", "aflow_tune.cli", "validate", "config.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert validation.returncode == 0, validation.stdout + validation.stderr
    own_test = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert own_test.returncode == 0, own_test.stdout
    assert "1 passed" in own_test.stdout


def test_existing_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "workflow.py").write_text("mine")
    assert tmp_path / "workflow.py" not in write_project(tmp_path)
    assert (tmp_path / "workflow.py").read_text() == "mine"
    assert main(["init", str(tmp_path)]) == 2
