"""What a run did, in the plain values that an evaluation's record holds (`EvalRecord`)."""

from __future__ import annotations

from typing import Any

from trinity.common.experience import Experience

from aflow_tune.context import RunContext
from aflow_tune.engines.trinity.rollout.recording import RecordedCall
from aflow_tune.report.records import answer_key
from aflow_tune.trace import OperatorCall, Trace


def response_length(experience: Experience) -> int:
    """Tokens that were drawn."""
    return len(experience.tokens) - experience.prompt_length


def call_summaries(context: RunContext, calls: list[RecordedCall]) -> list[dict[str, Any]]:
    """What `EvalRecord.calls` holds: all calls of the run, those without an answer included."""
    answered = {call.note.index: call for call in calls}
    summaries = []
    for note in list(context.calls):
        call = answered.get(note.index)
        summary: dict[str, Any] = {"caller": note.caller, "prompt_tokens": None, "tokens": None}
        if call is None:
            summary["failed"] = True
        else:
            if call.counted:
                summary["prompt_tokens"] = call.experiences[0].prompt_length
                summary["tokens"] = sum(map(response_length, call.experiences))
            if any(choice.truncate_status is not None for choice in call.experiences):
                summary["truncated"] = True
            if call.tools:
                summary["tools"] = call.tools
        summaries.append(summary)
    return summaries


def final_answer(response: Any, calls: list[RecordedCall]) -> str | None:
    """What the run ended with: the response that the workflow returned, else the last call's."""
    if callable(getattr(response, "get_text_content", None)):  # a message of AgentScope's
        response = response.get_text_content()
    if isinstance(response, str):
        return answer_key(response)
    if not calls:
        return None
    last = calls[-1]
    tools = [f"{tool['name']}({tool['arguments']})" for tool in last.tools]
    return answer_key("\n".join([last.experiences[0].response_text or "", *tools]))


def transcript_entry(call: RecordedCall) -> dict[str, Any]:
    """One entry of `EvalRecord.transcript`."""
    first = call.experiences[0]
    return {
        "caller": call.note.caller,
        "messages": call.messages,
        "response": first.response_text or "",
        "tokens": response_length(first),
    }


def operator_summaries(trace: Trace) -> list[dict[str, Any]]:
    """What `EvalRecord.operators` holds."""
    return [
        {
            "operator": use.operator,
            "instance": use.instance,
            "outcome": use.outcome,
            "attempts": use.attempts,
        }
        for use in trace.of(OperatorCall)
    ]
