"""Computes rewards: their settings, weighted parts, and two rewards that ship with the package.

`five_part` rewards a correct, cheap, simple, well-formed answer without repetition; `agent_reward`
rewards the right use of tools (`turns.turn_reward`: in one turn that has a gold answer). Each part
is in [0, 1], or None if unknown; then its weight is spread over the others. An answer that cannot
be scored has no reward (`Unscored`).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from aflow_tune.context import current_rollout
from aflow_tune.errors import BadInput, Fault
from aflow_tune.scoring.benchmarks import Benchmark, find
from aflow_tune.scoring.types import Rule, Score
from aflow_tune.sections import AgentRewardSection, FivePartSection, RewardsSection
from aflow_tune.trace import ModelCall, OperatorCall, Trace

WEIGHTS = {
    "five_part": ("correctness", "efficiency", "simplicity", "format", "repetition"),
    "agent": ("completion", "accuracy", "efficiency", "timing", "format"),
    "turns": (
        "tool_selection_accuracy",
        "plan_success_rate",
        "step_efficiency",
        "timing_precision",
        "argument_correctness",
        "end_to_end_success",
    ),
}
"""The names of each reward's weights in its section, in the order of its parts."""
_POSITIVE = ("usd_limit", "token_limit", "seconds_limit", "operator_limit", "optimal_steps")
_PENALTIES = ("wrong_tool", "redundant_call", "format_error", "time_out")


class Unscored(RuntimeError):
    """An answer could not be scored, so it has no reward: the rollout counts as failed."""


def reward_settings() -> RewardsSection:
    """The `rewards` section of the current rollout, or the defaults outside of one."""
    run = current_rollout()
    return RewardsSection() if run is None or run.rewards is None else run.rewards


def reward_faults(settings: RewardsSection) -> Iterable[Fault]:
    """What is wrong with a `rewards` section; each fault's `where` is the key."""
    for reward, names in WEIGHTS.items():
        section, key = getattr(settings, reward), f"rewards.{reward}"
        weights = [getattr(section, name) for name in names]
        checks = [
            *((name, weight, 0 <= weight <= 1, "a weight from 0 to 1")
              for name, weight in zip(names, weights, strict=True)),
            *((name, value, 0 < value < math.inf, "a number above 0")
              for name in _POSITIVE if (value := getattr(section, name, 1)) is not None),
            *((name, value, 0 <= value < math.inf, "0 or more, which is taken off")
              for name in _PENALTIES if (value := getattr(section, name, 0)) is not None),
        ]  # fmt: skip
        for name, value, holds, expected in checks:
            if not holds:
                yield Fault(f"{key}.{name}", expected, str(value), "correct it")
        if abs(sum(weights) - 1) > 1e-6:
            found = f"{sum(weights):g} = {' + '.join(f'{weight:g}' for weight in weights)}"
            expected = f"weights {', '.join(names)} that are 1 together"
            yield Fault(key, expected, found, "correct one")
    scale = settings.five_part
    if not -math.inf < scale.lowest < scale.highest < math.inf:
        found = f"{scale.lowest:g} and {scale.highest:g}"
        yield Fault("rewards.five_part", "`lowest` below `highest`", found, "correct one")
    if settings.benchmark is not None:
        try:
            find(settings.benchmark)
        except BadInput as error:
            yield from (replace(fault, where="rewards.benchmark") for fault in error.faults)


def benchmark_of(row: Mapping[str, Any]) -> Benchmark:
    """The benchmark of a row: its field `benchmark`, else `rewards.benchmark`. Raises BadInput."""
    name = row.get("benchmark") or reward_settings().benchmark
    if name is None:
        title = "A row without a benchmark cannot be scored."
        fix = "set `rewards: {benchmark: gsm8k}`, or give the rows a field `benchmark`"
        raise BadInput.of(title, "rewards.benchmark", "the name of a benchmark", "none", fix)
    return find(name)


def logged(scores: Mapping[Rule, Score]) -> dict[str, float]:
    """The scores by both rules as metrics, without those that are unscored."""
    return {rule: score.value for rule, score in scores.items() if score.value is not None}


def weighted(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """The weighted mean of the known parts. Raises Unscored: none with a weight is known."""
    known = {name: value for name, value in parts.items() if value is not None}
    total = sum(weights[name] for name in known)
    if total <= 0:
        raise Unscored("no part of the reward is known")
    return sum(weights[name] * value for name, value in known.items()) / total


def scored(score: Score) -> float:
    """The value of a score. Raises Unscored: it has none."""
    if score.value is None:
        raise Unscored(f"the answer could not be scored: {score.reason}")
    return score.value


def text_of(response: Any) -> str:
    """A workflow's result (None, a text or an AgentScope message) as text. Raises TypeError."""
    if response is None or isinstance(response, str):
        return response or ""
    if hasattr(response, "get_text_content"):
        return response.get_text_content() or ""
    raise TypeError(f"a response must be a text or a message, not {type(response).__name__}")


N = TypeVar("N", int, float)

NGRAM = 4


@dataclass(frozen=True)
class Usage:
    usd: float | None
    tokens: int | None
    seconds: float
    operators: int

    @classmethod
    def of(cls, trace: Trace) -> Usage:
        """The totals of a trace; seconds from the first event's start to the last one's end."""
        calls = [call for call in trace.of(ModelCall) if call.failure is None]
        tokens = [n for call in calls for n in (call.prompt_tokens, call.completion_tokens)]
        ends = [event.started + event.seconds for event in trace.events]
        starts = [event.started for event in trace.events]
        return cls(
            usd=total([call.cost for call in calls]),
            tokens=total(tokens),
            seconds=max(ends) - min(starts) if ends else 0.0,
            operators=len(trace.of(OperatorCall)),
        )


@dataclass(frozen=True)
class FivePart:
    """The reward, and its parts in [0, 1] by name; None for an unknown part."""

    reward: float
    parts: Mapping[str, float | None]

    def metrics(self) -> dict[str, float]:
        return {f"five_part/{name}": v for name, v in self.parts.items() if v is not None}


def five_part(
    score: float,
    answer: str,
    usage: Usage,
    settings: FivePartSection | None = None,
    form: str = r"\S",
) -> FivePart:
    """The reward of an answer: lowest + (highest - lowest) * weighted mean of the parts; with the
    defaults 20 * mean - 10. The parts, with left(x) = max(0, 1 - x / limit):

    - correctness: `score`, clipped to [0, 1].
    - efficiency: left(cost), left(tokens) if the cost is unknown, None if both are.
    - simplicity: the mean of left(seconds) and left(number of operator calls).
    - format: 1 if the regular expression `form` is found in the answer, else 0.
    - repetition: distinct word 4-grams / all of them, without case; 1 for fewer than four words.
    """
    chosen = settings or FivePartSection()
    words = answer.lower().split()
    runs = [tuple(words[start : start + NGRAM]) for start in range(len(words) - NGRAM + 1)]
    limits = {"usd": chosen.usd_limit, "tokens": chosen.token_limit}
    limits |= {"seconds": chosen.seconds_limit, "operators": chosen.operator_limit}
    left = {
        name: None if (used := getattr(usage, name)) is None else max(0.0, 1.0 - used / limit)
        for name, limit in limits.items()
    }
    parts = {
        "correctness": min(1.0, max(0.0, score)),
        "efficiency": left["tokens"] if left["usd"] is None else left["usd"],
        "simplicity": ((left["seconds"] or 0.0) + (left["operators"] or 0.0)) / 2,
        "format": float(re.search(form, answer, re.MULTILINE) is not None),
        "repetition": len(set(runs)) / len(runs) if runs else 1.0,
    }
    weights = {name: getattr(chosen, name) for name in WEIGHTS["five_part"]}
    scale = chosen.highest - chosen.lowest
    return FivePart(chosen.lowest + scale * weighted(parts, weights), parts)


def total(values: Sequence[N | None]) -> N | None:
    """The sum; None if there are no values or one of them is unknown."""
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(values) else None


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Any = None


def agent_reward(
    completion: float,
    calls: Sequence[ToolCall],
    wanted: Sequence[str],
    *,
    steps: int = 0,
    format_errors: int = 0,
    timed_out: bool = False,
    optimal_steps: int | None = None,
    settings: AgentRewardSection | None = None,
) -> tuple[float, dict[str, float]]:
    """The reward of an agent's rollout, and each part and penalty as the metric `agent/NAME`.

    The weighted mean of parts in [0, 1], minus a penalty for each wrong tool call, redundant call
    and format error, and for a time-out; at least `settings.lowest`. `wanted` are the tools that
    the task needs; `steps` counts the model's responses, with tool calls or without.
    """
    chosen = settings or AgentRewardSection()
    called = [call.name for call in calls]
    parts = {
        "completion": min(1.0, max(0.0, completion)),
        "accuracy": tool_accuracy(called, wanted),
        "efficiency": efficiency(steps, optimal_steps or chosen.optimal_steps),
        "timing": timing(called, wanted),
        "format": float(format_errors == 0),
    }
    counts = {
        "wrong_tool": sum(name not in wanted for name in called),
        "redundant_call": len(redundant_calls(calls, wanted)),
        "format_error": format_errors,
        "time_out": int(timed_out),
    }
    penalties = {f"penalty_{k}": -getattr(chosen, k) * n or 0.0 for k, n in counts.items()}
    weights = {name: getattr(chosen, name) for name in WEIGHTS["agent"]}
    reward = max(chosen.lowest, weighted(parts, weights) + sum(penalties.values()))
    return reward, {f"agent/{name}": value for name, value in (parts | penalties).items()}


def tool_accuracy(called: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 of the set of tools called against the set wanted; if none was wanted, 1.0 if none was
    called, else 0.5."""
    given, expected = set(called), set(wanted)
    if not expected:
        return 0.5 if given else 1.0
    return 2 * len(given & expected) / (len(given) + len(expected))


def efficiency(steps: int, optimal_steps: int) -> float:
    """1 up to `optimal_steps`, then `optimal_steps / steps`."""
    return min(1.0, optimal_steps / steps) if steps > 0 else 1.0


def timing(called: Sequence[str], wanted: Sequence[str]) -> float:
    """1 if a tool was called and one was wanted, or neither; else 0. Durations do not count."""
    return float(bool(called) == bool(wanted))


def redundant_calls(calls: Sequence[ToolCall], wanted: Sequence[str]) -> list[str]:
    """The names of wanted tools, once for each call that repeats an earlier one (name, arguments)
    more often than `wanted` lists the tool."""
    allowed, seen = Counter(wanted), Counter[str]()
    repeats = []
    for call in calls:
        key = json.dumps([call.name, call.arguments], sort_keys=True, default=str)
        seen[key] += 1
        if call.name in allowed and seen[key] > allowed[call.name]:
            repeats.append(call.name)
    return repeats


def target_tools(value: Any) -> list[str]:
    """The names in a row's `target_tools`: a list, a JSON list as text, or comma-separated text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.lstrip().startswith("[") else value.split(",")
        except ValueError:
            value = value.split(",")
    return [name for item in value or () if (name := str(item).strip())]
