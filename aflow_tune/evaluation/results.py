"""What an evaluation found: a cell for each column on each task set, and the comparisons.

Computed from the records by `aflow_tune.report`; nothing is measured here. `to_json` is what
`eval.json` holds (its keys call a rollout a run); terminal and page are made from the same objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from aflow_tune.evaluation.columns import Column, Plan
from aflow_tune.report.audit import Finding, audit_evaluation
from aflow_tune.report.evaluation import Comparison, Evaluation, compare
from aflow_tune.report.records import EvalRecord
from aflow_tune.report.statistics import Interval, mean, standard_deviation
from aflow_tune.report.usage import CallerUse, Cost, Price, Usage, callers, cost, per_solved, usage
from aflow_tune.scoring.agent_reward import efficiency, target_tools, timing, tool_accuracy
from aflow_tune.sections import AgentRewardSection

VERSION = 1
"""Of the form of `eval.json`."""


@dataclass(frozen=True)
class AgentMeasure:
    """Over the rollouts that could be measured. `std` is None for fewer than two of them."""

    mean: float | None
    std: float | None
    count: int


@dataclass(frozen=True)
class Cell:
    """One column on one task set.

    `price` is what the tokens of the column's model cost, `rows` those of the task set by item,
    `samples` the rollouts of each, `solved_at` the score from which on one has solved its task.
    """

    column: Column
    evaluation: Evaluation
    rows: Mapping[int, Mapping[str, Any]]
    price: Price | None
    samples: int
    solved_at: float

    @property
    def score(self) -> Interval | None:
        return self.evaluation.interval()

    @cached_property
    def pass_at(self) -> dict[int, Interval | None]:
        """pass@k over scored rollouts."""
        levels = pass_levels(self.samples)
        return {k: self.evaluation.pass_at(k, self.solved_at) for k in levels}

    @cached_property
    def pass_at_all(self) -> dict[int, Interval | None]:
        """The same with failed rollouts as unsolved; empty where none failed."""
        levels = pass_levels(self.samples) if self.evaluation.failed_rollouts else []
        at = self.solved_at
        return {k: self.evaluation.pass_at(k, at, failed_as_unsolved=True) for k in levels}

    @property
    def solved(self) -> int:
        return self.evaluation.solved_rollouts(self.solved_at)

    @cached_property
    def usage(self) -> Usage:
        return usage(self.evaluation.records)

    @cached_property
    def cost(self) -> Cost:
        return cost(self.evaluation.records, self.price)

    @cached_property
    def callers(self) -> list[CallerUse]:
        return callers(self.evaluation.records)

    @cached_property
    def measures(self) -> dict[str, Interval | None]:
        """Reward and every recorded metric, over items."""
        names = self.evaluation.metric_names()
        return {name: self.evaluation.metric_interval(name) for name in names}

    @cached_property
    def agents(self) -> dict[str, AgentMeasure]:
        return measure_agents(self.evaluation.records, self.rows, self.solved_at)

    @cached_property
    def findings(self) -> list[Finding]:
        return audit_evaluation(self.evaluation, f" ({self.column.name})")

    @property
    def tokens_per_solved(self) -> float | None:
        """Tokens of all rollouts, prompts included, for each solved one."""
        return per_solved(self.usage.total_tokens, self.solved)

    @property
    def cost_per_solved(self) -> float | None:
        """US dollars of all rollouts for each solved one; None where a price is unknown."""
        return per_solved(self.cost.total, self.solved)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; None is null: not known, or nothing to count."""
        evaluation = self.evaluation
        return {
            "items": evaluation.items,
            "runs": len(evaluation.records),
            "score": _plain(self.score),
            "pass_at": {str(k): _plain(value) for k, value in self.pass_at.items()},
            "pass_at_failed_as_unsolved": {
                str(k): _plain(value) for k, value in self.pass_at_all.items()
            },
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
                "unknown_roles": list(self.cost.unknown),
            },
            "callers": [asdict(use) for use in self.callers],
            "measures": {name: _plain(value) for name, value in self.measures.items()},
            "agents": {name: asdict(value) for name, value in self.agents.items()},
            "warnings": [asdict(finding) for finding in self.findings],
        }


@dataclass(frozen=True)
class Difference:
    """Two columns on one task set; `comparison` is None where they share no scored item."""

    taskset: str
    before: Column
    after: Column
    comparison: Comparison | None

    def sentences(self) -> list[str]:
        """The verdict and what has to be said beside it."""
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
            found |= asdict(self.comparison.primary) | {
                "direction": self.comparison.direction,
                "items_left_out": self.comparison.left_out,
            }
        return found


@dataclass(frozen=True)
class Result:
    """Everything that was measured. `facts` says with what, in the order in which it is shown;
    `cells` are by task set, in the order of the columns."""

    facts: Mapping[str, Any]
    samples: int
    solved_at: float
    columns: Sequence[Column]
    cells: Mapping[str, Sequence[Cell]]
    differences: Sequence[Difference]
    warnings: Sequence[str] = field(default_factory=tuple)

    def why_nothing(self) -> str | None:
        """Where nothing could be scored: how many rollouts there are, and what most of them met."""
        every = [cell for cells in self.cells.values() for cell in cells]
        records = [record for cell in every for record in cell.evaluation.records]
        if not records or any(record.score is not None for record in records):
            return None
        met = Counter((record.failure or "unscored", record.reason) for record in records)
        (failure, reason), _ = met.most_common(1)[0]
        why = f"{failure}: {reason or 'no reason'}"
        return f"none of {len(records)} rollouts could be scored; {why}"

    def to_json(self) -> dict[str, Any]:
        """The whole result as plain JSON values."""
        return {
            "version": VERSION,
            **self.facts,
            "samples": self.samples,
            "solved_at": self.solved_at,
            "warnings": list(self.warnings),
            "columns": [
                {
                    "name": column.name,
                    "weights": _path(column.side.weights),
                    "step": column.side.step,
                    "workflow": column.side.workflow,
                    "graph": _path(column.side.graph),
                    "config": _path(column.side.config),
                    "model": column.side.served_model,
                    "sampling": dict(column.sampling),
                    "prompts": _path(column.prompts),
                    "tasksets": {
                        name: cells[index].to_json() for name, cells in self.cells.items()
                    },
                }
                for index, column in enumerate(self.columns)
            ],
            "comparisons": [difference.to_json() for difference in self.differences],
        }


def compare_columns(plan: Plan, cells: Mapping[str, Sequence[Cell]]) -> list[Difference]:
    """The plan's comparisons on every task set."""
    return [
        Difference(name, before, after, compare(of[before], of[after]))
        for name, row in cells.items()
        for of in [{cell.column: cell.evaluation for cell in row}]
        for before, after in plan.pairs
    ]


def pass_levels(samples: int) -> list[int]:
    """The k of pass@k that are told: powers of two, and the number of samples."""
    levels = {2**power for power in range(samples.bit_length()) if 2**power <= samples}
    return sorted(levels | {samples})


def measure_agents(
    records: Sequence[EvalRecord], rows: Mapping[int, Mapping[str, Any]], solved_at: float
) -> dict[str, AgentMeasure]:
    """The five measures of tool-using agents over the rollouts on rows that have `target_tools`
    (a list of names, perhaps empty); empty without any.

    - tool_selection_accuracy: F1 of the tools that were called against `target_tools`; where
      none was wanted, 1 if none was called, else 0.5.
    - plan_success_rate: 1 for a rollout that called every tool of `target_tools`.
    - step_efficiency: `optimal_steps` (default 5) against the steps taken, at most 1. A step is
      one answer of the model.
    - timing_precision: 1 if a tool was called and one was wanted, or neither; else 0. Never
      seconds.
    - end_to_end_success: 1 for a score of at least `solved_at`.

    Parts that the agent reward pays for are computed by its own functions. A rollout that failed
    counts in none of them, as it has no score either; `count` says how many were measured.
    """
    names = ("tool_selection_accuracy", "plan_success_rate", "step_efficiency")
    values: dict[str, list[float]] = {
        name: [] for name in (*names, "timing_precision", "end_to_end_success")
    }
    for record in records:
        row = rows.get(record.item, {})
        if row.get("target_tools") is None or record.failure is not None:
            continue
        wanted = target_tools(row["target_tools"])
        called = [str(tool.get("name")) for call in record.calls for tool in call.get("tools", ())]
        steps = sum(not call.get("failed") for call in record.calls)
        optimal = int(row.get("optimal_steps") or AgentRewardSection().optimal_steps)
        values["tool_selection_accuracy"].append(tool_accuracy(called, wanted))
        values["plan_success_rate"].append(float(set(wanted) <= set(called)))
        values["step_efficiency"].append(efficiency(steps, optimal))
        values["timing_precision"].append(timing(called, wanted))
        if record.score is not None:
            values["end_to_end_success"].append(float(record.score >= solved_at))
    if not any(values.values()):
        return {}
    return {
        name: AgentMeasure(mean(found) if found else None, standard_deviation(found), len(found))
        for name, found in values.items()
    }


def _plain(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else asdict(interval)


def _path(path: object) -> str | None:
    return None if path is None else str(path)
