"""The reward of tool-using agents: parts, penalties and sums computed by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aflow_tune.contract.plugins import resolve
from aflow_tune.scoring.agent_reward import (
    AgentRun,
    ToolCall,
    agent_reward,
    efficiency,
    redundant_calls,
    target_tools,
    timing,
    tool_accuracy,
    wrong_calls,
)
from aflow_tune.sections import AgentRewardSection

ROOT = Path(__file__).parents[1]
agent_judge = resolve(f"{ROOT}/rewards/agent.py:agent_judge")


def _calls(*names: str) -> list[ToolCall]:
    return [ToolCall(name, number) for number, name in enumerate(names)]


def test_accuracy_is_f1_of_the_tools() -> None:
    assert tool_accuracy(["a", "b"], ["a", "b"]) == 1
    assert tool_accuracy(["a", "b", "c"], ["a", "b"]) == pytest.approx(0.8)  # P 2/3, R 1
    assert tool_accuracy(["a"], ["a", "b", "c"]) == pytest.approx(0.5)  # P 1, R 1/3
    assert tool_accuracy(["x"], ["a"]) == 0
    assert tool_accuracy([], ["a"]) == 0
    assert tool_accuracy([], []) == 1
    assert tool_accuracy(["a"], []) == 0.5


def test_efficiency_is_steps_against_the_optimum() -> None:
    assert [efficiency(steps, 5) for steps in (0, 3, 5, 10)] == [1, 1, 1, 0.5]


@pytest.mark.parametrize(
    ("called", "wanted", "value"),
    [(["a"], ["b"], 1), ([], [], 1), (["a"], [], 0), ([], ["a"], 0)],
)
def test_timing_is_whether_a_tool_was_called_when_needed(called, wanted, value) -> None:
    assert timing(called, wanted) == value


def test_wrong_and_redundant_calls() -> None:
    assert wrong_calls(["a", "x", "x"], ["a"]) == ["x", "x"]
    same = [ToolCall("a", {"q": 1}), ToolCall("a", {"q": 1}), ToolCall("a", {"q": 2})]
    assert redundant_calls(same, ["a"]) == ["a"]
    assert redundant_calls(same, ["a", "a"]) == []
    assert redundant_calls([ToolCall("x"), ToolCall("x")], ["a"]) == []  # wrong, not redundant


def test_the_sum_by_hand() -> None:
    perfect = AgentRun(completion=1, calls=_calls("a", "b"), steps=3)
    assert agent_reward(perfect, ["a", "b"]).reward == pytest.approx(1)
    # 0.40 + 0.25 * 0.8 + 0.15 * 5/10 + 0.10 + 0.10 * 0 - 0.3 - 0.2 - 0.1
    run = AgentRun(
        completion=1,
        calls=[*_calls("a", "b", "c"), ToolCall("a", 0)],
        steps=10,
        format_errors=1,
    )
    result = agent_reward(run, ["a", "b"])
    assert result.reward == pytest.approx(0.175)
    assert result.metrics() == {
        "agent/completion": 1.0,
        "agent/accuracy": pytest.approx(0.8),
        "agent/efficiency": 0.5,
        "agent/timing": 1.0,
        "agent/format": 0.0,
        "agent/penalty_wrong_tool": pytest.approx(-0.3),
        "agent/penalty_redundant_call": pytest.approx(-0.2),
        "agent/penalty_format_error": pytest.approx(-0.1),
        "agent/penalty_time_out": 0.0,
    }
    # 0 + 0.25 + 0.15 + 0.10 + 0.10 - 0.5
    late = AgentRun(completion=0, calls=_calls("a"), steps=1, timed_out=True)
    assert agent_reward(late, ["a"]).reward == pytest.approx(0.1)
    # No tool was wanted: 0.40 + 0.25 * 0.5 + 0.15 + 0 + 0.10 - 0.3
    needless = AgentRun(completion=1, calls=_calls("a"), steps=1)
    assert agent_reward(needless, []).reward == pytest.approx(0.475)


def test_settings_and_the_lowest_reward() -> None:
    wild = AgentRun(completion=0, calls=_calls(*"xxxxxxxxxx"), steps=10)
    assert agent_reward(wild, ["a"]).reward == -1
    # 0.15 * 2/10 + 0.10 (a tool was needed and called) + 0.10 - 10 * 0.01
    mild = AgentRewardSection(wrong_tool=0.01)
    assert agent_reward(wild, ["a"], 2, mild).reward == pytest.approx(0.13)


def test_feedback_names_what_to_do_otherwise() -> None:
    run = AgentRun(
        completion=0.5,
        calls=[*_calls("a", "x"), ToolCall("a", 0)],
        steps=7,
        format_errors=2,
        timed_out=True,
    )
    assert agent_reward(run, ["a", "b"]).feedback == (
        "The task was completed to 50%. Not called but needed: b. Called but not needed: x. "
        "a was called again 1 times without need. It took 7 steps where 5 are enough. "
        "2 answers could not be read: keep to the format. The time ran out."
    )
    good = AgentRun(completion=1, calls=_calls("a"), steps=1)
    assert agent_reward(good, ["a"]).feedback == (
        "The task was completed. The right tools were called: a."
    )


@pytest.mark.parametrize(
    ("value", "names"),
    [(["a", " b"], ["a", "b"]), ('["a"]', ["a"]), ("a, b", ["a", "b"]), (None, []), ("", [])],
)
def test_target_tools_of_a_row(value, names) -> None:
    assert target_tools(value) == names


def test_the_judge() -> None:
    row = {"instruction": "Add.", "target_tools": ["add"], "answer": "42", "optimal_steps": 2}
    done = {"answer": "42", "tool_calls": [{"name": "add", "arguments": {"a": 1}}], "steps": 4}
    verdict = asyncio.run(agent_judge(row, done))
    assert verdict.reward == pytest.approx(0.925)  # 1 - 0.15 * (1 - 2/4)
    assert verdict.metrics["agent/completion"] == 1
    told = asyncio.run(agent_judge(row, {"tool_calls": ["add"], "completion": 0.5}))
    assert told.metrics["agent/completion"] == 0.5
    scored = {**row, "benchmark": "gsm8k", "question": "?"}
    wrong = asyncio.run(agent_judge(scored, {"tool_calls": ["add"], "answer": "41 or 42"}))
    assert wrong.metrics["agent/completion"] == 0
    with pytest.raises(TypeError, match="agent_judge wants a response such as"):
        asyncio.run(agent_judge(row, "42"))
