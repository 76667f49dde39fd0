"""A ReAct agent with a calculator, as in the examples of AgentScope 1 or 2, whichever is installed.

The agent thinks, calls its tool as often as it likes, and ends with its answer in `\\boxed{}`.
Nothing here knows the data set: the YAML names the judge that scores the response, such as
rewards/gsm8k.py or rewards/math_boxed.py. Needs a model that can call tools, Qwen3 or better:
see configs/react_gsm8k_qwen.yaml.
"""

from __future__ import annotations

import ast
import operator
from typing import Any, Dict

import agentscope.agent
import agentscope.tool
from agentscope.message import Msg, TextBlock
from agentscope.tool import Toolkit

from aflow_tune import TrinityChatModel, WorkflowOutput, workflow

FIRST = hasattr(agentscope.agent, "ReActAgent")  # AgentScope 1; 2 calls it Agent
ToolResult = agentscope.tool.ToolResponse if FIRST else agentscope.tool.ToolChunk

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
    agent = agent_of_1(model) if FIRST else agent_of_2(model)
    content = [TextBlock(type="text", text=task["question"])]
    return WorkflowOutput(
        response=await agent.reply(Msg(name="user", content=content, role="user"))
    )


def agent_of_1(model: TrinityChatModel) -> Any:
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter

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
    return agent


def agent_of_2(model: TrinityChatModel) -> Any:
    from agentscope.agent import Agent, InjectionConfig, ReActConfig
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import FunctionTool

    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="it only calculates")
    return Agent(
        name="solver",
        system_prompt=SYSTEM_PROMPT,
        model=model,
        toolkit=Toolkit(tools=[FunctionTool(calculate, permission=allowed)]),
        react_config=ReActConfig(max_iters=10),  # as ReActAgent's
        injection_config=InjectionConfig(inject_runtime_state=False),  # else prompts tell the time
    )


async def calculate(expression: str) -> ToolResult:
    """Compute an arithmetic expression of numbers, + - * / and parentheses.

    Args:
        expression: such as "12 * (3 + 4) / 2"
    """
    try:
        result = str(evaluate(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        result = f"Error: {error}"
    return ToolResult(content=[TextBlock(type="text", text=result)])


def evaluate(node: ast.expr) -> float:
    """The value of an arithmetic expression; other code is refused, never executed."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    raise ValueError("only numbers, + - * / and parentheses")
