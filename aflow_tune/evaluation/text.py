"""An evaluation's result for a terminal or a log."""

from __future__ import annotations

from typing import Any

from aflow_tune.evaluation.results import Result
from aflow_tune.evaluation.table import rows

_MOST_CALLERS = 12


def print_result(result: Result, console: Any) -> None:
    """The table of each task set, its callers, and the comparisons in sentences."""
    from rich.table import Table

    for taskset, cells in result.cells.items():
        _say(console, f"\n{taskset}: {_extent(result, taskset)}")
        table = Table()
        table.add_column("")
        for column in result.columns:
            table.add_column(column.name.replace("[", "\\["), justify="right")
        for row in rows(cells, str(result.facts.get("score"))):
            table.add_row(row.label, *(value.replace("[", "\\[") for value in row.values))
        console.print(table)
        _print_callers(result, taskset, console)
        for cell in cells:
            reason = next((r.reason for r in cell.evaluation.records if r.reason), None)
            if reason is not None:
                _say(console, f"{cell.column.name}: the first failed run says: {reason}")
    for sentence in sentences(result):
        _say(console, sentence)


def _say(console: Any, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def sentences(result: Result) -> list[str]:
    """Every comparison, and every warning of the audit."""
    several = len(result.cells) > 1
    told = []
    for difference in result.differences:
        place = f"{difference.taskset}, " if several else ""
        name = f"{place}{difference.before.name} -> {difference.after.name}"
        told.append(f"{name}: {' '.join(difference.sentences())}")
    for cells in result.cells.values():
        told += [f"warning: {finding}" for cell in cells for finding in cell.findings]
    return told


def _extent(result: Result, taskset: str) -> str:
    tasks, samples = len(_items(result, taskset)), result.samples
    runs = f", {samples} runs each" if samples > 1 else ""
    return f"{tasks} task{'' if tasks == 1 else 's'}{runs}; intervals are 95%, over tasks"


def _items(result: Result, taskset: str) -> set[int]:
    return {r.item for cell in result.cells[taskset] for r in cell.evaluation.records}


def _print_callers(result: Result, taskset: str, console: Any) -> None:
    from rich.table import Table

    cells = result.cells[taskset]
    if all(len(cell.callers) < 2 and not any(u.outcomes for u in cell.callers) for cell in cells):
        return
    _say(console, "calls by caller")
    table = Table()
    for heading in ("column", "caller"):
        table.add_column(heading)
    for heading in ("calls", "tokens drawn", "share", "failed", "cut off", "outcomes"):
        table.add_column(heading, justify="right")
    for cell in cells:
        for index, use in enumerate(cell.callers[:_MOST_CALLERS]):
            own = use.usage
            table.add_row(
                cell.column.name.replace("[", "\\[") if index == 0 else "",
                use.caller.replace("[", "\\["),
                str(own.calls),
                "unknown" if own.tokens is None else str(own.tokens),
                "-" if use.token_share is None else f"{use.token_share:.0%}",
                str(own.failed_calls),
                str(own.truncated_calls),
                ", ".join(f"{count} {kind}" for kind, count in use.outcomes.items()) or "-",
            )
    console.print(table)
