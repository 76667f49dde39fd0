"""What a writer's run leaves: the workflow that counts, what was spent, who is to blame.

Left to others: making the run (`workflow.py`), its record (`record.py`), what it earns
(`reward.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aflow_tune.errors import AflowTuneError
from aflow_tune.models.types import ModelFailure
from aflow_tune.scoring import find
from aflow_tune.scoring.five_part import Usage
from aflow_tune.scoring.rewards import reward_settings
from aflow_tune.trace import ModelCall, Trace
from aflow_tune.writer.execute import Executed
from aflow_tune.writer.outcome import TurnResult
from aflow_tune.writer.reward import WriterReward, writer_reward
from aflow_tune.writer.types import Level, ProblemType

_BLAMELESS = frozenset(failure.value for failure in ModelFailure) - {ModelFailure.REFUSED.value}
"""Failures of a model that no workflow can be blamed for. What is refused may be too long."""


class ExecutorFailed(AflowTuneError, RuntimeError):
    """The executor, or another model of a graph's operators, did not answer."""


@dataclass(frozen=True)
class WriterRun:
    """What the policy wrote for one problem, and what became of it."""

    problem: str
    problem_type: ProblemType
    turns: int
    """How often the policy was asked."""
    last: TurnResult
    """The workflow that counts."""
    usage: Usage
    """Of the executor and the other frozen models, over all turns."""
    model_calls: int
    """Of the same, failed ones included."""

    @property
    def level(self) -> Level:
        """Which workflow gave the answer."""
        return self.last.executed.level

    @property
    def answer(self) -> Any:
        """What the workflow returned; None where none gave an answer."""
        return self.last.executed.run.answer

    @property
    def text(self) -> str:
        """The answer as text."""
        return self.last.executed.run.text

    def reward(self, score: float, benchmark: str | None = None) -> WriterReward:
        """What it earns if its answer scores `score`, by the run's settings."""
        verdict = self.last.verdict
        return writer_reward(
            score,
            self.text,
            self.usage,
            level=self.level,
            form=None if verdict.written is None else verdict.written.form,
            refusals=verdict.refusals,
            settings=reward_settings().five_part,
            answer_form=r"\S" if benchmark is None else find(benchmark).form,
        )


def usage_of(trace: Trace, executed: Executed) -> Usage:
    """What running a workflow spent: money and tokens as the models told, no calls no cost."""
    told = Usage.of(trace)
    if not trace.of(ModelCall):
        told = dataclasses.replace(told, usd=0.0, tokens=0)
    return dataclasses.replace(told, seconds=executed.seconds, operators=executed.calls)


def sum_of(usages: Sequence[Usage]) -> Usage:
    """All turns together; what one of them does not know is not known."""
    costs = [usage.usd for usage in usages if usage.usd is not None]
    tokens = [usage.tokens for usage in usages if usage.tokens is not None]
    return Usage(
        usd=sum(costs) if len(costs) == len(usages) else None,
        tokens=sum(tokens) if len(tokens) == len(usages) else None,
        seconds=sum(usage.seconds for usage in usages),
        operators=sum(usage.operators for usage in usages),
    )


def raise_if_models_failed(result: TurnResult) -> None:
    """Raises ExecutorFailed where the frozen models are to blame for a run without a clean end:
    none of their calls was answered, or one failed in an attempt that came to nothing."""
    executed = result.executed
    if result.model_calls and not executed.model_calls:
        kinds = {kind for attempt in executed.attempts for kind in attempt.run.failures}
        why = ", ".join(sorted(kinds)) or "no answer in time"
        raise ExecutorFailed(f"no call of the executor was answered: {why}; {_reason(executed)}")
    if executed.level is Level.CLEAN:
        return
    for attempt in executed.failed:
        blameless = _BLAMELESS & set(attempt.run.failures)
        if blameless:
            raise ExecutorFailed(
                f"calls of the executor failed ({', '.join(sorted(blameless))}), so the workflow "
                f"cannot be judged: {attempt.why}"
            )


def _reason(executed: Executed) -> str:
    return next((attempt.why for attempt in executed.failed), "")
