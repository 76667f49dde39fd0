"""Reward for answers in `\\boxed{...}`: mathematically equal to the reference, by math-verify.

`judge: rewards/math_boxed.py:math_judge` in a YAML scores the response of any workflow that
returns a `WorkflowOutput`; a workflow that scores itself calls `math_boxed_reward`. Both apply
the strict rule of `aflow_tune.scoring`: several different boxed answers, and lists, score 0.
"""

from __future__ import annotations

from typing import Any

from aflow_tune import JudgeOutput
from aflow_tune.scoring.mathematics import score_strict
from aflow_tune.scoring.numbers import boxed
from aflow_tune.scoring.rewards import scored, text_of

__all__ = ["boxed", "math_boxed_reward", "math_judge"]


def math_boxed_reward(response: str, truth: str) -> float:
    """1 if the boxed answer of `response` equals `truth`, else 0.

    `truth` may be a whole solution that ends in a boxed answer.

    Raises:
        ValueError: the reference is empty.
        Undecided: comparing took too long; the rollout counts as failed, not as wrong.
    """
    return scored(score_strict(response, truth))


async def math_judge(task: dict, response: Any) -> JudgeOutput:
    """Scores a response, a text or an AgentScope message, against the row's `solution`."""
    correct = math_boxed_reward(text_of(response), task["solution"])
    return JudgeOutput(reward=correct, metrics={"correct": correct})
