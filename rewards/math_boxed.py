"""Reward for answers in `\\boxed{...}`: equal to the reference as mathematics, by math-verify.

`judge: rewards/math_boxed.py:math_judge` in a YAML scores the response of any workflow that
returns a `WorkflowOutput`; a workflow that scores itself calls `math_boxed_reward`.
"""

from __future__ import annotations

from typing import Any

from aflow_tune import JudgeOutput
from aflow_tune.math_equality import equal_answers

MAX_ANSWER_CHARACTERS = 400
"""What is longer is no final answer."""


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` (or `\\boxed 7`) with balanced braces, or None."""
    _, found, rest = text.rpartition("\\boxed")
    if not found:
        return None
    if not rest.startswith("{"):
        words = rest.split("$")[0].split()
        return words[0] if words else None
    depth = 0
    for position, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:position]
    return None


def math_boxed_reward(response: str, truth: str) -> float:
    """1 if the last boxed answer of `response` equals `truth`, else 0.

    `truth` may be a whole solution that ends in a boxed answer.

    Raises:
        Undecided: the answer is such that no verdict is found; the run counts as failed, not
            as wrong.
    """
    answer = boxed(response)
    if answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
        return 0.0
    return float(equal_answers(answer, boxed(truth) or truth))


async def math_judge(task: dict, response: Any) -> JudgeOutput:
    """Scores a response, a text or an AgentScope message, against the row's `solution`."""
    text = response if isinstance(response, str) else response.get_text_content()
    correct = math_boxed_reward(text or "", task["solution"])
    return JudgeOutput(reward=correct, metrics={"correct": correct})
