"""What each part of a graph is worth: the graph without it, and both compared by problem.

An operator instance is taken out by putting its input in place of its result, an instruction by
leaving it out, a constant of `prompt_custom` by emptying it, an operator's own prompt by going back
to the shipped one. Texts that stand in graph.py itself stay. Parts are taken out one at a time, so
of two that do the same neither is seen to help.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aflow_tune.graph import inside
from aflow_tune.graph.graph import Graph
from aflow_tune.report.evaluation import Paired, pair
from aflow_tune.report.statistics import mean
from aflow_tune.search.edits import Editor, ablations
from aflow_tune.search.pool import Trial

INSTRUCTION, PROMPT = "instruction", "prompt"
EARNS, NO_DIFFERENCE, BETTER = "earns its calls", "no difference seen", "better without it"
HELPS = "helps"
"""What `EARNS` is for a text."""
STUCK, UNMEASURED = "cannot run without it", "not measured"

Refusals = Callable[[Graph], set[str]]
"""What the static check has against a graph."""


@dataclass(frozen=True)
class Part:
    """A part of a graph, and the graph without it; `graph` None: `why` says what prevents that.
    `kind`: the operator of an instance, or `INSTRUCTION` or `PROMPT`."""

    name: str
    kind: str
    graph: Graph | None
    why: str = ""


def operator_parts(graph: Graph, refusals: Refusals) -> list[Part]:
    """A part for each operator instance. What the check refuses in the whole graph already does not
    count against a part."""
    without, allowed = ablations(graph, graph.known), refusals(graph)
    parts = []
    for instance, operator in graph.shape.instances.items():
        changed = without.get(instance)
        if changed is None:
            parts.append(Part(instance, operator, None, _why_not(graph, instance, operator)))
            continue
        faults = refusals(changed) - allowed
        if not changed.flow.nodes:
            faults = {"no call of an operator would be left"}
        why = "; ".join(sorted(faults))
        parts.append(Part(instance, operator, None if why else changed, why))
    return parts


def _why_not(graph: Graph, instance: str, operator: str) -> str:
    editor = Editor(graph, graph.known)
    if not editor.editable:
        return "the constructor or `__call__` of its class is of a form that cannot be edited"
    if not any(site.instance == instance for site in editor.sites):
        return "no call was found that reaches it and nothing else"
    return f"nothing that {operator} is given can stand for its result everywhere"


def prompt_parts(graph: Graph) -> list[Part]:
    """A part for each instruction, each constant of `prompt_custom` that the code names and that is
    not empty, and each prompt that replaces an operator's own."""
    parts = []
    for name in graph.instructions:
        told = {other: text for other, text in graph.instructions.items() if other != name}
        parts.append(Part(name, INSTRUCTION, replace(graph, instructions=told)))
    own = graph.operator_prompts
    words = set(re.findall(r"\w+", graph.sources[inside.GRAPH_FILE]))
    for name, text in {**graph.shape.constants, **graph.constants}.items():
        if name in words and text.strip():
            changed = replace(graph, prompts={**graph.prompts, name: ""})
            parts.append(Part(name, PROMPT, changed))
    for name in own:
        prompts = {other: text for other, text in graph.prompts.items() if other != name}
        parts.append(Part(name, PROMPT, replace(graph, prompts=prompts)))
    return parts


@dataclass(frozen=True)
class Measured:
    """A graph's trials by problem."""

    trials: Mapping[str, Trial]

    def scores(self) -> dict[str, float]:
        return {key: trial.score for key, trial in self.trials.items() if trial.score is not None}

    def failed(self, problems: set[str]) -> list[Trial]:
        """Its trials on these problems that ended without an answer."""
        return [self.trials[key] for key in sorted(problems) if self._failed(key)]

    def _failed(self, problem: str) -> bool:
        return self.trials[problem].ending == "failed"


@dataclass(frozen=True)
class Effect:
    """What taking out a part did, on the problems that both graphs were scored on.

    `comparison` goes from the graph without the part to the whole; None: no such problem, or the
    part cannot be taken out. Savings are means a problem, negative if more is used without it;
    `usd` None: a price is unknown. `failed`: on how many problems it ended without an answer."""

    part: Part
    comparison: Paired | None = None
    calls: float = 0.0
    tokens: float = 0.0
    usd: float | None = None
    failed: int = 0
    verdict: str = UNMEASURED
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        found = self.comparison
        change = None if found is None else found.difference
        return {
            "name": self.part.name,
            "kind": self.part.kind,
            "removable": self.part.graph is not None,
            "score_without": None if found is None else found.mean_before,
            "score_whole": None if found is None else found.mean_after,
            "difference": None if change is None else change.mean,
            "low": None if change is None else change.low,
            "high": None if change is None else change.high,
            "p_value": None if found is None else found.p_value,
            "problems": 0 if change is None else change.count,
            "calls_saved": self.calls,
            "tokens_saved": self.tokens,
            "usd_saved": self.usd,
            "failed": self.failed,
            "verdict": self.verdict,
            "why": self.why,
        }


def effect_of(part: Part, whole: Measured, without: Measured | None) -> Effect:
    """Compare the whole graph with the one without a part. `without` None: it was not run."""
    if without is None:
        return Effect(part, why=part.why)
    before, after = without.scores(), whole.scores()
    both = sorted(before.keys() & after.keys())
    numbers = range(len(both))
    comparison = pair(
        {number: before[both[number]] for number in numbers},
        {number: after[both[number]] for number in numbers},
    )
    if comparison is None:
        reason = next((t.reason for t in without.trials.values() if t.score is None), "")
        return Effect(part, why=f"no problem was scored both ways: {reason}".rstrip(": "))
    pairs = [(whole.trials[key], without.trials[key]) for key in both]
    costs = [(a.usd, b.usd) for a, b in pairs]
    saved = [a - b for a, b in costs if a is not None and b is not None]
    failed = without.failed({*both})
    is_text = part.kind in (INSTRUCTION, PROMPT)
    words = {1: HELPS if is_text else EARNS, 0: NO_DIFFERENCE, -1: BETTER}
    verdict, why = words[comparison.direction], ""
    if 2 * len(failed) > len(both) >= 2 * len(whole.failed({*both})):
        verdict, why = STUCK, failed[0].reason
    return Effect(
        part,
        comparison,
        mean([a.calls - b.calls for a, b in pairs]),
        mean([a.tokens - b.tokens for a, b in pairs]),
        mean(saved) if len(saved) == len(pairs) else None,
        len(failed),
        verdict,
        why,
    )
