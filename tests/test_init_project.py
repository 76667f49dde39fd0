"""What `aflow-tune init` writes validates, passes its own test, and overwrites nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aflow_tune.cli import main
from aflow_tune.commands.init_project import write_project
from aflow_tune.errors import BadInput


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


def test_every_file_is_described_in_the_readme(tmp_path: Path) -> None:
    names = {path.name for path in write_project(tmp_path)}
    assert names == {path.name for path in tmp_path.iterdir()}
    readme = (tmp_path / "README.md").read_text()
    assert [name for name in names - {"README.md"} if f"`{name}`" not in readme] == []


def test_held_out_tasks_are_others_and_as_hard(tmp_path: Path) -> None:
    write_project(tmp_path)
    train, held_out = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("train.jsonl", "held_out.jsonl")
    )
    assert (len(train), len(held_out)) == (40, 20)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    # sums are 2n + 1 for n in 1..60: held out are 3, 6, ..., 60 with mean 31.5, so 64
    assert sum(row["answer"] for row in held_out) / 20 == 64
    assert sum(row["answer"] for row in train) / 40 == 61


@pytest.mark.parametrize("name", ["notes.txt", "notes.txt/mine"])
def test_a_file_in_the_way_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"a file, .*notes\.txt"):
        write_project(tmp_path / name)
    assert (tmp_path / "notes.txt").read_text() == "mine"
