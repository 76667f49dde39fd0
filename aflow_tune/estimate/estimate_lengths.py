"""How long prompts and responses are, and how many calls a run makes: the best that is known.

In this order: what the user said, what an earlier run in the same folder measured, what a
rehearsal of the workflow showed (`rehearsal.py`), the limits of the configuration. What comes from
limits is an upper bound and is called so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.data.fields import most_calls
from aflow_tune.estimate.step import Lengths, Speed
from aflow_tune.estimate.types import Known, Number
from aflow_tune.report.metrics import MetricsLine, read_metrics, series

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig
    from aflow_tune.estimate.rehearsal import Rehearsal

_NO_SPEED = (
    "no speed is known: give --tokens-per-second and --train-tokens-per-second, add --measure "
    "(local engine), or run a few steps first: their metrics are read from the run's folder"
)


@dataclass(frozen=True)
class Given:
    """What the user said on the command line; None: nothing."""

    prompt_tokens: int | None = None
    response_tokens: int | None = None
    calls: int | None = None
    tokens_per_second: float | None = None
    train_tokens_per_second: float | None = None


@dataclass
class Earlier:
    """What the metrics of an earlier run say; empty where there is none."""

    lines: list[MetricsLine] = field(default_factory=list)
    place: str = ""
    peak: float | None = None
    """Bytes that its process tree took at most, where that was measured."""

    @classmethod
    def of(cls, folder: Path, place: str = "") -> Earlier:
        """The metrics of the run in `folder`."""
        return cls(read_metrics(folder), place or f"metrics of {folder}")

    def mean(self, name: str) -> float | None:
        """The mean of a metric's last ten steps; None if it was never logged."""
        values = [value for _, value in series(self.lines, name)][-10:]
        return sum(values) / len(values) if values else None

    def largest(self, name: str) -> float | None:
        """The largest value of a metric."""
        return max((value for _, value in series(self.lines, name)), default=None)

    def number(self, value: float | None) -> Number | None:
        """A measured number, or None."""
        return None if value is None else Number(value, Known.MEASURED, self.place)


def limits_of(config: AflowConfig) -> tuple[int, int, int]:
    """Tokens of a prompt, of a response and of both together that a call may have at most."""
    model = config.model
    together = model.max_model_len or (
        (model.max_prompt_tokens or 0) + (model.max_response_tokens or 0)
    )
    response = model.max_response_tokens or together
    prompt = min(model.max_prompt_tokens or together, max(1, together - 1))
    return prompt, min(response, together), together


def lengths_of(
    config: AflowConfig,
    workflow: Callable[..., Any] | None,
    given: Given,
    earlier: Earlier,
    rehearsal: Rehearsal | None,
) -> Lengths:
    """Calls of a run, and mean tokens of prompts and responses."""
    prompt, response, _ = limits_of(config)
    limit = "the limit model.{}"
    most_prompt = given.prompt_tokens or earlier.largest("prompt_length/max")
    most_response = given.response_tokens or earlier.largest("response_length/max")
    return Lengths(
        longest_prompt=float(most_prompt or (rehearsal.longest if rehearsal else prompt)),
        longest_response=float(most_response or response),
        calls=_first(
            _given(given.calls),
            earlier.number(earlier.mean("rollout/calls/mean")),
            Number(rehearsal.calls, Known.COUNTED, rehearsal.how) if rehearsal else None,
            _calls_bound(config, workflow),
        ),
        prompt=_first(
            _given(given.prompt_tokens),
            earlier.number(earlier.mean("prompt_length/mean")),
            Number(rehearsal.prompt, Known.COUNTED, rehearsal.how) if rehearsal else None,
            Number(float(prompt), Known.BOUND, limit.format("max_prompt_tokens")),
        ),
        response=_first(
            _given(given.response_tokens),
            earlier.number(earlier.mean("response_length/mean")),
            Number(float(response), Known.BOUND, limit.format("max_response_tokens")),
        ),
    )


def speed_of(given: Given, earlier: Earlier) -> Speed:
    """Measured or given speeds; unknown otherwise."""
    unknown = Number(None, Known.UNKNOWN, _NO_SPEED)
    train_tokens, train_time = earlier.mean("perf/train_tokens"), earlier.mean("time/step")
    training = train_tokens / train_time if train_tokens and train_time else None
    waited = earlier.mean("explorer/time/wait_explore_step")
    synced = earlier.mean("time/sync_weight") or 0.0
    step = waited + train_time + synced if waited and train_time else None
    fresh = given.tokens_per_second or given.train_tokens_per_second
    return Speed(
        sampling=_first(
            _given(given.tokens_per_second),
            earlier.number(earlier.mean("rollout/tokens_per_second")),
            unknown,
        ),
        training=_first(_given(given.train_tokens_per_second), earlier.number(training), unknown),
        step=(None if fresh else earlier.number(step)) or unknown,
        step_tokens=train_tokens,
    )


def _calls_bound(config: AflowConfig, workflow: Callable[..., Any] | None) -> Number:
    if config.writer.executor:
        turns = config.writer.turns
        return Number(float(turns), Known.BOUND, "writer.turns: the policy writes")
    if config.graph.path:
        return Number(float(config.graph.max_calls), Known.BOUND, "the limit graph.max_calls")
    seen = most_calls(workflow) if workflow is not None else None
    if seen is not None:
        return Number(float(max(1, seen)), Known.BOUND, "calls in the workflow's source")
    how = "the workflow hands its model on: give --calls, or the number of a run's calls"
    return Number(None, Known.UNKNOWN, how)


def _given(value: float | None) -> Number | None:
    return None if value is None else Number(float(value), Known.GIVEN, "command line")


def _first(*numbers: Number | None) -> Number:
    return next(number for number in numbers if number is not None)


def whole(number: Number, default: int = 1) -> int:
    """A number as a count, rounded up; `default` where it is unknown."""
    return default if number.value is None else max(1, math.ceil(number.value))
