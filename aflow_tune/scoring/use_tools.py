"""Answers the turns of dialogues with tools, and scores the calls against those of the dialogue.

A row has `messages` and `tools` as OpenAI writes them (`aflow_tune/scoring/turns.py`). Each of its
assistant turns is asked for with the true history before it, results of tools included: what the
model answered in one turn does not change the next. A benchmark row has one turn; of a dialogue
that is not cut into turns (`aflow_tune.scoring.turns.as_tasks`) all are asked at once, measures and
reward are means over its turns, and each call has its turn's reward as its step reward.

    dialogues: {as_tasks: true}          # and no `workflow`
    report: {score: end_to_end_success}
    rewards: {turns: {end_to_end_success: 0.4, ...}}
"""

from __future__ import annotations

from typing import Any

from aflow_tune.context import record_metrics, step_reward
from aflow_tune.contract.plugins import workflow
from aflow_tune.models.chat_model import TrinityChatModel
from aflow_tune.models.types import read_blocks
from aflow_tune.scoring import turns


@workflow
async def use_tools(task: dict, model: TrinityChatModel) -> float:
    """The mean reward of the row's turns; their measures are recorded, and again by task type as
    `TYPE/MEASURE`."""
    rewards, found = [], []
    for turn in turns.as_tasks([task], must=True):
        tools = turns.tools_of(turn) or None
        response = await model(turns.prompt_of(turn), tools=tools)
        found.append(turns.measures(message_of(response), turn))
        rewards.append(turns.turn_reward(found[-1]))
        step_reward(rewards[-1])
    means = turns.mean_measures(found)
    kind = turns.task_type_of(task)
    by_type = {f"{kind}/{name}": value for name, value in means.items()} if kind else {}
    record_metrics(**means, **by_type)
    return sum(rewards) / len(rewards)


def message_of(response: Any) -> dict[str, Any]:
    """AgentScope's response as an assistant message of OpenAI's."""
    text, calls = read_blocks(list(map(dict, response.content)), None)
    return {"role": "assistant", "content": text, "tool_calls": calls}
