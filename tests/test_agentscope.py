"""Workflows, agents and judges in the AgentScope that is installed, 1 or 2: the same promises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import agentscope.agent
import agentscope.tool
import anyio
import pytest
from agentscope.message import Msg, TextBlock
from agentscope.model import ChatModelBase, OpenAIChatModel
from agentscope.tool import Toolkit
from agentscopes import SECOND, only_second
from pydantic import BaseModel
from scripted_server import Reply, ScriptedModel, ScriptedRunner, ScriptedServer, make_task
from trinity.common.experience import Experience

from aflow_tune import JudgeOutput, TrinityChatModel, WorkflowOutput, caller, text_of
from aflow_tune.contract.signature import check_functions
from aflow_tune.engines.trinity.rollout.operators import CALLER_KEY, FAILURE_KEY, STATE_KEY
from aflow_tune.models.client import as_client
from aflow_tune.scoring.use_tools import message_of

ASK = [{"role": "user", "content": "2 + 2?"}]
ToolResult = agentscope.tool.ToolChunk if SECOND else agentscope.tool.ToolResponse


class Answer(BaseModel):
    """What an agent is asked for."""

    result: str


async def add(a: int, b: int) -> ToolResult:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return ToolResult(content=[TextBlock(type="text", text=str(a + b))])


def agent_of(name: str, model: Any, *tools: Callable[..., Any]) -> Any:
    """A ReAct agent as the examples of the installed AgentScope make it."""
    if SECOND:
        from agentscope.agent import Agent
        from agentscope.permission import PermissionBehavior, PermissionDecision
        from agentscope.tool import FunctionTool

        allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="a test")
        toolkit = Toolkit(tools=[FunctionTool(tool, permission=allowed) for tool in tools])
        return Agent(name=name, system_prompt=f"You are {name}.", model=model, toolkit=toolkit)
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter

    toolkit = Toolkit()
    for tool in tools:
        toolkit.register_tool_function(tool)
    prompt, formatter = f"You are {name}.", OpenAIChatFormatter()
    agent = ReActAgent(name, prompt, model, formatter, toolkit=toolkit)
    agent.set_console_output_enabled(False)
    return agent


def said(text: str) -> Msg:
    return Msg(name="user", content=[TextBlock(type="text", text=text)], role="user")


async def structured(agent: Any, text: str) -> Any:
    """What the agent's structured answer holds."""
    if SECOND:
        return (await agent.reply(said(text), structured_schema=Answer)).structured_output
    return (await agent.reply(said(text), structured_model=Answer)).metadata


def run(
    answer: Callable[[dict[str, Any]], Reply | str], workflow: Any, repeats: int = 1, **task: Any
) -> tuple[list[Experience], list[dict[str, Any]]]:
    """Run one task through Trinity's runner; its experiences and what was asked."""
    with ScriptedServer(answer) as server:
        runner = ScriptedRunner(ScriptedModel(server.url))
        made = make_task(workflow, **task)
        status, payload = asyncio.run(runner.run_task(made, "1", repeat_times=repeats))
        assert status.ok, status.message
    experiences = Experience.deserialize_many(payload)
    failed = [one.info for one in experiences if FAILURE_KEY in one.info]
    assert not failed
    return experiences, server.requests


def tool_results(request: dict[str, Any]) -> list[str]:
    return [str(message["content"]) for message in request["messages"] if message["role"] == "tool"]


def test_the_contract_takes_agentscopes_models_and_gives_ours() -> None:
    seen: list[Any] = []

    async def ours(task: dict, model: TrinityChatModel) -> WorkflowOutput:
        seen.append(model)
        return WorkflowOutput(response=text_of((await model(ASK)).content))

    async def theirs(task: dict, model: OpenAIChatModel, auxiliary_models: dict) -> float: ...

    async def base(task: dict, model: ChatModelBase) -> float: ...

    async def judge(task: dict, response: str) -> JudgeOutput:
        return JudgeOutput(reward=float(response == "four"))

    for workflow in (theirs, base):
        check_functions(workflow)
    check_functions(ours, judge)
    (experience,), _ = run(lambda request: "four", ours, judge_func=judge)
    assert experience.reward == 1.0
    (model,) = seen
    assert isinstance(model, TrinityChatModel)
    assert isinstance(model, OpenAIChatModel)
    assert not model.stream


def test_a_react_agent_uses_its_tool_and_a_judge_scores_its_message() -> None:
    def answer(request: dict[str, Any]) -> Reply:
        found = tool_results(request)
        return Reply(f"It is {found[0]}.") if found else Reply("", [("add", {"a": 2, "b": 2})])

    async def workflow(task: dict, model: TrinityChatModel) -> WorkflowOutput:
        reply = await agent_of("solver", model, add).reply(said(task["question"]))
        return WorkflowOutput(response=reply)

    async def judge(task: dict, response: Msg) -> JudgeOutput:
        return JudgeOutput(reward=float(response.get_text_content() == f"It is {task['answer']}."))

    experiences, requests = run(answer, workflow, repeats=3, judge_func=judge)
    assert [one.reward for one in experiences] == [1.0] * 6
    steps = sorted((one.eid.run, one.eid.step) for one in experiences)
    assert steps == [(run, step) for run in range(3) for step in range(2)]
    # Neither ids of calls nor the time that AgentScope 2's agents are told split the states.
    assert len({one.info[STATE_KEY] for one in experiences}) == 2
    (tool,) = requests[0]["tools"]
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    assert not any(request.get("stream") for request in requests)


def test_an_agents_structured_output_is_recorded_and_rewarded() -> None:
    def answer(request: dict[str, Any]) -> Reply:
        asked = {
            it["function"]["name"]: str(it["function"]["parameters"]) for it in request["tools"]
        }
        if request.get("tool_choice") == "none":  # AgentScope 1 asks for words at the end
            return Reply("It is four.")
        if not tool_results(request):
            return Reply("", [("add", {"a": 2, "b": 2})])
        (name,) = (name for name, parameters in asked.items() if "result" in parameters)
        return Reply("", [(name, {"result": "4"})])

    async def workflow(task: dict, model: TrinityChatModel) -> float:
        found = await structured(agent_of("solver", model, add), task["question"])
        return float(found["result"] == task["answer"])

    experiences, requests = run(answer, workflow)
    assert {one.reward for one in experiences} == {1.0}
    assert len(experiences) == len(requests) == (2 if SECOND else 3)


def test_two_agents_share_the_model_and_each_call_knows_whose_it_is() -> None:
    def answer(request: dict[str, Any]) -> Reply:
        critic = "critic" in str(request["messages"][0]["content"])
        return Reply("Are you sure?" if critic else "four")

    async def workflow(task: dict, model: TrinityChatModel) -> float:
        solver, critic = agent_of("solver", model), agent_of("critic", model)
        with caller("solver"):
            draft = await solver.reply(said(task["question"]))
        with caller("critic"):
            doubt = await critic.reply(draft)
        with caller("solver"):
            final = await solver.reply(doubt)
        return float(final.get_text_content() == "four")

    experiences, requests = run(answer, workflow)
    callers = [one.info[CALLER_KEY] for one in experiences]
    assert callers == ["solver", "critic", "solver"]
    assert experiences[0].reward == 1.0
    assert "Are you sure?" in str(requests[2]["messages"])


def test_the_model_takes_openais_messages_and_tools_and_our_clients_take_the_model() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    seen: list[Any] = []

    async def workflow(task: dict, model: TrinityChatModel) -> float:
        seen.append(message_of(await model(ASK, tools=[tool])))
        client = as_client(model)
        reply = await client.complete(ASK, tools=[tool], stop=["END"], seed=1)
        seen.extend([client.model, reply.text, reply.tool_calls[0]["function"], reply.usage])
        seen.append((await client.complete(ASK, schema=schema)).text)
        return 1.0

    def answer(request: dict[str, Any]) -> Reply:
        if "tools" not in request:
            return Reply('{"n": 4}')
        return Reply("Let me see.", [("add", {"a": 2})])

    experiences, requests = run(answer, workflow)
    message, model, text, function, usage, structured = seen
    assert message["content"] == text == "Let me see."
    assert message["tool_calls"][0]["function"] == function
    assert function == {"name": "add", "arguments": '{"a": 2}'}
    assert (model, usage.completion_tokens, structured) == ("scripted", 12, '{"n": 4}')
    assert [request["messages"] for request in requests] == [ASK] * 3
    assert (requests[1]["stop"], requests[1]["seed"]) == (["END"], 1)
    assert requests[2]["response_format"]["type"] == "json_schema"
    assert len(experiences) == 3


@only_second
def test_agentscope_2_structured_output_and_parameters_of_the_model() -> None:
    from agentscope.message import UserMsg

    async def workflow(task: dict, model: Any) -> float:
        asked = [UserMsg(name="user", content=task["question"])]
        found = await model.generate_structured_output(asked, Answer)
        model.parameters.max_tokens = 5
        model.extra_body = {"min_tokens": 1}
        await model(asked)
        return float(found.content["result"] == task["answer"])

    def answer(request: dict[str, Any]) -> Reply:
        tools = [(tool["function"]["name"], {"result": "4"}) for tool in request.get("tools", ())]
        return Reply("", tools)

    experiences, (first, second) = run(answer, workflow)
    assert [one.reward for one in experiences] == [1.0, 1.0]
    assert first["tool_choice"]["function"]["name"] == first["tools"][0]["function"]["name"]
    assert first["max_tokens"] == 64
    assert second["max_completion_tokens"] == 5
    assert "max_tokens" not in second
    assert (first.get("min_tokens"), second["min_tokens"]) == (None, 1)
    client = SimpleNamespace(model_path="m", max_model_len=4096)
    assert TrinityChatModel(client).context_size == 4096  # what its agents compress by
    assert TrinityChatModel(client, {"max_tokens": 96}).context_size == 4000  # and then answer


def test_a_cancelled_call_raises_and_is_no_empty_answer() -> None:
    async def workflow(task: dict, model: TrinityChatModel) -> float:
        await model(ASK)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await model([{"role": "user", "content": "slow"}])
        with anyio.move_on_after(0.05) as limit:
            await model([{"role": "user", "content": "slow"}])
        assert limit.cancelled_caught
        return 1.0

    def answer(request: dict[str, Any]) -> Reply:
        return Reply("x", delay=5 if request["messages"] != ASK else 0)

    experiences, _ = run(answer, workflow)
    assert [one.reward for one in experiences] == [1.0]
