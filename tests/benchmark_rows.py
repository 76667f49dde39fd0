"""Rows of the benchmark files, which lie beside the project and are never part of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "shared/data/benchmarks"


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of one file; the test is skipped where the file is absent."""
    path = FOLDER / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there: put the benchmark files beside the project")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
