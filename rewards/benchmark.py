"""Reward for any benchmark: 1 for a right answer by the strict rule, the one to train with.

`judge: rewards/benchmark.py:benchmark_judge` in a YAML scores the response of any workflow that
returns a `WorkflowOutput`. The benchmark is the row's field `benchmark`, as mixed data has it,
or `rewards.benchmark` of the configuration. Both rules are logged: `strict` and `published`.
"""

from __future__ import annotations

from typing import Any

from aflow_tune import JudgeOutput
from aflow_tune.scoring import score_both
from aflow_tune.scoring.rewards import benchmark_of, logged, scored, text_of


async def benchmark_judge(task: dict, response: Any) -> JudgeOutput:
    """Scores a response, a text or an AgentScope message, against the row.

    Raises:
        BadInput: no benchmark is named, or the row is not one of its rows.
        Unscored: the strict rule found no verdict; the rollout counts as failed, not as wrong.
    """
    scores = await score_both(benchmark_of(task), task, text_of(response))
    return JudgeOutput(reward=scored(scores["strict"]), metrics=logged(scores))
