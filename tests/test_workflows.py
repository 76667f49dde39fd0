"""The shipped agent and graphs against scripted models."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Reply, ScriptedModel, ScriptedRunner, ScriptedServer, make_task
from trinity.common.experience import Experience

from aflow_tune import text_of
from aflow_tune.contract.plugins import resolve
from aflow_tune.graph.graph import load_graph
from aflow_tune.graph.run import GraphEnding
from aflow_tune.models import ScriptedModel as ScriptedReplies

ROOT = Path(__file__).parents[1]
react_agent = resolve(f"{ROOT}/workflows/react_agent.py:react_agent")
calculate = resolve(f"{ROOT}/workflows/react_agent.py:calculate")
gsm8k_judge = resolve(f"{ROOT}/rewards/gsm8k.py:gsm8k_judge")
gsm8k_reward = resolve(f"{ROOT}/rewards/gsm8k.py:gsm8k_reward")


def _run(last_words: str) -> tuple[list[Experience], list[dict[str, Any]]]:
    """One run of the agent that calculates 2 + 2 and then says `last_words`."""

    def answer(request: dict[str, Any]) -> Reply:
        if any(message["role"] == "tool" for message in request["messages"]):
            return Reply(last_words)
        return Reply("Let me see.", tool_calls=[("calculate", {"expression": "2 + 2"})])

    with ScriptedServer(answer) as server:
        runner = ScriptedRunner(ScriptedModel(server.url))
        task = make_task(react_agent, judge_func=gsm8k_judge)
        status, payload = asyncio.run(runner.run_task(task, "1", repeat_times=1))
        assert status.ok, status.message
        return Experience.deserialize_many(payload), server.requests


@pytest.mark.parametrize(("last_words", "reward"), [("\\boxed{4}", 1.0), ("\\boxed{5}", 0.0)])
def test_the_agent_calculates_answers_and_is_judged(last_words: str, reward: float) -> None:
    experiences, requests = _run(last_words)
    assert [exp.reward for exp in experiences] == [reward, reward]
    assert [exp.eid.step for exp in experiences] == [0, 1]
    assert experiences[-1].metrics["correct"] == reward
    (tool,) = requests[0]["tools"]
    assert tool["function"]["name"] == "calculate"
    (result,) = (message for message in requests[1]["messages"] if message["role"] == "tool")
    assert "4" in str(result["content"])


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12 * (3 + 4) / 2", "42.0"),
        (" -3 - -1", "-2"),
        *((text, "Error") for text in ("1 / 0", "9 ** 9 ** 9", "__import__('os').getcwd()")),
        *((text, "Error") for text in ("True + 1", "2 +", "", "(" * 500 + "1", "1" + "0" * 5000)),
    ],
)
def test_the_calculator_knows_arithmetic_only(expression: str, result: str) -> None:
    response = asyncio.run(calculate(expression))
    assert text_of(response.content).partition(":")[0] == result


def _adds(messages: Sequence[Mapping[str, Any]]) -> str:
    first, second = re.findall(r"\d+", str(messages[-1]["content"]))
    return f"The answer is {int(first) + int(second)}."


def _lies(messages: Sequence[Mapping[str, Any]]) -> str:
    return "The answer is 99."


@pytest.mark.parametrize(("answers", "reward"), [(_adds, 1.0), (_lies, 0.0)])
def test_the_shipped_graph_adds_in_two_calls(answers: Any, reward: float) -> None:
    folder = ROOT / "workflows/graphs/three_terms"
    score = resolve(f"{folder}/score.py:score")
    rows = (ROOT / "workflows/data/three_terms/held_out.jsonl").read_text().splitlines()
    task = json.loads(rows[0])
    run = asyncio.run(load_graph(folder).run(task["question"], model=ScriptedReplies(answers)))
    assert (run.ending, run.calls) == (GraphEnding.ANSWERED, 2)
    assert score(task, run.answer) == reward


@pytest.mark.parametrize(("settled", "reward"), [("\\boxed{72}", 1.0), ("\\boxed{36}", 0.0)])
def test_the_shipped_gsm8k_graph_settles_on_one_of_two_answers(settled: str, reward: float) -> None:
    seen: list[str] = []

    def answers(messages: Sequence[Mapping[str, Any]]) -> str:
        seen.append(str(messages[-1]["content"]))
        return settled if len(seen) == 3 else f"\\boxed{{{(48, 72)[len(seen) - 1]}}}"

    graph = load_graph(ROOT / "workflows/graphs/gsm8k")
    run = asyncio.run(graph.run("How many clips?", model=ScriptedReplies(answers)))
    assert (run.ending, run.calls) == (GraphEnding.ANSWERED, 3)
    assert "How many clips?" in seen[2]
    assert "A: \\boxed{48}" in seen[2]
    assert "B: \\boxed{72}" in seen[2]
    assert gsm8k_reward(str(run.answer), "48 + 24\n#### 72") == reward
