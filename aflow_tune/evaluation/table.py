"""The rows of an evaluation's table, for a terminal and for a page: a label, a text a column.

A number that is not known is said to be unknown, and one that nothing was counted for is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aflow_tune.evaluation.results import Cell
from aflow_tune.report.charts import number
from aflow_tune.report.quantities import TRACE_METRICS
from aflow_tune.report.statistics import Interval

NOTHING = "-"
UNKNOWN = "unknown"
_MOST_MEASURES = 12


@dataclass(frozen=True)
class Row:
    """`values` are in the order of the columns."""

    label: str
    values: Sequence[str]


def rows(cells: Sequence[Cell], score: str) -> list[Row]:
    """The table of one task set; `score` is the name of the held-out score."""
    levels = list(cells[0].pass_at)
    failing = any(cell.pass_at_all for cell in cells)
    table = [
        _row(cells, f"held-out score ({score})", lambda cell: interval_text(cell.score)),
        *(_pass_row(cells, k) for k in levels),
        *(_pass_row(cells, k, failed=True) for k in levels if failing),
        _row(cells, "solved runs", lambda cell: f"{cell.solved} of {len(cell.evaluation.records)}"),
        _row(cells, "failed runs", _failures),
        _row(cells, "calls a run", lambda cell: _per_run(cell, cell.usage.calls)),
        _row(cells, "tokens a run", lambda cell: _per_run(cell, cell.usage.total_tokens)),
        _row(cells, "tokens a solved run", lambda cell: _per_solved(cell, cell.tokens_per_solved)),
        _row(cells, "US dollars", lambda cell: _money(cell, cell.cost.total)),
        _row(cells, "US dollars a solved run", _dollars_per_solved),
    ]
    names = dict.fromkeys(name for cell in cells for name in cell.measures)
    shown = [name for name in names if name != score and not name.startswith(TRACE_METRICS)]
    for name in shown[:_MOST_MEASURES]:
        table.append(Row(name, [interval_text(cell.measures.get(name)) for cell in cells]))
    for name in dict.fromkeys(name for cell in cells for name in cell.agents):
        table.append(Row(name, [_agent(cell, name) for cell in cells]))
    return table


def interval_text(interval: Interval | None) -> str:
    """`0.120 (0.05 to 0.21)`."""
    if interval is None:
        return NOTHING
    if interval.low is None or interval.high is None:
        return f"{interval.mean:.3f}"
    return f"{interval.mean:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _row(cells: Sequence[Cell], label: str, text: Callable[[Cell], str]) -> Row:
    return Row(label, [text(cell) for cell in cells])


def _pass_row(cells: Sequence[Cell], k: int, failed: bool = False) -> Row:
    label = f"pass@{k}" + (", failed runs as unsolved" if failed else "")

    def text(cell: Cell) -> str:
        levels = cell.pass_at_all if failed and cell.pass_at_all else cell.pass_at
        return interval_text(levels[k])

    return _row(cells, label, text)


def _failures(cell: Cell) -> str:
    kinds = [f"{count} {kind}" for kind, count in cell.evaluation.failures.items()]
    return ", ".join(kinds) or "none"


def _per_run(cell: Cell, amount: int | None) -> str:
    return UNKNOWN if amount is None else number(amount / max(1, cell.usage.runs))


def _per_solved(cell: Cell, amount: float | None) -> str:
    if not cell.solved:
        return "none solved"
    return UNKNOWN if amount is None else number(amount)


def _money(cell: Cell, amount: float | None) -> str:
    if amount is not None:
        return number(amount)
    known = sum(cell.cost.by_role.values())
    unknown = f"{UNKNOWN} ({', '.join(cell.cost.unknown)})"
    return f"{number(known)} + {unknown}" if known else unknown


def _dollars_per_solved(cell: Cell) -> str:
    if cell.cost.total is None:
        return UNKNOWN
    return _per_solved(cell, cell.cost_per_solved)


def _agent(cell: Cell, name: str) -> str:
    measure = cell.agents.get(name)
    if measure is None or measure.mean is None:
        return NOTHING
    spread = "" if measure.std is None else f" ± {measure.std:.3f}"
    return f"{measure.mean:.3f}{spread} (n = {measure.count})"
