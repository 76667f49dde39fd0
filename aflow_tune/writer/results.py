"""What becomes of a workflow that the policy wrote: its outcome, reward and record.

The outcome is a class, coarse on purpose: with the graph's structure it is GiGPO's anchor state,
in which different rollouts of a task have to meet. What the policy is told between turns holds no
score and nothing that the answer was scored by.

The reward has the parts of `scoring/five_part.py`, computed on what running the workflow spent:
calls of the executor and other frozen models, over all attempts and turns. The policy's own
tokens are no part of it. The part `format` is the answer's form times the form of the writing:

    hybrid 1, repaired 0.75, code alone 0.5, unreadable 0; less a tenth of that for each refusal,
    at most nine; code that is no Python counts as nine refusals.

With `span` = highest - lowest and `sum` the weighted mean of the known parts:

    clean run                  lowest + span * (0.1 + 0.9 * sum)
    1: default prompts         lowest + span * (0.06 + 0.02 * sum)
    2: simpler workflow        lowest + span * (0.03 + 0.02 * sum)
    3: default workflow        lowest + span * 0.02 * form of the writing

So a fallback earns less than the worst clean run, and a deeper one less than a shallower one. The
answer of the default workflow is not the policy's doing: only how near the writing came counts.

The keys of a record are the contract with its readers: it stands in `rollouts/` of a training run
and in the records of evaluations under `writer`. Nothing of the gold answer is in it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aflow_tune.errors import AflowTuneError
from aflow_tune.graph.flow import ANSWER, MODEL, PROBLEM, Flow, Loop
from aflow_tune.graph.graph import Graph
from aflow_tune.models.types import ModelFailure
from aflow_tune.operators.reading import whole_object
from aflow_tune.scoring import find
from aflow_tune.scoring.five_part import Usage, five_part
from aflow_tune.scoring.rewards import WEIGHTS, reward_settings, weighted
from aflow_tune.sections import FivePartSection
from aflow_tune.trace import ModelCall, Trace
from aflow_tune.writer.execute import Executed
from aflow_tune.writer.prompting import KEEP, Turn
from aflow_tune.writer.types import Level, ProblemType, Refusal, RefusalKind, Verdict, WrittenForm

_MARKS = {"data": ">", "carried": "~", "decides": "?"}
_ROUNDS = 6
"""Of colour refinement: graphs are a few calls deep."""


def structure_of(graph: Graph) -> str:
    """The structure as one line, such as `Custom[1] ScEnsemble | P>0 0>1 1>A`.

    Operators stand by their distance from the problem and then by name, so that the order of
    statements that do not depend on each other plays no part; each with the loops around it. `>`
    is 'feeds', `~` 'feeds in its next turn', `?` 'decides about'. Empty for a graph without calls.
    """
    flow = graph.flow
    order = _order(flow)
    place = {number: at for at, number in enumerate(order)}
    loops: dict[Loop, int] = {}
    calls = []
    for number in order:
        node = flow.nodes[number]
        numbers = [loops.setdefault(loop, len(loops) + 1) for loop in node.loops]
        around = f"[{'.'.join(map(str, numbers))}]" if numbers else ""
        calls.append((node.operator or MODEL) + around)
    if not calls:
        return ""
    edges = sorted(
        (place.get(edge.source, -1), place.get(edge.target, len(order)), _MARKS[edge.kind])
        for edge in flow.edges
    )
    drawn = [
        f"{'P' if source < 0 else source}{mark}{'A' if target == len(order) else target}"
        for source, target, mark in edges
    ]
    return f"{' '.join(calls)} | {' '.join(drawn)}"


def _order(flow: Flow) -> list[int]:
    """The nodes in an order that their own surroundings decide, not the source's lines.

    Nodes that a few rounds of colour refinement (Weisfeiler and Leman) cannot tell apart keep
    the order of the source.
    """
    count = len(flow.nodes)
    colours: dict[int, str] = {
        node.number: f"{node.operator or MODEL}/{len(node.loops)}" for node in flow.nodes
    }
    names = dict(colours)
    colours |= {PROBLEM: "P", ANSWER: "A"}
    for _ in range(min(count, _ROUNDS)):
        around: dict[int, list[str]] = {number: [] for number in colours}
        for edge in flow.edges:
            around[edge.target].append(f"in {edge.kind} {colours[edge.source]}")
            around[edge.source].append(f"out {edge.kind} {colours[edge.target]}")
        colours = {
            number: hashlib.sha256("|".join([colour, *sorted(around[number])]).encode()).hexdigest()
            for number, colour in colours.items()
        }
    depths = dict.fromkeys(range(count), 0)
    for _ in range(count):
        before = dict(depths)
        for edge in flow.edges:
            if edge.source >= 0 and edge.target >= 0 and edge.kind != "carried":
                depths[edge.target] = min(count, max(depths[edge.target], depths[edge.source] + 1))
        if depths == before:
            break
    return sorted(range(count), key=lambda n: (depths[n], names[n], colours[n], n))


def operators_of(graph: Graph) -> dict[str, int]:
    """Call sites by operator; direct calls of the model under `llm`."""
    return dict(Counter(node.operator or MODEL for node in graph.flow.nodes))


START = "start"
"""The state before anything was written."""
UNREADABLE, REFUSED, NOT_BUILT = "unreadable", "refused", "not_built"
"""Outcomes beside the endings of a graph's run."""
TOLD_ANSWER = 400
"""Characters of an answer that the policy is shown."""
TOLD_REASON = 400
TOLD_REFUSALS = 8
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


@dataclass(frozen=True)
class TurnResult:
    """A text of the policy's, its verdict, and the run of it."""

    text: str
    verdict: Verdict
    executed: Executed
    usage: Usage
    """Of this turn: the executor and the other frozen models."""
    model_calls: int
    """Of the same, failed ones included."""

    @functools.cached_property
    def structure(self) -> str | None:
        """Of the written graph; None where its code is no Python."""
        graph = self.verdict.graph
        return None if graph is None else structure_of(graph)

    @property
    def outcome(self) -> str:
        """What became of the graph as it was written: how its run ended, or why it had none."""
        if self.verdict.graph is None:
            return UNREADABLE
        if not self.verdict.ok:
            return REFUSED
        own = self.executed.attempts[0].run
        return own.ending.value if own.built or own.ok else NOT_BUILT

    @property
    def state(self) -> str:
        """The anchor state of the next turn, without the task, which the recorder adds."""
        return f"{self.structure or '-'} / {self.outcome}"

    def told(self) -> Turn:
        """The turn as the policy is shown it before the next one."""
        return Turn(self.text, "\n".join([*self._happened(), _ASK]))

    def _happened(self) -> list[str]:
        run, first = self.executed.run, self.executed.attempts[0]
        if self.executed.level is Level.CLEAN and run.ok:
            return [
                f"Your workflow ran and answered:\n{_cut(run.text, TOLD_ANSWER)}",
                self._spent(),
            ]
        refusals = self.verdict.refusals
        if refusals:
            lines = ["Your workflow was refused before it ran:"]
            lines += [f"- {_cut(str(item), TOLD_REASON)}" for item in refusals[:TOLD_REFUSALS]]
            if len(refusals) > TOLD_REFUSALS:
                lines.append(f"- and {len(refusals) - TOLD_REFUSALS} more")
        else:
            lines = [f"Your workflow failed: {_cut(first.why, TOLD_REASON)}"]
        stand_in = _STAND_IN.get(self.executed.level, "nothing")
        if run.ok:
            lines.append(
                f"In its place {stand_in} ran, which earns you next to nothing, and answered:\n"
                f"{_cut(run.text, TOLD_ANSWER)}"
            )
        else:
            lines.append(f"In its place {stand_in} ran and gave no answer either.")
        return lines

    def _spent(self) -> str:
        calls = f"{self.model_calls} model call{'' if self.model_calls == 1 else 's'}"
        tokens = self.usage.tokens
        return f"It made {calls}" + (f" of {tokens} tokens." if tokens is not None else ".")


def keeps(text: str) -> bool:
    """Whether a reply says to keep the graph: the word KEEP, or the object {"keep": true}."""
    if len(text) > _MAX_KEEP:
        return False
    bare = _FENCE.sub("", text.strip()).strip()
    if bare.strip("\"'`.! \n").upper() == KEEP:
        return True
    found = whole_object(bare)
    return isinstance(found, dict) and found == {"keep": True}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


CLEAN_FLOOR = 0.1
"""Share of the span that every clean run earns, and no fallback."""
FALLBACK_STEP = 0.03
"""Share of the span between the lowest rewards of two neighbouring levels."""
FALLBACK_SPAN = 0.02
"""Share of the span within one level; below FALLBACK_STEP, so that levels do not touch."""
FORM_WORTH = {WrittenForm.HYBRID: 1.0, WrittenForm.REPAIRED: 0.75, WrittenForm.CODE: 0.5}
REFUSAL_COST = 0.1
MOST_REFUSALS = 9
"""More refusals cost no more: there is always something left to lose by writing nothing."""
_NO_CODE = frozenset({RefusalKind.SYNTAX, RefusalKind.UNREADABLE})


@dataclass(frozen=True)
class WriterReward:
    """The reward, and its parts in [0, 1] by name; None for a part that is not known."""

    total: float
    parts: Mapping[str, float | None]

    def metrics(self) -> dict[str, float]:
        """Each known part under `five_part/NAME`."""
        return {f"five_part/{name}": v for name, v in self.parts.items() if v is not None}


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
) -> WriterReward:
    """The reward of one run.

    Args:
        score: of the delivered answer, in [0, 1].
        usage: of the executor and the other frozen models.
        level: which workflow gave the answer.
        form: how the workflow was read; None where nothing could be read.
        answer_form: a regular expression that a well-formed answer contains.

    Raises:
        Unscored: no part with a weight above 0 is known.
    """
    chosen = settings or FivePartSection()
    writing = writing_form(form, refusals)
    parts = dict(five_part(score, answer, usage, chosen, answer_form).parts)
    parts["format"] = (parts["format"] or 0.0) * writing
    weights = {name: getattr(chosen, name) for name in WEIGHTS["five_part"]}
    share = _share(level, weighted(parts, weights), writing)
    return WriterReward(chosen.lowest + (chosen.highest - chosen.lowest) * share, parts)


def writing_form(form: WrittenForm | None, refusals: Sequence[Refusal] = ()) -> float:
    """How well the policy kept to the form, in [0, 1]: the table in this module's description."""
    if form is None:
        return 0.0
    count = min(len(refusals), MOST_REFUSALS)
    if any(refusal.kind in _NO_CODE for refusal in refusals):
        count = MOST_REFUSALS
    return FORM_WORTH[form] * (1.0 - REFUSAL_COST * count)


def _share(level: Level, total: float, writing: float) -> float:
    """The share of the span that a run earns."""
    if level is Level.CLEAN:
        return CLEAN_FLOOR + (1.0 - CLEAN_FLOOR) * total
    within = writing if level is Level.DEFAULT_WORKFLOW else total
    return FALLBACK_STEP * (Level.DEFAULT_WORKFLOW - level) + FALLBACK_SPAN * within


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
