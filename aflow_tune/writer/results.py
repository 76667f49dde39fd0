"""Executes a workflow that the policy wrote, and computes its outcome, reward and record.

Three fallbacks replace a graph that fails (`Level`). The time limit covers all attempts together,
every other limit applies to each attempt; refused code is never executed. An answer that comes
before any call of the graph has returned a result counts as none: the policy could otherwise earn
the most by writing an answer that it knows into the graph.

The reward has the parts of `five_part`, with the executor's spend over all attempts and turns. Its
part `format` is the form of the answer times `writing_form`. With `span` = highest - lowest and
`sum` the weighted mean of the known parts, every fallback earns less than the worst clean run, and
each deeper one less than a shallower one:

    clean run                  lowest + span * (0.1 + 0.9 * sum)
    1: default prompts         lowest + span * (0.06 + 0.02 * sum)
    2: simpler workflow        lowest + span * (0.03 + 0.02 * sum)
    3: default workflow        lowest + span * 0.02 * writing_form

Structure and outcome (a coarse class) form the anchor state of GiGPO (arXiv:2505.10978). Other
modules read a record by its keys; it contains nothing of the gold answer.
"""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from aflow_tune.errors import AflowTuneError
from aflow_tune.graph.flow import ANSWER, MODEL, PROBLEM
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.run import GraphEnding, GraphLimits, GraphRun
from aflow_tune.graph.shape import walk
from aflow_tune.models import as_client
from aflow_tune.models.types import ModelClient, ModelFailure
from aflow_tune.operators import OPERATORS, Operator
from aflow_tune.operators.reading import whole_object
from aflow_tune.sandbox.types import SandboxUnavailable
from aflow_tune.scoring import find
from aflow_tune.scoring.rewards import (
    WEIGHTS,
    FivePart,
    Usage,
    five_part,
    reward_settings,
    total,
    weighted,
)
from aflow_tune.sections import FivePartSection
from aflow_tune.trace import ModelCall, Trace
from aflow_tune.writer.prompting import KEEP
from aflow_tune.writer.templates import (
    INSTRUCTIONS,
    default_graph,
    default_instructions,
    straight_line,
)
from aflow_tune.writer.types import (
    MAX_REFUSALS,
    Level,
    ProblemType,
    Refusal,
    RefusalKind,
    Verdict,
    WrittenForm,
)

SHARE = 0.75
"""Of the time left, for an attempt that others may follow."""
LEAST_SECONDS = 0.05
"""With less time left, no attempt starts."""


@dataclass(frozen=True)
class Attempt:
    """One graph that was executed, or could not be."""

    level: Level
    graph: Graph
    run: GraphRun

    @property
    def why(self) -> str:
        """Why it gave no answer: its ending and the reason; empty if it gave one."""
        return "" if self.run.ok else f"{self.run.ending.value}: {self.run.reason}"


@dataclass(frozen=True)
class Executed:
    """The execution of a written workflow: all attempts in order. The last one counts and gives
    `level`, `run` and `graph`. `seconds` is the wall-clock time of all attempts."""

    attempts: tuple[Attempt, ...]
    seconds: float

    @property
    def level(self) -> Level:
        return self.attempts[-1].level

    @property
    def run(self) -> GraphRun:
        return self.attempts[-1].run

    @property
    def graph(self) -> Graph:
        return self.attempts[-1].graph

    @property
    def why(self) -> str:
        """Why the first failed attempt failed; empty if none did."""
        return next((attempt.why for attempt in self.attempts if attempt.why), "")


async def run_written(
    verdict: Verdict,
    problem: str,
    entry_point: str | None = None,
    *,
    executor: Any,
    clients: Mapping[str, ModelClient] | None = None,
    models: Mapping[str, str] | None = None,
    limits: GraphLimits | None = None,
    sandbox: str = "auto",
    problem_type: str = "math",
    operators: Mapping[str, type[Operator]] = OPERATORS,
    fallbacks: bool = True,
) -> Executed:
    """Execute a written workflow on a problem, and its fallbacks if it fails.

    Args:
        entry_point: name of the function to write, for code problems.
        executor: the frozen model that operators call; `clients`: other models by role.
        models: role by operator, instance or the graph's own name of a model.
        limits: `seconds` for all attempts together, the rest for each attempt.
        fallbacks: False: a graph that passed the check is executed once, without fallbacks.

    Raises:
        BudgetReached: the budget of the run is spent.
        SandboxUnavailable: no sandbox can be started on this machine.
        BadInput: `models` names a role without a client, or no operator can answer a problem.
    """
    most = limits or GraphLimits()
    given: dict[str, Any] = {"model": as_client(executor), "clients": clients}
    given |= {"models": models, "sandbox": sandbox}
    names_entry = entry_point is not None
    default = default_graph(problem_type, operators, names_entry)
    started = time.monotonic()
    attempts: list[Attempt] = []

    async def attempt(level: Level, graph: Graph, share: float = SHARE) -> GraphRun:
        """Execute a graph within `share` of the time left, and append the attempt."""
        seconds = (most.seconds - (time.monotonic() - started)) * share
        if seconds < LEAST_SECONDS:
            reason = f"no time is left of {most.seconds:g} s"
            run = GraphRun(GraphEnding.TIMED_OUT, reason=reason)
        elif graph.shape.needs_entry_point and not names_entry:
            reason = "its __call__ takes an entry point, and the problem has none"
            run = GraphRun(GraphEnding.RAISED, reason=reason)
        else:
            bounded = replace(most, seconds=seconds)
            run = (await graph.run(problem, entry_point, limits=bounded, **given)).with_text()
        if run.ending is GraphEnding.SANDBOX_UNAVAILABLE:
            raise SandboxUnavailable(run.reason)
        if run.ok and not run.answered:
            reason = f"{graph.label}: it answered without a result of any operator"
            run = replace(run, ending=GraphEnding.NO_ANSWER, answer=None, reason=reason)
        attempts.append(Attempt(level, graph, run))
        return run

    async def written(graph: Graph) -> bool:
        """Try the written graph and the two fallbacks derived from it; whether one answered."""
        run = await attempt(Level.CLEAN, graph) if verdict.ok else None
        if run is None or (run.ending is GraphEnding.RAISED and run.level and not run.built):
            plain = with_default_prompts(graph, problem_type)
            run = await attempt(Level.DEFAULT_PROMPTS, plain)
        named = list(graph.shape.instances.values())
        line = None if run.ok else straight_line(named, operators, problem_type, names_entry)
        return run.ok or (line is not None and (await attempt(Level.SIMPLER, line)).ok)

    graph = verdict.graph
    if graph is not None and verdict.ok and not fallbacks:
        await attempt(Level.CLEAN, graph, share=1.0)
    elif graph is None or not verdict.code_ok or not await written(graph):
        await attempt(Level.DEFAULT_WORKFLOW, default, share=1.0)
    return Executed(tuple(attempts), time.monotonic() - started)


def with_default_prompts(graph: Graph, problem_type: str) -> Graph:
    """The same code with default instructions for its operators and for every prompt that it reads
    as `self.prompts["name"]` or `prompt_custom.name`."""
    shape = graph.shape
    plain = INSTRUCTIONS.get(problem_type, INSTRUCTIONS["math"])
    read = {}
    for node in walk(shape.tree) if shape.tree is not None else ():
        owner = getattr(node, "value", None)
        key = getattr(getattr(node, "slice", None), "value", None)
        if getattr(owner, "attr", "") == "prompts" and isinstance(key, str):
            read[key] = plain
        elif shape.modules.get(getattr(owner, "id", "")) == "prompt" and hasattr(node, "attr"):
            read[node.attr] = plain
    own = dict.fromkeys(shape.instances, "")
    takes = default_instructions(shape.instances, graph.known, problem_type)
    return replace(graph, prompts={}, instructions={**read, **own, **takes})


START = "start"
"""The anchor state of the first turn."""
UNREADABLE, REFUSED, NOT_BUILT = "unreadable", "refused", "not_built"
"""Outcomes besides the values of `GraphEnding`."""
CLEAN_FLOOR, FALLBACK_STEP, FALLBACK_SPAN = 0.1, 0.03, 0.02
"""Shares of the span: the least that a clean run earns; the distance between the lowest rewards of
neighbouring fallbacks; the range within one, which is smaller, so that they do not overlap."""
FORM_WORTH = {WrittenForm.HYBRID: 1.0, WrittenForm.REPAIRED: 0.75, WrittenForm.CODE: 0.5}
REFUSAL_COST, MOST_REFUSALS = 0.1, 9
"""More refusals cost no more, so that any readable graph earns more than an unreadable one."""
MAX_PROBLEM, MAX_ANSWER, MAX_TEXT, MAX_REASON = 2_000, 500, 200_000, 2_000
"""Most characters that a record keeps."""
_TOLD, _TOLD_REFUSALS = 400, 8
"""Most characters of an answer or reason, and most refusals, in the feedback to the policy."""
_MAX_KEEP = 200
_FENCE = re.compile(r"^```\w*\s*|\s*```$")
_STAND_IN = {
    Level.DEFAULT_PROMPTS: "the same graph with plain prompts",
    Level.SIMPLER: "a simpler workflow of the same operators",
    Level.DEFAULT_WORKFLOW: "the default workflow",
}
_ASK = (
    'Reply with a better workflow as one JSON object with "prompts" and "graph_code", or with '
    f"{KEEP} to stay with this one."
)
BLAMELESS = frozenset(failure.value for failure in ModelFailure) - {ModelFailure.REFUSED.value}
"""Model failures that are not the workflow's fault. A refused prompt may be too long."""
_MARKS = {"data": ">", "carried": "~", "decides": "?"}


def structure_of(graph: Graph) -> str:
    """The structure as one line, such as `Custom[1] ScEnsemble | P>0 0>1 1>A`.

    Operators are sorted by their distance from the problem and then by name, so that the order of
    independent statements does not matter; brackets number the loops around each. `>` is a data
    edge, `~` one to a later iteration, `?` a condition. Empty for a graph without calls.
    """
    flow = graph.flow
    depths, most = dict.fromkeys(range(len(flow.nodes)), 0), len(flow.nodes)
    forward = [e for e in flow.edges if e.source >= 0 and e.target >= 0 and e.kind != "carried"]
    for _ in flow.nodes:
        for edge in forward:
            deeper = max(depths[edge.target], depths[edge.source] + 1)
            depths[edge.target] = min(most, deeper)
    order = sorted(
        flow.nodes, key=lambda n: (depths[n.number], n.operator or MODEL, len(n.loops), n.number)
    )
    place = {PROBLEM: -1, ANSWER: len(order)} | {node.number: at for at, node in enumerate(order)}
    shown = {-1: "P", len(order): "A"}
    loops: dict[Any, str] = {}
    calls = []
    for node in order:
        around = [loops.setdefault(loop, str(len(loops) + 1)) for loop in node.loops]
        calls.append((node.operator or MODEL) + (f"[{'.'.join(around)}]" if around else ""))
    edges = sorted((place[e.source], place[e.target], _MARKS[e.kind]) for e in flow.edges)
    drawn = [f"{shown.get(a, a)}{mark}{shown.get(b, b)}" for a, b, mark in edges]
    return f"{' '.join(calls)} | {' '.join(drawn)}" if calls else ""


def operators_of(graph: Graph | None) -> dict[str, int]:
    """Number of call sites by operator; direct calls of the model under `llm`."""
    nodes = () if graph is None else graph.flow.nodes
    return dict(Counter(node.operator or MODEL for node in nodes))


@dataclass(frozen=True)
class TurnResult:
    """One reply of the policy, its verdict and its execution. `usage` and `model_calls` (failed
    calls included) are those of the frozen models in this turn."""

    text: str
    verdict: Verdict
    executed: Executed
    usage: Usage
    model_calls: int

    @functools.cached_property
    def structure(self) -> str | None:
        """Of the written graph; None if there is no graph."""
        graph = self.verdict.graph
        return None if graph is None else structure_of(graph)

    @property
    def outcome(self) -> str:
        """How the execution of the graph as written ended, or why it was not executed."""
        if self.verdict.graph is None:
            return UNREADABLE
        if not self.verdict.ok:
            return REFUSED
        own = self.executed.attempts[0].run
        return own.ending.value if own.built or own.ok else NOT_BUILT

    @property
    def state(self) -> str:
        """The anchor state of the next turn; the recorder adds the task."""
        return f"{self.structure or '-'} / {self.outcome}"

    def told(self) -> str:
        """The feedback on this turn that the policy gets in the next one."""
        run, refusals = self.executed.run, self.verdict.refusals
        if self.executed.level is Level.CLEAN and run.ok:
            tokens = "" if self.usage.tokens is None else f" of {self.usage.tokens} tokens"
            calls = f"{self.model_calls} model call{'' if self.model_calls == 1 else 's'}"
            answered = f"Your workflow ran and answered:\n{_cut(run.text)}"
            return f"{answered}\nIt made {calls}{tokens}.\n{_ASK}"
        lines = [f"Your workflow failed: {_cut(self.executed.attempts[0].why)}"]
        if refusals:
            lines = ["Your workflow was refused before it ran:"]
            lines += [f"- {_cut(str(item))}" for item in refusals[:_TOLD_REFUSALS]]
        if len(refusals) > _TOLD_REFUSALS:
            lines.append(f"- and {len(refusals) - _TOLD_REFUSALS} more")
        ending = "and gave no answer either."
        if run.ok:
            ending = f"and answered, which earns you next to nothing:\n{_cut(run.text)}"
        lines.append(f"In its place {_STAND_IN.get(self.executed.level, 'nothing')} ran {ending}")
        return "\n".join([*lines, _ASK])


def _cut(text: str) -> str:
    return text if len(text) <= _TOLD else f"{text[: _TOLD - 4]} ..."


def keeps(text: str) -> bool:
    """Whether a reply says to keep the graph: the word KEEP, or the object {"keep": true}."""
    if len(text) > _MAX_KEEP:
        return False
    bare = _FENCE.sub("", text.strip()).strip()
    return bare.strip("\"'`.! \n").upper() == KEEP or whole_object(bare) == {"keep": True}


def writer_reward(
    score: float,
    answer: str,
    usage: Usage,
    *,
    level: Level,
    form: WrittenForm | None,
    refusals: Sequence[Refusal] = (),
    settings: FivePartSection | None = None,
    answer_form: str = r"\S",
) -> FivePart:
    """The reward of one rollout, by the table in the module docstring.

    Args:
        score: of the delivered answer, in [0, 1].
        usage: of the executor and the other frozen models.
        form: how the workflow was read; None if nothing could be read.
        answer_form: a regular expression that matches somewhere in a well-formed answer.

    Raises:
        Unscored: no part with a weight above 0 is known.
    """
    chosen = settings or FivePartSection()
    writing = writing_form(form, refusals)
    parts = dict(five_part(score, answer, usage, chosen, answer_form).parts)
    parts["format"] = (parts["format"] or 0.0) * writing
    total = weighted(parts, {name: getattr(chosen, name) for name in WEIGHTS["five_part"]})
    if level is Level.CLEAN:
        share = CLEAN_FLOOR + (1.0 - CLEAN_FLOOR) * total
    else:
        within = writing if level is Level.DEFAULT_WORKFLOW else total
        share = FALLBACK_STEP * (Level.DEFAULT_WORKFLOW - level) + FALLBACK_SPAN * within
    return FivePart(chosen.lowest + (chosen.highest - chosen.lowest) * share, parts)


def writing_form(form: WrittenForm | None, refusals: Sequence[Refusal] = ()) -> float:
    """How well the policy kept to the form, in [0, 1]: hybrid 1, repaired 0.75, code alone 0.5,
    unreadable 0; minus a tenth of that for each refusal, nine at most. Code that does not parse
    counts as nine."""
    kinds = {refusal.kind for refusal in refusals}
    broken = RefusalKind.SYNTAX in kinds or RefusalKind.UNREADABLE in kinds
    count = MOST_REFUSALS if broken else min(len(refusals), MOST_REFUSALS)
    return 0.0 if form is None else FORM_WORTH[form] * (1.0 - REFUSAL_COST * count)


class ExecutorFailed(AflowTuneError, RuntimeError):
    """The executor, or another model of a graph's operators, did not answer."""


@dataclass(frozen=True)
class WriterRun:
    """One rollout, not scored yet. `turns` is how often the policy was asked, including a reply
    that kept the graph. The last of `results` counts."""

    problem: str
    problem_type: ProblemType
    turns: int
    results: tuple[TurnResult, ...]

    @property
    def last(self) -> TurnResult:
        return self.results[-1]

    @property
    def usage(self) -> Usage:
        """The usage of all turns."""
        usages = [result.usage for result in self.results]
        return Usage(
            usd=total([one.usd for one in usages]),
            tokens=total([one.tokens for one in usages]),
            seconds=sum(one.seconds for one in usages),
            operators=sum(one.operators for one in usages),
        )

    @property
    def model_calls(self) -> int:
        """Of all turns, failed ones included."""
        return sum(result.model_calls for result in self.results)

    @property
    def level(self) -> Level:
        return self.last.executed.level

    @property
    def answer(self) -> Any:
        """What the last workflow returned; None if it gave no answer. `text`: the same as text."""
        return self.last.executed.run.answer

    @property
    def text(self) -> str:
        return self.last.executed.run.text

    def reward(self, score: float, benchmark: str | None = None) -> FivePart:
        """The reward if the answer scores `score`, by the settings of the run."""
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
    """The spend of an execution, as the models reported it; zero without model calls."""
    told = Usage.of(trace)
    if not trace.of(ModelCall):
        told = replace(told, usd=0.0, tokens=0)
    calls = sum(attempt.run.calls for attempt in executed.attempts)
    return replace(told, seconds=executed.seconds, operators=calls)


def raise_if_models_failed(result: TurnResult) -> None:
    """Raise `ExecutorFailed` if the frozen models are to blame for a failed execution: none of
    their calls was answered, or one failed in an attempt without an answer."""
    executed = result.executed
    if result.model_calls and not sum(attempt.run.model_calls for attempt in executed.attempts):
        kinds = {kind for attempt in executed.attempts for kind in attempt.run.failures}
        why = ", ".join(sorted(kinds)) or "no answer in time"
        raise ExecutorFailed(f"no call of the executor was answered: {why}; {executed.why}")
    for attempt in executed.attempts if executed.level is not Level.CLEAN else ():
        blameless = sorted(BLAMELESS & set(attempt.run.failures))
        if blameless and not attempt.run.ok:
            raise ExecutorFailed(
                f"calls of the executor failed ({', '.join(blameless)}), so the workflow "
                f"cannot be judged: {attempt.why}"
            )


def record_of(run: WriterRun) -> dict[str, Any]:
    """The unscored record of a rollout: `usd`, wall-clock `seconds`, `tokens` in plus out."""
    last = run.last
    verdict, executed, bound = last.verdict, last.executed, last.verdict.bound
    written = verdict.written
    operators = operators_of(verdict.graph)
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
        "bound": None if bound is None else {**asdict(bound), "tokens": bound.tokens},
        "level": int(executed.level),
        "structure": last.structure,
        "operators": operators,
        "nodes": sum(operators.values()),
        "ending": executed.run.ending.value,
        "outcome": last.outcome,
        "reason": executed.why[:MAX_REASON],
        "answer": run.text[:MAX_ANSWER],
        "score": None,
        "parts": None,
        "usd": run.usage.usd,
        "tokens": run.usage.tokens,
        "seconds": round(run.usage.seconds, 3),
        "calls": run.model_calls,
    }


def run_metrics(run: WriterRun) -> dict[str, float]:
    """The metrics of a rollout, without those of its score."""
    verdict = run.last.verdict
    return {
        "writer/valid": float(verdict.ok),
        **{f"writer/level_{int(level)}": float(run.level is level) for level in Level},
        "writer/nodes": float(sum(operators_of(verdict.graph).values())),
        "writer/turns": float(run.turns),
        "writer/model_calls": float(run.model_calls),
    }
