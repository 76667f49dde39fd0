"""Reward for GSM8K: the number that an answer ends with against the number after `####`.

`judge: rewards/gsm8k.py:gsm8k_judge` in a YAML scores the response of any workflow that returns
a `WorkflowOutput`; a workflow that scores itself calls `gsm8k_reward`.
"""

from __future__ import annotations

import re
from typing import Any

from aflow_tune import JudgeOutput

TOLERANCE = 1e-6
# A minus after a word, a number or a bracket is a difference or a range, not a sign.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
)
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")


def last_number(text: str) -> float | None:
    """The last number in a text, thousands separators removed; None if there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def gsm8k_reward(response: str, truth: str) -> float:
    """1 if the last number of `response` is that of the reference, within 1e-6; else 0.

    The last number in `\\boxed{}` where there is one, else the last of the whole text.

    Raises:
        ValueError: the reference has no number, so nothing can be scored.
    """
    expected = last_number(truth.rpartition("####")[2])
    if expected is None:
        raise ValueError(f"a reference without a number: {truth[-200:]!r}")
    # LaTeX writes thousands as 1{,}000 or 1,\!000.
    plain = response.replace("{,}", ",").replace("\\!", "")
    boxes = _BOXED.findall(plain)
    answer = last_number(boxes[-1] if boxes else plain)
    return float(answer is not None and abs(answer - expected) <= TOLERANCE)


async def gsm8k_judge(task: dict, response: Any) -> JudgeOutput:
    """Scores a response, a text or an AgentScope message, against the row's `answer`."""
    text = response if isinstance(response, str) else response.get_text_content()
    correct = gsm8k_reward(text or "", task["answer"])
    return JudgeOutput(reward=correct, metrics={"correct": correct})
