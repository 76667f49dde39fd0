"""The page over all stages of a chain: what each did, its held-out score, where its report is.

Reads what the chain left in its folder: `chain.json` (names, modes, status, seconds), and each
stage's own state, metrics and evaluations. Whether a stage learned is its own report's matter;
here scores stand side by side, so that stages on the same held-out tasks can be compared.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.report.evaluation import Comparison, compare, load_evaluations
from aflow_tune.report.html import REPORT_NAME, steps_done
from aflow_tune.report.metrics import read_metrics
from aflow_tune.report.page import render, write_page

CHAIN_FILE = "chain.json"
_TEMPLATE = "chain.html.jinja"


@dataclass(frozen=True)
class Score:
    """Held-out score of one task set in one stage: at its first and its last evaluation.

    `after` is None where there was one evaluation only.
    """

    taskset: str
    items: int
    before: str
    after: str | None


@dataclass(frozen=True)
class StageLine:
    """One stage as it is shown. `link` is relative to the chain's folder, None before it ran."""

    name: str
    mode: str
    status: str
    steps: str
    seconds: str
    model: str
    scores: list[Score]
    link: str | None


def read_chain(folder: Path) -> list[StageLine]:
    """The stages of the chain in `folder`, in their order."""
    entries = json.loads((folder / CHAIN_FILE).read_text(encoding="utf-8"))["stages"]
    return [_line(folder, entry) for entry in entries]


def across_stages(folder: Path) -> list[tuple[str, Comparison]]:
    """For each task set that several stages evaluated: its first evaluation against its last.

    The first of the chain's first stage against the last of its last one. Items are paired.
    """
    entries = json.loads((folder / CHAIN_FILE).read_text(encoding="utf-8"))["stages"]
    whole: dict[str, list[Any]] = {}
    stages: dict[str, set[str]] = {}
    for entry in entries:
        try:
            found = load_evaluations(folder / entry["name"])
        except ValueError:
            continue
        for name, steps in found.items():
            whole.setdefault(name, []).extend(e for e in steps.values() if e.whole)
            stages.setdefault(name, set()).add(entry["name"])
    compared = []
    for name, evaluations in whole.items():
        if len(stages[name]) > 1 and len(evaluations) > 1:
            comparison = compare(evaluations[0], evaluations[-1])
            if comparison is not None:
                compared.append((name, comparison))
    return compared


def write_chain_report(folder: Path) -> Path:
    """Write the page; returns its path."""
    text = render(
        _TEMPLATE,
        title=folder.resolve().name,
        written=time.strftime("%Y-%m-%d %H:%M"),
        stages=read_chain(folder),
        compared=across_stages(folder),
    )
    return write_page(folder / REPORT_NAME, text)


def chain_summary(folder: Path, report: Path) -> str:
    """What is printed at the end of a chain."""
    lines = read_chain(folder)
    rows = [("stage", "mode", "status", "steps", "held-out")]
    rows += [
        (line.name, line.mode, line.status, line.steps or "-", _scores(line.scores) or "-")
        for line in lines
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    sentences = [f"{name}, over all stages: {c.verdict()}" for name, c in across_stages(folder)]
    return "\n".join([*table, "", *sentences, f"report:     {report}"])


def _line(folder: Path, entry: dict[str, Any]) -> StageLine:
    place = folder / entry["name"]
    done, target = steps_done(read_metrics(place)), int(entry.get("target") or 0)
    report = place / REPORT_NAME
    return StageLine(
        name=entry["name"],
        mode=entry["mode"],
        status=entry["status"],
        steps=f"{done} of {target}" if target else "",
        seconds=_clock(float(entry.get("seconds") or 0.0)),
        model=_beginning(folder, str(entry.get("model") or "")),
        scores=_score_list(place),
        link=f"{entry['name']}/{REPORT_NAME}" if report.exists() else None,
    )


def _beginning(folder: Path, model: str) -> str:
    """A model's name; of one that an earlier stage left, its path within the chain's folder."""
    path = Path(model)
    inside = path.is_absolute() and path.is_relative_to(folder.resolve())
    return str(path.relative_to(folder.resolve())) if inside else model


def _score_list(place: Path) -> list[Score]:
    try:
        evaluations = load_evaluations(place)
    except ValueError:  # its own report says what is damaged
        return []
    found = []
    for name, steps in evaluations.items():
        whole = [evaluation for evaluation in steps.values() if evaluation.whole]
        means = [(e, interval) for e in whole if (interval := e.interval()) is not None]
        if means:
            before = f"{means[0][1].mean:.3f}"
            after = f"{means[-1][1].mean:.3f}" if len(means) > 1 else None
            found.append(Score(name, means[0][0].items, before, after))
    return found


def _scores(scores: list[Score]) -> str:
    return ", ".join(
        f"{score.taskset} {score.before}" + (f" -> {score.after}" if score.after else "")
        for score in scores
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if seconds else ""
