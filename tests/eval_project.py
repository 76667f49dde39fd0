"""What the evaluations of a scripted server have in common: workflow, answers, types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scripted_server import Reply

WORKFLOW = """
from typing import Dict

from agentscope.model import TrinityChatModel

from aflow_tune import caller, record_metrics


async def ask_once(task: Dict, model: TrinityChatModel) -> float:
    with caller("ask"):
        reply = await model([{"role": "user", "content": task["question"]}])
    text = "".join(block["text"] for block in reply.content if block["type"] == "text")
    if text == "crash":
        raise LookupError("no such planet")
    right = float(task["answer"] in text)
    record_metrics(right=right)
    return right


async def always_wrong(task: Dict, model: TrinityChatModel) -> float:
    await model([{"role": "user", "content": task["question"]}])
    record_metrics(right=0.0)
    return 0.0
"""


def numbers(request: dict[str, Any]) -> Reply:
    """`tuned` answers every question right, `small` the even ones."""
    number = int("".join(c for c in request["messages"][-1]["content"] if c.isdigit()))
    right = request["model"] == "tuned" or number % 2 == 0
    return Reply(f"<answer>{number if right else 0}</answer>")


Run = Callable[..., tuple[int, dict[str, Any]]]
