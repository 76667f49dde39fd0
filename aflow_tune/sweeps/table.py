"""The table of a sweep's trials, best first: as text, in `sweep.json`, with plots in `sweep.html`.

Each score has its interval, and remarks say that the best of many trials was selected on these
held-out tasks, so that its score is biased upwards.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from aflow_tune.config.changes import masked
from aflow_tune.files import write_json
from aflow_tune.report.charts import Mark, scatter_chart
from aflow_tune.report.page import write_page
from aflow_tune.sweeps.plan import Axis, Plan, settings_of
from aflow_tune.sweeps.study import TrialRecord

JSON_FILE, PAGE_FILE = "sweep.json", "sweep.html"
_ORDER = {"complete": 0, "budget": 0, "pruned": 1, "unfinished": 2, "failed": 3}
_HEAD = ["trial", "state", "score", "95% interval", "step", "seconds", "cost"]
Row = dict[str, Any]
"""A trial, as `_row` makes it and `sweep.json` has it."""


def write(plan: Plan, records: Sequence[TrialRecord]) -> tuple[str, dict[str, Any]]:
    """Write `sweep.json` and `sweep.html`; returns the table as text, and the JSON's content."""
    request = plan.request
    rows = sorted((_row(plan, record) for record in records), key=_rank)
    ended = [row for row in rows if _ORDER[row["state"]] == 0]
    best = ended[0] if ended else None
    pairs = [setting.split("=", 1) for setting in request.overrides]
    settings = [f"{key}={masked(key, text)}" for key, text in pairs]
    content: dict[str, Any] = {
        "config": str(request.config),
        "settings": settings,
        "space": {axis.key: axis.told() for axis in plan.axes},
        "sampler": request.sampler,
        "seed": request.seed,
        "seeds": list(request.seeds),
        "prune": request.prune,
        "objective": request.objective,
        "score": plan.config.report.score or "reward",
        "planned_trials": plan.trials,
        "best_trial": best and best["number"],
        "remarks": [*_remarks(plan, len(ended))],
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "trials": rows,
    }
    write_json(plan.folder / JSON_FILE, content)
    lines = [[*_HEAD, *content["space"]], *map(_cells, rows)]
    reasons = ["", *map(_reason, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line, reason in zip(lines, reasons, strict=True):
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        text.append("  ".join(padded).rstrip())
        text += [f"    {reason}"] if reason else []
    again = ""
    if best is not None:
        words = [str(request.config), *settings, *settings_of(best["values"])]
        again = f"aflow-tune {shlex.join(words)}"
        text += ["", *content["remarks"]]
        text += ["", f"best: trial {best['number']} in {', '.join(best['runs'])}"]
        text.append(f"again: {again}")
    write_page(
        plan.folder / PAGE_FILE,
        "sweep.html.jinja",
        title=f"Sweep: {plan.config.name}",
        facts=[
            ("configuration", content["config"]),
            ("sampler", request.sampler),
            ("objective", f"{request.objective} held-out {content['score']}"),
            ("trials", f"{len(rows)} of {plan.trials}"),
            ("pruned by", request.prune),
        ],
        charts=[*_charts(plan.axes, rows, best)],
        lines=lines,
        reasons=reasons,
        best=best,
        again=again,
        content=content,
        folder=str(plan.folder),
    )
    return "\n".join(text), content


def _row(plan: Plan, record: TrialRecord) -> Row:
    """One trial. `low`, `high`: its 95% interval or None. Seconds and US dollars are over its runs.
    A pruned or unfinished trial has its last reported score."""
    notes = record.notes
    state = "unfinished" if record.state == "running" else record.state
    if state == "complete" and notes.get("budget"):
        state = "budget"
    score, step = record.value, notes.get("step")
    if state in ("pruned", "unfinished") and record.reported:
        step = max(record.reported)
        score = record.reported[step]
    return {
        "number": record.number,
        "state": state,
        "score": score,
        "low": notes.get("low"),
        "high": notes.get("high"),
        "step": step,
        "by_seed": list(notes.get("by_seed") or ()),
        "seconds": notes.get("seconds"),
        "usd": notes.get("usd"),
        "usd_is_approximate": bool(notes.get("about")),
        "values": record.values,
        "runs": [str(plan.folder / plan.run_name(record.number, seed)) for seed in plan.seeds],
        "reason": notes.get("reason"),
    }


def _rank(row: Row) -> tuple[int, float, int]:
    score = -math.inf if row["score"] is None else -row["score"]
    return _ORDER[row["state"]], score, row["number"]


def _cells(row: Row) -> list[str]:
    """The cells below `_HEAD`, then the trial's values; a dash for what is missing."""

    def told(name: str, form: str) -> str:
        return "-" if row[name] is None else f"{row[name]:{form}}"

    about = "~" if row["usd_is_approximate"] else ""
    return [
        str(row["number"]),
        row["state"],
        told("score", ".3f"),
        "-" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}",
        told("step", "d"),
        told("seconds", ".0f"),
        "-" if row["usd"] is None else f"{about}${row['usd']:.2f}",
        *map(_short, row["values"].values()),
    ]


def _reason(row: Row) -> str:
    """Why a trial failed, in one line of at most 160 characters; empty if it did not."""
    line = " ".join((row["reason"] or "").split())[:160]
    return "".join(c if c.isprintable() else "?" for c in line)


def _remarks(plan: Plan, ended: int) -> Iterator[str]:
    """What a reader has to know about the scores of so many trials."""
    if ended and len(plan.seeds) == 1:
        yield (
            "One seed a trial: intervals are over held-out tasks only, not over the luck of "
            "training; a difference within them means nothing. --seeds 0,1,2 repeats every trial."
        )
    elif ended:
        yield (
            f"Scores are means over {len(plan.seeds)} seeds, intervals Student's t over them; a "
            "difference within them means nothing."
        )
    if ended > 1:
        yield (
            f"The best of {ended} was chosen on these held-out tasks, so its score is too high on "
            "average: measure it again on tasks that the sweep has not seen."
        )


def _short(text: str) -> str:
    """A number with four digits if that is shorter; else the text."""
    try:
        return min(text, f"{float(text):.4g}", key=len)
    except ValueError:
        return text


def _charts(
    axes: Sequence[Axis], rows: Sequence[Row], best: Row | None
) -> Iterator[tuple[str, Markup]]:
    """For each key a plot of the scores over its values; lists are evenly spaced."""
    shown = [row for row in rows if row["score"] is not None and row["state"] != "unfinished"]
    for axis in axes if shown else ():

        def place(text: str, axis: Axis = axis) -> float:
            if axis.choices:
                return float(axis.choices.index(text))
            return math.log10(float(text)) if axis.log else float(text)

        marks = []
        for row in shown:
            colour = 2 if row is best else (1 if row["state"] == "pruned" else 0)
            at, name = place(row["values"][axis.key]), f"trial {row['number']}"
            marks.append(Mark(at, row["score"], name, row["low"], row["high"], colour))
        ticks = [(place(text), _short(text)[:12]) for text in axis.probes]
        yield axis.key, Markup(scatter_chart(axis.key, marks, (ticks[0][0], ticks[-1][0]), ticks))
