"""The reward of tool-using agents: five weighted parts, less penalties, and a written feedback.

A run is described by the tools it called in order, so nothing here depends on an agent framework.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aflow_tune.scoring.rewards import WEIGHTS, weighted
from aflow_tune.sections import AgentRewardSection


@dataclass(frozen=True)
class ToolCall:
    """One call; its arguments as far as they are known."""

    name: str
    arguments: Any = None


@dataclass(frozen=True, kw_only=True)
class AgentRun:
    """What an agent did for one task: how far it was completed, in [0, 1]; its tool calls; `steps`,
    the model's answers, those without a tool call included; how many could not be read."""

    completion: float
    calls: Sequence[ToolCall] = ()
    steps: int = 0
    format_errors: int = 0
    timed_out: bool = False


@dataclass(frozen=True)
class AgentReward:
    """The reward, its parts in [0, 1], what was taken off and why."""

    reward: float
    parts: Mapping[str, float]
    penalties: Mapping[str, float] = field(default_factory=dict)
    """What was taken off, by name, as numbers of 0 or less."""
    feedback: str = ""

    def metrics(self) -> dict[str, float]:
        """Each part and each penalty under `agent/NAME`."""
        return {f"agent/{n}": v for n, v in (*self.parts.items(), *self.penalties.items())}


def agent_reward(
    run: AgentRun,
    wanted: Sequence[str],
    optimal_steps: int | None = None,
    settings: AgentRewardSection | None = None,
) -> AgentReward:
    """The reward of a run whose task wants the tools `wanted` (none: an empty list).

    A penalty counts once for each wrong tool call, redundant call and format error, and once
    for a time-out. The sum is not below `settings.lowest`.
    """
    chosen = settings or AgentRewardSection()
    optimal = optimal_steps or chosen.optimal_steps
    called = [call.name for call in run.calls]
    parts = {
        "completion": min(1.0, max(0.0, run.completion)),
        "accuracy": tool_accuracy(called, wanted),
        "efficiency": efficiency(run.steps, optimal),
        "timing": timing(called, wanted),
        "format": float(run.format_errors == 0),
    }
    counts = {
        "wrong_tool": sum(name not in wanted for name in called),
        "redundant_call": len(redundant_calls(run.calls, wanted)),
        "format_error": run.format_errors,
        "time_out": int(run.timed_out),
    }
    penalties = {f"penalty_{name}": -getattr(chosen, name) * n for name, n in counts.items()}
    weights = {name: getattr(chosen, name) for name in WEIGHTS["agent"]}
    total = weighted(parts, weights) + sum(penalties.values())
    return AgentReward(
        reward=max(chosen.lowest, total),
        parts=parts,
        penalties={name: value or 0.0 for name, value in penalties.items()},
        feedback=feedback(run, wanted, optimal),
    )


def tool_accuracy(called: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 of the set of tools called against the set wanted; where none was wanted, 1.0 if none was
    called, else 0.5."""
    given, expected = set(called), set(wanted)
    if not expected:
        return 0.5 if given else 1.0
    return 2 * len(given & expected) / (len(given) + len(expected))


def efficiency(steps: int, optimal_steps: int) -> float:
    """1 up to `optimal_steps`, then `optimal_steps / steps`."""
    return min(1.0, optimal_steps / steps) if steps > 0 else 1.0


def timing(called: Sequence[str], wanted: Sequence[str]) -> float:
    """1 if a tool was called and one was needed, or neither; else 0. Never seconds."""
    return float(bool(called) == bool(wanted))


def redundant_calls(calls: Sequence[ToolCall], wanted: Sequence[str]) -> list[str]:
    """Calls of wanted tools that repeat one before, name and arguments, in order.

    A tool that `wanted` names several times may be called as often.
    """
    allowed, seen = Counter(wanted), Counter[str]()
    repeats = []
    for call in calls:
        key = json.dumps([call.name, call.arguments], sort_keys=True, default=str)
        seen[key] += 1
        if call.name in allowed and seen[key] > allowed[call.name]:
            repeats.append(call.name)
    return repeats


def feedback(run: AgentRun, wanted: Sequence[str], optimal_steps: int) -> str:
    """What went well and what to do otherwise, a sentence each."""
    called = [call.name for call in run.calls]
    missing = ", ".join(name for name in dict.fromkeys(wanted) if name not in called)
    wrong = ", ".join(name for name in dict.fromkeys(called) if name not in wanted)
    repeated = Counter(redundant_calls(run.calls, wanted))
    done = "completed" if run.completion >= 1 else f"completed to {run.completion:.0%}"
    unneeded = " None should have been called." if called else ""
    lines = {
        f"The task was {done if run.completion > 0 else 'not completed'}.": True,
        f"No tool was needed.{unneeded}": not wanted,
        f"The right tools were called: {', '.join(dict.fromkeys(wanted))}.": wanted
        and not missing
        and not wrong,
        f"Not called but needed: {missing}.": missing,
        f"Called but not needed: {wrong}.": wrong,
        **{f"{name} was called again {n} times without need.": n for name, n in repeated.items()},
        f"It took {run.steps} steps where {optimal_steps} are enough.": run.steps > optimal_steps,
        f"{run.format_errors} answers could not be read: keep to the format.": run.format_errors,
        "The time ran out.": run.timed_out,
    }
    return " ".join(line for line, holds in lines.items() if holds)


def target_tools(value: Any) -> list[str]:
    """The names in a row's `target_tools`: a list, a JSON list as text, or names and commas."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.lstrip().startswith("[") else value.split(",")
        except ValueError:
            value = value.split(",")
    return [name for item in value or () if (name := str(item).strip())]
