"""The trials of a sweep in a table: as text, in `sweep.json`, and with plots in `sweep.html`.

The best first. What a score is worth is said beside it: its interval, and that differences within
it mean nothing; the best of many is also the luckiest of many on these held-out tasks.
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
from aflow_tune.report.charts import Mark, nice_ticks, number, scatter_chart, step_ticks
from aflow_tune.report.page import write_page
from aflow_tune.sweeps.plan import Axis, Plan, settings_of
from aflow_tune.sweeps.study import TrialRecord

JSON_FILE, PAGE_FILE = "sweep.json", "sweep.html"
_LONGEST_REASON = 160
_LONGEST_NAME = 12
_ORDER = {"complete": 0, "budget": 0, "pruned": 1, "unfinished": 2, "failed": 3}
_COLUMNS = {
    # field of the page's template: head of the table
    "number": "trial",
    "state": "state",
    "score": "score",
    "interval": "95% interval",
    "step": "step",
    "seconds": "seconds",
    "cost": "cost",
}
Row = dict[str, Any]
"""A trial as `_row` makes it and `sweep.json` holds it."""


def write(
    plan: Plan, records: Sequence[TrialRecord], *, at_the_end: bool = False
) -> tuple[str, dict[str, Any]]:
    """Write `sweep.json` and `sweep.html`; the table as text, and the content of the former."""
    request = plan.request
    rows = sorted((_row(plan, record) for record in records), key=_rank)
    best = next((row for row in rows if _ended(row)), None)
    pairs = [setting.split("=", 1) for setting in request.overrides]
    settings = [f"{key}={masked(key, text)}" for key, text in pairs]
    again = ["aflow-tune", str(request.config), *map(shlex.quote, settings)]
    again += map(shlex.quote, settings_of(best["values"])) if best else []
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
        "remarks": [*_remarks(plan, rows, best)],
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "trials": rows,
    }
    write_json(plan.folder / JSON_FILE, content)
    _write_page(plan, content, best, " ".join(again))
    lines = [[*_COLUMNS.values(), *content["space"]], *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line, why in zip(lines, ["", *map(_why, rows)], strict=True):
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        text.append("  ".join(padded).rstrip())
        text += [f"    {why}"] if why else []
    if best is not None:
        text += ["", *content["remarks"]]
        text += ["", f"best: trial {best['number']} in {', '.join(best['runs'])}"]
        text.append(f"again: {' '.join(again)}")
    if at_the_end:
        text += ["", f"{plan.folder / PAGE_FILE} and {JSON_FILE} beside it"]
    return "\n".join(text), content


def _row(plan: Plan, record: TrialRecord) -> Row:
    """`low` and `high` bound the score where that is known; seconds and US dollars are of all its
    runs. A pruned trial has its last score, and comes after those that ended."""
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


def _ended(row: Row) -> bool:
    return _ORDER[row["state"]] == 0


def _rank(row: Row) -> tuple[int, float, int]:
    score = -math.inf if row["score"] is None else -row["score"]
    return _ORDER[row["state"]], score, row["number"]


def _cells(row: Row) -> list[str]:
    """What `_COLUMNS` name, and the trial's values; a dash where there is nothing."""
    interval = cost = "-"
    if row["low"] is not None and row["high"] is not None:
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
    if row["usd"] is not None:
        cost = f"{'~' if row['usd_is_approximate'] else ''}${row['usd']:.2f}"
    score, step, seconds = row["score"], row["step"], row["seconds"]
    return [
        str(row["number"]),
        row["state"],
        "-" if score is None else f"{score:.3f}",
        interval,
        "-" if step is None else str(step),
        "-" if seconds is None else f"{seconds:.0f}",
        cost,
        *map(_short, row["values"].values()),
    ]


def _why(row: Row) -> str:
    """The reason in one line, bounded; empty where there is none."""
    line = " ".join((row["reason"] or "").split())[:_LONGEST_REASON]
    return "".join(c if c.isprintable() else "?" for c in line)


def _remarks(plan: Plan, rows: Sequence[Row], best: Row | None) -> Iterator[str]:
    """What must be said beside the table."""
    if best is None:
        return
    others = [row for row in rows if _ended(row) and row is not best]
    if len(plan.seeds) == 1:
        yield (
            "One seed a trial: a difference between two trials that lies within their intervals "
            "means nothing, and the intervals are over held-out tasks only, not over the luck of "
            "training. --seeds 0,1,2 repeats every trial."
        )
    else:
        yield (
            f"Scores are means over {len(plan.seeds)} seeds, intervals Student's t over them; a "
            "difference within them means nothing."
        )
    if best["low"] is not None and others:
        near = sum(row["high"] is not None and row["high"] >= best["low"] for row in others)
        yield (
            f"The intervals of {near} of the {len(others)} other trials overlap with that of "
            f"the best, trial {best['number']}."
        )
    if others:
        yield (
            f"The best of {len(others) + 1} was chosen on these held-out tasks, so its score is "
            "too high on average: measure it again on tasks that the sweep has not seen."
        )


def _short(text: str) -> str:
    """A value with four digits where it is a long number."""
    try:
        return min(text, f"{float(text):.4g}", key=len)
    except ValueError:
        return text


# -- the page ------------------------------------------------------------------------------


def _write_page(plan: Plan, content: dict[str, Any], best: Row | None, again: str) -> None:
    request, rows, width = plan.request, content["trials"], len(_COLUMNS)
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
        space=[*content["space"].items()],
        charts=[(name, note, Markup(svg)) for name, note, svg in _charts(plan, rows, best)],
        remarks=content["remarks"],
        keys=[*content["space"]],
        rows=[
            dict(zip(_COLUMNS, line, strict=False)) | {"settings": line[width:], "reason": why}
            for line, why in zip(map(_cells, rows), map(_why, rows), strict=True)
        ],
        best=best,
        again=again if best else "",
        written=content["written"][:16],
        folder=str(plan.folder),
    )


def _charts(plan: Plan, rows: Sequence[Row], best: Row | None) -> Iterator[tuple[str, str, str]]:
    """(title, note, drawing): the scores in the order of the trials, then against each key."""
    shown = [row for row in rows if row["score"] is not None and row["state"] != "unfinished"]
    if not shown:
        return
    line: list[tuple[float, float]] = []  # the best so far
    for row in sorted(shown, key=lambda row: row["number"]):
        if row["state"] != "pruned":
            top = max(row["score"] or 0.0, line[-1][1] if line else -math.inf)
            line.append((row["number"], top))
    marks = [_mark(row, row["number"], best) for row in shown]
    last = max(row["number"] for row in shown)
    ticks = [(float(at), str(at)) for at in step_ticks(0, last)]
    drawing = scatter_chart("score by trial", marks, (0, last), ticks, line=line)
    yield "Score by trial", "line: the best so far; orange: pruned, its last score", drawing
    for axis in plan.axes:
        yield axis.key, "score against it", _against(axis, shown, best)


def _against(axis: Axis, shown: Sequence[Row], best: Row | None) -> str:
    """The scores over the values of one key: numbers at their place, words side by side."""
    texts = {row["number"]: row["values"][axis.key] for row in shown}
    try:
        numbers = [float(text) for text in axis.probes]
        logarithmic = axis.log or (min(numbers) > 0 and max(numbers) / min(numbers) >= 100)
        scale = math.log10 if logarithmic else float
        at = {text: scale(float(text)) for text in texts.values()}
        ends = (scale(min(numbers)), scale(max(numbers)))
        ticks = [
            (place, number(10**place if logarithmic else place))
            for place in nice_ticks(*ends)
            if ends[0] <= place <= ends[1]
        ]
    except ValueError:
        at = {text: float(place) for place, text in enumerate(axis.choices)}
        ends = (-0.5, len(at) - 0.5)
        ticks = [(place, text[:_LONGEST_NAME]) for text, place in at.items()]
    marks = [_mark(row, at[texts[row["number"]]], best) for row in shown]
    return scatter_chart(axis.key, marks, ends, ticks)


def _mark(row: Row, at: float, best: Row | None) -> Mark:
    colour = 2 if row is best else (1 if row["state"] == "pruned" else 0)
    return Mark(at, row["score"] or 0.0, f"trial {row['number']}", row["low"], row["high"], colour)
