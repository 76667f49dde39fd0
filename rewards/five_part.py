"""The five-part reward: correctness, cost, simplicity, format and repetition in one number.

`judge: rewards/five_part.py:five_part_judge` in a YAML scores the response of any workflow that
returns a `WorkflowOutput`. Weights, limits and scale are `rewards.five_part` of the
configuration; the benchmark is the row's field `benchmark` or `rewards.benchmark`. Each part is
logged as `five_part/NAME`, the score by both rules as `strict` and `published`.
"""

from __future__ import annotations

from typing import Any

from aflow_tune import JudgeOutput
from aflow_tune.scoring import score_both
from aflow_tune.scoring.rewards import (
    Usage,
    benchmark_of,
    five_part,
    logged,
    reward_settings,
    scored,
    text_of,
)
from aflow_tune.trace import Trace, current_trace


async def five_part_judge(task: dict, response: Any) -> JudgeOutput:
    """Scores a response, a text or an AgentScope message, and what the rollout spent on it.

    Raises:
        BadInput: no benchmark is named, or the row is not one of its rows.
        Unscored: the strict rule found no verdict; the rollout counts as failed, not as wrong.
    """
    settings, benchmark, answer = reward_settings(), benchmark_of(task), text_of(response)
    usage = Usage.of(current_trace() or Trace())  # before scoring, which adds its own programs
    scores = await score_both(benchmark, task, answer)
    result = five_part(scored(scores["strict"]), answer, usage, settings.five_part, benchmark.form)
    return JudgeOutput(reward=result.reward, metrics={**logged(scores), **result.metrics()})
