"""A problem as it is asked, and what came of it: the words of `inferring.py` and of its users.

A `Solved` is plain data, everything that there is to show of one problem: commands and the server
hand it out as JSON, `solved_text` makes what a terminal shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from aflow_tune.context import DEFAULT_CALLER
from aflow_tune.errors import BadInput, Fault
from aflow_tune.graph.draw import to_mermaid, to_svg
from aflow_tune.trace import POLICY, Event, ModelCall, OperatorCall, ProgramRun, Trace
from aflow_tune.writer.types import PROBLEM_TYPES, Level, ProblemType

if TYPE_CHECKING:
    from aflow_tune.graph.graph import Graph
    from aflow_tune.writer.workflow import WriterRun

MAX_PROBLEM_CHARS = 50_000
"""Of a problem; a policy's prompt is bounded more tightly by its own `max_prompt_tokens`."""
MAX_TRUTH_CHARS = 100_000
MAX_DRAWN = 200
"""Calls in the source of a graph that is drawn; a picture of more tells nothing."""

LEVEL_WORDS: Mapping[int, str] = {
    Level.CLEAN: "the workflow as it was written",
    Level.DEFAULT_PROMPTS: "fallback 1: the written workflow with the operators' own prompts",
    Level.SIMPLER: "fallback 2: a simpler workflow of the same operators",
    Level.DEFAULT_WORKFLOW: "fallback 3: the default workflow of this type of problem",
}
"""Which workflow gave the answer, in words."""

Solved = dict[str, Any]
"""What `solved` describes."""


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
            told = "nothing" if found is None else f"{found!r:.80}"
            faults.append(Fault(f"{where}: {name}", expected, told, f"correct `{name}`"))

        text, kind = row.get("problem"), row.get("type") or row.get("problem_type")
        if not isinstance(text, str) or not text.strip() or len(text) > MAX_PROBLEM_CHARS:
            wrong("problem", f"a text of at most {MAX_PROBLEM_CHARS} characters, not empty", text)
        if kind not in PROBLEM_TYPES:
            wrong("type", " | ".join(PROBLEM_TYPES), kind)
        entry_point = row.get("entry_point")
        if entry_point is None and kind == "code":
            wrong("entry_point", "for code the name of the function to write", None)
        elif entry_point is not None and not (
            isinstance(entry_point, str) and entry_point.isidentifier()
        ):
            wrong("entry_point", "the name of a function", entry_point)
        truth = row.get("truth", row.get("ground_truth"))
        if isinstance(truth, int | float) and not isinstance(truth, bool):
            truth = str(truth)
        if truth is not None and not (isinstance(truth, str) and 0 < len(truth) <= MAX_TRUTH_CHARS):
            wrong("truth", f"a text of at most {MAX_TRUTH_CHARS} characters", truth)
        if faults:
            raise BadInput("This problem cannot be asked.", faults)
        return cls(text, kind, entry_point, truth)  # type: ignore[arg-type]


def solved(
    problem: Problem, run: WriterRun, trace: Trace, started: float, seconds: float
) -> Solved:
    """One problem, asked once, in the order in which it is read; `started` is a reading of the
    monotonic clock.

    - `answer` (None: no workflow gave one), `level` of the workflow that ran last with its meaning,
      how it ended (a `GraphEnding` value) and why; `attempts` are all runs of a graph.
    - `workflow`: what the policy wrote (`text`, in `turns` turns), how it was read (`form`: None
      where nothing could be read), what the check said, and its drawings; `ran`: the workflow that
      ran last, drawn if it is another.
    - `usd`: what all answered calls of models cost (None: the price of one is not known; the policy
      counts only where it has a price). `policy_tokens` are prompt and completion of the policy's
      calls (None: not counted by its server), `tokens` and `model_calls` those of other models.
    - `calls`: the events of the trace by their start: `kind` (model, operator, program, or workflow
      for the run of its own code), `caller`, `start` after `started` and `seconds`; the rest
      depends on the kind.

    Where the truth is known, whoever scores the answer fills in `score`, `score_reason`, `reward`
    and its `parts`; None: not known.
    """
    verdict, executed = run.last.verdict, run.last.executed
    written, ran = verdict.written, executed.run
    answered = [call for call in trace.of(ModelCall) if call.failure is None]
    # A policy without a price is no news.
    costs = [call.cost for call in answered if not (call.role == POLICY and call.cost is None)]
    known = [cost for cost in costs if cost is not None]
    svg = _svg(verdict.graph, "the workflow that was written")
    ran_svg = _svg(executed.graph, "the workflow that answered") if executed.level else ""
    calls = []
    for event in sorted(trace.events, key=lambda event: event.started):
        entry = _entry(event)
        if entry is not None:
            start = round(max(0.0, event.started - started), 3)
            times = {"start": start, "seconds": round(event.seconds, 3)}
            calls.append({**entry, "caller": event.caller, **times})
    found: Solved = {
        "problem": problem.text,
        "type": problem.type,
        "entry_point": problem.entry_point,
        "answered": ran.ok,
        "answer": ran.text if ran.ok else None,
        "level": int(executed.level),
        "level_meaning": LEVEL_WORDS[executed.level],
        "ending": ran.ending.value,
        "reason": ran.reason,
        "attempts": [
            {"level": int(one.level), "ending": one.run.ending.value, "reason": one.run.reason}
            for one in executed.attempts
        ],
        "workflow": {
            "valid": written is not None and not verdict.refusals,
            "form": None if written is None else written.form.value,
            "code": "" if written is None else written.code,
            "prompts": {} if written is None else dict(written.prompts),
            "text": run.last.text,
            "turns": run.turns,
            "refusals": [refusal.to_json() for refusal in verdict.refusals],
            "bound": None if verdict.bound is None else asdict(verdict.bound),
            "mermaid": to_mermaid(verdict.graph.flow) if svg and verdict.graph else "",
            "svg": svg,
        },
        "ran": {
            "code": executed.graph.sources["graph.py"],
            "prompts": dict(executed.graph.instructions),
            "svg": ran_svg,
        },
        "usd": sum(known) if len(known) == len(costs) else None,
        "tokens": _tokens([call for call in answered if call.role != POLICY]),
        "policy_tokens": _tokens([call for call in answered if call.role == POLICY]),
        "model_calls": run.model_calls,
        "seconds": round(seconds, 3),
        "calls": calls,
    }
    if problem.truth is not None:
        unknown: Solved = {"score": None, "score_reason": "", "reward": None, "parts": {}}
        found |= {"truth": problem.truth, **unknown}
    return found


def _svg(graph: Graph | None, title: str) -> str:
    drawable = graph is not None and 0 < len(graph.flow.nodes) <= MAX_DRAWN
    return to_svg(graph.flow, title=title) if graph is not None and drawable else ""


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


def _tokens(calls: Sequence[ModelCall]) -> int | None:
    counts = [
        call.prompt_tokens + call.completion_tokens
        for call in calls
        if call.prompt_tokens is not None and call.completion_tokens is not None
    ]
    return sum(counts) if len(counts) == len(calls) else None


def solved_text(got: Solved, *, drawing: bool = True) -> str:
    """Everything about one problem for a terminal, which obeys none of what a model wrote:
    unprintable characters are spelled out. `drawing`: with the graph as a Mermaid text."""
    return "\n".join(_lines(got, drawing)) + "\n"


def _shown(text: str) -> str:
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def _block(text: str) -> Sequence[str]:
    return [f"    {line}" for line in _shown(text).splitlines()]


def _lines(got: Solved, drawing: bool) -> Iterator[str]:
    written, bound = got["workflow"], got["workflow"]["bound"]
    told = [f"read as {written['form']}" if written["form"] else "could not be read"]
    told.append("passed the check" if written["valid"] else "refused by the check")
    if written["turns"] > 1:
        told.append(f"after {written['turns']} turns")
    if bound is not None:
        calls, tokens = bound["model_calls"], bound["prompt_tokens"] + bound["completion_tokens"]
        most = f"at worst {calls} model call{'' if calls == 1 else 's'} and {tokens} tokens"
        told.append(most if bound["usd"] is None else f"{most}, {_usd(bound['usd'])}")
    yield f"workflow: {'; '.join(told)}"
    for refusal in written["refusals"]:
        place = "line {line}, column {column}: ".format(**refusal) if refusal["line"] else ""
        yield f"  refused: {_shown(place + refusal['message'])}"
    yield "" if written["code"] else "  the model wrote:"
    yield from _block(written["code"] or written["text"])
    if written["prompts"]:
        yield "\nprompts:"
        for name, prompt in written["prompts"].items():
            yield f"  {_shown(name)}:"
            yield from _block(prompt)
    if drawing and written["mermaid"]:
        yield "\ngraph:"
        yield from _block(written["mermaid"].rstrip("\n"))
    if got["level"]:
        yield f"\nwhat ran instead: {got['level_meaning']}"
        for attempt in got["attempts"]:
            reason = f": {_shown(attempt['reason'])}" if attempt["reason"] else ""
            name = f"fallback {attempt['level']}" if attempt["level"] else "as written"
            yield f"  {name}: {attempt['ending']}{reason}"
        yield from _block(got["ran"]["code"])
    if got["answer"] is None:
        yield f"\nno answer: the last workflow ended with {got['ending']}"
        yield from _block(got["reason"])
    else:
        yield f"\nanswer ({got['level_meaning']}):"
        yield from _block(got["answer"])
    tokens, policy_tokens = (
        "not counted" if got[name] is None else got[name] for name in ("tokens", "policy_tokens")
    )
    yield (
        f"\ncost {_usd(got['usd'])}  seconds {got['seconds']:.1f}  "
        f"model calls {got['model_calls']}  tokens {tokens}  policy tokens {policy_tokens}"
    )
    if "truth" not in got:
        return
    why = _shown(got["score_reason"])
    if got["reward"] is None:
        yield f"reward: not known, {why or 'the answer was not scored'}"
    else:
        parts = ", ".join(f"{name} {_part(value)}" for name, value in got["parts"].items())
        reason = f" ({why})" if why else ""
        yield f"reward {got['reward']:.2f}, score {_part(got['score'])}{reason}: {parts}"


def _usd(value: float | None) -> str:
    if value is None:
        return "not known"
    return "$0" if value == 0 else f"${value:.2g}" if value < 0.01 else f"${value:.4f}"


def _part(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"
