"""Traces made again from evaluation records, for whoever counts what operators did.

A record knows every call of the evaluated model and every use of an operator. It does not know
calls of other models, nor what a call cost: those are missing here too.
"""

from __future__ import annotations

from collections.abc import Iterable

from aflow_tune.report.records import EvalRecord
from aflow_tune.trace import POLICY, ModelCall, OperatorCall, Trace


def traces_of(records: Iterable[EvalRecord]) -> list[tuple[Trace, float | None]]:
    """The trace of each run with its reward; None for a run that failed."""
    return [(_trace(record), record.reward) for record in records]


def _trace(record: EvalRecord) -> Trace:
    trace = Trace()
    for call in record.calls:
        trace.events.append(
            ModelCall(
                caller=call["caller"],
                role=POLICY,
                model="",
                prompt_tokens=call["prompt_tokens"],
                completion_tokens=call["tokens"],
                failure="no answer" if call.get("failed") else None,
            )
        )
    for use in record.operators:
        trace.events.append(
            OperatorCall(
                operator=use["operator"],
                instance=use["instance"],
                outcome=use["outcome"],
                attempts=use["attempts"],
            )
        )
    return trace
