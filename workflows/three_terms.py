"""The quickstart's workflow: add three numbers with two calls to the model.

The first call adds the first two terms; the second adds the third term to whatever the first
call answered. A small model is bad at both to begin with. The reward pays a little for the
form of the answers and most for the sums; the held-out score, `correct`, counts nothing but
the final number.
"""

from __future__ import annotations

import re
from typing import Any, Dict

from aflow_tune import TrinityChatModel, caller, record_metrics, text_of, workflow

FIRST_PROMPT = "{a} + {b}"
SECOND_PROMPT = "{partial} + {c}"
# Worked examples show the form. As a prefix of every call they are prefilled once.
WORKED = [("3 + 4", 7), ("9 + 6", 15), ("12 + 4", 16)]


@workflow
async def add_three_terms(task: Dict, model: TrinityChatModel) -> float:
    """Reward: 0.05 for each well-formed answer, 0.4 for a right first sum, 0.5 for the last."""
    a, b, c = task["terms"]
    with caller("first_sum"):
        partial = await ask(model, FIRST_PROMPT.format(a=a, b=b))
    with caller("second_sum"):
        total = await ask(model, SECOND_PROMPT.format(partial=partial or 0, c=c))
    correct = total == task["answer"]
    record_metrics(correct=correct, first_sum_correct=partial == a + b)
    well_formed = (partial is not None) + (total is not None)
    return 0.05 * well_formed + 0.4 * (partial == a + b) + 0.5 * correct


async def ask(model: TrinityChatModel, question: str) -> int | None:
    """One call; the number in its answer tag, or None if the answer has another form."""
    response = await model(messages_for(question))
    match = re.fullmatch(r"\s*<answer>(\d{1,3})</answer>\s*", text_of(response.content))
    return int(match[1]) if match else None


def messages_for(question: str) -> list[dict[str, Any]]:
    """The worked turns, then the question."""
    messages = []
    for example, answer in WORKED:
        messages.append({"role": "user", "content": example})
        messages.append({"role": "assistant", "content": f"<answer>{answer}</answer>"})
    return [*messages, {"role": "user", "content": question}]
