"""The trials of a sweep in a table: on standard output, in `sweep.json`, and for the page.

The best first. What a score is worth is said beside it: its interval, and that differences within
it mean nothing; the best of many is also the luckiest of many on these held-out tasks.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.files import write_json
from aflow_tune.sweeps.plan import Plan
from aflow_tune.sweeps.space import settings_of
from aflow_tune.sweeps.study import TrialRecord

JSON_FILE = "sweep.json"
_LONGEST_REASON = 160


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
    seconds: float | None
    usd: float | None
    about: bool
    values: dict[str, str]
    places: tuple[str, ...]
    by_seed: tuple[float, ...] = ()
    reason: str | None = None


def rows(plan: Plan, records: Sequence[TrialRecord]) -> list[Row]:
    """All trials, the best first, then those that were pruned, are unfinished or failed."""
    order = {"complete": 0, "budget": 0, "pruned": 1, "unfinished": 2, "failed": 3}
    found = [_row(plan, record) for record in records]
    lowest = float("-inf")
    return sorted(
        found,
        key=lambda row: (
            order[row.state],
            -(row.score if row.score is not None else lowest),
            row.number,
        ),
    )


def best_of(found: Sequence[Row]) -> Row | None:
    """The best trial that came to its end."""
    return next((row for row in found if row.state in ("complete", "budget")), None)


def remarks(plan: Plan, found: Sequence[Row]) -> list[str]:
    """What must be said beside the table; `found` is in its order."""
    best = best_of(found)
    if best is None:
        return []
    said = []
    ended = [row for row in found if row.state in ("complete", "budget")]
    if len(plan.seeds) == 1:
        said.append(
            "One seed a trial: a difference between two trials that lies within their intervals "
            "means nothing, and the intervals are over held-out tasks only, not over the luck of "
            "training. --seeds 0,1,2 repeats every trial."
        )
    else:
        said.append(
            f"Scores are means over {len(plan.seeds)} seeds, intervals Student's t over them; a "
            "difference within them means nothing."
        )
    if best.low is not None:
        others = [row for row in ended if row is not best]
        near = sum(row.high is not None and row.high >= (best.low or 0.0) for row in others)
        if others:
            said.append(
                f"The intervals of {near} of the {len(others)} other trials overlap with that of "
                f"the best, trial {best.number}."
            )
    if len(ended) > 1:
        said.append(
            f"The best of {len(ended)} was chosen on these held-out tasks, so its score is too "
            "high on average: measure it again on tasks that the sweep has not seen."
        )
    return said


def command_of_best(plan: Plan, best: Row) -> str:
    """The command that trains with the best settings again."""
    settings = [*_shown(plan.request.overrides), *settings_of(best.values)]
    return " ".join(["aflow-tune", str(plan.request.config), *map(shlex.quote, settings)])


def render(plan: Plan, found: Sequence[Row]) -> str:
    """The table as text, with its remarks."""
    keys = [axis.key for axis in plan.axes]
    heads = ("trial", "state", "score", "95% interval", "step", "seconds", "cost", *keys)
    lines: list[tuple[str, ...]] = [heads]
    for row in found:
        lines.append(
            (
                str(row.number),
                row.state,
                "-" if row.score is None else f"{row.score:.3f}",
                interval_text(row),
                "-" if row.step is None else str(row.step),
                "-" if row.seconds is None else f"{row.seconds:.0f}",
                cost_text(row),
                *(short(row.values[key]) for key in keys),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    text = []
    for number, line in enumerate(lines, -1):
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        text.append("  ".join(padded).rstrip())
        reason = found[number].reason if number >= 0 else None
        if reason:
            text.append(f"    {one_line(reason)}")
    said = remarks(plan, found)
    if said:
        text += ["", *said]
    best = best_of(found)
    if best is not None:
        text += ["", f"best: trial {best.number} in {', '.join(best.places)}"]
        text.append(f"again: {command_of_best(plan, best)}")
    return "\n".join(text)


def write_json_file(plan: Plan, found: Sequence[Row]) -> Path:
    """Write `sweep.json` into the sweep's folder; returns its path."""
    path = plan.folder / JSON_FILE
    write_json(path, as_json(plan, found))
    return path


def as_json(plan: Plan, found: Sequence[Row]) -> dict[str, Any]:
    """The sweep as plain data."""
    request = plan.request
    best = best_of(found)
    return {
        "config": str(request.config),
        "settings": _shown(request.overrides),
        "space": {axis.key: axis.told() for axis in plan.axes},
        "sampler": request.sampler,
        "seed": request.seed,
        "seeds": list(request.seeds),
        "prune": request.prune,
        "objective": request.objective,
        "score": plan.config.report.score or "reward",
        "planned_trials": plan.trials,
        "best_trial": best and best.number,
        "remarks": remarks(plan, found),
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "trials": [
            {
                "number": row.number,
                "state": row.state,
                "score": row.score,
                "low": row.low,
                "high": row.high,
                "step": row.step,
                "by_seed": list(row.by_seed),
                "seconds": row.seconds,
                "usd": row.usd,
                "usd_is_approximate": row.about,
                "values": row.values,
                "runs": list(row.places),
                "reason": row.reason,
            }
            for row in found
        ],
    }


def interval_text(row: Row) -> str:
    """`0.412 to 0.630`; a dash where there is none."""
    return "-" if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}"


def cost_text(row: Row) -> str:
    """`$0.12`, with a ~ where it is only about right; a dash where it is not known."""
    return "-" if row.usd is None else f"{'~' if row.about else ''}${row.usd:.2f}"


def short(text: str) -> str:
    """A value with four digits where it is a long number."""
    try:
        shown = f"{float(text):.4g}"
    except ValueError:
        return text
    return shown if len(shown) < len(text) else text


def one_line(text: str) -> str:
    """The first line of a reason, bounded."""
    lines = text.splitlines() or [""]
    shown = "".join(c if c.isprintable() else "?" for c in " ".join(lines).strip())
    return shown if len(shown) <= _LONGEST_REASON else f"{shown[: _LONGEST_REASON - 3]}..."


def _row(plan: Plan, record: TrialRecord) -> Row:
    notes = record.notes
    state = {"running": "unfinished"}.get(record.state, record.state)
    if state == "complete" and notes.get("budget"):
        state = "budget"
    places = (str(plan.folder / plan.run_name(record.number, seed)) for seed in plan.seeds)
    last = max(record.reported, default=None)
    score, step = record.value, notes.get("step")
    if record.state in ("pruned", "running") and last is not None:
        score, step = record.reported[last], last
    return Row(
        record.number,
        state,
        score,
        notes.get("low"),
        notes.get("high"),
        step,
        notes.get("seconds"),
        notes.get("usd"),
        bool(notes.get("about")),
        record.values,
        tuple(places),
        tuple(notes.get("by_seed") or ()),
        notes.get("reason"),
    )


def _shown(settings: Sequence[str]) -> list[str]:
    """Settings of the command line, without what must not be shown."""
    from aflow_tune.config.changes import masked

    pairs = [setting.split("=", 1) for setting in settings]
    return [f"{key}={masked(key, text)}" for key, text in pairs]
