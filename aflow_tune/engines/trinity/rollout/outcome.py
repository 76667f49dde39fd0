"""What one run of a workflow came to: a reward with metrics, or a failure with its reason.

Everything that user code can hand back or raise is sorted here. Nothing of Trinity's is.
"""

from __future__ import annotations

import math
import numbers
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from aflow_tune.engines.trinity.rollout.run_thread import Blocked, Escaped, TimedOut
from aflow_tune.types import Failure

MAX_DETAIL = 8000
"""Characters of a traceback that are kept, from its end."""

_MACHINERY = tuple(
    os.fspath(Path(__file__).with_name(name)) for name in ("adapter.py", "run_thread.py")
)


class BadReward(Exception):
    """A run returned something that is no reward; `kind` says what."""

    def __init__(self, kind: Failure, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True)
class Outcome:
    """`failure` is None for a run that succeeded; `detail` says why one did not."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    detail: str = ""

    def score(self, name: str) -> float | None:
        """What evaluation counts: 'reward' or a recorded metric; None if there is none."""
        return self.reward if name == "reward" else self.metrics.get(name)


def failed(error: Exception) -> Outcome:
    """The outcome of a run that ended with `error`."""
    if isinstance(error, BadReward):
        return Outcome(failure=error.kind, detail=str(error))
    if isinstance(error, TimedOut):
        at = _last_frames(traceback.extract_tb(error.error.__traceback__)) if error.error else ""
        return Outcome(failure=Failure.TIMED_OUT, detail=f"{error}{at}")
    if isinstance(error, Blocked):
        return Outcome(failure=Failure.BLOCKED_LOOP, detail=f"{error}{_last_frames(error.stack)}")
    raised = error.error if isinstance(error, Escaped) else error
    return Outcome(failure=Failure.RAISED, detail=_traceback(raised))


def as_reward(value: Any, who: str) -> float:
    """A reward as a finite float. Scalars of numpy and torch are numbers, and so is a bool.

    Raises:
        BadReward: None, not a number, or not finite; `who` is named in the message.
    """
    if value is None:
        raise BadReward(Failure.RETURNED_NONE, f"{who} returned None as the reward")
    number = value
    if hasattr(number, "item"):  # numpy and torch
        try:
            number = number.item()
        except (RuntimeError, ValueError, TypeError):
            number = None  # more than one element
    if not isinstance(number, numbers.Real | Decimal):
        kind = type(value).__name__
        raise BadReward(
            Failure.NOT_A_NUMBER, f"{who} returned no number but {kind}: {value!r:.200}"
        )
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise BadReward(Failure.NOT_FINITE, f"{who} returned {reward} as the reward")
    return reward


def as_metrics(metrics: Mapping[str, Any] | None, who: str) -> dict[str, float]:
    """Metrics of a result object as finite floats.

    Raises:
        ValueError: one is not a finite number.
    """
    checked = {}
    for name, value in (metrics or {}).items():
        try:
            checked[str(name)] = as_reward(value, who)
        except BadReward:
            raise ValueError(
                f"{who} gave the metric {name!r} the value {value!r:.200}; "
                "a metric is a finite number"
            ) from None
    return checked


def _traceback(error: BaseException) -> str:
    """The traceback from the user's function on, without the frames that lead to it."""
    trace, start = error.__traceback__, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in _MACHINERY:
            start = trace.tb_next
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, start or error.__traceback__)
    return "".join(lines).rstrip()[-MAX_DETAIL:]


def _last_frames(stack: traceback.StackSummary) -> str:
    """Where a run was when its time was up, innermost frame last."""
    ours = [i for i, frame in enumerate(stack) if frame.filename in _MACHINERY]
    frames = stack[ours[-1] + 1 :] if ours else stack
    if not frames:
        return ""
    listed = "".join(traceback.StackSummary.from_list(frames[-5:]).format()).rstrip()
    return f"; it was at\n{listed}"
