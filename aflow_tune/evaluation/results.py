"""What an evaluation found: a cell for each column on each task set, and the comparisons.

Computed from the records by `aflow_tune.report`; nothing is measured here. `to_json` is what
`eval.json` holds; the text and the page are made from the same objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aflow_tune.evaluation.agents import AgentMeasure, measure_agents
from aflow_tune.evaluation.columns import Column, Plan
from aflow_tune.report.audit import Finding, audit_evaluation
from aflow_tune.report.evaluation import Comparison, Evaluation, compare
from aflow_tune.report.statistics import Interval
from aflow_tune.report.usage import (
    CallerUse,
    Cost,
    Price,
    Usage,
    callers,
    cost,
    per_solved,
    usage,
)

VERSION = 1
"""Of the form of `eval.json`."""


@dataclass(frozen=True)
class Cell:
    """One column on one task set."""

    column: Column
    evaluation: Evaluation
    score: Interval | None
    pass_at: Mapping[int, Interval | None]
    """pass@k over scored runs."""
    pass_at_all: Mapping[int, Interval | None]
    """The same with failed runs as unsolved; empty where no run failed."""
    solved: int
    usage: Usage
    cost: Cost
    callers: Sequence[CallerUse]
    measures: Mapping[str, Interval | None]
    """Reward and every recorded metric, over items."""
    agents: Mapping[str, AgentMeasure]
    findings: Sequence[Finding]

    @property
    def tokens_per_solved(self) -> float | None:
        """Tokens of all runs, prompts included, for each solved one."""
        return per_solved(self.usage.total_tokens, self.solved)

    @property
    def cost_per_solved(self) -> float | None:
        """US dollars of all runs for each solved one; None where a price is unknown."""
        return per_solved(self.cost.total, self.solved)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; None is null: not known, or nothing to count."""
        evaluation = self.evaluation
        return {
            "items": evaluation.items,
            "runs": len(evaluation.records),
            "score": _interval(self.score),
            "pass_at": {str(k): _interval(value) for k, value in self.pass_at.items()},
            "pass_at_failed_as_unsolved": {
                str(k): _interval(value) for k, value in self.pass_at_all.items()
            },
            "solved_runs": self.solved,
            "failed_runs": evaluation.failed_runs,
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
            "measures": {name: _interval(value) for name, value in self.measures.items()},
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
            primary = self.comparison.primary
            found |= {
                "mean_before": primary.mean_before,
                "mean_after": primary.mean_after,
                "difference": _interval(primary.difference),
                "p_value": primary.p_value,
                "better": primary.better,
                "worse": primary.worse,
                "direction": self.comparison.direction,
                "items_left_out": self.comparison.left_out,
            }
        return found


@dataclass(frozen=True)
class Result:
    """Everything that was measured. `facts` says with what, in the order in which it is shown."""

    facts: Mapping[str, Any]
    samples: int
    solved_at: float
    columns: Sequence[Column]
    cells: Mapping[str, Sequence[Cell]]
    """By task set, in the order of the columns."""
    differences: Sequence[Difference]
    warnings: Sequence[str] = field(default_factory=tuple)

    def why_nothing(self) -> str | None:
        """Where not one run could be scored: how many there are, and what most of them met."""
        records = [
            record
            for cells in self.cells.values()
            for cell in cells
            for record in cell.evaluation.records
        ]
        if not records or any(record.score is not None for record in records):
            return None
        met = Counter((record.failure or "unscored", record.reason) for record in records)
        (failure, reason), _ = met.most_common(1)[0]
        return f"none of {len(records)} runs could be scored; {failure}: {reason or 'no reason'}"

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
                    "weights": str(column.side.weights) if column.side.weights else None,
                    "step": column.side.step,
                    "workflow": column.side.workflow,
                    "graph": str(column.side.graph) if column.side.graph else None,
                    "config": str(column.side.config) if column.side.config else None,
                    "model": column.side.served_model,
                    "sampling": dict(column.sampling),
                    "prompts": str(column.prompts) if column.prompts else None,
                    "tasksets": {
                        name: cells[index].to_json() for name, cells in self.cells.items()
                    },
                }
                for index, column in enumerate(self.columns)
            ],
            "comparisons": [difference.to_json() for difference in self.differences],
        }


def build(
    plan: Plan,
    evaluations: Mapping[Column, Mapping[str, Evaluation]],
    rows: Mapping[str, Mapping[int, Mapping[str, Any]]],
    prices: Mapping[Column, Price | None],
    *,
    facts: Mapping[str, Any],
    samples: int,
    solved_at: float,
    warnings: Sequence[str] = (),
) -> Result:
    """The result of a plan.

    Args:
        evaluations: of every column, by task set.
        rows: of every task set, by item.
        prices: what the tokens of a column's model cost.
        solved_at: the score from which on a run has solved its task.
    """
    tasksets = list(rows)
    cells = {
        name: [
            _cell(column, evaluations[column][name], rows[name], prices[column], samples, solved_at)
            for column in plan.columns
        ]
        for name in tasksets
    }
    differences = [
        Difference(
            name, before, after, compare(evaluations[before][name], evaluations[after][name])
        )
        for name in tasksets
        for before, after in plan.pairs
    ]
    return Result(facts, samples, solved_at, plan.columns, cells, differences, tuple(warnings))


def pass_levels(samples: int) -> list[int]:
    """The k of pass@k that are told: powers of two, and the number of samples."""
    levels = {2**power for power in range(samples.bit_length()) if 2**power <= samples}
    return sorted(levels | {samples})


def _cell(
    column: Column,
    evaluation: Evaluation,
    rows: Mapping[int, Mapping[str, Any]],
    price: Price | None,
    samples: int,
    solved_at: float,
) -> Cell:
    levels = pass_levels(samples)
    failed = evaluation.failed_runs > 0
    return Cell(
        column=column,
        evaluation=evaluation,
        score=evaluation.interval(),
        pass_at={k: evaluation.pass_at(k, solved_at) for k in levels},
        pass_at_all={
            k: evaluation.pass_at(k, solved_at, failed_as_unsolved=True) for k in levels if failed
        },
        solved=evaluation.solved_runs(solved_at),
        usage=usage(evaluation.records),
        cost=cost(evaluation.records, price),
        callers=callers(evaluation.records),
        measures={name: evaluation.metric_interval(name) for name in evaluation.metric_names()},
        agents=measure_agents(evaluation.records, rows, solved_at),
        findings=audit_evaluation(evaluation, f" ({column.name})"),
    )


def _interval(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else asdict(interval)
