"""A problem as it is asked, and what came of it: the words of `inferring.py` and of its users.

A `Solved` holds everything that there is to show of one problem: the workflow that the policy
wrote, what the check said, which workflow answered in the end, the calls that were made, and,
where the right answer was known, the reward. It is plain data; `to_json` is what commands and
the server hand out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from aflow_tune.context import DEFAULT_CALLER
from aflow_tune.errors import BadInput, Fault
from aflow_tune.trace import POLICY, Event, ModelCall, OperatorCall, ProgramRun, Trace
from aflow_tune.writer.types import PROBLEM_TYPES, Bound, Level, ProblemType, Refusal

MAX_PROBLEM_CHARS = 50_000
"""Of a problem; a policy's prompt is bounded more tightly by its own `max_prompt_tokens`."""
MAX_NAME_CHARS = 80
MAX_TRUTH_CHARS = 100_000

LEVEL_WORDS: Mapping[Level, str] = {
    Level.CLEAN: "the workflow as it was written",
    Level.DEFAULT_PROMPTS: "fallback 1: the written workflow with the operators' own prompts",
    Level.SIMPLER: "fallback 2: a simpler workflow of the same operators",
    Level.DEFAULT_WORKFLOW: "fallback 3: the default workflow of this type of problem",
}
"""Which workflow gave the answer, in words."""


@dataclass(frozen=True)
class Problem:
    """What is asked. `truth` is the right answer, or for code the tests, where it is known."""

    text: str
    type: ProblemType
    entry_point: str | None = None
    """Name of the function to write, for problems of code."""
    truth: str | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any], where: str) -> Problem:
        """From plain data with `problem`, `type`, and perhaps `entry_point` and `truth`.

        A data set's own names, `problem_type` and `ground_truth`, mean the same.

        Raises:
            BadInput: with everything that is wrong with it; `where` is the place.
        """
        faults = []
        text, kind = row.get("problem"), row.get("type") or row.get("problem_type")
        if not isinstance(text, str) or not text.strip():
            faults.append(_fault(where, "problem", "a text that is not empty", text))
        elif len(text) > MAX_PROBLEM_CHARS:
            found = f"{len(text)} characters"
            expected = f"at most {MAX_PROBLEM_CHARS} characters"
            faults.append(Fault(f"{where}: problem", expected, found, "shorten it"))
        if kind not in PROBLEM_TYPES:
            faults.append(_fault(where, "type", " | ".join(PROBLEM_TYPES), kind))
        entry_point = row.get("entry_point")
        if entry_point is not None and not _is_name(entry_point):
            faults.append(_fault(where, "entry_point", "the name of a function", entry_point))
        truth = row.get("truth", row.get("ground_truth"))
        if isinstance(truth, int | float) and not isinstance(truth, bool):
            truth = str(truth)
        if truth is not None and not (isinstance(truth, str) and 0 < len(truth) <= MAX_TRUTH_CHARS):
            expected = f"a text of at most {MAX_TRUTH_CHARS} characters"
            faults.append(_fault(where, "truth", expected, truth))
        if kind == "code" and entry_point is None:
            expected = "for code the name of the function to write"
            faults.append(_fault(where, "entry_point", expected, entry_point))
        if faults:
            raise BadInput("This problem cannot be asked.", faults)
        return cls(text, kind, entry_point, truth)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Solved:
    """One problem, asked once."""

    problem: Problem
    text: str
    """The policy's own words, of the turn that counted."""
    turns: int
    form: str | None
    """How the workflow was read from them; None where nothing could be read."""
    code: str
    prompts: Mapping[str, str]
    refusals: Sequence[Refusal]
    bound: Bound | None
    level: Level
    """Which workflow gave the answer."""
    ran_code: str
    """Of the workflow that ran last: the written one, or the fallback's."""
    ran_prompts: Mapping[str, str]
    ending: str
    """How it ended; a `GraphEnding` value."""
    reason: str
    """Of an ending without an answer."""
    answer: str | None
    attempts: Sequence[Mapping[str, Any]] = ()
    """Every run of a graph, fallbacks included: level, ending, reason."""
    calls: Sequence[Mapping[str, Any]] = ()
    """Calls of models, uses of operators and programs, by their start: see `call_entries`."""
    usd: float | None = None
    """What all calls of models cost. None: the price of one is not known. The policy counts
    only where it has a price."""
    policy_tokens: int | None = None
    """Prompt and completion of the policy's own calls. None: not counted by its server."""
    tokens: int | None = None
    """The same for all other models."""
    model_calls: int = 0
    """Of models other than the policy."""
    seconds: float = 0.0
    mermaid: str = ""
    """The workflow that was written, drawn; empty where its code could not be read."""
    svg: str = ""
    """The same as a picture."""
    ran_svg: str = ""
    """The workflow that gave the answer, where it is another one."""
    score: float | None = None
    """Against the truth, in [0, 1]. None: not known, or it could not be scored."""
    score_reason: str = ""
    reward: float | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """The reward's parts in [0, 1]; None for one that is not known."""

    @property
    def answered(self) -> bool:
        """Whether there is an answer, from whichever workflow."""
        return self.answer is not None

    @property
    def valid(self) -> bool:
        """Whether the workflow passed the check as it was written."""
        return self.form is not None and not self.refusals

    def to_json(self) -> dict[str, Any]:
        """As plain data, in the order in which it is read."""
        bound = self.bound
        scored = self.problem.truth is not None
        return {
            "problem": self.problem.text,
            "type": self.problem.type,
            "entry_point": self.problem.entry_point,
            "answered": self.answered,
            "answer": self.answer,
            "level": int(self.level),
            "level_meaning": LEVEL_WORDS[self.level],
            "ending": self.ending,
            "reason": self.reason,
            "attempts": [dict(attempt) for attempt in self.attempts],
            "workflow": {
                "valid": self.valid,
                "form": self.form,
                "code": self.code,
                "prompts": dict(self.prompts),
                "text": self.text,
                "turns": self.turns,
                "refusals": [refusal.to_json() for refusal in self.refusals],
                "bound": None if bound is None else bound_json(bound),
                "mermaid": self.mermaid,
                "svg": self.svg,
            },
            "ran": {
                "code": self.ran_code,
                "prompts": dict(self.ran_prompts),
                "svg": self.ran_svg,
            },
            "usd": self.usd,
            "tokens": self.tokens,
            "policy_tokens": self.policy_tokens,
            "model_calls": self.model_calls,
            "seconds": round(self.seconds, 3),
            "calls": [dict(call) for call in self.calls],
            **({"truth": self.problem.truth} if scored else {}),
            **(
                {
                    "score": self.score,
                    "score_reason": self.score_reason,
                    "reward": self.reward,
                    "parts": dict(self.parts),
                }
                if scored
                else {}
            ),
        }


def bound_json(bound: Bound) -> dict[str, Any]:
    """A bound as plain data; `usd` is None where a price is not known."""
    return {
        "operator_calls": bound.operator_calls,
        "model_calls": bound.model_calls,
        "prompt_tokens": bound.prompt_tokens,
        "completion_tokens": bound.completion_tokens,
        "usd": bound.usd,
    }


def call_entries(trace: Trace, origin: float) -> list[dict[str, Any]]:
    """The events of a trace by their start, as plain data.

    Each has `kind` (model, operator, program, or workflow for the run of its own code),
    `caller`, `start` (seconds after `origin`, a reading of the monotonic clock) and `seconds`;
    the rest depends on the kind.
    """
    found = []
    for event in sorted(trace.events, key=lambda event: event.started):
        entry = _entry(event)
        if entry is not None:
            start = round(max(0.0, event.started - origin), 3)
            found.append({**entry, "start": start, "seconds": round(event.seconds, 3)})
    return found


def _entry(event: Event) -> dict[str, Any] | None:
    if isinstance(event, ModelCall):
        return {
            "kind": "model",
            "caller": event.caller,
            "role": event.role,
            "model": _model_name(event),
            "prompt_tokens": event.prompt_tokens,
            "completion_tokens": event.completion_tokens,
            "usd": event.cost,
            "retries": event.retries,
            "failure": event.failure,
        }
    if isinstance(event, OperatorCall):
        return {
            "kind": "operator",
            "caller": event.caller,
            "operator": event.operator,
            "instance": event.instance,
            "outcome": event.outcome,
            "attempts": event.attempts,
            "reason": event.reason,
        }
    if isinstance(event, ProgramRun):
        # The code of the workflow itself runs outside of any operator.
        return {
            "kind": "workflow" if event.caller == DEFAULT_CALLER else "program",
            "caller": event.caller,
            "outcome": event.outcome,
            "wall": event.level,
            "limits_hit": list(event.limits_hit),
        }
    return None


@dataclass(frozen=True)
class Totals:
    """Sums over a trace: see the fields of the same names of `Solved`."""

    usd: float | None
    tokens: int | None
    policy_tokens: int | None


def totals(trace: Trace) -> Totals:
    """What the answered calls of models used together."""
    calls = [call for call in trace.of(ModelCall) if call.failure is None]
    # A policy without a price is no news.
    costs = [call.cost for call in calls if not (call.role == POLICY and call.cost is None)]
    known = [cost for cost in costs if cost is not None]
    return Totals(
        usd=sum(known) if len(known) == len(costs) else None,
        tokens=_tokens([call for call in calls if call.role != POLICY]),
        policy_tokens=_tokens([call for call in calls if call.role == POLICY]),
    )


def _tokens(calls: Sequence[ModelCall]) -> int | None:
    counts = [
        call.prompt_tokens + call.completion_tokens
        for call in calls
        if call.prompt_tokens is not None and call.completion_tokens is not None
    ]
    return sum(counts) if len(counts) == len(calls) else None


def _model_name(call: ModelCall) -> str:
    """A model's name for others to see: a local model is its folder, of which the end is shown."""
    return PurePath(call.model).name if call.model.startswith(("/", "~", ".")) else call.model


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier() and len(value) <= MAX_NAME_CHARS


def _fault(where: str, name: str, expected: str, found: Any) -> Fault:
    shown = "nothing" if found is None else f"{found!r:.80}"
    return Fault(f"{where}: {name}", expected, shown, f"correct `{name}`")
