"""An evaluation's result for people: the table of each task set, and the comparisons in
sentences, on a terminal and as `eval.html`.

A number that is not known is said to be unknown, and one that nothing was counted for is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aflow_tune.evaluation.results import Cell, Result
from aflow_tune.report.charts import Estimate, interval_chart, number
from aflow_tune.report.page import TONES, plain_text, render, transcript_pairs, write_page
from aflow_tune.report.quantities import TRACE_METRICS
from aflow_tune.report.statistics import Interval

PAGE_NAME = "eval.html"
NOTHING, UNKNOWN = "-", "unknown"
_MOST_MEASURES = _MOST_CALLERS = 12
_COLOURS = 6


def rows(cells: Sequence[Cell], score: str) -> list[tuple[str, list[str]]]:
    """The table of one task set: labels with a text for each column. `score` is the name of the
    held-out score."""
    levels = list(cells[0].pass_at)
    failing = any(cell.pass_at_all for cell in cells)
    names = dict.fromkeys(name for cell in cells for name in cell.measures)
    shown = [name for name in names if name != score and not name.startswith(TRACE_METRICS)]
    table: list[tuple[str, Callable[[Cell], str]]] = [
        (f"held-out score ({score})", lambda cell: _interval(cell.score)),
        *((f"pass@{k}", lambda cell, k=k: _interval(cell.pass_at[k])) for k in levels),
        *(
            (
                f"pass@{k}, failed rollouts as unsolved",
                lambda cell, k=k: _interval((cell.pass_at_all or cell.pass_at)[k]),
            )
            for k in levels
            if failing
        ),
        ("solved rollouts", lambda cell: f"{cell.solved} of {len(cell.evaluation.records)}"),
        ("failed rollouts", lambda cell: _counts(cell.evaluation.failures) or "none"),
        ("calls a rollout", lambda cell: _per_rollout(cell, cell.usage.calls)),
        ("tokens a rollout", lambda cell: _per_rollout(cell, cell.usage.total_tokens)),
        ("tokens a solved rollout", lambda cell: _per_solved(cell, cell.tokens_per_solved)),
        ("US dollars", _dollars),
        ("US dollars a solved rollout", _dollars_per_solved),
        *(
            (name, lambda cell, name=name: _interval(cell.measures.get(name)))
            for name in shown[:_MOST_MEASURES]
        ),
        *(
            (name, lambda cell, name=name: _agent(cell, name))
            for name in dict.fromkeys(name for cell in cells for name in cell.agents)
        ),
    ]
    return [(label, [text(cell) for cell in cells]) for label, text in table]


def print_result(result: Result, console: Any) -> None:
    """The table of each task set, its callers, and the comparisons in sentences."""
    from rich.table import Table

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for taskset, cells in result.cells.items():
        tasks = len({record.item for cell in cells for record in cell.evaluation.records})
        extent = f"{tasks} task{'' if tasks == 1 else 's'}"
        if result.samples > 1:
            extent += f", {result.samples} rollouts each"
        say(f"\n{taskset}: {extent}; intervals are 95%, over tasks")
        table = Table()
        table.add_column("")
        for column in result.columns:
            table.add_column(_plain(column.name), justify="right")
        for label, values in rows(cells, str(result.facts.get("score"))):
            table.add_row(_plain(label), *map(_plain, values))
        console.print(table)
        if any(len(cell.callers) > 1 or any(u.outcomes for u in cell.callers) for cell in cells):
            say("calls by caller")
            console.print(_callers(cells))
        for cell in cells:
            reason = next((r.reason for r in cell.evaluation.records if r.reason), None)
            if reason is not None:
                say(f"{cell.column.name}: the first failed rollout says: {reason}")
    for sentence in sentences(result):
        say(sentence)


def _callers(cells: Sequence[Cell]) -> Any:
    from rich.table import Table

    table = Table()
    for heading in ("column", "caller"):
        table.add_column(heading)
    for heading in ("calls", "tokens drawn", "share", "failed", "cut off", "outcomes"):
        table.add_column(heading, justify="right")
    for cell in cells:
        for index, use in enumerate(cell.callers[:_MOST_CALLERS]):
            own = use.usage
            table.add_row(
                _plain(cell.column.name) if index == 0 else "",
                _plain(use.caller),
                str(own.calls),
                UNKNOWN if own.tokens is None else str(own.tokens),
                NOTHING if use.token_share is None else f"{use.token_share:.0%}",
                str(own.failed_calls),
                str(own.truncated_calls),
                _counts(use.outcomes) or NOTHING,
            )
    return table


def sentences(result: Result) -> list[str]:
    """Every comparison, and every warning of the audit."""
    told = []
    for difference in result.differences:
        place = f"{difference.taskset}, " if len(result.cells) > 1 else ""
        name = f"{place}{difference.before.name} -> {difference.after.name}"
        told.append(f"{name}: {' '.join(difference.sentences())}")
    return told + [f"warning: {finding}" for finding in _findings(result)]


def write_eval_page(path: Path, result: Result) -> Path:
    """Write the page of a result; returns its path."""
    from markupsafe import Markup

    facts, score = dict(result.facts), str(result.facts.get("score"))
    shown = {k: v for k, v in facts.items() if k not in ("tasks", "written", "score")}
    shown |= {"rollouts a task": result.samples, "solved from": f"{result.solved_at:g}"}
    text = render(
        "eval.html.jinja",
        title=f"Evaluation: {Path(str(facts.get('config'))).stem}",
        facts=[(name, plain_text(str(v))) for name, v in shown.items() if v is not None],
        score=score,
        columns=[column.name for column in result.columns],
        tasksets=[
            {
                "name": name,
                "rows": rows(cells, score),
                "cells": cells,
                "charts": [(title, note, Markup(svg)) for title, note, svg in _charts(cells)],
            }
            for name, cells in result.cells.items()
        ],
        differences=[
            {
                "name": f"{d.taskset}: {d.before.name} against {d.after.name}",
                "tone": TONES[d.comparison.direction if d.comparison else 0],
                "sentences": d.sentences(),
                "comparison": d.comparison,
            }
            for d in result.differences
        ],
        findings=_findings(result),
        transcripts=[
            (f"{d.taskset}: {d.before.name} and {d.after.name}", transcript_pairs(d.comparison))
            for d in result.differences
            if d.comparison is not None
        ][:2],
        warnings=result.warnings,
        written=facts.get("written"),
        folder=str(path.parent),
    )
    return write_page(path, text)


def _findings(result: Result) -> list[Any]:
    return [f for cells in result.cells.values() for cell in cells for f in cell.findings]


def _charts(cells: Sequence[Cell]) -> list[tuple[str, str, str]]:
    """(title, note, drawing) of score and of pass@k for the most samples; a column a line."""
    sides = list(dict.fromkeys(cell.column.side.name for cell in cells))
    wanted = {"Held-out score": ("mean over tasks", [cell.score for cell in cells])}
    most = max(cells[0].pass_at)
    if most > 1:
        note = "chance that one of the samples solves the task"
        wanted[f"pass@{most}"] = note, [cell.pass_at[most] for cell in cells]
    drawn = []
    for title, (note, intervals) in wanted.items():
        estimates = [
            Estimate(cell.column.name, interval, sides.index(cell.column.side.name) % _COLOURS)
            for cell, interval in zip(cells, intervals, strict=True)
        ]
        known = [interval for interval in intervals if interval is not None]
        if known:
            unit = all(0 <= interval.mean <= 1 for interval in known)
            drawing = interval_chart(title, estimates, (0, 1) if unit else None)
            drawn.append((title, f"{note}, 95% interval", drawing))
    return drawn


def _interval(interval: Interval | None) -> str:
    return NOTHING if interval is None else interval.text()


def _counts(kinds: Any) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _per_rollout(cell: Cell, amount: int | None) -> str:
    return UNKNOWN if amount is None else number(amount / max(1, cell.usage.runs))


def _per_solved(cell: Cell, amount: float | None) -> str:
    if not cell.solved:
        return "none solved"
    return UNKNOWN if amount is None else number(amount)


def _dollars(cell: Cell) -> str:
    if cell.cost.total is not None:
        return number(cell.cost.total)
    known = sum(cell.cost.by_role.values())
    unknown = f"{UNKNOWN} ({', '.join(cell.cost.unknown)})"
    return f"{number(known)} + {unknown}" if known else unknown


def _dollars_per_solved(cell: Cell) -> str:
    return UNKNOWN if cell.cost.total is None else _per_solved(cell, cell.cost_per_solved)


def _agent(cell: Cell, name: str) -> str:
    measure = cell.agents.get(name)
    if measure is None or measure.mean is None:
        return NOTHING
    spread = "" if measure.std is None else f" ± {measure.std:.3f}"
    return f"{measure.mean:.3f}{spread} (n = {measure.count})"


def _plain(text: str) -> str:
    """Text that rich does not take for markup."""
    return text.replace("[", "\\[")
