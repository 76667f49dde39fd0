"""A graph as the workflow function that `tune` and `eval` take: run it on a row, score it.

`GraphWorkflow` scores the answer itself; `GraphResponse` leaves that to a judge function. They hold
texts, settings and the user's functions only, so they can be pickled to a worker. The tuned model
is the graph's model; operators may use other models by role.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict  # noqa: UP035 (the contract's spelling)

from aflow_tune.context import record_metrics
from aflow_tune.data.fields import FieldRead
from aflow_tune.errors import AflowTuneError, BadInput, Fault
from aflow_tune.graph.graph import Graph, load_graph
from aflow_tune.graph.run import GraphEnding, GraphLimits, GraphRun
from aflow_tune.models.clients import make_client
from aflow_tune.models.settings import check_models
from aflow_tune.models.types import ModelClient
from aflow_tune.operators import Operator, TestCases, use_test_cases
from aflow_tune.operators.programs import use_libraries
from aflow_tune.sandbox.policy import MATHEMATICS
from aflow_tune.sandbox.types import SandboxUnavailable
from aflow_tune.scoring import find, score_both
from aflow_tune.scoring.rewards import logged, scored
from aflow_tune.sections import GraphSection, ModelSettings
from aflow_tune.trace import POLICY
from aflow_tune.types import WorkflowOutput

if TYPE_CHECKING:
    from aflow_tune.models.chat_model import TrinityChatModel

ScoreFunction = Callable[[Mapping[str, Any], Any], float | Awaitable[float]]
"""Takes a row and the graph's answer; returns the reward."""


class GraphFailed(AflowTuneError, RuntimeError):
    """The execution failed: an exception, a limit, a crash, a forged message. `run` has details."""

    def __init__(self, run: GraphRun) -> None:
        super().__init__(run)
        self.run = run

    def __str__(self) -> str:
        return f"{self.run.ending.value}: {self.run.reason}"


@dataclass(frozen=True)
class GraphFunction:
    """A graph with its settings. The subclasses are workflow functions."""

    graph: Graph
    benchmark: str | None = None
    score: ScoreFunction | None = None
    problem: str | None = None  # field of the question; None: the benchmark's, or a usual name
    entry_point: str = "entry_point"  # field with the name of the function to write
    limits: GraphLimits = field(default_factory=GraphLimits)
    sandbox: str = "auto"
    models: Mapping[str, str] = field(default_factory=dict)  # role by instance, operator or model
    test_cases: TestCases = field(default_factory=TestCases)  # for the operator Test
    clients: Mapping[str, ModelClient] = field(default_factory=dict)
    """Clients of the roles in `models` other than 'policy'. They are pickled without API keys."""

    @property
    def carries(self) -> tuple[Callable[..., Any], ...]:
        """The user's functions and classes, whose code has to be sent to workers too."""
        scores = () if self.score is None else (self.score,)
        return (*scores, *self.graph.operators.values())

    @property
    def reads(self) -> tuple[FieldRead, ...]:
        """The fields that every row must have."""
        names = [self.problem] if self.problem else []
        if self.benchmark is not None:
            names += find(self.benchmark).fields
        return tuple(FieldRead(name, self.graph.label, tolerant=False) for name in names)

    async def answer(self, task: Mapping[str, Any], model: Any) -> GraphRun:
        """Run the graph on a row. The result's ending is ANSWERED or NO_ANSWER.

        Raises:
            GraphFailed: it ended otherwise, which must not count as a wrong answer.
            SandboxUnavailable: no sandbox can be started on this machine.
            BadInput, BudgetReached: as `Graph.run`, or the row has no problem.
        """
        entry_point = task.get(self.entry_point)
        name = self.benchmark or self.graph.dataset or ""
        libraries = MATHEMATICS if name.casefold() == "math" else ()
        with use_test_cases(self.test_cases), use_libraries(libraries):
            run = await self.graph.run(
                problem_of(task, self.problem, self.benchmark, "graph"),
                entry_point if isinstance(entry_point, str) else None,
                model=model,
                clients=self.clients,
                models=self.models,
                limits=self.limits,
                sandbox=self.sandbox,
                dataset=self.graph.dataset or self.benchmark,
            )
        if self.score is None:  # the user's score function may take any answer
            run = run.with_text()
        failed = sum(run.failures.values())
        record_metrics(**{"graph/calls": run.calls, "graph/failed_calls": failed})
        if run.ending is GraphEnding.SANDBOX_UNAVAILABLE:
            raise SandboxUnavailable(run.reason)
        if run.ending not in (GraphEnding.ANSWERED, GraphEnding.NO_ANSWER):
            raise GraphFailed(run)
        return run


def problem_of(
    task: Mapping[str, Any], field: str | None, benchmark: str | None, section: str
) -> str:
    """The text of a row's problem: from `field`, else as its benchmark builds it, else from the
    first of the usual fields. Raises `BadInput` if there is none; `section` is for its fix."""
    if field is None and benchmark is not None:
        return find(benchmark).question(task)
    names = [field] if field is not None else ["question", "problem", "prompt"]
    for name in names:
        if isinstance(task.get(name), str):
            return str(task[name])
    fields = " or ".join(names)
    title, fix = f"The task has no text under {fields}.", f"{section}: {{problem: FIELD}}"
    raise BadInput.of(title, "problem", f"a text under {fields}", "none", fix)


@dataclass(frozen=True)
class GraphWorkflow(GraphFunction):
    """`async def f(task: Dict, model: TrinityChatModel) -> float`: run the graph, score its answer.

    Exactly one of `benchmark` and `score` is set."""

    async def __call__(self, task: Dict, model: TrinityChatModel) -> float:  # noqa: UP006
        """The reward of one rollout. Raises as `answer`; `Unscored`: the scorer cannot decide."""
        return await self.score_of(task, await self.answer(task, model))

    async def score_of(self, task: Mapping[str, Any], run: GraphRun) -> float:
        """The score of an execution's answer. Raises `Unscored`: the scorer cannot decide."""
        if self.score is not None:
            value = self.score(task, run.answer)
            return await value if isinstance(value, Awaitable) else value
        assert self.benchmark is not None
        scores = await score_both(self.benchmark, task, run.text, policy=self.sandbox)
        record_metrics(**logged(scores))
        return scored(scores["strict"])


@dataclass(frozen=True)
class GraphResponse(GraphFunction):
    """As `GraphWorkflow` for a judge function: returns the answer's text, unscored."""

    async def __call__(self, task: Dict, model: TrinityChatModel) -> WorkflowOutput:  # noqa: UP006
        """The response of one rollout. Raises as `answer`."""
        return WorkflowOutput(response=(await self.answer(task, model)).text)


def workflow_from_config(
    section: GraphSection,
    settings: Mapping[str, ModelSettings],
    *,
    path: Path,
    test_cases: Path | None,
    operators: Mapping[str, type[Operator]],
    score: ScoreFunction | None,
    judged: bool,
    where: Callable[[str], str],
) -> GraphWorkflow | GraphResponse:
    """The workflow of a configuration's `graph:` section. Raises `BadInput` with its faults.

    Args:
        settings: the configuration's `models:`.
        test_cases: path of `section.test_cases`.
        judged: whether a judge function scores the answers.
        where: maps a key of the configuration to its place, for messages.
    """
    graph = load_graph(path, trust=section.trust, operators=operators)
    faults = []

    def require(holds: bool, key: str, expected: str, found: object, fix: str) -> None:
        if not holds:
            faults.append(Fault(where(f"graph.{key}"), expected, str(found), fix))

    if section.benchmark is not None:
        try:
            find(section.benchmark)
        except BadInput as error:
            faults += [replace(wrong, where=where("graph.benchmark")) for wrong in error.faults]
    scorers = [section.benchmark is not None and not judged, score is not None, judged]
    found = "more than one" if any(scorers) else "none of them"
    expected = "one that scores: a benchmark, a score function or a judge"
    fix = "write graph: {benchmark: gsm8k}, graph: {score: path/file.py:function}, or judge: ..."
    require(sum(scorers) == 1, "benchmark", expected, found, fix)
    valid, fix = 0 < section.timeout < math.inf, "graph: {timeout: 180}"
    require(valid, "timeout", "seconds above 0", f"{section.timeout:g}", fix)
    fix = "graph: {max_calls: 100}"
    require(section.max_calls >= 1, "max_calls", "1 or more", section.max_calls, fix)
    names = {*graph.shape.instances, *graph.shape.instances.values()}
    roles = set(section.models.values()) - {POLICY}
    for name, role in section.models.items():
        place, expected = f"models.{name}", f"a role of `models:` ({', '.join(settings) or 'none'})"
        require(role in (*settings, POLICY), place, expected, role, "add it under `models:`")
        expected = f"an operator of the graph ({', '.join(sorted(names))})"
        known = name in names or not name[:1].isupper()
        require(known, place, expected, name, "name one of them")
    faults = faults or check_models({role: settings[role] for role in roles})
    if faults:
        raise BadInput("The graph section cannot be used.", faults)
    kind = GraphResponse if judged else GraphWorkflow
    return kind(
        graph.with_prompts(section.prompts) if section.prompts else graph,
        benchmark=section.benchmark,
        score=score,
        problem=section.problem,
        entry_point=section.entry_point,
        limits=GraphLimits(seconds=section.timeout, calls=section.max_calls),
        test_cases=TestCases() if test_cases is None else TestCases.load(test_cases),
        models=dict(section.models),
        clients={role: make_client(settings[role], role) for role in sorted(roles)},
    )
