"""`eval.html`: an evaluation as one page, made of the parts that a run's report is made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aflow_tune.evaluation.results import Cell, Result
from aflow_tune.evaluation.table import rows
from aflow_tune.report.charts import Estimate, interval_chart
from aflow_tune.report.page import pairs, plain_text, render, write_page

PAGE_NAME = "eval.html"
_TEMPLATE = "eval.html.jinja"
_COLOURS = 6


def write_eval_page(path: Path, result: Result) -> Path:
    """Write the page of a result; returns its path."""
    from markupsafe import Markup

    score = str(result.facts.get("score"))
    tasksets = [
        {
            "name": name,
            "rows": rows(cells, score),
            "cells": cells,
            "charts": [(title, note, Markup(svg)) for title, note, svg in _charts(result, cells)],
        }
        for name, cells in result.cells.items()
    ]
    differences = [
        {
            "name": f"{difference.taskset}: {difference.before.name} against "
            f"{difference.after.name}",
            "tone": _tone(difference.comparison.direction if difference.comparison else 0),
            "sentences": difference.sentences(),
            "comparison": difference.comparison,
        }
        for difference in result.differences
    ]
    transcripts = [
        (f"{d.taskset}: {d.before.name} and {d.after.name}", pairs(d.comparison))
        for d in result.differences
        if d.comparison is not None
    ]
    text = render(
        _TEMPLATE,
        title=f"Evaluation: {Path(str(result.facts.get('config'))).stem}",
        facts=[(name, plain_text(str(value))) for name, value in _shown(result)],
        score=score,
        columns=[column.name for column in result.columns],
        tasksets=tasksets,
        differences=differences,
        findings=[f for cells in result.cells.values() for cell in cells for f in cell.findings],
        transcripts=transcripts[:2],
        warnings=result.warnings,
        written=result.facts.get("written"),
        folder=str(path.parent),
    )
    return write_page(path, text)


def _shown(result: Result) -> list[tuple[str, Any]]:
    facts = [
        (name, value)
        for name, value in result.facts.items()
        if value is not None and name not in ("tasks", "written", "score")
    ]
    return [*facts, ("runs a task", result.samples), ("solved from", f"{result.solved_at:g}")]


def _charts(result: Result, cells: Sequence[Cell]) -> list[tuple[str, str, str]]:
    """(title, note, drawing) of score and of pass@k for the most samples; a column a line."""
    sides = list(dict.fromkeys(column.side.name for column in result.columns))
    most = max(cells[0].pass_at)
    wanted = [("Held-out score", "mean over tasks, 95% interval", lambda cell: cell.score)]
    if most > 1:
        note = "chance that one of the samples solves the task, 95% interval"
        wanted.append((f"pass@{most}", note, lambda cell: cell.pass_at[most]))
    drawn = []
    for title, note, interval in wanted:
        estimates = [
            Estimate(
                cell.column.name, interval(cell), sides.index(cell.column.side.name) % _COLOURS
            )
            for cell in cells
        ]
        known = [e.interval for e in estimates if e.interval is not None]
        if known:
            unit = all(0 <= found.mean <= 1 for found in known)
            drawn.append((title, note, interval_chart(title, estimates, (0, 1) if unit else None)))
    return drawn


def _tone(direction: int) -> str:
    return {1: "rose", -1: "fell", 0: "unclear"}[direction]
