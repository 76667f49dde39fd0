"""What the page of a harvest says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aflow_tune.report.html import COUNTS_FILE, harvest_rows, write_report

COUNTS = {
    "problems": 4,
    "solved_problems": 3,
    "refused": 2,
    "kept": 3,
    "kept_by_source": {"templates": 1, "teacher": 2},
    "kept_by_structure": {"Custom | P>0 0>A": 3},
    "executor": {"calls": 7, "tokens": 90, "usd": None},
}


def test_the_counts_stand_in_reading_order(tmp_path: Path) -> None:
    (tmp_path / COUNTS_FILE).write_text(json.dumps(COUNTS))
    assert harvest_rows(tmp_path) == [
        ("problems", "4"),
        ("of them solved by some graph", "3"),
        ("graphs refused by the check", "2"),
        ("pairs kept", "3"),
        ("pairs from teacher", "2"),
        ("pairs from templates", "1"),
        ("pairs of the structure Custom | P>0 0>A", "3"),
        ("calls of the executor", "7"),
        ("tokens of the executor", "90"),
    ]
    config = {"mode": "harvest", "algorithm.algorithm_type": "ppo"}
    page = write_report(tmp_path, config=config).read_text()
    assert "What was harvested" in page
    assert "Custom | P&gt;0 0&gt;A" in page
    assert "<dt>algorithm</dt>" not in page
    assert "ppo" not in page.partition("<h2>")[0]


@pytest.mark.parametrize("content", [None, "", "[1]", "{"])
def test_a_folder_without_a_finished_harvest_has_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / COUNTS_FILE).write_text(content)
    assert harvest_rows(tmp_path) == []
    assert "What was harvested" not in write_report(tmp_path).read_text()
