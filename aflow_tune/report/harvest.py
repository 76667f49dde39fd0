"""What a harvest found, for its page: the counts that it left in `harvest.json` as rows to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COUNTS_FILE = "harvest.json"
_MOST_ROWS = 12
_ROWS = (
    ("problems", "problems"),
    ("solved_problems", "of them solved by some graph"),
    ("leaks", "dropped: they stand among the held-out problems"),
    ("refused", "graphs refused by the check"),
    ("failed", "graphs that failed while they ran"),
    ("wrong", "graphs with a wrong answer"),
    ("unscored", "graphs whose answer could not be scored"),
    ("untried", "graphs not judged, since a model did not answer in time"),
    ("solved", "graphs that solved their problem"),
    ("dropped_for_balance", "left out because their structure had its share"),
    ("kept", "pairs kept"),
)


def harvest_rows(run_dir: Path) -> list[tuple[str, str]]:
    """Labels and numbers in reading order; nothing where no harvest ended in this folder."""
    try:
        counts = json.loads((run_dir / COUNTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(counts, Mapping):
        return []
    rows = [(label, str(counts[key])) for key, label in _ROWS if key in counts]
    rows += _parts("pairs from", counts.get("kept_by_source"))
    rows += _parts("pairs of the structure", counts.get("kept_by_structure"))
    executor = counts.get("executor")
    if isinstance(executor, Mapping):
        rows.append(("calls of the executor", str(executor.get("calls"))))
        rows.append(("tokens of the executor", str(executor.get("tokens"))))
    return rows


def _parts(label: str, counts: Any) -> list[tuple[str, str]]:
    if not isinstance(counts, Mapping):
        return []
    most = sorted(counts.items(), key=lambda item: (-float(item[1]), str(item[0])))[:_MOST_ROWS]
    return [(f"{label} {name}", str(count)) for name, count in most]
