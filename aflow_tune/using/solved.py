"""A problem, and the result of solving it.

A `Solved` is plain data: commands and the server return it as JSON, `solved_text` formats it for a
terminal.
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
MAX_TRUTH_CHARS = 100_000
MAX_DRAWN = 200
"""Graphs with more calls in their source are not drawn."""

LEVEL_WORDS: Mapping[int, str] = {
    Level.CLEAN: "the workflow as it was written",
    Level.DEFAULT_PROMPTS: "fallback 1: the written workflow with the operators' own prompts",
    Level.SIMPLER: "fallback 2: a simpler workflow of the same operators",
    Level.DEFAULT_WORKFLOW: "fallback 3: the default workflow of this type of problem",
}

Solved = dict[str, Any]
"""The result of one problem; `solved` lists its fields."""


@dataclass(frozen=True)
class Problem:
    """One problem. `entry_point`: for code, the function to write. `truth`: the right answer, or
    for code the tests; None if unknown."""

    text: str
    type: ProblemType
    entry_point: str | None = None
    truth: str | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any], where: str) -> Problem:
        """From plain data with `problem`, `type` (or `problem_type`), and perhaps `entry_point` and
        `truth` (or `ground_truth`). Raises BadInput with all faults."""
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
        named = isinstance(entry_point, str) and entry_point.isidentifier()
        if not named and (entry_point is not None or kind == "code"):
            wrong("entry_point", "for code the name of a function to write", entry_point)
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
    """The result of solving one problem once; `started` is a reading of the monotonic clock.

    - `answer` is None if no workflow gave one; `level`, `ending` and `reason` are those of the
      workflow that ran last, `attempts` lists every execution of a graph.
    - `workflow` is what the policy wrote (`form` None: unreadable) with the verdict of the check,
      `ran` the workflow that ran last, drawn if it is a different one.
    - `usd` is the cost of all answered calls (None: a price is unknown; calls of a policy without
      a price are left out). `policy_tokens` are prompt and completion of the policy (None: not
      reported), `tokens` and `model_calls` those of other models.
    - `calls` are the events of the trace in order of start, each with its `kind`.

    If the truth is known there are also `score`, `score_reason`, `reward` and its `parts`; the
    caller that scores the answer fills them in.
    """
    verdict, executed = run.last.verdict, run.last.executed
    written, ran = verdict.written, executed.run
    answered = [call for call in trace.of(ModelCall) if call.failure is None]
    # A local policy has no price; that does not make the cost unknown.
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
        if name.startswith(("/", "~", ".")):  # a local folder: show its last part only
            name = PurePath(name).name
        told = of("role", "prompt_tokens", "completion_tokens", "retries", "failure")
        return {"kind": "model", "model": name, "usd": event.cost, **told}
    if isinstance(event, OperatorCall):
        told = of("operator", "instance", "outcome", "attempts", "reason")
        return {"kind": "operator", **told}
    if isinstance(event, ProgramRun):
        # Outside of operators it is the code of the workflow itself.
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
    """The result as text for a terminal. Unprintable characters are escaped, so that no model can
    send control sequences. `drawing`: with the graph as Mermaid text."""
    text = "\n".join(_lines(got, drawing))
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text) + "\n"


def _block(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


def _lines(got: Solved, drawing: bool) -> Iterator[str]:
    written, bound = got["workflow"], got["workflow"]["bound"]
    verdict = "passed the check" if written["valid"] else "refused by the check"
    told = [f"form {written['form'] or 'unreadable'}", verdict, f"turns {written['turns']}"]
    if bound is not None:
        tokens = bound["prompt_tokens"] + bound["completion_tokens"]
        most = f"at worst {bound['model_calls']} model calls, {tokens} tokens"
        told.append(f"{most}, cost {_known(bound['usd'], '${:.4g}')}")
    yield f"workflow: {'; '.join(told)}"
    for refusal in written["refusals"]:
        yield "  refused, line {line}, column {column}: {message}".format(**refusal)
    yield from _block(written["code"] or written["text"])
    for name, prompt in written["prompts"].items():
        yield f"prompt of {name}:"
        yield from _block(prompt)
    if drawing and written["mermaid"]:
        yield "graph:"
        yield from _block(written["mermaid"])
    if got["level"]:
        for attempt in got["attempts"]:
            name = LEVEL_WORDS[attempt["level"]]
            yield f"ran {name}: {attempt['ending']} {attempt['reason']}".rstrip()
        yield from _block(got["ran"]["code"])
    if got["answer"] is None:
        yield f"no answer: the last workflow ended with {got['ending']}: {got['reason']}"
    else:
        yield f"answer ({got['level_meaning']}):"
        yield from _block(got["answer"])
    tokens, policy_tokens = (_known(got[name], "{}") for name in ("tokens", "policy_tokens"))
    yield (
        f"cost {_known(got['usd'], '${:.4g}')}  seconds {got['seconds']:.1f}  "
        f"model calls {got['model_calls']}  tokens {tokens}  policy tokens {policy_tokens}"
    )
    if "truth" in got:
        score, reward = (_known(got[name], "{:.2f}") for name in ("score", "reward"))
        parts = [f"{name} {_known(value, '{:.2f}')}" for name, value in got["parts"].items()]
        yield f"reward {reward}  score {score}  {got['score_reason']}".rstrip()
        yield f"parts {', '.join(parts) or 'not known'}"


def _known(value: float | None, form: str) -> str:
    return "not known" if value is None else form.format(value)
