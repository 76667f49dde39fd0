"""How one use of an operator ended, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How one use ended. The value is its word in traces and metrics."""

    ANSWERED = "answered"
    """Read as it was asked for, at the first attempt."""
    REPAIRED = "repaired"
    """Read, but only after repairs or after asking again; or some of several votes were lost, or
    a program had to be mended before it ran or passed its tests."""
    UNREADABLE = "unreadable"
    """No attempt could be read. The keys are there, with the operator's fallback values."""
    PROGRAM_FAILED = "program_failed"
    """No program ran to a result."""
    TESTS_FAILED = "tests_failed"
    """The last solution does not pass the tests."""
    NO_TESTS = "no_tests"
    """There was nothing to test with, so nothing was tested and nothing passed."""
    UNDECIDED = "undecided"
    """The tests could not be run, which says nothing about the solution."""
    # What follows is noted in the trace; the call itself raises.
    MODEL_FAILED = "model_failed"
    """The model gave no reply after its retries: `ModelError`."""
    SANDBOX_UNAVAILABLE = "sandbox_unavailable"
    """A program could not be run at all: `SandboxUnavailable`."""
    STOPPED = "stopped"
    """Cancelled, or ended by the run's budget."""
    RAISED = "raised"
    """Any other exception: wrong arguments, or a defect of an operator."""


READ_OUTCOMES = frozenset({Outcome.ANSWERED, Outcome.REPAIRED})
"""The outcomes with an answer that the model gave."""


class OperatorResult(dict[str, Any]):
    """What an operator returns: a dict with the operator's keys, plus how it came about.

    Attributes:
        outcome: see `Outcome`. Values are the operator's fallbacks where it is 'unreadable'.
        reason: why it is no plain answer; empty where there is nothing to say.
        attempts: model calls that it took.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        outcome: Outcome | str = Outcome.ANSWERED,
        reason: str = "",
        attempts: int = 0,
    ) -> None:
        super().__init__(values)
        self.outcome = Outcome(outcome)
        self.reason = reason
        self.attempts = attempts

    @property
    def ok(self) -> bool:
        """Whether it holds an answer. Not whether that is right."""
        return self.outcome in READ_OUTCOMES

    def __reduce__(self) -> Any:
        return type(self), (dict(self), self.outcome, self.reason, self.attempts)
