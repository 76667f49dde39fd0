"""What is kept of a writer's run, as plain data: for the report, the harvest, the exports.

The keys of a record are the room's contract with its readers: it stands in `rollouts/` of a
training run and in the records of evaluations under `writer`. Nothing of the gold answer is in
it; `score` and `parts` are None until the answer was scored.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aflow_tune.writer.structure import operators_of
from aflow_tune.writer.types import Level, Verdict
from aflow_tune.writer.written_run import WriterRun

MAX_PROBLEM = 2_000
"""Characters of the problem that are kept."""
MAX_ANSWER = 500
MAX_TEXT = 200_000
"""Of the policy's text; a longer one is not read either."""
MAX_REASON = 2_000
MAX_REFUSALS = 50


def record_of(run: WriterRun) -> dict[str, Any]:
    """The record of a run, not scored yet. US dollars, seconds, tokens of prompt and completion."""
    last = run.last
    verdict, executed = last.verdict, last.executed
    written = verdict.written
    failed = executed.failed
    return {
        "problem": run.problem[:MAX_PROBLEM],
        "problem_type": run.problem_type,
        "turns": run.turns,
        "text": last.text[:MAX_TEXT],
        "prompts": {} if written is None else dict(written.prompts),
        "code": "" if written is None else written.code,
        "form": None if written is None else written.form.value,
        "valid": verdict.ok,
        "refusals": [refusal.to_json() for refusal in verdict.refusals[:MAX_REFUSALS]],
        "bound": _bound(verdict),
        "level": int(executed.level),
        "structure": last.structure,
        "operators": _operators(verdict),
        "nodes": sum(_operators(verdict).values()),
        "ending": executed.run.ending.value,
        "outcome": last.outcome,
        "reason": (failed[0].why if failed else "")[:MAX_REASON],
        "answer": run.text[:MAX_ANSWER],
        "score": None,
        "parts": None,
        "usd": run.usage.usd,
        "tokens": run.usage.tokens,
        "seconds": round(run.usage.seconds, 3),
        "calls": run.model_calls,
    }


def run_metrics(run: WriterRun) -> dict[str, float]:
    """Numbers of a run for the curves, those of the score left out."""
    verdict = run.last.verdict
    return {
        "writer/valid": float(verdict.ok),
        **{f"writer/level_{int(level)}": float(run.level is level) for level in Level},
        "writer/nodes": float(sum(_operators(verdict).values())),
        "writer/turns": float(run.turns),
        "writer/model_calls": float(run.model_calls),
    }


def _operators(verdict: Verdict) -> dict[str, int]:
    return {} if verdict.graph is None else operators_of(verdict.graph)


def _bound(verdict: Verdict) -> dict[str, Any] | None:
    bound = verdict.bound
    return None if bound is None else {**asdict(bound), "tokens": bound.tokens}
