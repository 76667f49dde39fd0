"""What a workflow may say about the run it is in: who calls, what to measure, step rewards.

One `RunContext` exists per run of a workflow. It travels in a context variable, so it follows
the workflow through `await`, `asyncio.gather` and tasks, and two runs never see each other.
Outside of a run every function here does nothing, so that a workflow can be called from a
plain unit test.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

DEFAULT_CALLER = "workflow"

_caller: ContextVar[str] = ContextVar("aflow_tune_caller", default=DEFAULT_CALLER)
_state_key: ContextVar[str | None] = ContextVar("aflow_tune_state_key", default=None)
_latest: ContextVar[CallNote | None] = ContextVar("aflow_tune_latest_call", default=None)
_run: ContextVar[RunContext | None] = ContextVar("aflow_tune_run", default=None)


@dataclass
class CallNote:
    """What the context knows about one model call."""

    index: int
    caller: str
    state_key: str | None = None
    step_reward: float | None = None


@dataclass
class RunContext:
    """The notes of one run: its calls in the order they started, and the user's metrics."""

    calls: list[CallNote] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def activate(self) -> Iterator[RunContext]:
        """Make this the run of the current context and of everything it starts."""
        tokens = (_run.set(self), _latest.set(None), _caller.set(DEFAULT_CALLER))
        try:
            yield self
        finally:
            for variable, token in zip((_run, _latest, _caller), tokens, strict=True):
                variable.reset(token)  # type: ignore[arg-type]

    def note_call(self) -> CallNote:
        """Note that a model call starts now, in the current context."""
        note = CallNote(len(self.calls), _caller.get(), _state_key.get())
        self.calls.append(note)
        _latest.set(note)
        return note


def current_run() -> RunContext | None:
    """The run that the current code belongs to, or None."""
    return _run.get()


@contextlib.contextmanager
def caller(name: str) -> Iterator[None]:
    """Attribute the model calls of the block to `name`. Nested names join: 'plan/search'."""
    outer = _caller.get()
    token = _caller.set(name if outer == DEFAULT_CALLER else f"{outer}/{name}")
    try:
        yield
    finally:
        _caller.reset(token)


def current_caller() -> str:
    """Who the next model call of this context is attributed to."""
    return _caller.get()


@contextlib.contextmanager
def state_key(key: str) -> Iterator[None]:
    """Name the state that the calls of the block are made in, for GiGPO's anchor groups.

    Without it the state is a hash of task, caller and normalised input.
    """
    token = _state_key.set(key)
    try:
        yield
    finally:
        _state_key.reset(token)


def step_reward(value: float) -> None:
    """Give the latest call of this context a reward of its own.

    Raises:
        ValueError: the value is not a finite number.
    """
    note = _latest.get()
    if note is not None:
        note.step_reward = _finite("step_reward", value)


def record_metrics(**metrics: float) -> None:
    """Record numbers about this run; they appear in training and evaluation curves.

    Raises:
        ValueError: a value is not a finite number.
    """
    run = _run.get()
    checked = {name: _finite(name, value) for name, value in metrics.items()}
    if run is not None:
        run.metrics.update(checked)


def _finite(name: str, value: float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    return number
