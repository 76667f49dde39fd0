"""What the shipped rewards share: their settings, weights that are checked, unscored answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from aflow_tune.context import current_rollout
from aflow_tune.errors import BadInput, Fault
from aflow_tune.scoring.benchmarks import Benchmark, find
from aflow_tune.scoring.types import Rule, Score
from aflow_tune.sections import RewardsSection

WEIGHTS = {
    "five_part": ("correctness", "efficiency", "simplicity", "format", "repetition"),
    "agent": ("completion", "accuracy", "efficiency", "timing", "format"),
}
"""The weights of each reward's section, in the order of its parts."""
_POSITIVE = ("usd_limit", "token_limit", "seconds_limit", "operator_limit", "optimal_steps")
_PENALTIES = ("wrong_tool", "redundant_call", "format_error", "time_out")


class Unscored(RuntimeError):
    """An answer could not be scored, so it has no reward: the run counts as failed."""


def reward_settings() -> RewardsSection:
    """The `rewards` section of the current run's configuration, or the defaults."""
    run = current_rollout()
    return RewardsSection() if run is None or run.rewards is None else run.rewards


def reward_faults(settings: RewardsSection) -> Iterable[Fault]:
    """What is wrong with a `rewards` section. `where` is the key path."""
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
    """The benchmark of a row: its field `benchmark`, or `rewards.benchmark`. Raises BadInput."""
    name = row.get("benchmark") or reward_settings().benchmark
    if name is None:
        title = "A row without a benchmark cannot be scored."
        fix = "set `rewards: {benchmark: gsm8k}`, or give the rows a field `benchmark`"
        raise BadInput.of(title, "rewards.benchmark", "the name of a benchmark", "none", fix)
    return find(name)


def logged(scores: Mapping[Rule, Score]) -> dict[str, float]:
    """The scores by both rules as metrics; what is unscored is left out."""
    return {rule: score.value for rule, score in scores.items() if score.value is not None}


def weighted(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """The weighted mean of the parts that are known, in [0, 1] if they are. A part that is None is
    unknown, not 0: its weight falls to the others. Raises Unscored: none is known."""
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
    """What a workflow returned, a text or an AgentScope message, as text. Raises TypeError."""
    if response is None or isinstance(response, str):
        return response or ""
    if hasattr(response, "get_text_content"):
        return response.get_text_content() or ""
    raise TypeError(f"a response must be a text or a message, not {type(response).__name__}")
