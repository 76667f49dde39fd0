"""A project whose model is behind a scripted server, and the command that evaluates it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eval_project import WORKFLOW, Run, numbers
from project import write_project
from scripted_server import ScriptedServer

from aflow_tune.cli import main


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(numbers) as running:
        yield running


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A project of ten held-out tasks; its model is on no disk."""
    path = write_project(tmp_path, Path("nobody/no-such-model"), workflow=WORKFLOW)
    rows = [json.dumps({"question": f"What is {n}?", "answer": str(n)}) for n in range(100, 110)]
    (tmp_path / "held_out.jsonl").write_text("\n".join(rows) + "\n")
    text = path.read_text().replace("flow.py:two_calls", "flow.py:ask_once")
    path.write_text(text.replace("score: letters", "score: right"))
    return path


@pytest.fixture
def evaluate(server: ScriptedServer, config: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command on the server; its exit code and what it printed as JSON."""

    def run(*arguments: str, models: tuple[str, ...] = ("small",)) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        endpoint = ["--endpoint", server.url, "--model", *models]
        code = main(["eval", str(config), *arguments, *endpoint, "--json"])
        printed = capsys.readouterr().out
        return code, json.loads(printed) if printed else {}

    return run
