"""A ReAct agent with a calculator, as in AgentScope's examples.

The agent thinks, calls its tool as often as it likes, and ends with its answer in `\\boxed{}`.
Nothing here knows the data set: the YAML names the judge that scores the response, such as
rewards/gsm8k.py or rewards/math_boxed.py. Needs a model that can call tools, Qwen3 or better:
see configs/react_gsm8k_qwen.yaml.
"""

from __future__ import annotations

import ast
import operator
from typing import Dict

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import TrinityChatModel
from agentscope.tool import Toolkit, ToolResponse

from aflow_tune import WorkflowOutput, workflow

SYSTEM_PROMPT = (
    "You solve mathematical problems. Think step by step and use the tool for arithmetic. "
    "Give the final answer within \\boxed{}."
)
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@workflow
async def react_agent(task: Dict, model: TrinityChatModel) -> WorkflowOutput:
    """Answers the row's `question`; the response is the agent's last message."""
    toolkit = Toolkit()
    toolkit.register_tool_function(calculate)
    agent = ReActAgent(
        name="solver",
        sys_prompt=SYSTEM_PROMPT,
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
    )
    agent.set_console_output_enabled(False)
    return WorkflowOutput(response=await agent(Msg("user", task["question"], "user")))


async def calculate(expression: str) -> ToolResponse:
    """Compute an arithmetic expression of numbers, + - * / and parentheses.

    Args:
        expression: such as "12 * (3 + 4) / 2"
    """
    try:
        result = str(evaluate(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        result = f"Error: {error}"
    return ToolResponse(content=[TextBlock(type="text", text=result)])


def evaluate(node: ast.expr) -> float:
    """The value of an arithmetic expression; other code is refused, never executed."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    raise ValueError("only numbers, + - * / and parentheses")
