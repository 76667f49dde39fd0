"""One training step as numbers: tokens, seconds, US dollars.

Counts multiply: tasks x runs of each x calls of a run x tokens of a call. How well a product is
known is how well its worst factor is. A speed is never assumed: without one that was measured or
given, the time is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aflow_tune.estimate.types import Known, Number

_WORST = (Known.UNKNOWN, Known.BOUND, Known.GIVEN, Known.MEASURED, Known.COUNTED)
_ALIKE = 0.1
"""Share by which the tokens of two steps of the same settings may differ."""


@dataclass(frozen=True)
class Lengths:
    """Calls of a run, and tokens of a call's prompt and response."""

    calls: Number
    prompt: Number
    response: Number
    longest_prompt: float = 0.0
    """Tokens of the longest prompt; 0: as `prompt`."""
    longest_response: float = 0.0
    """Tokens of the longest response; 0: as `response`."""


@dataclass(frozen=True)
class Speed:
    """Tokens a second. `sampling` counts new tokens, `training` the tokens of samples."""

    sampling: Number
    training: Number
    step: Number
    """Seconds of a whole step, where that itself was measured."""
    step_tokens: float | None = None
    """Train tokens of that measured step."""


@dataclass(frozen=True)
class RoleUse:
    """What a step asks of one model behind an API. `price`: US dollars of one call, or None."""

    role: str
    calls: Number
    price: float | None
    why: str = ""


def worst(*numbers: Number) -> Known:
    """The standing of what is computed from all of them."""
    return min((number.known for number in numbers), key=_WORST.index)


def product(*numbers: Number, how: str = "") -> Number:
    """The product; unknown if a factor is."""
    value = 1.0
    for number in numbers:
        if number.value is None:
            return Number(None, Known.UNKNOWN, number.how)
        value *= number.value
    return Number(value, worst(*numbers), how)


def counted(value: float, how: str = "") -> Number:
    """A number that follows from the settings."""
    return Number(float(value), Known.COUNTED, how)


def step_tokens(tasks: int, repeats: int, lengths: Lengths) -> dict[str, Number]:
    """Runs, calls and tokens of one training step."""
    runs = counted(tasks * repeats, f"{tasks} tasks x {repeats} runs")
    calls = product(runs, lengths.calls, how="runs x calls of a run")
    new = product(calls, lengths.response, how="calls x tokens of a response")
    read = product(calls, lengths.prompt, how="calls x tokens of a prompt, shared ones included")
    both = Number(None, Known.UNKNOWN, new.how)
    if new.value is not None and read.value is not None:
        both = Number(new.value + read.value, worst(new, read), "what the trainer is given")
    return {
        "runs": runs,
        "calls": calls,
        "prompt tokens": read,
        "response tokens": new,
        "train tokens": both,
    }


def step_seconds(tokens: dict[str, Number], speed: Speed) -> dict[str, Number]:
    """Seconds of sampling, of training and of the step, one after the other.

    A step that was measured counts as such only if it had as many tokens as this one: the settings
    may have changed since. Otherwise its speeds do.
    """
    if speed.step.value is not None and _alike(tokens["train tokens"].value, speed.step_tokens):
        return {"seconds": speed.step}
    sampling = _quotient(tokens["response tokens"], speed.sampling)
    training = _quotient(tokens["train tokens"], speed.training)
    found = {"seconds sampling": sampling, "seconds training": training}
    if sampling.value is None or training.value is None:
        unknown = sampling if sampling.value is None else training
        return found | {"seconds": unknown}
    both = sampling.value + training.value
    return found | {"seconds": Number(both, worst(sampling, training), "taking turns")}


def step_dollars(
    seconds: Number, gpus: int, usd_per_gpu_hour: float | None, roles: Sequence[RoleUse]
) -> dict[str, Number]:
    """US dollars of a step: the GPUs' time, and each model behind an API."""
    found: dict[str, Number] = {}
    if usd_per_gpu_hour is None:
        how = "give --usd-per-gpu-hour"
        found["usd for GPUs"] = Number(None, Known.UNKNOWN, how) if gpus else counted(0, "no GPU")
    else:
        rate = Number(gpus * usd_per_gpu_hour / 3600, Known.GIVEN)
        found["usd for GPUs"] = product(seconds, rate, how=f"{gpus} GPUs x the step's time")
    for use in roles:
        name = f"usd for {use.role}"
        if use.price is None:
            found[name] = Number(None, Known.UNKNOWN, use.why)
        else:
            found[name] = product(use.calls, counted(use.price), how=use.why)
    known = [number.value for number in found.values() if number.value is not None]
    if len(known) == len(found):
        found["usd"] = Number(sum(known), worst(*found.values()), "all of these")
    else:
        found["usd"] = Number(None, Known.UNKNOWN, "some of these are unknown")
    return found


def _alike(tokens: float | None, measured: float | None) -> bool:
    if tokens is None or measured is None:
        return False
    return abs(tokens - measured) <= _ALIKE * measured


def _quotient(tokens: Number, speed: Number) -> Number:
    if tokens.value is None or speed.value is None:
        unknown = tokens if tokens.value is None else speed
        return Number(None, Known.UNKNOWN, unknown.how)
    return Number(tokens.value / speed.value, worst(tokens, speed), f"{speed.value:,.0f} a second")
