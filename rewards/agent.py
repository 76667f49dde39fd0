"""Reward for tool-using agents: task completed, right tools, few steps, timing, format.

`judge: rewards/agent.py:agent_judge` in a YAML scores the response of a workflow that returns a
`WorkflowOutput` whose `response` describes what the agent did:

    {"answer": "42", "tool_calls": ["search", {"name": "add", "arguments": {"a": 1}}],
     "steps": 3, "format_errors": 0, "timed_out": false, "completion": 1.0}

Only `tool_calls` is required; `steps` defaults to their number. Without `completion` the answer is
scored: by the benchmark that the row or `rewards.benchmark` names, else against the row's `answer`
by the strict rule for short answers. Rows have `target_tools` (names) and may have `optimal_steps`.
Weights and penalties are `rewards.agent` of the configuration. Each part and penalty is logged
as `agent/NAME`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aflow_tune import JudgeOutput
from aflow_tune.scoring import score_answer
from aflow_tune.scoring.qa import hotpotqa_strict
from aflow_tune.scoring.rewards import (
    ToolCall,
    agent_reward,
    benchmark_of,
    reward_settings,
    scored,
    target_tools,
    text_of,
)
from aflow_tune.scoring.turns import measures, turn_reward


async def agent_judge(task: dict, response: Any, logger: Any = None) -> JudgeOutput:
    """Scores what an agent did for a row.

    Raises:
        TypeError: the response is no mapping with `tool_calls`.
        Unscored: whether the answer is right could not be decided.
    """
    if not isinstance(response, Mapping) or "tool_calls" not in response:
        raise TypeError(
            "agent_judge wants a response such as {'answer': ..., 'tool_calls': [...], "
            f"'steps': 3}}, not {response!r:.200}"
        )
    calls = [
        ToolCall(call) if isinstance(call, str) else ToolCall(call["name"], call.get("arguments"))
        for call in response["tool_calls"]
    ]
    reward, metrics = agent_reward(
        await _completion(task, response),
        calls,
        target_tools(task.get("target_tools")),
        steps=int(response.get("steps", len(calls))),
        format_errors=int(response.get("format_errors", 0)),
        timed_out=bool(response.get("timed_out", False)),
        optimal_steps=task.get("optimal_steps"),
        settings=reward_settings().agent,
    )
    return JudgeOutput(reward=reward, metrics=metrics)


async def _completion(task: dict, response: Mapping[str, Any]) -> float:
    if "completion" in response:
        return float(response["completion"])
    answer = str(response.get("answer") or "")
    if task.get("benchmark") or reward_settings().benchmark:
        return scored(await score_answer(benchmark_of(task), task, answer))
    return scored(hotpotqa_strict(answer, str(task["answer"])))


async def turn_judge(task: dict, response: Any) -> JudgeOutput:
    """Scores one turn, an assistant message as OpenAI writes it or its text, against the row's gold
    answer (`aflow_tune/scoring/turns.py`), by the weights of `rewards.turns`.

    Raises:
        BadInput: the row has no gold answer.
        Unscored: no measure with a weight applies to the row.
    """
    answer = response if isinstance(response, Mapping) else {"content": text_of(response)}
    found = measures(answer, task)
    return JudgeOutput(reward=turn_reward(found), metrics=found)
