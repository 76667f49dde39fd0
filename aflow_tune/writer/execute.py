"""Running what the policy wrote, with three fallbacks, each of which is counted.

- 0, clean: the graph as it was written, if the check let it pass.
- 1, default prompts: the same code with plain instructions, if its constructor raised or the
  check refused nothing but prompts.
- 2, simpler: a straight line of the operators that it names, if it failed while it ran.
- 3, default workflow: the fixed one of the problem's type, if the code was refused or 2 failed.

Code that was refused is never run. What a graph says before any of its operators gave a result is
no answer: one that its writer knew would otherwise earn the most, for nothing. The time limit is
for all attempts together, every other limit is each attempt's own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aflow_tune.graph.graph import Graph
from aflow_tune.graph.run import GraphEnding, GraphLimits, GraphRun
from aflow_tune.graph.shape import walk
from aflow_tune.models import as_client
from aflow_tune.models.types import ModelClient
from aflow_tune.operators import OPERATORS, Operator
from aflow_tune.sandbox.types import SandboxUnavailable
from aflow_tune.writer.templates import (
    INSTRUCTIONS,
    default_graph,
    default_instructions,
    straight_line,
)
from aflow_tune.writer.types import Level, Verdict

SHARE = 0.75
"""Of the time that is left, for an attempt that another may follow."""
LEAST_SECONDS = 0.05
"""With less than this left no attempt begins."""


@dataclass(frozen=True)
class Attempt:
    """One graph that was run, or could not be."""

    level: Level
    graph: Graph
    run: GraphRun

    @property
    def why(self) -> str:
        """Why it gave no answer: its ending and the reason; empty if it gave one."""
        return "" if self.run.ok else f"{self.run.ending.value}: {self.run.reason}"


@dataclass(frozen=True)
class Executed:
    """What became of a written workflow: all attempts in order, of which the last one counts.

    Only the last one may have an answer. `seconds` is the wall-clock time of everything.
    """

    attempts: tuple[Attempt, ...]
    seconds: float

    @property
    def level(self) -> Level:
        """Of the last attempt."""
        return self.attempts[-1].level

    @property
    def run(self) -> GraphRun:
        """The last attempt's."""
        return self.attempts[-1].run

    @property
    def graph(self) -> Graph:
        """That was run last."""
        return self.attempts[-1].graph

    @property
    def why(self) -> str:
        """Why the first attempt that failed did; empty where none failed."""
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
    """Run what the policy wrote on a problem; where that fails, what stands in for it.

    Args:
        verdict: of the check, which decides what of it may run.
        entry_point: name of the function to write; for problems of code.
        executor: the frozen model that operators call, as `aflow_tune.models.as_client` takes it.
        clients: other models by role.
        models: role by operator, instance or the graph's own name of a model.
        limits: `seconds` for everything together, the rest for each attempt.
        operators: those that a graph may use, by name.
        fallbacks: False: a graph that passed the check is run once, and its failure is the
            result; for whoever only wants to know whether it works.

    Raises:
        BudgetReached: the run's budget is used up.
        SandboxUnavailable: no sandbox can be built here.
        BadInput: `models` names a role without a client, or no operator can answer a problem.
    """
    most = limits or GraphLimits()
    given: dict[str, Any] = {"model": as_client(executor), "clients": clients}
    given |= {"models": models, "sandbox": sandbox}
    names_entry = entry_point is not None
    default = default_graph(problem_type, operators, names_entry)
    started = time.monotonic()
    attempts: list[Attempt] = []

    async def run_graph(graph: Graph, seconds: float) -> GraphRun:
        if seconds < LEAST_SECONDS:
            reason = f"no time is left of {most.seconds:g} s"
            return GraphRun(GraphEnding.TIMED_OUT, reason=reason)
        if graph.shape.needs_entry_point and not names_entry:
            reason = "its __call__ takes an entry point, and the problem has none"
            return GraphRun(GraphEnding.RAISED, reason=reason)
        bounded = replace(most, seconds=seconds)
        return (await graph.run(problem, entry_point, limits=bounded, **given)).with_text()

    async def attempt(level: Level, graph: Graph, share: float = SHARE) -> GraphRun:
        """Run a graph in `share` of the time that is left, and note how it went."""
        seconds = (most.seconds - (time.monotonic() - started)) * share
        run = await run_graph(graph, seconds)
        if run.ending is GraphEnding.SANDBOX_UNAVAILABLE:
            raise SandboxUnavailable(run.reason)
        if run.ok and not run.answered:
            reason = f"{graph.label}: it answered without a result of any operator"
            run = replace(run, ending=GraphEnding.NO_ANSWER, answer=None, reason=reason)
        attempts.append(Attempt(level, graph, run))
        return run

    async def written(graph: Graph) -> bool:
        """What was written, and what is built of its parts; whether one gave an answer."""
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
    """The same code with plain instructions, and one for every name of a prompt that it reads:
    `self.prompts["name"]`, `prompt_custom.name`."""
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
