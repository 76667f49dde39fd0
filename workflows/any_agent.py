"""One agent in four frameworks, and one in another language: what trains is the model behind it.

Each is written as its framework's documentation writes it, with the address and the key of
`openai_endpoint(model)` in the place of OpenAI's. Rows have a `question` and a numeric `answer`;
the model has to be able to call tools. Install the framework that you use, for instance
`pip install 'aflow-tune[langchain]'`; see docs/any_agent.md.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any, Dict

from aflow_tune import TrinityChatModel, openai_endpoint, workflow

INSTRUCTIONS = "Answer with a number. Use the tool to add."
NODE_AGENT = Path(__file__).parent / "node_agent" / "agent.mjs"


def add(a: float, b: float) -> float:
    """The sum of two numbers."""
    return a + b


def score(task: Dict, said: Any) -> float:
    """1 if the last number that was said is the answer."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", str(said))
    return float(bool(numbers) and float(numbers[-1]) == float(task["answer"]))


@workflow
async def with_openai_agents(task: Dict, model: TrinityChatModel) -> float:
    """OpenAI's Agents SDK, over the Responses API."""
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)  # its traces go to OpenAI
    async with openai_endpoint(model) as endpoint:
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        agent = Agent(
            name="adder",
            instructions=INSTRUCTIONS,
            tools=[function_tool(add)],
            model=OpenAIResponsesModel("policy", client),
        )
        result = await Runner.run(agent, task["question"])
    return score(task, result.final_output)


@workflow
async def with_langchain(task: Dict, model: TrinityChatModel) -> float:
    """LangChain's agent, a graph of LangGraph."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    async with openai_endpoint(model) as endpoint:
        chat: Any = ChatOpenAI(model="policy", base_url=endpoint.base_url, api_key=endpoint.api_key)
        agent = create_agent(chat, tools=[add], system_prompt=INSTRUCTIONS)
        messages = [{"role": "user", "content": task["question"]}]
        result = await agent.ainvoke({"messages": messages})
    return score(task, result["messages"][-1].content)


@workflow
async def with_pydantic_ai(task: Dict, model: TrinityChatModel) -> float:
    """Pydantic AI, with an answer of a type."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with openai_endpoint(model) as endpoint:
        provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key)
        chat = OpenAIChatModel("policy", provider=provider)
        agent = Agent(chat, instructions=INSTRUCTIONS, tools=[add], output_type=float)
        result = await agent.run(task["question"])
    return score(task, result.output)


@workflow
async def with_dspy(task: Dict, model: TrinityChatModel) -> float:
    """DSPy's ReAct, whose prompts and parsing are DSPy's own."""
    import dspy

    async with openai_endpoint(model) as endpoint:
        # Without `cache=False` the second run of a task would get the answers of the first.
        address = {"api_base": endpoint.base_url, "api_key": endpoint.api_key}
        with dspy.context(lm=dspy.LM("openai/policy", cache=False, **address)):
            program = dspy.ReAct("question -> answer: float", tools=[add])
            result = await program.acall(question=task["question"])
    return score(task, result.answer)


@workflow
async def with_node(task: Dict, model: TrinityChatModel) -> float:
    """A program in another language: OpenAI's package for Node reads address and key from the
    environment. Before: `npm install` in workflows/node_agent."""
    async with openai_endpoint(model) as endpoint:
        process = await asyncio.create_subprocess_exec(
            "node",
            str(NODE_AGENT),
            task["question"],
            env={**os.environ, **endpoint.env},
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"{NODE_AGENT.name} ended with {process.returncode}")
    return score(task, said.decode())
