"""The five measures of tool-using agents, from the tool calls that were recorded.

Rows that have `target_tools` ask for them (a list of names, perhaps empty); `optimal_steps` is
optional. A run's tool calls are those that its recorded answers ask for; a step is one answer
of the model. The parts that the agent reward pays for have their one home in `aflow_tune.scoring`,
so that a measure and the reward's part of the same name never disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aflow_tune.report.records import EvalRecord
from aflow_tune.report.statistics import mean, standard_deviation
from aflow_tune.scoring.agent_reward import efficiency, target_tools, timing, tool_accuracy
from aflow_tune.sections import AgentRewardSection

MEASURES = (
    "tool_selection_accuracy",
    "plan_success_rate",
    "step_efficiency",
    "timing_precision",
    "end_to_end_success",
)


@dataclass(frozen=True)
class AgentMeasure:
    """Over the runs that could be measured. `std` is None for fewer than two of them."""

    mean: float | None
    std: float | None
    count: int


def measure_agents(
    records: Sequence[EvalRecord], rows: Mapping[int, Mapping[str, Any]], solved_at: float
) -> dict[str, AgentMeasure]:
    """The five measures over the runs on rows that have `target_tools`; empty without any.

    - tool_selection_accuracy: F1 of the tools that were called against `target_tools`; where
      none was wanted, 1 if none was called, else 0.5.
    - plan_success_rate: 1 for a run that called every tool of `target_tools`.
    - step_efficiency: `optimal_steps` (default 5) against the steps taken, at most 1.
    - timing_precision: 1 if a tool was called and one was wanted, or neither; else 0. Never
      seconds.
    - end_to_end_success: 1 for a score of at least `solved_at`.

    A run that failed counts in none of them, as it has no score either; how many did is told
    with the failures, and `count` says how many were measured.
    """
    values: dict[str, list[float]] = {name: [] for name in MEASURES}
    for record in records:
        row = rows.get(record.item)
        if row is None or row.get("target_tools") is None or record.failure is not None:
            continue
        for name, value in _of_run(record, row, solved_at).items():
            values[name].append(value)
    if not any(values.values()):
        return {}
    return {
        name: AgentMeasure(mean(found) if found else None, standard_deviation(found), len(found))
        for name, found in values.items()
    }


def called_tools(record: EvalRecord) -> list[str]:
    """The names of the tools that a run called, in order."""
    return [str(tool.get("name")) for call in record.calls for tool in call.get("tools", ())]


def _of_run(record: EvalRecord, row: Mapping[str, Any], solved_at: float) -> dict[str, float]:
    wanted, called = target_tools(row["target_tools"]), called_tools(record)
    steps = sum(not call.get("failed") for call in record.calls)
    optimal = row.get("optimal_steps") or AgentRewardSection().optimal_steps
    found = {
        "tool_selection_accuracy": tool_accuracy(called, wanted),
        "plan_success_rate": float(set(wanted) <= set(called)),
        "step_efficiency": efficiency(steps, int(optimal)),
        "timing_precision": timing(called, wanted),
    }
    if record.score is not None:
        found["end_to_end_success"] = float(record.score >= solved_at)
    return found
