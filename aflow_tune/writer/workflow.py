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

import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Dict  # noqa: UP035 (the contract's spelling)

from aflow_tune.context import caller, keep, record_metrics, state_key
from aflow_tune.data.fields import FieldRead
from aflow_tune.errors import AflowTuneError, BadInput, Fault
from aflow_tune.graph.limits import GraphLimits
from aflow_tune.graph.workflow import DEFAULT_PROBLEM_FIELDS, ScoreFunction
from aflow_tune.models import as_client
from aflow_tune.models.books import client_for
from aflow_tune.models.types import Message, ModelClient, ModelFailure
from aflow_tune.operators import OPERATORS, Operator, TestCases, use_test_cases
from aflow_tune.scoring import find, score_both
from aflow_tune.scoring.five_part import FORMS, Usage
from aflow_tune.scoring.rewards import Unscored, logged, reward_settings, scored
from aflow_tune.trace import ModelCall, Trace, note
from aflow_tune.writer.check import check_written
from aflow_tune.writer.execute import Executed, run_written
from aflow_tune.writer.prompting import policy_messages
from aflow_tune.writer.record import record_of, run_metrics
from aflow_tune.writer.reward import WriterReward, writer_reward
from aflow_tune.writer.outcome import START, TurnResult, keeps
from aflow_tune.writer.types import PROBLEM_TYPES, CheckLimits, Level, ProblemType

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
            answer_form=FORMS.get(benchmark or "", r"\S"),
        )


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
    clients: Mapping[str, ModelClient] = field(default_factory=dict)
    """By role, where no configuration's `models:` answer. They travel without their keys."""

    @property
    def carries(self) -> tuple[Callable[..., Any], ...]:
        """Functions and classes of the user's inside, which travel to a worker as well."""
        scores = () if self.score is None else (self.score,)
        return (*scores, *self.operators.values())

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
            auxiliary_models=auxiliary_models,
        )
        record = record_of(run)
        keep(CALLER, record)
        record_metrics(**run_metrics(run))
        _raise_if_models_failed(run.last)
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
        auxiliary_models: Mapping[str, Any] | None = None,
    ) -> WriterRun:
        """Let the policy write for a problem, and run what it writes; nothing is scored.

        Args:
            model: the policy, as `aflow_tune.models.as_client` takes it.

        Raises:
            ModelError: the policy itself did not answer.
            SandboxUnavailable, BudgetReached: as `run_written`.
        """
        policy = as_client(model)
        results: list[TurnResult] = []
        asked = 0
        while asked < self.turns:
            text = await self._ask(policy, problem, problem_type, entry_point, results)
            asked += 1
            if results and keeps(text):
                break
            results.append(
                await self._run(text, problem, problem_type, entry_point, auxiliary_models or {})
            )
        return WriterRun(
            problem,
            problem_type,
            asked,
            results[-1],
            _sum([result.usage for result in results]),
            sum(result.model_calls for result in results),
        )

    def messages(
        self,
        problem: str,
        problem_type: ProblemType,
        entry_point: str | None = None,
        results: list[TurnResult] | None = None,
    ) -> list[dict[str, str]]:
        """What the policy is asked, after these turns."""
        return policy_messages(
            problem,
            operators=self.operators,
            problem_type=problem_type,
            limits=self.check,
            entry_point=entry_point,
            template=self.template,
            earlier=[result.told() for result in results or ()],
        )

    def problem_of(self, task: Mapping[str, Any]) -> str:
        """The problem's text.

        Raises:
            BadInput: the row has none.
        """
        benchmark = self._benchmark_of(task)
        if self.problem is None and benchmark is not None:
            return find(benchmark).question(task)
        names = [self.problem] if self.problem is not None else list(DEFAULT_PROBLEM_FIELDS)
        for name in names:
            if isinstance(task.get(name), str):
                return str(task[name])
        fields = " or ".join(names)
        cure = "set `writer: {problem: FIELD}`"
        fault = Fault("problem", f"a text under {fields}", "none", cure)
        raise BadInput(f"The task has no text under {fields}.", [fault])

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
        problem: str,
        problem_type: ProblemType,
        entry_point: str | None,
        results: list[TurnResult],
    ) -> str:
        messages: list[Message] = [*self.messages(problem, problem_type, entry_point, results)]
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
            with trace.activate(), use_test_cases(self.test_cases):
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
                )
        finally:
            for event in trace.events:
                note(event)
        calls = trace.of(ModelCall)
        return TurnResult(text, verdict, executed, _usage(trace, executed), len(calls))

    def _client(self, role: str, auxiliary_models: Mapping[str, Any]) -> ModelClient:
        """A frozen model: given here, an auxiliary model, or of the configuration's `models:`."""
        if role in self.clients:
            return self.clients[role]
        if role in auxiliary_models:
            name = EXECUTOR_ROLE if role == self.executor else role
            return as_client(auxiliary_models[role], role=name)
        return client_for(role)

    def _limits(self) -> GraphLimits:
        """What the check allowed, enforced while the graph runs."""
        return GraphLimits(
            seconds=self.seconds,
            model_calls=self.check.model_calls,
            tokens=self.check.tokens,
            call_prompt_tokens=self.check.call_prompt_tokens,
            call_completion_tokens=self.check.call_completion_tokens,
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


def _usage(trace: Trace, executed: Executed) -> Usage:
    """What running a workflow spent: money and tokens as the models told, no calls no cost."""
    told = Usage.of(trace)
    if not trace.of(ModelCall):
        told = dataclasses.replace(told, usd=0.0, tokens=0)
    return dataclasses.replace(told, seconds=executed.seconds, operators=executed.calls)


def _sum(usages: list[Usage]) -> Usage:
    """All turns together; what one of them does not know is not known."""
    costs = [usage.usd for usage in usages if usage.usd is not None]
    tokens = [usage.tokens for usage in usages if usage.tokens is not None]
    return Usage(
        usd=sum(costs) if len(costs) == len(usages) else None,
        tokens=sum(tokens) if len(tokens) == len(usages) else None,
        seconds=sum(usage.seconds for usage in usages),
        operators=sum(usage.operators for usage in usages),
    )


def _raise_if_models_failed(result: TurnResult) -> None:
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
        kinds = _BLAMELESS & set(attempt.run.failures)
        if kinds:
            raise ExecutorFailed(
                f"calls of the executor failed ({', '.join(sorted(kinds))}), so the workflow "
                f"cannot be judged: {attempt.why}"
            )


def _reason(executed: Executed) -> str:
    return next((attempt.why for attempt in executed.failed), "")


def _as_score(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise Unscored(f"writer.score returned {value!r:.80}; a score is a number from 0 to 1")
    return number
