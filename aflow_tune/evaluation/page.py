"""An evaluation's result for people: the table of each task set, and the comparisons in
sentences, on a terminal and as `eval.html`.

A number that is not known is said to be unknown; one that nothing was counted for is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from aflow_tune.evaluation.results import Cell, Result
from aflow_tune.report.charts import interval_chart, number
from aflow_tune.report.page import plain_text, render, transcript_pairs, write_page
from aflow_tune.report.quantities import TRACE_METRICS
from aflow_tune.report.statistics import Interval

PAGE_NAME = "eval.html"
NOTHING, UNKNOWN = "-", "unknown"
_MOST_MEASURES = _MOST_CALLERS = 12
_COLOURS = 6


def rows(cells: Sequence[Cell], score: str) -> list[tuple[str, list[str]]]:
    """The table of one task set: labels with a text for each column. `score` is the name of the
    held-out score."""

    def interval(found: Interval | None) -> str:
        return NOTHING if found is None else found.text()

    def per_rollout(cell: Cell, amount: int | None) -> str:
        return UNKNOWN if amount is None else number(amount / max(1, cell.usage.runs))

    def per_solved(cell: Cell, amount: float | None) -> str:
        known = UNKNOWN if amount is None else number(amount)
        return known if cell.solved else "none solved"

    def dollars(cell: Cell) -> str:
        if cell.cost.total is not None:
            return number(cell.cost.total)
        known = sum(cell.cost.by_role.values())
        unknown = f"{UNKNOWN} ({', '.join(cell.cost.unknown)})"
        return f"{number(known)} + {unknown}" if known else unknown

    def dollars_per_solved(cell: Cell) -> str:
        return UNKNOWN if cell.cost.total is None else per_solved(cell, cell.cost_per_solved)

    def agent(cell: Cell, name: str) -> str:
        measure = cell.agents.get(name)
        if measure is None or measure.mean is None:
            return NOTHING
        spread = "" if measure.std is None else f" ± {measure.std:.3f}"
        return f"{measure.mean:.3f}{spread} (n = {measure.count})"

    table: list[tuple[str, Callable[[Cell], str]]] = [
        (f"held-out score ({score})", lambda cell: interval(cell.score)),
        *((f"pass@{k}", lambda cell, k=k: interval(cell.pass_at[k])) for k in cells[0].pass_at),
        *(
            (
                f"pass@{k}, failed rollouts as unsolved",
                lambda cell, k=k: interval((cell.pass_at_all or cell.pass_at)[k]),
            )
            for k in cells[0].pass_at
            if any(cell.pass_at_all for cell in cells)
        ),
        ("solved rollouts", lambda cell: f"{cell.solved} of {len(cell.evaluation.records)}"),
        ("failed rollouts", lambda cell: _counts(cell.evaluation.failures) or "none"),
        ("calls a rollout", lambda cell: per_rollout(cell, cell.usage.calls)),
        ("tokens a rollout", lambda cell: per_rollout(cell, cell.usage.total_tokens)),
        ("tokens a solved rollout", lambda cell: per_solved(cell, cell.tokens_per_solved)),
        ("US dollars", dollars),
        ("US dollars a solved rollout", dollars_per_solved),
    ]
    names = dict.fromkeys(name for cell in cells for name in cell.measures)
    shown = [name for name in names if name != score and not name.startswith(TRACE_METRICS)]
    for name in shown[:_MOST_MEASURES]:
        table.append((name, lambda cell, name=name: interval(cell.measures.get(name))))
    for name in dict.fromkeys(name for cell in cells for name in cell.agents):
        table.append((name, lambda cell, name=name: agent(cell, name)))
    return [(label, [text(cell) for cell in cells]) for label, text in table]


def print_result(result: Result, console: Any) -> None:
    """The table of each task set, its callers, and the comparisons in sentences."""
    from rich.table import Table

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def plain(text: str) -> str:
        """Text that rich does not take for markup."""
        return text.replace("[", "\\[")

    for taskset, cells in result.cells.items():
        tasks = len({record.item for cell in cells for record in cell.evaluation.records})
        extent = f"{tasks} task{'' if tasks == 1 else 's'}"
        if result.samples > 1:
            extent += f", {result.samples} rollouts each"
        say(f"\n{taskset}: {extent}; intervals are 95%, over tasks")
        table = Table("")
        for column in result.columns:
            table.add_column(plain(column.name), justify="right")
        for label, values in rows(cells, str(result.facts.get("score"))):
            table.add_row(plain(label), *map(plain, values))
        console.print(table)
        if any(len(cell.callers) > 1 or any(u.outcomes for u in cell.callers) for cell in cells):
            say("calls by caller")
            table = Table("column", "caller")
            for heading in ("calls", "tokens drawn", "share", "failed", "cut off", "outcomes"):
                table.add_column(heading, justify="right")
            for cell in cells:
                for index, use in enumerate(cell.callers[:_MOST_CALLERS]):
                    own = use.usage
                    table.add_row(
                        "" if index else plain(cell.column.name),
                        plain(use.caller),
                        str(own.calls),
                        UNKNOWN if own.tokens is None else str(own.tokens),
                        NOTHING if use.token_share is None else f"{use.token_share:.0%}",
                        str(own.failed_calls),
                        str(own.truncated_calls),
                        _counts(use.outcomes) or NOTHING,
                    )
            console.print(table)
        for cell in cells:
            reason = next((r.reason for r in cell.evaluation.records if r.reason), None)
            if reason is not None:
                say(f"{cell.column.name}: the first failed rollout says: {reason}")
    for difference in result.differences:
        place = f"{difference.taskset}, " if len(result.cells) > 1 else ""
        name = f"{place}{difference.before.name} -> {difference.after.name}"
        say(f"{name}: {' '.join(difference.sentences())}")
    for cell in result.every:
        for finding in cell.findings:
            say(f"warning: {finding}")


def write_eval_page(path: Path, result: Result) -> Path:
    """Write the page of a result; returns its path."""
    facts, score = dict(result.facts), str(result.facts.get("score"))
    shown = {k: v for k, v in facts.items() if k not in ("tasks", "written", "score")}
    shown |= {"rollouts a task": result.samples, "solved from": f"{result.solved_at:g}"}
    compared = [difference for difference in result.differences if difference.comparison]
    text = render(
        "eval.html.jinja",
        title=f"Evaluation: {Path(str(facts.get('config'))).stem}",
        facts=[(name, plain_text(str(v))) for name, v in shown.items() if v is not None],
        score=score,
        result=result,
        rows=rows,
        charts=_charts,
        transcripts=transcript_pairs,
        compared=compared[:2],
        written=facts.get("written"),
        folder=str(path.parent),
    )
    return write_page(path, text)


def _charts(cells: Sequence[Cell]) -> list[tuple[str, str, Markup]]:
    """(title, note, drawing) of score and of pass@k for the most samples; a column a line."""
    sides = list(dict.fromkeys(cell.column.side.name for cell in cells))
    wanted = {"Held-out score": ("mean over tasks", [cell.score for cell in cells])}
    most = max(cells[0].pass_at)
    if most > 1:
        note = "chance that one of the samples solves the task"
        wanted[f"pass@{most}"] = note, [cell.pass_at[most] for cell in cells]
    drawn = []
    for title, (note, intervals) in wanted.items():
        known = [interval for interval in intervals if interval is not None]
        if known:
            estimates = [
                (cell.column.name, interval, sides.index(cell.column.side.name) % _COLOURS)
                for cell, interval in zip(cells, intervals, strict=True)
            ]
            unit = all(0 <= interval.mean <= 1 for interval in known)
            drawing = interval_chart(title, estimates, (0, 1) if unit else None)
            drawn.append((title, f"{note}, 95% interval", Markup(drawing)))
    return drawn


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())
