"""The examples of workflows/any_agent.py with the real frameworks, where they are installed."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Reply, ScriptedModel, ScriptedRunner, ScriptedServer, make_task
from trinity.common.experience import Experience

from aflow_tune.contract.plugins import resolve

GIVEN = {"a": 2, "b": 2}
FILE = Path(__file__).parents[1] / "workflows" / "any_agent.py"


def adder(request: dict[str, Any]) -> Reply:
    """Calls `add` and says what it returned; DSPy knows no tool calls and is told as it asks."""
    shown = json.dumps(request["messages"])
    if "tools" not in request:
        fields = {"next_thought": "add", "next_tool_name": "add"}
        fields["next_tool_args"] = json.dumps(GIVEN)
        if "observation_0" in shown:
            fields = {"next_thought": "done", "next_tool_name": "finish", "next_tool_args": "{}"}
        if "next_tool_name" not in shown or "reasoning" in str(request["messages"][-1]):
            fields = {"reasoning": "added", "answer": "4.0"}
        said = [f"[[ ## {name} ## ]]\n{value}" for name, value in fields.items()]
        return Reply("\n\n".join([*said, "[[ ## completed ## ]]"]))
    results = [it["content"] for it in request["messages"] if it["role"] == "tool"]
    names = [tool["function"]["name"] for tool in request["tools"]]
    if not results:
        return Reply("", tool_calls=[("add", GIVEN)], finish_reason="tool_calls")
    if "final_result" in names:  # Pydantic AI asks for a typed answer by a tool
        call = ("final_result", {"response": 4})
        return Reply("", tool_calls=[call], finish_reason="tool_calls")
    return Reply(f"It is {results[-1]}.")


def run(name: str, file: Path = FILE) -> list[Experience]:
    """One rollout of a workflow whose task is `2 + 2?`."""
    with ScriptedServer(adder) as server:
        runner = ScriptedRunner(ScriptedModel(server.url))
        task = make_task(resolve(f"{file}:{name}"))
        status, payload = asyncio.run(runner.run_task(task, "1", repeat_times=1))
    assert status.ok, status.message
    return Experience.deserialize_many(payload)


@pytest.mark.parametrize(
    ("name", "package", "calls"),
    [
        ("with_openai_agents", "agents", 2),
        ("with_langchain", "langchain", 2),
        ("with_pydantic_ai", "pydantic_ai", 2),
        ("with_dspy", "dspy", 3),
    ],
)
def test_an_agent_is_recorded_and_rewarded(name: str, package: str, calls: int) -> None:
    pytest.importorskip(package)
    experiences = run(name)
    assert len(experiences) == calls
    assert {experience.reward for experience in experiences} == {1.0}


@pytest.mark.slow
def test_a_program_in_another_language(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("Node is not installed here")
    folder = tmp_path / "workflows"
    shutil.copytree(FILE.parent / "node_agent", folder / "node_agent")
    file = Path(shutil.copy(FILE, folder))
    subprocess.run(["npm", "install", "--silent"], cwd=folder / "node_agent", check=True)
    experiences = run("with_node", file)
    assert [experience.reward for experience in experiences] == [1.0, 1.0]
