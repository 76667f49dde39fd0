"""The result of an evaluation: a cell for each column on each task set, and the comparisons; and
its display on a terminal and as `eval.html`.

Everything is computed from the records. `Result.to_json` is the content of `eval.json` (whose keys
call a rollout a run).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from aflow_tune.evaluation.columns import Column, Plan
from aflow_tune.report.audit import audit_evaluation
from aflow_tune.report.charts import number
from aflow_tune.report.evaluation import (
    Comparison,
    Evaluation,
    Paired,
    Price,
    callers,
    compare,
    cost,
    mean_by_item,
    pair,
    per_solved,
    usage_of,
)
from aflow_tune.report.page import TONES, plain_text, write_page
from aflow_tune.report.quantities import TRACE_METRICS
from aflow_tune.report.records import EvalRecord
from aflow_tune.report.statistics import (
    Interval,
    share_or_mean_interval,
    standard_deviation,
)
from aflow_tune.scoring.rewards import efficiency, target_tools, timing, tool_accuracy
from aflow_tune.scoring.turns import MEASURES, task_type_of
from aflow_tune.sections import AgentRewardSection

VERSION = 1
"""Version of the format of `eval.json`."""
PAGE_NAME = "eval.html"
NOTHING, UNKNOWN = "-", "unknown"
_MOST_MEASURES = 12


class Cell:
    """One column on one task set, with the statistics of its records.

    `pass_at`: pass@k over scored rollouts; `pass_at_all`: with failed ones as unsolved (empty if
    none failed); `measures`: the interval over items of the reward and each recorded metric;
    `agents`: the measures of tool use over all tasks, and `agents_by_type` those of each task type.

    Args:
        rows: those of the task set, by item.
        price: of the tokens of the column's model.
        samples: rollouts per row.
        solved_at: the least score that counts as solved.
    """

    def __init__(
        self,
        column: Column,
        evaluation: Evaluation,
        rows: Mapping[int, Mapping[str, Any]],
        price: Price | None,
        samples: int,
        solved_at: float,
    ) -> None:
        self.column, self.evaluation = column, evaluation
        records, names = evaluation.records, evaluation.metric_names()
        # k of pass@k: powers of two, and the number of samples.
        levels = sorted({2**n for n in range(samples.bit_length())} | {samples})
        failed = levels if evaluation.failed_rollouts else []
        self.score = evaluation.interval()
        self.pass_at = {k: evaluation.pass_at(k, solved_at) for k in levels}
        self.pass_at_all = {
            k: evaluation.pass_at(k, solved_at, failed_as_unsolved=True) for k in failed
        }
        self.solved = evaluation.solved_rollouts(solved_at)
        self.usage = usage_of(records)
        self.cost = cost(records, price)
        self.callers = callers(records)
        self.measures = {name: evaluation.metric_interval(name) for name in names}
        self.agent_values = agent_values(records, rows, solved_at)
        self.agents = {name: Spread.of(of) for name, of in self.agent_values.items()}
        self.types = types_of(rows)
        self.agents_by_type = {
            kind: {name: Spread.of(only(of, items)) for name, of in self.agent_values.items()}
            for kind, items in self.types.items()
        }
        self.findings = audit_evaluation(evaluation, f" ({column.name})")
        self.tokens_per_solved = per_solved(self.usage.total_tokens, self.solved)
        self.cost_per_solved = per_solved(self.cost.total, self.solved)

    def to_json(self) -> dict[str, Any]:
        evaluation = self.evaluation
        return {
            "items": evaluation.items,
            "runs": len(evaluation.records),
            "score": self.score,
            "pass_at": self.pass_at,
            "pass_at_failed_as_unsolved": self.pass_at_all,
            "solved_runs": self.solved,
            "failed_runs": evaluation.failed_rollouts,
            "failures": evaluation.failures,
            "tokens": {
                **asdict(self.usage),
                "total_tokens": self.usage.total_tokens,
                "per_solved_run": self.tokens_per_solved,
            },
            "cost_usd": {
                "total": self.cost.total,
                "per_solved_run": self.cost_per_solved,
                "by_role": self.cost.by_role,
                "unknown_roles": self.cost.unknown,
            },
            "callers": self.callers,
            "measures": self.measures,
            "agents": {name: asdict(found) for name, found in self.agents.items() if found},
            "agents_by_type": {
                kind: {name: asdict(found) for name, found in of.items() if found}
                for kind, of in self.agents_by_type.items()
            },
            "warnings": self.findings,
        }


@dataclass(frozen=True)
class Difference:
    """Two columns on one task set; `comparison` is None if they share no scored item."""

    taskset: str
    before: Column
    after: Column
    comparison: Comparison | None
    agents: Mapping[str, Paired]
    """The measures of tool use on the tasks that both sides have: `NAME`, or `NAME, TASK TYPE`."""

    @classmethod
    def of(cls, taskset: str, before: Cell, after: Cell) -> Difference:
        comparison = compare(before.evaluation, after.evaluation)
        agents = {}
        for kind, items in [(None, None), *before.types.items()]:
            for name in before.agent_values.keys() & after.agent_values.keys():
                found = pair(*(only(cell.agent_values[name], items) for cell in (before, after)))
                if found is not None:
                    agents[f"{name}, {kind}" if kind else name] = found
        return cls(taskset, before.column, after.column, comparison, dict(sorted(agents.items())))

    @property
    def tone(self) -> str:
        return TONES[self.comparison.direction if self.comparison else 0]

    def sentences(self) -> list[str]:
        """The verdict and its caveats."""
        if self.comparison is None:
            return ["Nothing can be compared: no item was scored on both sides."]
        return [self.comparison.verdict(), *self.comparison.caveats()]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "taskset": self.taskset,
            "before": self.before.name,
            "after": self.after.name,
            "sentences": self.sentences(),
        }
        if self.comparison is not None:
            found |= asdict(self.comparison.primary)
            found["direction"] = self.comparison.direction
            found["items_left_out"] = self.comparison.left_out
        found["agents"] = {
            name: {**asdict(paired), "direction": paired.direction}
            for name, paired in self.agents.items()
        }
        return found


class Result:
    """The whole result; `cells` are by task set, in the order of the columns."""

    def __init__(
        self,
        facts: Mapping[str, Any],
        samples: int,
        solved_at: float,
        plan: Plan,
        cells: Mapping[str, Sequence[Cell]],
        warnings: Sequence[str],
    ) -> None:
        self.facts, self.samples, self.solved_at = facts, samples, solved_at
        self.columns, self.cells, self.warnings = plan.columns, cells, warnings
        self.every = [cell for of_set in cells.values() for cell in of_set]
        self.differences = [
            Difference.of(name, of[before], of[after])
            for name, of_set in cells.items()
            for of in [{cell.column: cell for cell in of_set}]
            for before, after in plan.pairs
        ]

    def why_nothing(self) -> str | None:
        """If no rollout was scored: their number and the most frequent failure; else None."""
        records = [record for cell in self.every for record in cell.evaluation.records]
        if not records or any(record.score is not None for record in records):
            return None
        met = Counter((record.failure or "unscored", record.reason) for record in records)
        (failure, reason), _ = met.most_common(1)[0]
        why = f"{failure}: {reason or 'no reason'}"
        return f"none of {len(records)} rollouts could be scored; {why}"

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values; null: unknown, or nothing to count."""
        columns = [
            {
                "name": column.name,
                "weights": column.side.weights,
                "step": column.side.step,
                "workflow": column.side.workflow,
                "graph": column.side.graph,
                "config": column.side.config,
                "model": column.side.served_model,
                "sampling": dict(column.sampling),
                "prompts": column.prompts,
                "tasksets": {name: of_set[index].to_json() for name, of_set in self.cells.items()},
            }
            for index, column in enumerate(self.columns)
        ]
        found: dict[str, Any] = _plain(
            {
                "version": VERSION,
                **self.facts,
                "samples": self.samples,
                "solved_at": self.solved_at,
                "warnings": self.warnings,
                "columns": columns,
                "comparisons": [difference.to_json() for difference in self.differences],
            }
        )
        return found


def _plain(value: Any) -> Any:
    """Convert to JSON values: dataclasses and mappings to objects, paths to texts."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True)
class Spread:
    """A measure over `count` tasks: their mean with its 95% interval and standard deviation."""

    mean: float
    std: float | None
    count: int
    low: float | None
    high: float | None

    @classmethod
    def of(cls, by_item: Mapping[int, float]) -> Spread | None:
        """Of the value of each task; None if there are none."""
        values = list(by_item.values())
        shares = all(0 <= value <= 1 for value in values)
        found = share_or_mean_interval(values, shares=shares)
        if found is None:
            return None
        return cls(found.mean, standard_deviation(values), found.count, found.low, found.high)

    def text(self) -> str:
        spread = "" if self.std is None else f" ± {self.std:.3f}"
        bounds = "" if self.low is None else f"{self.low:.3f} to {self.high:.3f}, "
        return f"{self.mean:.3f}{spread} ({bounds}n = {self.count})"


def agent_values(
    records: Sequence[EvalRecord], rows: Mapping[int, Mapping[str, Any]], solved_at: float
) -> dict[str, dict[int, float]]:
    """The measures of tool use, by task: of each measure the mean over the task's rollouts that did
    not fail. A rollout has those that it recorded (`aflow_tune.scoring.turns.MEASURES`). One that
    recorded none, on a row with `target_tools` (names of tools, may be empty), has these:

    - tool_selection_accuracy: F1 of the set of tools called against `target_tools`; if that is
      empty, 1 if none was called, else 0.5.
    - plan_success_rate: 1 if every tool of `target_tools` was called, else 0.
    - step_efficiency: `optimal_steps` (default 5) divided by the steps taken, at most 1. A step is
      one answer of the model.
    - timing_precision: 1 if tools were called and wanted, or neither; else 0.
    - end_to_end_success: 1 for a score of at least `solved_at`, else 0; scored rollouts only.
    """
    values: dict[str, list[tuple[int, float | None]]] = defaultdict(list)
    for record in records:
        row = rows.get(record.item, {})
        if record.failure is not None:
            continue
        found: dict[str, float | None] = {
            name: record.metrics[name] for name in MEASURES if name in record.metrics
        }
        if not found and row.get("target_tools") is not None:
            wanted = target_tools(row["target_tools"])
            called = [str(tool.get("name")) for c in record.calls for tool in c.get("tools", ())]
            steps = sum(not call.get("failed") for call in record.calls)
            optimal = int(row.get("optimal_steps") or AgentRewardSection().optimal_steps)
            found = {
                "tool_selection_accuracy": tool_accuracy(called, wanted),
                "plan_success_rate": float(set(wanted) <= set(called)),
                "step_efficiency": efficiency(steps, optimal),
                "timing_precision": timing(called, wanted),
                "end_to_end_success": (
                    None if record.score is None else float(record.score >= solved_at)
                ),
            }
        for name, value in found.items():
            values[name].append((record.item, value))
    by_item = {name: mean_by_item(values[name]) for name in MEASURES if name in values}
    return {name: found for name, found in by_item.items() if found}


def types_of(rows: Mapping[int, Mapping[str, Any]]) -> dict[str, set[int]]:
    """The items of each task type, in the order of the types' names; {} without types."""
    found: dict[str, set[int]] = defaultdict(set)
    for item, row in rows.items():
        if (kind := task_type_of(row)) is not None:
            found[kind].add(item)
    return dict(sorted(found.items()))


def only(values: Mapping[int, float], items: set[int] | None) -> dict[int, float]:
    """The values of these items; None: of all."""
    return {item: value for item, value in values.items() if items is None or item in items}


# Display


def rows(cells: Sequence[Cell], score: str) -> list[tuple[str, list[str]]]:
    """The table of one task set: each label with a text for each column. `score` is the name of
    the held-out score."""

    def interval(found: Interval | None) -> str:
        return NOTHING if found is None else found.text()

    def amount(value: float | None, of: int = 1) -> str:
        return UNKNOWN if value is None else number(value / max(1, of))

    def solved(cell: Cell, value: float | None) -> str:
        return amount(value) if cell.solved else "none solved"

    def dollars(cell: Cell) -> str:
        known, unknown = cell.cost.by_role.values(), cell.cost.unknown
        parts = [number(sum(known))] if known or not unknown else []
        return " + ".join(parts + [f"{UNKNOWN} ({role})" for role in unknown])

    def agent(found: Spread | None) -> str:
        return NOTHING if found is None else found.text()

    def failures(cell: Cell) -> str:
        kinds = cell.evaluation.failures.items()
        return ", ".join(f"{count} {kind}" for kind, count in kinds) or "none"

    levels = list(cells[0].pass_at)
    any_failed = any(cell.pass_at_all for cell in cells)
    names = dict.fromkeys(name for cell in cells for name in cell.measures)
    agents = [name for name in MEASURES if any(name in cell.agents for cell in cells)]
    types = dict.fromkeys(kind for cell in cells for kind in cell.types)
    apart = {score, *agents, *(f"{kind}/{name}" for kind in types for name in agents)}
    shown = [n for n in names if n not in apart and not n.startswith(TRACE_METRICS)]
    of_types = [
        (name, kind)
        for name in agents
        for kind in types
        if any(cell.agents_by_type.get(kind, {}).get(name) for cell in cells)
    ]
    table: list[tuple[str, Callable[[Cell], str]]] = [
        (f"held-out score ({score})", lambda cell: interval(cell.score)),
        *((f"pass@{k}", lambda cell, k=k: interval(cell.pass_at[k])) for k in levels),
        *(
            (
                f"pass@{k}, failed rollouts as unsolved",
                lambda cell, k=k: interval((cell.pass_at_all or cell.pass_at)[k]),
            )
            for k in (levels if any_failed else ())
        ),
        ("solved rollouts", lambda cell: f"{cell.solved} of {len(cell.evaluation.records)}"),
        ("failed rollouts", failures),
        ("calls a rollout", lambda cell: amount(cell.usage.calls, cell.usage.runs)),
        ("tokens a rollout", lambda cell: amount(cell.usage.total_tokens, cell.usage.runs)),
        ("tokens a solved rollout", lambda cell: solved(cell, cell.tokens_per_solved)),
        ("US dollars", dollars),
        ("US dollars a solved rollout", lambda cell: solved(cell, cell.cost_per_solved)),
        *(
            (name, lambda cell, name=name: interval(cell.measures.get(name)))
            for name in shown[:_MOST_MEASURES]
        ),
        *((name, lambda cell, name=name: agent(cell.agents.get(name))) for name in agents),
        *(
            (
                f"{name}, {kind}",
                lambda cell, name=name, kind=kind: agent(
                    cell.agents_by_type.get(kind, {}).get(name)
                ),
            )
            for name, kind in of_types
        ),
    ]
    return [(label, [text(cell) for cell in cells]) for label, text in table]


def print_result(result: Result, console: Any) -> None:
    """Print the table of each task set, the comparisons in sentences, and warnings."""
    from rich.markup import escape
    from rich.table import Table

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for taskset, cells in result.cells.items():
        tasks = len({record.item for cell in cells for record in cell.evaluation.records})
        extent = f"tasks {tasks}, rollouts of each {result.samples}"
        say(f"\n{taskset}: {extent}; intervals are 95%, over tasks")
        table = Table("")
        for column in result.columns:
            table.add_column(escape(column.name), justify="right")
        for label, values in rows(cells, str(result.facts.get("score"))):
            table.add_row(escape(label), *map(escape, values))
        console.print(table)
        for cell in cells:
            reason = next((r.reason for r in cell.evaluation.records if r.reason), None)
            if reason is not None:
                say(f"{cell.column.name}: the first failed rollout says: {reason}")
    for difference in result.differences:
        place = f"{difference.taskset}, " if len(result.cells) > 1 else ""
        name = f"{place}{difference.before.name} -> {difference.after.name}"
        say(f"{name}: {' '.join(difference.sentences())}")
        for measure, paired in difference.agents.items():
            say(f"  {measure} went {paired.numbers()}")
    for cell in result.every:
        for finding in cell.findings:
            say(f"warning: {finding}")


def write_eval_page(path: Path, result: Result) -> Path:
    """Write the HTML page of a result; returns its path."""
    facts, score = dict(result.facts), str(result.facts.get("score"))
    shown = {k: v for k, v in facts.items() if k not in ("tasks", "written", "score")}
    shown |= {"rollouts a task": result.samples, "solved from": f"{result.solved_at:g}"}
    compared = [difference for difference in result.differences if difference.comparison]
    return write_page(
        path,
        "eval.html.jinja",
        title=f"Evaluation: {Path(str(facts.get('config'))).stem}",
        facts=[(name, plain_text(str(v))) for name, v in shown.items() if v is not None],
        score=score,
        result=result,
        rows=rows,
        compared=compared[:2],
        written=facts.get("written"),
        folder=str(path.parent),
    )
