"""Reward for GSM8K: an answer's final number against the number after `####`.

`judge: rewards/gsm8k.py:gsm8k_judge` in a YAML scores the response of any workflow that returns
a `WorkflowOutput`; a workflow that scores itself calls `gsm8k_reward`. Both apply the strict rule
of `aflow_tune.scoring`: an answer with several candidate numbers scores 0.
"""

from __future__ import annotations

from typing import Any

from aflow_tune import JudgeOutput
from aflow_tune.scoring.numbers import last_number, score_strict
from aflow_tune.scoring.rewards import scored, text_of

__all__ = ["gsm8k_judge", "gsm8k_reward", "last_number"]


def gsm8k_reward(response: str, truth: str) -> float:
    """1 if the single final number of `response` is the reference's, within 1e-6; else 0.

    Raises:
        ValueError: the reference has no number, so nothing can be scored.
    """
    return scored(score_strict(response, truth))


async def gsm8k_judge(task: dict, response: Any) -> JudgeOutput:
    """Scores a response, a text or an AgentScope message, against the row's `answer`."""
    correct = gsm8k_reward(text_of(response), task["answer"])
    return JudgeOutput(reward=correct, metrics={"correct": correct})
