"""The policy writes a workflow, a frozen executor runs it, the answer is scored: one run.

`WriterWorkflow` is a workflow function like any other, and travels to a worker by value. The
policy's calls go through the model that it is given, so they are recorded and trained. Executor
and other models are other clients: of `explorer.auxiliary_models`, of the configuration's
`models:` (`client_for`), or given here. Nothing that they say is recorded for training.

With `turns` above 1 the policy sees what became of its graph and may write again, or keep it. The
last workflow that it wrote is the one that counts; what all turns had the executor do counts as
spent. Each of its calls is made in a state of its own, (graph structure, outcome) of the turn
before, to which the recorder adds the task: GiGPO's anchor states.

What is nobody's doing is no reward: where the executor does not answer, or the scorer cannot
tell, the run fails and says why. A graph that fails for reasons of its own has fallbacks
(`execute.py`), and earns what `reward.py` says.

Left to others: from a configuration to this object (`settings.py`), the record (`record.py`).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Dict  # noqa: UP035 (the contract's spelling)

from aflow_tune.context import caller, keep, record_metrics, state_key
from aflow_tune.data.fields import FieldRead
from aflow_tune.errors import BadInput, Fault
from aflow_tune.graph.limits import GraphLimits
from aflow_tune.graph.workflow import ScoreFunction, problem_of
from aflow_tune.models import as_client
from aflow_tune.models.clients import client_for
from aflow_tune.models.types import Message, ModelClient, ModelError, ModelFailure, Reply
from aflow_tune.operators import OPERATORS, Operator, TestCases, use_test_cases
from aflow_tune.operators.programmer import use_libraries
from aflow_tune.operators.registry import BUILT_IN
from aflow_tune.sandbox.policy import MATHEMATICS
from aflow_tune.scoring import find, score_both, with_form
from aflow_tune.scoring.rewards import Unscored, logged, scored
from aflow_tune.trace import ModelCall, Trace, note
from aflow_tune.writer.check import check_written
from aflow_tune.writer.execute import run_written
from aflow_tune.writer.outcome import START, TurnResult, keeps
from aflow_tune.writer.prompting import policy_messages
from aflow_tune.writer.record import record_of, run_metrics
from aflow_tune.writer.types import PROBLEM_TYPES, CheckLimits, Level, ProblemType
from aflow_tune.writer.written_run import (
    ExecutorFailed,
    WriterRun,
    raise_if_models_failed,
    sum_of,
    usage_of,
)

__all__ = ["CALLER", "TYPE_OF_BENCHMARK", "ExecutorFailed", "WriterRun", "WriterWorkflow"]

if TYPE_CHECKING:
    from agentscope.model import TrinityChatModel

CALLER = "writer"
"""Caller of the policy's calls."""
EXECUTOR_ROLE = "executor"
"""What calls of an auxiliary model that executes are counted under."""
TYPE_OF_BENCHMARK: Mapping[str, ProblemType] = {
    "gsm8k": "math",
    "math": "math",
    "humaneval": "code",
    "mbpp": "code",
    "hotpotqa": "qa",
    "drop": "qa",
}


@dataclass(frozen=True)
class WriterWorkflow:
    """`async def f(task: Dict, model: TrinityChatModel) -> float`: the policy writes, others run.

    Exactly one of `benchmark`, `score` and a row's own field `benchmark` says what an answer is
    worth; the row's wins over `benchmark`, `score` over both.
    """

    executor: str
    """Name of an auxiliary model, or role of `clients` or of the configuration's `models:`."""
    operators: Mapping[str, type[Operator]] = field(default_factory=lambda: dict(OPERATORS))
    """That a graph may use, by name."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Role by operator, for those that do not use the executor."""
    benchmark: str | None = None
    score: ScoreFunction | None = None
    problem_type: ProblemType | None = None
    """Of rows that do not say it. None: by their benchmark."""
    problem: str | None = None
    """Field with the question. None: the benchmark's own text, or the first usual name."""
    entry_point: str = "entry_point"
    test_cases: TestCases = field(default_factory=TestCases)
    """What the operator Test may use."""
    template: str | None = None
    """The policy's prompt. None: the shipped one."""
    turns: int = 1
    check: CheckLimits = field(default_factory=CheckLimits)
    """What a graph may use at worst; one that could use more is refused."""
    seconds: float = 180.0
    """For running one graph, fallbacks included."""
    sandbox: str = "auto"
    limited: tuple[str, ...] = ()
    """Roles whose models limit the length of their answers by themselves; to all others
    `check.call_completion_tokens` is given."""
    fallbacks: bool = True
    """False: as in `run_written`. For trying graphs out, never for training."""
    clients: Mapping[str, ModelClient] = field(default_factory=dict)
    """By role, where no configuration's `models:` answer. They travel without their keys."""

    @property
    def carries(self) -> tuple[Callable[..., Any], ...]:
        """Functions and classes of the user's inside, which travel to a worker as well."""
        scores = () if self.score is None else (self.score,)
        return (*scores, *(kind for name, kind in self.operators.items() if name not in BUILT_IN))

    @property
    def reads(self) -> tuple[FieldRead, ...]:
        """The fields that every row must have, for the check of the data."""
        names = [self.problem] if self.problem else []
        if self.benchmark is None and self.score is None:
            names.append("benchmark")
        return tuple(FieldRead(name, "writer", tolerant=False) for name in names)

    async def __call__(
        self,
        task: Dict,  # noqa: UP006
        model: TrinityChatModel,
        auxiliary_models: Dict[str, Any] | None = None,  # noqa: UP006
    ) -> float:
        """The reward of one run.

        Raises:
            ExecutorFailed: the frozen models did not answer.
            Unscored: the scorer could not tell.
            SandboxUnavailable: the graph would have to run, and no wall can be built here.
            BadInput: the row has no problem, or its type or benchmark is not known.
        """
        benchmark = self._benchmark_of(task)
        run = await self.write(
            self.problem_of(task),
            self.type_of(task),
            model,
            entry_point=self._entry_point_of(task),
            answer_form=self.answer_form_of(task),
            auxiliary_models=auxiliary_models,
        )
        record = record_of(run)
        keep(CALLER, record)
        record_metrics(**run_metrics(run))
        raise_if_models_failed(run.last)
        score, scores = await self._score(task, run, benchmark)
        reward = run.reward(score, benchmark)
        keep(CALLER, {**record, "score": score, "parts": dict(reward.parts)})
        clean = score if run.level is Level.CLEAN else 0.0
        record_metrics(correct=score, correct_clean=clean, **scores, **reward.metrics())
        return reward.total

    async def write(
        self,
        problem: str,
        problem_type: ProblemType,
        model: Any,
        *,
        entry_point: str | None = None,
        answer_form: str = "",
        auxiliary_models: Mapping[str, Any] | None = None,
    ) -> WriterRun:
        """Let the policy write for a problem, and run what it writes; nothing is scored.

        Args:
            model: the policy, as `aflow_tune.models.as_client` takes it.
            answer_form: what the policy and, behind the problem, its graph are told about it.

        Raises:
            ModelError: the policy itself did not answer.
            SandboxUnavailable, BudgetReached: as `run_written`.
        """
        policy = as_client(model)
        results: list[TurnResult] = []
        asked = 0
        while asked < self.turns:
            try:
                messages = self.messages(problem, problem_type, entry_point, results, answer_form)
                text = await self._ask(policy, messages, results)
            except ModelError as error:
                if results and error.failure is ModelFailure.REFUSED:
                    break  # the conversation has outgrown the policy: what it wrote counts
                raise
            asked += 1
            if results and keeps(text):
                break
            asked_for = with_form(problem, answer_form)
            results.append(
                await self._run(text, asked_for, problem_type, entry_point, auxiliary_models or {})
            )
        return WriterRun(
            problem,
            problem_type,
            asked,
            results[-1],
            sum_of([result.usage for result in results]),
            sum(result.model_calls for result in results),
        )

    def messages(
        self,
        problem: str,
        problem_type: ProblemType,
        entry_point: str | None = None,
        results: list[TurnResult] | None = None,
        answer_form: str = "",
    ) -> list[dict[str, str]]:
        """What the policy is asked, after these turns."""
        return policy_messages(
            problem,
            operators=self.operators,
            problem_type=problem_type,
            limits=self.check,
            entry_point=entry_point,
            template=self.template,
            answer_form=answer_form,
            earlier=[result.told() for result in results or ()],
        )

    def problem_of(self, task: Mapping[str, Any]) -> str:
        """The problem's text.

        Raises:
            BadInput: the row has none.
        """
        return problem_of(task, self.problem, self._benchmark_of(task), "writer")

    def answer_form_of(self, task: Mapping[str, Any]) -> str:
        """What its benchmark says about the form of an answer; empty where a function scores."""
        benchmark = self._benchmark_of(task)
        return "" if benchmark is None else find(benchmark).answer_form

    def type_of(self, task: Mapping[str, Any]) -> ProblemType:
        """The problem's type: of the row, else of the configuration, else by its benchmark.

        Raises:
            BadInput: none of them says it, or the row says another one.
        """
        said = task.get("problem_type")
        benchmark = self._benchmark_of(task)
        found = said or self.problem_type
        if found is None and benchmark is not None:
            found = TYPE_OF_BENCHMARK.get(find(benchmark).name)
        if found in PROBLEM_TYPES:
            return found
        expected = " | ".join(PROBLEM_TYPES)
        cure = "set `writer: {problem_type: math}`, or give the rows a field `problem_type`"
        fault = Fault("problem_type", expected, "none" if found is None else f"{found!r:.40}", cure)
        raise BadInput("A row's type of problem is not known.", [fault])

    def row_faults(self, row: Mapping[str, Any]) -> list[Fault]:
        """What keeps a row from being asked about or scored: one fault, or none."""
        try:
            benchmark = self._benchmark_of(row)
            if benchmark is not None:
                fields = find(benchmark).fields
                lacking = [
                    name for name, kind in fields.items() if not isinstance(row.get(name), kind)
                ]
                if lacking:
                    expected = f"the fields of {benchmark}: {', '.join(fields)}"
                    cure = "correct the row, or its field `benchmark`"
                    return [Fault("benchmark", expected, f"without {', '.join(lacking)}", cure)]
            self.problem_of(row)
            self.type_of(row)
        except BadInput as error:
            return list(error.faults)
        return []

    def _benchmark_of(self, task: Mapping[str, Any]) -> str | None:
        """The benchmark that scores a row's answer; None where a function does."""
        if self.score is not None:
            return None
        name = task.get("benchmark") or self.benchmark
        if not isinstance(name, str):
            cure = "set `writer: {benchmark: gsm8k}`, or give the rows a field `benchmark`"
            fault = Fault("benchmark", "the name of a benchmark", f"{name!r:.40}", cure)
            raise BadInput("A row without a benchmark cannot be scored.", [fault])
        return find(name).name

    def _entry_point_of(self, task: Mapping[str, Any]) -> str | None:
        entry_point = task.get(self.entry_point)
        return entry_point if isinstance(entry_point, str) else None

    async def _ask(
        self,
        policy: ModelClient,
        messages: Sequence[Message],
        results: list[TurnResult],
    ) -> str:
        state = results[-1].state if results else START
        with caller(CALLER), state_key(state):
            return (await policy.complete(messages)).text

    async def _run(
        self,
        text: str,
        problem: str,
        problem_type: ProblemType,
        entry_point: str | None,
        auxiliary_models: Mapping[str, Any],
    ) -> TurnResult:
        verdict = check_written(
            text, operators=self.operators, problem_type=problem_type, limits=self.check
        )
        clients = {
            role: self._client(role, auxiliary_models)
            for role in {self.executor, *self.models.values()}
        }
        trace = Trace()
        try:
            libraries = MATHEMATICS if problem_type == "math" else ()
            with (
                trace.activate(),
                use_test_cases(self.test_cases),
                use_libraries(libraries),
            ):
                executed = await run_written(
                    verdict,
                    problem,
                    entry_point,
                    executor=clients[self.executor],
                    clients=clients,
                    models=self.models,
                    limits=self._limits(),
                    sandbox=self.sandbox,
                    problem_type=problem_type,
                    operators=self.operators,
                    fallbacks=self.fallbacks,
                )
        finally:
            for event in trace.events:
                note(event)
        calls = trace.of(ModelCall)
        return TurnResult(text, verdict, executed, usage_of(trace, executed), len(calls))

    def _client(self, role: str, auxiliary_models: Mapping[str, Any]) -> ModelClient:
        """A frozen model: given here, an auxiliary model, or of the configuration's `models:`."""
        if role in self.clients:
            client = self.clients[role]
        elif role in auxiliary_models:
            name = EXECUTOR_ROLE if role == self.executor else role
            client = as_client(auxiliary_models[role], role=name)
        else:
            client = client_for(role)
        return client if role in self.limited else _Limited(client, self.check)

    def _limits(self) -> GraphLimits:
        """What the check allowed, enforced while the graph runs."""
        return GraphLimits(
            seconds=self.seconds,
            model_calls=self.check.model_calls,
            tokens=self.check.tokens,
            call_prompt_tokens=self.check.call_prompt_tokens,
            retries=self.check.retries,
        )

    async def _score(
        self, task: Mapping[str, Any], run: WriterRun, benchmark: str | None
    ) -> tuple[float, dict[str, float]]:
        """The score of the answer in [0, 1], and the scores by both rules for the metrics."""
        if not run.last.executed.run.ok:
            return 0.0, {}  # no answer: there is nothing that a scorer could be asked
        if self.score is not None:
            value = self.score(task, run.answer)
            return _as_score(await value if isinstance(value, Awaitable) else value), {}
        assert benchmark is not None
        scores = await score_both(benchmark, task, run.text, policy=self.sandbox)
        return scored(scores["strict"]), logged(scores)


class _Limited:
    """A client whose answers are as long as the check has counted with, and no longer."""

    def __init__(self, client: ModelClient, limits: CheckLimits) -> None:
        self._client, self._most = client, limits.call_completion_tokens
        self.role, self.model = client.role, client.model

    async def complete(self, messages: Sequence[Message], **settings: Any) -> Reply:
        """As the client's."""
        asked = settings.pop("max_tokens", None)
        most = self._most if asked is None else min(asked, self._most)
        return await self._client.complete(messages, max_tokens=most, **settings)


def _as_score(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise Unscored(f"writer.score returned {value!r:.80}; a score is a number from 0 to 1")
    return number
