"""`WorkflowState`: one workflow of a search, by its content, and what came of running it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from aflow_tune.graph import inside
from aflow_tune.graph.graph import Graph, PromptText
from aflow_tune.operators import Operator
from aflow_tune.writer.results import structure_of

_RECENT = 32
"""Graphs that are kept with what was found out about them: a new one is soon checked and run."""


@dataclass(frozen=True)
class Outcome:
    """What running a workflow on problems of its task set showed. `score`: the mean over the
    `scored` ones, None if there are none; `tokens` and `usd` (None: a price is unknown) of all."""

    score: float | None = None
    scored: int = 0
    failed: int = 0
    tokens: int = 0
    usd: float | None = 0.0


@dataclass(frozen=True, eq=False)
class WorkflowState:
    """A workflow for a task set: the source of its graph, its prompts, its structure.

    Two states are equal if task set and content are; the outcome does not count."""

    taskset: str
    sources: Mapping[str, str]
    """graph.py, and prompt.py where there is one."""
    prompts: Mapping[str, PromptText] = field(default_factory=dict)
    instructions: Mapping[str, str] = field(default_factory=dict)
    structure: str = ""
    """Operators and edges as one line (`writer.results.structure_of`)."""
    outcome: Outcome | None = None

    @classmethod
    def of(cls, taskset: str, graph: Graph) -> WorkflowState:
        """The state of a graph, not run yet."""
        given = dict(graph.sources), dict(graph.prompts), dict(graph.instructions)
        state = cls(taskset, *given)
        return replace(state, structure=structure_of(state.graph(graph.operators)))

    @cached_property
    def key(self) -> str:
        """A hash of the content, the same in every process."""
        content = [self.sources, self.prompts, self.instructions]
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]

    @property
    def code(self) -> str:
        return self.sources[inside.GRAPH_FILE]

    def graph(self, operators: Mapping[str, type[Operator]] | None = None) -> Graph:
        """The workflow, ready to be checked and run; `operators`: the user's own."""
        return _graph(self, tuple((operators or {}).items()))

    def with_outcome(self, outcome: Outcome | None) -> WorkflowState:
        return replace(self, outcome=outcome)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, held: Mapping[str, Any]) -> WorkflowState:
        """From `to_json`. Raises TypeError, KeyError: it is something else."""
        outcome = held.get("outcome")
        return cls(**{**held, "outcome": None if outcome is None else Outcome(**outcome)})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkflowState):
            return NotImplemented
        return (self.taskset, self.key) == (other.taskset, other.key)

    def __hash__(self) -> int:
        return hash((self.taskset, self.key))


@lru_cache(maxsize=_RECENT)
def _graph(state: WorkflowState, operators: tuple[tuple[str, type[Operator]], ...]) -> Graph:
    return Graph(
        state.key,
        state.sources,
        state.prompts,
        operators=dict(operators),
        instructions=state.instructions,
    )
