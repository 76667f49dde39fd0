"""A ReAct agent on GSM8K: the example that AgentScope users know.

The agent thinks, may use tools, and ends with an answer in `\\boxed{}`. Needs a model that can
call tools, Qwen3 or better: see configs/react_gsm8k_qwen.yaml.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.model import TrinityChatModel

from aflow_tune import record_metrics, workflow
from aflow_tune.plugins import resolve

SYSTEM_PROMPT = (
    "You solve grade school mathematics. Think step by step; use tools where they help. "
    "Give the final number in \\boxed{}."
)
gsm8k_reward = resolve("rewards/gsm8k.py:gsm8k_reward", Path(__file__).parents[1])


@workflow
async def react_gsm8k(task: Dict, model: TrinityChatModel) -> float:
    """Reward 1 for the right number, else 0."""
    agent = ReActAgent(
        name="solver",
        sys_prompt=SYSTEM_PROMPT,
        model=model,
        formatter=OpenAIChatFormatter(),
    )
    reply = await agent.reply(Msg("user", task["question"], role="user"))
    correct = gsm8k_reward(reply.get_text_content() or "", task["answer"])
    record_metrics(correct=correct)
    return correct
