"""Running what the policy wrote, with three fallbacks, each of which is counted.

- 0, clean: the graph as it was written, if the check let it pass.
- 1, default prompts: the same code with plain instructions, if its constructor raised or the
  check refused nothing but prompts.
- 2, simpler: a straight line of the operators that it names, built by us, if it failed while it
  ran, or level 1 did.
- 3, default workflow: the fixed workflow of the problem's type, if the code was refused, names
  no operator that can answer, or level 2 failed.

Code that was refused is never run. A run fails that gives no answer, whatever the reason; a
wrong answer is an answer. What a graph says before any of its operators gave a result is none: an
answer that its writer knew would otherwise earn the most, for nothing.

`GraphLimits.seconds` is for all attempts together: an attempt that may be followed by another
gets three quarters of what is left, so that time remains. Every other limit is each attempt's
own; `Executed` adds up what all of them spent. What ends an attempt is its own affair, except
for two things that no other graph could mend and that are raised: a budget that is used up, and
a sandbox that cannot be built.

Left to others: what an answer is worth and what a fallback costs (`results.py`).
"""

from __future__ import annotations

import ast
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aflow_tune.graph.broker import GraphLimits
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.run import GraphEnding, GraphRun
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
    """What became of a written workflow: the attempt that counts, and what all of them spent."""

    level: Level
    """Of the last attempt."""
    run: GraphRun
    """The last attempt's, which is the only one that may have an answer."""
    graph: Graph
    """That was run last."""
    attempts: tuple[Attempt, ...]
    """All, in order; at least one."""
    seconds: float
    """Wall-clock time of everything."""

    @property
    def calls(self) -> int:
        """Calls of operators and models that the graphs made."""
        return sum(attempt.run.calls for attempt in self.attempts)

    @property
    def model_calls(self) -> int:
        """Answers of models, of all attempts."""
        return sum(attempt.run.model_calls for attempt in self.attempts)

    @property
    def prompt_tokens(self) -> int:
        """Of all attempts."""
        return sum(attempt.run.prompt_tokens for attempt in self.attempts)

    @property
    def completion_tokens(self) -> int:
        """Of all attempts."""
        return sum(attempt.run.completion_tokens for attempt in self.attempts)

    @property
    def cost(self) -> float | None:
        """US dollars of all attempts; None if the price of a call is not known."""
        costs = [attempt.run.cost for attempt in self.attempts]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) else None

    @property
    def failed(self) -> tuple[Attempt, ...]:
        """The attempts without an answer."""
        return tuple(attempt for attempt in self.attempts if not attempt.run.ok)


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
    operators: Mapping[str, type[Operator]] | None = None,
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
        operators: those that a graph may use, by name. None: every shipped one.
        fallbacks: False: a graph that passed the check is run once, and its failure is the
            result; for whoever only wants to know whether it works.

    Raises:
        BudgetReached: the run's budget is used up.
        SandboxUnavailable: no sandbox can be built here.
        BadInput: `models` names a role without a client, or no operator can answer a problem.
    """
    allowed = OPERATORS if operators is None else operators
    running = _Running(
        problem,
        entry_point,
        limits or GraphLimits(),
        {"model": as_client(executor), "clients": clients, "models": models, "sandbox": sandbox},
    )
    if verdict.ok and verdict.graph is not None and not fallbacks:
        await running.attempt(Level.CLEAN, verdict.graph, share=1.0)
    else:
        await running.written(verdict, problem_type, allowed)
    last = running.attempts[-1]
    seconds = time.monotonic() - running.started
    return Executed(last.level, last.run, last.graph, tuple(running.attempts), seconds)


class _Running:
    """The attempts on one problem."""

    def __init__(
        self,
        problem: str,
        entry_point: str | None,
        limits: GraphLimits,
        given: Mapping[str, Any],
    ) -> None:
        self.started = time.monotonic()
        self.attempts: list[Attempt] = []
        self._problem, self._entry_point = problem, entry_point
        self._limits, self._given = limits, given

    async def written(
        self, verdict: Verdict, problem_type: str, allowed: Mapping[str, type[Operator]]
    ) -> None:
        """Attempt after attempt until one has an answer, or none is left."""
        names_entry = self._entry_point is not None
        default = default_graph(problem_type, allowed, names_entry)
        graph = verdict.graph
        if graph is not None and verdict.code_ok:
            run = await self.attempt(Level.CLEAN, graph) if verdict.ok else None
            if run is None or (run.ending is GraphEnding.RAISED and run.level and not run.built):
                plain = with_default_prompts(graph, problem_type)
                run = await self.attempt(Level.DEFAULT_PROMPTS, plain)
            if run.ok:
                return
            named = list(graph.shape.instances.values())
            line = straight_line(named, allowed, problem_type, names_entry)
            if line is not None and (await self.attempt(Level.SIMPLER, line)).ok:
                return
        await self.attempt(Level.DEFAULT_WORKFLOW, default, share=1.0)

    async def attempt(self, level: Level, graph: Graph, share: float = SHARE) -> GraphRun:
        """Run a graph in `share` of the time that is left, and note how it went."""
        seconds = (self._limits.seconds - (time.monotonic() - self.started)) * share
        run = (await self._run(graph, seconds)).with_text()
        if run.ending is GraphEnding.SANDBOX_UNAVAILABLE:
            raise SandboxUnavailable(run.reason)
        if run.ok and not run.answered:
            reason = f"{graph.label}: it answered without a result of any operator"
            run = replace(run, ending=GraphEnding.NO_ANSWER, answer=None, reason=reason)
        self.attempts.append(Attempt(level, graph, run))
        return run

    async def _run(self, graph: Graph, seconds: float) -> GraphRun:
        if seconds < LEAST_SECONDS:
            reason = f"no time is left of {self._limits.seconds:g} s"
            return GraphRun(GraphEnding.TIMED_OUT, reason=reason)
        if graph.shape.needs_entry_point and self._entry_point is None:
            reason = "its __call__ takes an entry point, and the problem has none"
            return GraphRun(GraphEnding.RAISED, reason=reason)
        limits = replace(self._limits, seconds=seconds)
        return await graph.run(self._problem, self._entry_point, limits=limits, **self._given)


def with_default_prompts(graph: Graph, problem_type: str) -> Graph:
    """The same code with plain instructions, and every name of a prompt that it reads."""
    plain = INSTRUCTIONS.get(problem_type, INSTRUCTIONS["math"])
    read = dict.fromkeys(_names_read(graph), plain)
    own = dict.fromkeys(graph.shape.instances, "")
    takes = default_instructions(graph.shape.instances, graph.known, problem_type)
    return replace(graph, prompts={}, instructions={**read, **own, **takes})


def _names_read(graph: Graph) -> list[str]:
    """Names that the code reads, as `self.prompts["name"]` or as `prompt_custom.name`."""
    names = []
    for node in ast.walk(graph.shape.tree or ast.Module([], [])):
        if isinstance(node, ast.Subscript) and _is_prompts(node.value):
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                names.append(node.slice.value)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and graph.shape.modules.get(node.value.id) == "prompt"
        ):
            names.append(node.attr)
    return names


def _is_prompts(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "prompts"
