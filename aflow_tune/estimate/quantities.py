"""One training step as numbers: calls, tokens, seconds, US dollars, and how well each is known.

Lengths and calls come from the first of these: the command line, an earlier run in the same
folder, a rehearsal, the limits of the configuration (upper bounds). A product is known as well as
its worst factor. A speed is never assumed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.data.fields import most_calls
from aflow_tune.models.prices import price_of
from aflow_tune.models.types import Usage
from aflow_tune.report.metrics import MetricsLine, read_metrics, series

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig
    from aflow_tune.estimate.rehearsal import Seen


class Known(StrEnum):
    """How well a number is known, the worst first."""

    UNKNOWN = "unknown"
    BOUND = "upper bound"  # the settings allow no more; the run may stay far below
    GIVEN = "given"  # by the user
    MEASURED = "measured"  # by an earlier run of the same folder, or by --measure
    COUNTED = "counted"  # follows from the settings and the data alone


@dataclass(frozen=True)
class Number:
    """A quantity. `value` is None only if unknown. `how`: where it comes from, or how to find it
    out."""

    value: float | None
    known: Known
    how: str = ""

    def ceiling(self) -> int:
        """Rounded up to a count of at least one; one if unknown."""
        return 1 if self.value is None else max(1, math.ceil(self.value))


def computed(how: str, function: Callable[..., float], *numbers: Number) -> Number:
    """`function` of the values, known as well as the worst of them; unknown if one of them is."""
    for number in numbers:
        if number.value is None:
            return number
    known = min((number.known for number in numbers), key=list(Known).index)
    return Number(function(*(number.value for number in numbers)), known, how)


@dataclass(frozen=True)
class EstimateOptions:
    """What the command line adds to the configuration. Memory in bytes; None: not given."""

    prompt_tokens: int | None = None
    response_tokens: int | None = None
    calls: int | None = None
    tokens_per_second: float | None = None
    train_tokens_per_second: float | None = None
    gpu_memory: float | None = None
    gpus: int | None = None
    memory: float | None = None
    usd_per_gpu_hour: float | None = None
    rehearse: bool = True
    measure: bool = False


@dataclass
class Earlier:
    """The metrics of an earlier run; empty if there is none."""

    lines: list[MetricsLine] = field(default_factory=list)
    place: str = ""

    @classmethod
    def of(cls, folder: Path, place: str = "") -> Earlier:
        """The metrics of the run in `folder`."""
        return cls(read_metrics(folder), place or f"metrics of {folder}")

    def mean(self, name: str) -> float | None:
        values = [value for _, value in series(self.lines, name)][-10:]
        return sum(values) / len(values) if values else None

    def largest(self, name: str) -> float | None:
        return max((value for _, value in series(self.lines, name)), default=None)


@dataclass(frozen=True)
class Lengths:
    """Calls of a rollout, mean tokens of a call's prompt and response, and the longest of each.
    `unshared`: a rollout's prompt tokens that no other shares; None without a rehearsal."""

    calls: Number
    prompt: Number
    response: Number
    longest_prompt: float
    longest_response: float
    unshared: float | None = None


def limits_of(config: AflowConfig) -> tuple[int, int, int]:
    """Most tokens of a call: of its prompt, of its response, and of both together."""
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
    given: EstimateOptions,
    earlier: Earlier,
    seen: Seen | None,
) -> Lengths:
    prompt, response, _ = limits_of(config)
    most = most_calls(workflow) if workflow is not None else None
    if config.writer.executor:
        calls = Number(float(config.writer.turns), Known.BOUND, "writer.turns: the policy writes")
    elif config.graph.path:
        calls = Number(float(config.graph.max_calls), Known.BOUND, "the limit graph.max_calls")
    elif most is not None:
        calls = Number(float(max(1, most)), Known.BOUND, "calls in the workflow's source")
    else:
        how = "the workflow hands its model on: give --calls, or the number of a run's calls"
        calls = Number(None, Known.UNKNOWN, how)
    prompts = Number(float(prompt), Known.BOUND, "the limit model.max_prompt_tokens")
    responses = Number(float(response), Known.BOUND, "the limit model.max_response_tokens")
    if seen is not None:
        calls = Number(seen.calls, Known.COUNTED, seen.how)
        prompts = Number(seen.prompt, Known.COUNTED, seen.how)
        prompt = math.ceil(seen.longest_prompt)

    def best(said: int | None, metric: str, otherwise: Number) -> Number:
        if said is not None:
            return Number(float(said), Known.GIVEN, "command line")
        measured = earlier.mean(metric)
        return otherwise if measured is None else Number(measured, Known.MEASURED, earlier.place)

    return Lengths(
        best(given.calls, "rollout/calls/mean", calls),
        best(given.prompt_tokens, "prompt_length/mean", prompts),
        best(given.response_tokens, "response_length/mean", responses),
        float(given.prompt_tokens or earlier.largest("prompt_length/max") or prompt),
        float(given.response_tokens or earlier.largest("response_length/max") or response),
        None if seen is None else seen.unshared,
    )


def step_quantities(
    config: AflowConfig,
    lengths: Lengths,
    given: EstimateOptions,
    earlier: Earlier,
    gpus: int,
) -> dict[str, Number]:
    """The quantities of a training step, by the names that are printed."""
    tasks, repeats = config.buffer.batch_size, config.algorithm.repeat_times
    runs = Number(float(tasks * repeats), Known.COUNTED, f"{tasks} tasks x {repeats} runs")
    calls = computed("runs x calls of a run", operator.mul, runs, lengths.calls)
    how = "calls x tokens of a prompt, shared ones included"
    read = computed(how, operator.mul, calls, lengths.prompt)
    new = computed("calls x tokens of a response", operator.mul, calls, lengths.response)
    train = computed("what the trainer is given", operator.add, new, read)
    seconds = _seconds(new, train, given, earlier)
    gpu_dollars = Number(0.0, Known.COUNTED, "no GPU")
    if given.usd_per_gpu_hour is not None:
        rate = Number(gpus * given.usd_per_gpu_hour / 3600, Known.GIVEN)
        how = f"{gpus} GPUs x the step's time"
        gpu_dollars = computed(how, operator.mul, seconds["seconds"], rate)
    elif gpus:
        gpu_dollars = Number(None, Known.UNKNOWN, "give --usd-per-gpu-hour")
    dollars = {"usd for GPUs": gpu_dollars}
    for role, model in config.models.items():
        if role != "policy" and model.model:
            dollars[f"usd for {model.role or role}"] = _api_dollars(config, role, earlier, runs)
    return {
        "calls of a run": lengths.calls,
        "tokens of a prompt": lengths.prompt,
        "tokens of a response": lengths.response,
        "runs": runs,
        "calls": calls,
        "prompt tokens": read,
        "response tokens": new,
        "train tokens": train,
        **seconds,
        **dollars,
        "usd": computed("all of these", lambda *known: sum(known), *dollars.values()),
    }


def _seconds(
    new: Number, train: Number, given: EstimateOptions, earlier: Earlier
) -> dict[str, Number]:
    """Seconds of a step: those of an earlier run scaled by train tokens, or sampling plus training
    at the given speeds."""
    names = ("perf/train_tokens", "time/step", "explorer/time/wait_explore_step")
    tokens, time, waited = (earlier.mean(name) or 0.0 for name in names)
    speeds = (given.tokens_per_second, given.train_tokens_per_second)
    if tokens and time and waited and speeds == (None, None):
        step = waited + time + (earlier.mean("time/sync_weight") or 0.0)
        measured = Number(step / tokens, Known.MEASURED)
        how = f"{step:,.1f} s for {tokens:,.0f} train tokens: {earlier.place}"
        return {"seconds": computed(how, operator.mul, measured, train)}
    how = "give both speeds, add --measure (local engine), or run a few steps in this folder first"
    found = {}
    for name, count, speed in zip(("sampling", "training"), (new, train), speeds, strict=True):
        known = Number(speed, Known.UNKNOWN if speed is None else Known.GIVEN, how)
        text = f"{speed or 0:,.0f} a second"
        found[f"seconds {name}"] = computed(text, operator.truediv, count, known)
    return found | {"seconds": computed("taking turns", operator.add, *found.values())}


def _api_dollars(config: AflowConfig, role: str, earlier: Earlier, runs: Number) -> Number:
    """US dollars of a step for a model behind an API; without an earlier run unknown, or 0."""
    model, every = config.models[role], runs.value or 0.0
    spent = earlier.mean(f"rollout/cost/{model.role or role}/mean")
    if spent is not None:
        return Number(every * spent, Known.MEASURED, f"US dollars of a run: {earlier.place}")
    price = price_of(model.provider, model.base_url, model.model or "", model.prices)
    if price is None:
        return Number(None, Known.UNKNOWN, f"no price of {model.model}: give models.{role}.prices")
    million = price.cost(Usage(1_000_000, 0)), price.cost(Usage(0, 1_000_000))
    if not any(million):
        return Number(0.0, runs.known, "it costs nothing")
    why = "US dollars of a million tokens: {:.2f} in, {:.2f} out; lengths are not known"
    return Number(None, Known.UNKNOWN, why.format(*million))
