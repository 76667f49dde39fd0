"""What a graph's operators did in traced runs: calls, tokens, money, failures, share of reward.

The share of reward is a bookkeeping of credit, not a cause: each run's reward is split evenly
over the model calls of that run, and summed by who made them. It is None where no run has a
reward, or where rewards are not all of one sign (shares of a sum near zero mean nothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aflow_tune.operators import READ_OUTCOMES
from aflow_tune.trace import ModelCall, OperatorCall, Trace


@dataclass
class Measured:
    """Of one operator instance over all traced runs."""

    calls: int = 0
    """Of the operator; for direct calls of the model, of the model."""
    model_calls: int = 0
    tokens: int = 0
    """Prompt and completion, as far as they are known."""
    cost: float | None = 0.0
    failures: int = 0
    seconds: float = 0.0
    reward_share: float | None = None


def measure(runs: Sequence[tuple[Trace, float | None]]) -> dict[str, Measured]:
    """Numbers by caller, `Operator.instance` or `llm`, from traces with their rewards."""
    measured: dict[str, Measured] = {}
    earned: dict[str, float] = {}
    for trace, reward in runs:
        for use in trace.of(OperatorCall):
            row = measured.setdefault(f"{use.operator}.{use.instance}", Measured())
            row.calls += 1
            row.seconds += use.seconds
            row.failures += use.outcome not in READ_OUTCOMES
        callers = []
        for call in trace.of(ModelCall):
            who = call.caller.rpartition("/")[2]
            row = measured.setdefault(who, Measured())
            row.model_calls += 1
            row.tokens += (call.prompt_tokens or 0) + (call.completion_tokens or 0)
            if row.cost is not None:
                row.cost = None if call.cost is None else row.cost + call.cost
            if "." not in who:  # no operator counts it
                row.calls += 1
                row.seconds += call.seconds
                row.failures += call.failure is not None
            callers.append(who)
        for who in callers:
            if reward is not None:
                earned[who] = earned.get(who, 0.0) + reward / len(callers)
    rewards = [reward for _, reward in runs if reward is not None]
    total = sum(rewards)
    if total and (min(rewards) >= 0 or max(rewards) <= 0):
        for who, row in measured.items():
            row.reward_share = earned.get(who, 0.0) / total
    return measured
