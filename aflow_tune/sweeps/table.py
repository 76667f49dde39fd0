"""The trials of a sweep in a table: as text, in `sweep.json`, and with plots in `sweep.html`.

The best first. What a score is worth is said beside it: its interval, and that differences within
it mean nothing; the best of many is also the luckiest of many on these held-out tasks.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from markupsafe import Markup

from aflow_tune.config.changes import masked
from aflow_tune.files import write_json
from aflow_tune.report.charts import Mark, nice_ticks, number, scatter_chart, step_ticks
from aflow_tune.report.page import render, write_page
from aflow_tune.sweeps.plan import Plan
from aflow_tune.sweeps.space import Axis, settings_of
from aflow_tune.sweeps.study import TrialRecord

JSON_FILE, PAGE_FILE = "sweep.json", "sweep.html"
_LONGEST_REASON = 160
_LONGEST_NAME = 12
_ORDER = {"complete": 0, "budget": 0, "pruned": 1, "unfinished": 2, "failed": 3}
_COLUMNS = ("trial", "state", "score", "95% interval", "step", "seconds", "cost")
_FIELDS = ("number", "state", "score", "interval", "step", "seconds", "cost")
"""Of the page's template, one for each column."""


@dataclass(frozen=True)
class Row:
    """One trial. `low` and `high` bound the score where that is known; seconds and US dollars
    are of all its runs. A pruned trial has its last score, and comes after those that ended."""

    number: int
    state: str
    score: float | None
    low: float | None
    high: float | None
    step: int | None
    by_seed: list[float]
    seconds: float | None
    usd: float | None
    usd_is_approximate: bool
    values: dict[str, str]
    runs: list[str]
    reason: str | None

    @property
    def ended(self) -> bool:
        """Whether it came to its end with a score."""
        return _ORDER[self.state] == 0

    def cells(self) -> list[str]:
        """What `_COLUMNS` name, and its values; a dash where there is nothing."""
        interval = cost = "-"
        if self.low is not None and self.high is not None:
            interval = f"{self.low:.3f} to {self.high:.3f}"
        if self.usd is not None:
            cost = f"{'~' if self.usd_is_approximate else ''}${self.usd:.2f}"
        return [
            str(self.number),
            self.state,
            "-" if self.score is None else f"{self.score:.3f}",
            interval,
            "-" if self.step is None else str(self.step),
            "-" if self.seconds is None else f"{self.seconds:.0f}",
            cost,
            *(_short(text) for text in self.values.values()),
        ]

    def why(self) -> str:
        """The reason in one line, bounded; empty where there is none."""
        lines = " ".join((self.reason or "").splitlines()).strip()
        shown = "".join(c if c.isprintable() else "?" for c in lines)
        return shown if len(shown) <= _LONGEST_REASON else f"{shown[: _LONGEST_REASON - 3]}..."


def write(
    plan: Plan, records: Sequence[TrialRecord], *, at_the_end: bool = False
) -> tuple[str, dict[str, Any]]:
    """Write `sweep.json` and `sweep.html`; the table as text, and the content of the former."""
    rows = [_row(plan, record) for record in records]
    rows.sort(key=lambda r: (_ORDER[r.state], -math.inf if r.score is None else -r.score, r.number))
    best = next((row for row in rows if row.ended), None)
    content = _as_json(plan, rows, best)
    write_json(plan.folder / JSON_FILE, content)
    _write_page(plan, rows, best)
    text = _as_text(plan, rows, best)
    if at_the_end:
        text += f"\n\n{plan.folder / PAGE_FILE} and {JSON_FILE} beside it"
    return text, content


def _row(plan: Plan, record: TrialRecord) -> Row:
    notes = record.notes
    state = "unfinished" if record.state == "running" else record.state
    if state == "complete" and notes.get("budget"):
        state = "budget"
    score, step = record.value, notes.get("step")
    if state in ("pruned", "unfinished") and record.reported:
        step = max(record.reported)
        score = record.reported[step]
    return Row(
        record.number,
        state,
        score,
        notes.get("low"),
        notes.get("high"),
        step,
        list(notes.get("by_seed") or ()),
        notes.get("seconds"),
        notes.get("usd"),
        bool(notes.get("about")),
        record.values,
        [str(plan.folder / plan.run_name(record.number, seed)) for seed in plan.seeds],
        notes.get("reason"),
    )


def _as_json(plan: Plan, rows: Sequence[Row], best: Row | None) -> dict[str, Any]:
    request = plan.request
    return {
        "config": str(request.config),
        "settings": _shown(plan),
        "space": {axis.key: axis.told() for axis in plan.axes},
        "sampler": request.sampler,
        "seed": request.seed,
        "seeds": list(request.seeds),
        "prune": request.prune,
        "objective": request.objective,
        "score": plan.config.report.score or "reward",
        "planned_trials": plan.trials,
        "best_trial": best and best.number,
        "remarks": [*_remarks(plan, rows, best)],
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "trials": [asdict(row) for row in rows],
    }


def _as_text(plan: Plan, rows: Sequence[Row], best: Row | None) -> str:
    """The table with its remarks."""
    lines = [[*_COLUMNS, *(axis.key for axis in plan.axes)], *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line, why in zip(lines, ["", *(row.why() for row in rows)], strict=True):
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        text.append("  ".join(padded).rstrip())
        text += [f"    {why}"] if why else []
    if best is not None:
        text += ["", *_remarks(plan, rows, best)]
        text += ["", f"best: trial {best.number} in {', '.join(best.runs)}"]
        text.append(f"again: {_again(plan, best)}")
    return "\n".join(text)


def _remarks(plan: Plan, rows: Sequence[Row], best: Row | None) -> Iterator[str]:
    """What must be said beside the table."""
    if best is None:
        return
    others = [row for row in rows if row.ended and row is not best]
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
    if best.low is not None and others:
        near = sum(row.high is not None and row.high >= best.low for row in others)
        yield (
            f"The intervals of {near} of the {len(others)} other trials overlap with that of "
            f"the best, trial {best.number}."
        )
    if others:
        yield (
            f"The best of {len(others) + 1} was chosen on these held-out tasks, so its score is "
            "too high on average: measure it again on tasks that the sweep has not seen."
        )


def _again(plan: Plan, best: Row) -> str:
    """The command that trains with the best settings again."""
    settings = [*_shown(plan), *settings_of(best.values)]
    return " ".join(["aflow-tune", str(plan.request.config), *map(shlex.quote, settings)])


def _shown(plan: Plan) -> list[str]:
    """Settings of the command line, without what must not be shown."""
    pairs = [setting.split("=", 1) for setting in plan.request.overrides]
    return [f"{key}={masked(key, text)}" for key, text in pairs]


def _short(text: str) -> str:
    """A value with four digits where it is a long number."""
    try:
        return min(text, f"{float(text):.4g}", key=len)
    except ValueError:
        return text


# -- the page ------------------------------------------------------------------------------


def _write_page(plan: Plan, rows: Sequence[Row], best: Row | None) -> None:
    request = plan.request
    width = len(_COLUMNS)
    cells = [row.cells() for row in rows]
    text = render(
        "sweep.html.jinja",
        title=f"Sweep: {plan.config.name}",
        facts=[
            ("configuration", str(request.config)),
            ("sampler", request.sampler),
            ("objective", f"{request.objective} held-out {plan.config.report.score or 'reward'}"),
            ("trials", f"{len(rows)} of {plan.trials}"),
            ("pruned by", request.prune),
        ],
        space=[(axis.key, axis.told()) for axis in plan.axes],
        charts=[(name, note, Markup(svg)) for name, note, svg in _charts(plan, rows, best)],
        remarks=[*_remarks(plan, rows, best)],
        keys=[axis.key for axis in plan.axes],
        rows=[
            dict(zip(_FIELDS, line, strict=False)) | {"settings": line[width:], "reason": r.why()}
            for r, line in zip(rows, cells, strict=True)
        ],
        best=best,
        again=_again(plan, best) if best else "",
        written=time.strftime("%Y-%m-%d %H:%M"),
        folder=str(plan.folder),
    )
    write_page(plan.folder / PAGE_FILE, text)


def _charts(plan: Plan, rows: Sequence[Row], best: Row | None) -> Iterator[tuple[str, str, str]]:
    """(title, note, drawing): the scores in the order of the trials, then against each key."""
    shown = [row for row in rows if row.score is not None and row.state != "unfinished"]
    if not shown:
        return
    line: list[tuple[float, float]] = []  # the best so far
    for row in sorted(shown, key=lambda row: row.number):
        if row.state != "pruned":
            top = max(row.score or 0.0, line[-1][1] if line else -math.inf)
            line.append((row.number, top))
    marks = [_mark(row, row.number, best) for row in shown]
    last = max(row.number for row in shown)
    ticks = [(float(at), str(at)) for at in step_ticks(0, last)]
    drawing = scatter_chart("score by trial", marks, (0, last), ticks, line=line)
    yield "Score by trial", "line: the best so far; orange: pruned, its last score", drawing
    for axis in plan.axes:
        yield axis.key, "score against it", _against(axis, shown, best)


def _against(axis: Axis, shown: Sequence[Row], best: Row | None) -> str:
    """The scores over the values of one key: numbers at their place, words side by side."""
    try:
        numbers = [float(text) for text in axis.probes]
    except ValueError:
        numbers = [math.nan]
    logarithmic = axis.log or (min(numbers) > 0 and max(numbers) / min(numbers) >= 100)
    scale = math.log10 if logarithmic else float
    if all(map(math.isfinite, numbers)):
        at = {row.values[axis.key]: scale(float(row.values[axis.key])) for row in shown}
        ends = (scale(min(numbers)), scale(max(numbers)))
        places = nice_ticks(*ends)
        ticks = [
            (p, number(10**p if logarithmic else p)) for p in places if ends[0] <= p <= ends[1]
        ]
    else:
        at = {text: float(place) for place, text in enumerate(axis.choices)}
        ends = (-0.5, len(at) - 0.5)
        ticks = [(place, text[:_LONGEST_NAME]) for text, place in at.items()]
    marks = [_mark(row, at[row.values[axis.key]], best) for row in shown]
    return scatter_chart(axis.key, marks, ends, ticks)


def _mark(row: Row, at: float, best: Row | None) -> Mark:
    colour = 2 if row is best else (1 if row.state == "pruned" else 0)
    return Mark(at, row.score or 0.0, f"trial {row.number}", row.low, row.high, colour)
