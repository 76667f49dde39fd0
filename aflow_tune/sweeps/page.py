"""`sweep.html`: the table of a sweep with its plots, made of the parts of a run's report."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from aflow_tune.report.charts import Mark, nice_ticks, number, scatter_chart, step_ticks
from aflow_tune.report.page import render, write_page
from aflow_tune.sweeps.plan import Plan
from aflow_tune.sweeps.space import Axis
from aflow_tune.sweeps.table import (
    Row,
    best_of,
    command_of_best,
    cost_text,
    interval_text,
    one_line,
    remarks,
    short,
)

PAGE_FILE = "sweep.html"
_TEMPLATE = "sweep.html.jinja"
_BEST, _ENDED, _PRUNED = 2, 0, 1
_LONGEST_NAME = 12


def write_sweep_page(plan: Plan, found: Sequence[Row]) -> Path:
    """Write the page; `found` is in the table's order. Returns its path."""
    from markupsafe import Markup

    request = plan.request
    keys = [axis.key for axis in plan.axes]
    best = best_of(found)
    text = render(
        _TEMPLATE,
        title=f"Sweep: {plan.config.name}",
        facts=[
            ("configuration", str(request.config)),
            ("sampler", request.sampler),
            ("objective", f"{request.objective} held-out {plan.config.report.score or 'reward'}"),
            ("trials", f"{len(found)} of {plan.trials}"),
            ("pruned by", request.prune),
        ],
        space=[(axis.key, axis.told()) for axis in plan.axes],
        charts=[(title, note, Markup(svg)) for title, note, svg in _charts(plan, found)],
        remarks=remarks(plan, found),
        keys=keys,
        rows=[
            {
                "number": row.number,
                "state": row.state,
                "score": "" if row.score is None else f"{row.score:.3f}",
                "interval": interval_text(row),
                "step": "" if row.step is None else row.step,
                "seconds": "" if row.seconds is None else f"{row.seconds:.0f}",
                "cost": cost_text(row),
                "settings": [short(row.values[key]) for key in keys],
                "reason": one_line(row.reason) if row.reason else "",
            }
            for row in found
        ],
        best=best,
        again=command_of_best(plan, best) if best else "",
        written=time.strftime("%Y-%m-%d %H:%M"),
        folder=str(plan.folder),
    )
    return write_page(plan.folder / PAGE_FILE, text)


def _charts(plan: Plan, found: Sequence[Row]) -> list[tuple[str, str, str]]:
    """(title, note, drawing): the scores in the order of the trials, then against each key."""
    shown = [row for row in found if row.score is not None and row.state != "unfinished"]
    if not shown:
        return []
    best = best_of(found)
    first, last = 0, max(row.number for row in shown)
    drawn = [
        (
            "Score by trial",
            "line: the best so far; orange: pruned, its last score",
            scatter_chart(
                "score by trial",
                [_mark(row, row.number, best) for row in shown],
                (first, last),
                [(at, str(at)) for at in step_ticks(first, last)],
                line=_best_so_far(shown),
            ),
        )
    ]
    for axis in plan.axes:
        drawn.append((axis.key, "score against it", _against(axis, shown, best)))
    return drawn


def _best_so_far(shown: Sequence[Row]) -> list[tuple[float, float]]:
    line: list[tuple[float, float]] = []
    for row in sorted(shown, key=lambda row: row.number):
        if row.state != "pruned" and row.score is not None:
            top = max(row.score, line[-1][1]) if line else row.score
            line.append((row.number, top))
    return line


def _against(axis: Axis, shown: Sequence[Row], best: Row | None) -> str:
    """The scores over the values of one key: numbers at their place, words side by side."""
    numbers = _numbers(axis)
    if numbers is None:
        names = list(axis.choices)
        marks = [_mark(row, names.index(row.values[axis.key]), best) for row in shown]
        ticks = [(float(at), _name(name)) for at, name in enumerate(names)]
        return scatter_chart(axis.key, marks, (-0.5, len(names) - 0.5), ticks)
    low, high = min(numbers), max(numbers)
    if axis.log or (low > 0 and high / low >= 100):
        marks = [_mark(row, math.log10(float(row.values[axis.key])), best) for row in shown]
        ends = (math.log10(low), math.log10(high))
        powers = range(math.ceil(ends[0] - 1e-9), math.floor(ends[1] + 1e-9) + 1)
        ticks = [(float(power), number(10.0**power)) for power in powers]
        ticks = ticks or [(end, number(10.0**end)) for end in ends]
        return scatter_chart(axis.key, marks, ends, ticks)
    marks = [_mark(row, float(row.values[axis.key]), best) for row in shown]
    places = [at for at in nice_ticks(low, high) if low <= at <= high]
    return scatter_chart(axis.key, marks, (low, high), [(at, number(at)) for at in places])


def _numbers(axis: Axis) -> list[float] | None:
    """What an axis reaches over, if all of its values are numbers."""
    try:
        found = [float(text) for text in axis.probes]
    except ValueError:
        return None
    return found if all(map(math.isfinite, found)) else None


def _mark(row: Row, at: float, best: Row | None) -> Mark:
    colour = _BEST if row is best else (_PRUNED if row.state == "pruned" else _ENDED)
    return Mark(at, row.score or 0.0, f"trial {row.number}", row.low, row.high, colour)


def _name(text: str) -> str:
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…"
