"""A problem as it is asked, and what came of it: the words of `inferring.py` and of its users.

A `Solved` holds everything that there is to show of one problem: the workflow that the policy
wrote, what the check said, which workflow answered in the end, the calls that were made, and,
where the right answer was known, the reward. `to_json` is what commands and the server hand out,
`solved_text` what a terminal shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    """What is asked. `entry_point` is the function to write, for problems of code; `truth` the
    right answer, or for code the tests, where it is known."""

    text: str
    type: ProblemType
    entry_point: str | None = None
    truth: str | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any], where: str) -> Problem:
        """From plain data with `problem`, `type`, and perhaps `entry_point` and `truth`.

        A data set's own names, `problem_type` and `ground_truth`, mean the same.

        Raises:
            BadInput: with everything that is wrong with it; `where` is the place.
        """
        faults = []

        def wrong(name: str, expected: str, found: Any) -> None:
            shown = "nothing" if found is None else f"{found!r:.80}"
            faults.append(Fault(f"{where}: {name}", expected, shown, f"correct `{name}`"))

        text, kind = row.get("problem"), row.get("type") or row.get("problem_type")
        if not isinstance(text, str) or not text.strip():
            wrong("problem", "a text that is not empty", text)
        elif len(text) > MAX_PROBLEM_CHARS:
            expected, found = f"at most {MAX_PROBLEM_CHARS} characters", f"{len(text)} characters"
            faults.append(Fault(f"{where}: problem", expected, found, "shorten it"))
        if kind not in PROBLEM_TYPES:
            wrong("type", " | ".join(PROBLEM_TYPES), kind)
        entry_point = row.get("entry_point")
        if entry_point is None and kind == "code":
            wrong("entry_point", "for code the name of the function to write", None)
        elif entry_point is not None and not _is_name(entry_point):
            wrong("entry_point", "the name of a function", entry_point)
        truth = row.get("truth", row.get("ground_truth"))
        if isinstance(truth, int | float) and not isinstance(truth, bool):
            truth = str(truth)
        if truth is not None and not (isinstance(truth, str) and 0 < len(truth) <= MAX_TRUTH_CHARS):
            wrong("truth", f"a text of at most {MAX_TRUTH_CHARS} characters", truth)
        if faults:
            raise BadInput("This problem cannot be asked.", faults)
        return cls(text, kind, entry_point, truth)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Solved:
    """One problem, asked once.

    - `text`, `turns`, `form`: the policy's own words of the turn that counted, how many turns it
      took, and how the workflow was read from them (None where nothing could be read).
    - `code`, `prompts`, `refusals`, `bound`: what was read, and what the check said of it.
    - `level`, `ran_code`, `ran_prompts`, `ending` (a `GraphEnding` value), `reason`, `answer`: the
      workflow that ran last, the written one or a fallback's, and how it ended. `attempts` are
      all runs of a graph: level, ending, reason. `calls`: see `call_entries`.
    - `usd`: what all calls of models cost (None: the price of one is not known; the policy counts
      only where it has a price). `policy_tokens` are prompt and completion of the policy's calls
      (None: not counted by its server), `tokens` and `model_calls` those of all other models.
    - `mermaid`, `svg`, `ran_svg`: the written workflow drawn, and the one that answered where it
      is another; empty where the code could not be read.
    - `score` against the truth, in [0, 1], `reward` and its `parts`; None: not known.
    """

    problem: Problem
    text: str
    turns: int
    form: str | None
    code: str
    prompts: Mapping[str, str]
    refusals: Sequence[Refusal]
    bound: Bound | None
    level: Level
    ran_code: str
    ran_prompts: Mapping[str, str]
    ending: str
    reason: str
    answer: str | None
    attempts: Sequence[Mapping[str, Any]] = ()
    calls: Sequence[Mapping[str, Any]] = ()
    usd: float | None = None
    policy_tokens: int | None = None
    tokens: int | None = None
    model_calls: int = 0
    seconds: float = 0.0
    mermaid: str = ""
    svg: str = ""
    ran_svg: str = ""
    score: float | None = None
    score_reason: str = ""
    reward: float | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict)

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
        found: dict[str, Any] = {
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
                "bound": None if self.bound is None else asdict(self.bound),
                "mermaid": self.mermaid,
                "svg": self.svg,
            },
            "ran": {"code": self.ran_code, "prompts": dict(self.ran_prompts), "svg": self.ran_svg},
            "usd": self.usd,
            "tokens": self.tokens,
            "policy_tokens": self.policy_tokens,
            "model_calls": self.model_calls,
            "seconds": round(self.seconds, 3),
            "calls": [dict(call) for call in self.calls],
        }
        if self.problem.truth is not None:
            found |= {
                "truth": self.problem.truth,
                "score": self.score,
                "score_reason": self.score_reason,
                "reward": self.reward,
                "parts": dict(self.parts),
            }
        return found


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
            entry |= {"caller": event.caller, "start": start, "seconds": round(event.seconds, 3)}
            found.append(entry)
    return found


def _entry(event: Event) -> dict[str, Any] | None:
    def of(*names: str) -> dict[str, Any]:
        return {name: getattr(event, name) for name in names}

    if isinstance(event, ModelCall):
        name = event.model
        if name.startswith(("/", "~", ".")):  # a local folder, of which others see the end
            name = PurePath(name).name
        told = of("role", "prompt_tokens", "completion_tokens", "retries", "failure")
        return {"kind": "model", "model": name, "usd": event.cost, **told}
    if isinstance(event, OperatorCall):
        told = of("operator", "instance", "outcome", "attempts", "reason")
        return {"kind": "operator", **told}
    if isinstance(event, ProgramRun):
        # The code of the workflow itself runs outside of any operator.
        kind = "workflow" if event.caller == DEFAULT_CALLER else "program"
        limits = list(event.limits_hit)
        return {"kind": kind, "wall": event.level, "limits_hit": limits, **of("outcome")}
    return None


def spent_in(trace: Trace) -> dict[str, Any]:
    """What the answered calls of models used together: `usd`, `tokens` and `policy_tokens`, as
    the fields of `Solved`."""
    calls = [call for call in trace.of(ModelCall) if call.failure is None]
    # A policy without a price is no news.
    costs = [call.cost for call in calls if not (call.role == POLICY and call.cost is None)]
    known = [cost for cost in costs if cost is not None]
    return {
        "usd": sum(known) if len(known) == len(costs) else None,
        "tokens": _tokens([call for call in calls if call.role != POLICY]),
        "policy_tokens": _tokens([call for call in calls if call.role == POLICY]),
    }


def _tokens(calls: Sequence[ModelCall]) -> int | None:
    counts = [
        call.prompt_tokens + call.completion_tokens
        for call in calls
        if call.prompt_tokens is not None and call.completion_tokens is not None
    ]
    return sum(counts) if len(counts) == len(calls) else None


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier() and len(value) <= MAX_NAME_CHARS


def solved_text(solved: Solved, *, drawing: bool = True) -> str:
    """Everything about one problem for a terminal, which obeys none of what a model wrote:
    unprintable characters are spelled out.

    Args:
        drawing: whether the workflow's graph is in it, as a Mermaid text.
    """
    return "\n".join(_lines(solved, drawing)) + "\n"


def shown(text: str) -> str:
    """Text with its unprintable characters spelled out, but for line ends and tabs."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def _lines(solved: Solved, drawing: bool) -> Iterator[str]:
    yield f"workflow: {_verdict(solved)}"
    for refusal in solved.refusals:
        yield f"  refused: {shown(str(refusal))}"
    if solved.code:
        yield ""
        yield from _block(solved.code)
    else:
        yield "  the model wrote:"
        yield from _block(solved.text)
    if solved.prompts:
        yield "\nprompts:"
        for name, prompt in solved.prompts.items():
            yield f"  {shown(name)}:"
            yield from _block(prompt)
    if drawing and solved.mermaid:
        yield "\ngraph:"
        yield from _block(solved.mermaid.rstrip("\n"))
    if solved.level:
        yield f"\nwhat ran instead: {LEVEL_WORDS[solved.level]}"
        for attempt in solved.attempts:
            reason = f": {shown(str(attempt['reason']))}" if attempt.get("reason") else ""
            name = f"fallback {attempt['level']}" if attempt["level"] else "as written"
            yield f"  {name}: {attempt['ending']}{reason}"
        yield from _block(solved.ran_code)
    if solved.answer is None:
        yield f"\nno answer: the last workflow ended with {solved.ending}"
        yield from _block(solved.reason)
    else:
        yield f"\nanswer ({LEVEL_WORDS[solved.level]}):"
        yield from _block(solved.answer)
    yield (
        f"\ncost {_usd(solved.usd)}  seconds {solved.seconds:.1f}  "
        f"model calls {solved.model_calls}  tokens {_count(solved.tokens)}  "
        f"policy tokens {_count(solved.policy_tokens)}"
    )
    if solved.problem.truth is None:
        return
    why = shown(solved.score_reason)
    if solved.reward is None:
        yield f"reward: not known, {why or 'the answer was not scored'}"
    else:
        parts = ", ".join(f"{name} {_part(value)}" for name, value in solved.parts.items())
        reason = f" ({why})" if why else ""
        yield f"reward {solved.reward:.2f}, score {_part(solved.score)}{reason}: {parts}"


def _verdict(solved: Solved) -> str:
    read = f"read as {solved.form}" if solved.form else "could not be read"
    told = [read, "passed the check" if solved.valid else "refused by the check"]
    if solved.turns > 1:
        told.append(f"after {solved.turns} turns")
    if solved.bound is not None:
        bound = solved.bound
        calls = f"{bound.model_calls} model call{'' if bound.model_calls == 1 else 's'}"
        most = f"at worst {calls} and {bound.tokens} tokens"
        told.append(most if bound.usd is None else f"{most}, {_usd(bound.usd)}")
    return "; ".join(told)


def _usd(value: float | None) -> str:
    if value is None:
        return "not known"
    return "$0" if value == 0 else f"${value:.2g}" if value < 0.01 else f"${value:.4f}"


def _part(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"


def _count(value: int | None) -> str:
    return "not counted" if value is None else str(value)


def _block(text: str) -> Sequence[str]:
    return [f"    {line}" for line in shown(text).splitlines()]
