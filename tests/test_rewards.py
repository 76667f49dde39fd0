"""The shipped rewards: parts, penalties and sums by hand, judges on hand-written answers."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from aflow_tune.context import RolloutContext
from aflow_tune.contract.plugins import resolve
from aflow_tune.scoring.asked_process import Undecided
from aflow_tune.scoring.mathematics import equal_answers
from aflow_tune.scoring.rewards import (
    ToolCall,
    Usage,
    agent_reward,
    efficiency,
    five_part,
    redundant_calls,
    timing,
    tool_accuracy,
)
from aflow_tune.sections import AgentRewardSection, FivePartSection, RewardsSection
from aflow_tune.trace import ModelCall, OperatorCall, Trace

ROOT = Path(__file__).parents[1]
ROW = {"question": "?", "answer": "#### 42", "benchmark": "gsm8k"}
NOTHING = Usage(usd=0.0, tokens=0, seconds=0.0, operators=0)


def shipped(name: str) -> Any:
    """A function of `rewards/`, named as `file:function`."""
    return resolve(f"{ROOT}/rewards/{name.replace(':', '.py:')}")


def judge(name: str, row: dict[str, Any], response: Any, **rewards: Any) -> Any:
    async def run() -> Any:
        with RolloutContext(rewards=RewardsSection(**rewards)).activate():
            return await shipped(f"{name}:{name}_judge")(row, response)

    return asyncio.run(run())


def test_answers_are_compared_from_many_threads_and_without_end() -> None:
    reward = shipped("math_boxed:math_boxed_reward")
    questions = [(f"\\boxed{{\\frac{{{n}}}{{4}}}}", str(n / 4)) for n in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda asked: reward(*asked), questions)) == [1.0] * 8
    with pytest.raises(Undecided, match="3 s of processor time"):
        equal_answers("9^{9^{9^{9}}}", "8")
    assert reward(r"\boxed{\frac{6}{4}}", "1.5") == 1.0


def test_the_comparing_process_ends_with_its_parent() -> None:
    code = (
        "import os, psutil, signal\n"
        "from aflow_tune.scoring.mathematics import equal_answers\n"
        "assert equal_answers('0.5', '\\\\frac12')\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(timeout=120)


def test_the_five_parts_by_hand() -> None:
    def part(name: str, score: float = 1.0, answer: str = "", usage: Usage = NOTHING) -> Any:
        return five_part(score, answer, usage, form=r"[^\s]").parts[name]

    assert [part("correctness", value) for value in (-1, 0.4, 2)] == [0.0, 0.4, 1.0]
    usage = Usage(usd=0.004, tokens=2048, seconds=15.0, operators=4)
    # 1 - 0.004 / 0.01; without money 1 - 2048 / 8192
    assert part("efficiency", usage=usage) == pytest.approx(0.6)
    assert part("efficiency", usage=Usage(None, 2048, 0, 0)) == pytest.approx(0.75)
    assert part("efficiency", usage=Usage(None, None, 0, 0)) is None
    # (1 - 15/60 + 1 - 4/10) / 2
    assert part("simplicity", usage=usage) == pytest.approx(0.675)
    assert part("simplicity", usage=Usage(0.0, 0, 600.0, 100)) == 0
    assert [part("format", answer=text) for text in ("42", " \n")] == [1, 0]
    # a b c d, b c d a, c d a b, d a b c, a b c d: one of five is a repeat
    assert part("repetition", answer="a b c d a b c D") == pytest.approx(0.8)
    assert part("repetition", answer="a b c") == 1


def test_the_sum_of_five_parts_by_hand() -> None:
    assert five_part(1.0, "42", NOTHING).reward == pytest.approx(10)
    # 0.15 + 0.10 + 0.05 + 0.05 = 0.35; 20 * 0.35 - 10
    assert five_part(0.0, "42", NOTHING).reward == pytest.approx(-3)
    usage = Usage(usd=0.004, tokens=2048, seconds=15.0, operators=4)
    # 0.65 + 0.15 * 0.6 + 0.10 * 0.675 + 0 + 0.05 * 0.8 = 0.8475; 20 * 0.8475 - 10
    result = five_part(1.0, "a b c d a b c d", usage, form=r"\d")
    assert result.reward == pytest.approx(6.95)
    assert result.metrics() == {
        "five_part/correctness": 1.0,
        "five_part/efficiency": pytest.approx(0.6),
        "five_part/simplicity": pytest.approx(0.675),
        "five_part/format": 0.0,
        "five_part/repetition": pytest.approx(0.8),
    }
    # A cost that is not known is never zero: the other weights are all that count.
    unknown = five_part(1.0, "42", Usage(None, None, 0, 0))
    assert "five_part/efficiency" not in unknown.metrics()
    assert unknown.reward == pytest.approx(10)
    settings = FivePartSection(
        correctness=1.0, efficiency=0, simplicity=0, format=0, repetition=0, lowest=0, highest=1
    )
    assert five_part(0.25, "", NOTHING, settings).reward == pytest.approx(0.25)


def test_what_a_run_used_is_read_from_its_trace() -> None:
    call = {"role": "policy", "model": "m", "prompt_tokens": 10, "completion_tokens": 5}
    trace = Trace(
        [
            ModelCall(**call, cost=0.25, started=100.0, seconds=1.0),
            ModelCall(**call, cost=0.5, started=101.0, seconds=3.0),
            ModelCall(role="policy", model="m", failure="timed_out", started=102.0, seconds=1.0),
            OperatorCall(operator="Custom", instance="c", outcome="answered", started=100.0),
        ]
    )
    assert Usage.of(trace) == Usage(usd=0.75, tokens=30, seconds=4.0, operators=1)
    trace.events.append(ModelCall(**call, cost=None, started=100.0))
    assert Usage.of(trace).usd is None
    assert Usage.of(Trace()) == Usage(None, None, 0.0, 0)


def calls(*names: str) -> list[ToolCall]:
    return [ToolCall(name, number) for number, name in enumerate(names)]


# ab of abc: P 2/3, R 1; a of abc: P 1, R 1/3.
TOOLS: list[Any] = [("ab", "ab", 1, 1), ("abc", "ab", 0.8, 1), ("a", "abc", 0.5, 1)]
TOOLS += [("x", "a", 0, 1), ("", "a", 0, 0), ("", "", 1, 1), ("a", "", 0.5, 0)]


@pytest.mark.parametrize(("called", "wanted", "accuracy", "timed"), TOOLS)
def test_accuracy_is_f1_of_the_tools_and_timing_whether_one_was_called_when_needed(
    called: str, wanted: str, accuracy: float, timed: float
) -> None:
    assert tool_accuracy(list(called), list(wanted)) == pytest.approx(accuracy)
    assert timing(list(called), list(wanted)) == timed


def test_efficiency_wrong_and_redundant_calls() -> None:
    assert [efficiency(steps, 5) for steps in (0, 3, 5, 10)] == [1, 1, 1, 0.5]
    same = [ToolCall("a", {"q": 1}), ToolCall("a", {"q": 1}), ToolCall("a", {"q": 2})]
    assert redundant_calls(same, ["a"]) == ["a"]
    assert redundant_calls(same, ["a", "a"]) == []
    assert redundant_calls([ToolCall("x"), ToolCall("x")], ["a"]) == []  # wrong, not redundant


def test_the_sum_of_an_agent_by_hand() -> None:
    assert agent_reward(1, calls("a", "b"), ["a", "b"], steps=3)[0] == pytest.approx(1)
    # 0.40 + 0.25 * 0.8 + 0.15 * 5/10 + 0.10 + 0.10 * 0 - 0.3 - 0.2 - 0.1
    made = [*calls("a", "b", "c"), ToolCall("a", 0)]
    reward, metrics = agent_reward(1, made, ["a", "b"], steps=10, format_errors=1)
    assert reward == pytest.approx(0.175)
    assert metrics == {
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
    late = agent_reward(0, calls("a"), ["a"], steps=1, timed_out=True)
    assert late[0] == pytest.approx(0.1)
    # No tool was wanted: 0.40 + 0.25 * 0.5 + 0.15 + 0 + 0.10 - 0.3
    assert agent_reward(1, calls("a"), [], steps=1)[0] == pytest.approx(0.475)
    wild = 0, calls(*"xxxxxxxxxx"), ["a"]
    assert agent_reward(*wild, steps=10)[0] == -1
    # 0.15 * 2/10 + 0.10 (a tool was needed and called) + 0.10 - 10 * 0.01
    mild = AgentRewardSection(wrong_tool=0.01)
    found = agent_reward(*wild, steps=10, optimal_steps=2, settings=mild)
    assert found[0] == pytest.approx(0.13)


def test_the_agent_judge() -> None:
    row = {"instruction": "Add.", "target_tools": ["add"], "answer": "42", "optimal_steps": 2}
    done = {"answer": "42", "tool_calls": [{"name": "add", "arguments": {"a": 1}}], "steps": 4}
    verdict = judge("agent", row, done)
    assert verdict.reward == pytest.approx(0.925)  # 1 - 0.15 * (1 - 2/4)
    assert verdict.metrics["agent/completion"] == 1
    told = judge("agent", row, {"tool_calls": ["add"], "completion": 0.5})
    assert told.metrics["agent/completion"] == 0.5
    scored = {**row, "benchmark": "gsm8k", "question": "?"}
    wrong = judge("agent", scored, {"tool_calls": ["add"], "answer": "41 or 42"})
    assert wrong.metrics["agent/completion"] == 0
    with pytest.raises(TypeError, match="agent_judge wants a response such as"):
        judge("agent", row, "42")
