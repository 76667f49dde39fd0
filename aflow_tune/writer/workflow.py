"""The policy writes a workflow, a frozen executor runs it, the answer is scored: one rollout.

`WriterWorkflow` is a workflow function like any other, pickled to workers. Only the policy's calls
are recorded and trained on. With `turns` above 1, the policy gets feedback on its graph and may
write another, or keep it; the last workflow and the spend of all turns count. If the executor does
not answer or the scorer cannot decide, the rollout fails with a reason. `writer_from_config` builds
one from the section `writer:`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, cast  # noqa: UP035 (the contract's spelling)

from aflow_tune.context import caller, keep, record_metrics, state_key
from aflow_tune.data.fields import FieldRead
from aflow_tune.errors import BadInput, Fault
from aflow_tune.graph.run import GraphLimits
from aflow_tune.graph.workflow import ScoreFunction, problem_of
from aflow_tune.models import as_client
from aflow_tune.models.clients import client_for
from aflow_tune.models.prices import price_of
from aflow_tune.models.settings import check_models
from aflow_tune.models.types import Message, ModelClient, ModelError, ModelFailure, Reply, Usage
from aflow_tune.operators import OPERATORS, Operator, TestCases, use_test_cases
from aflow_tune.operators.base import MAX_RETRIES
from aflow_tune.operators.programs import use_libraries
from aflow_tune.sandbox.policy import MATHEMATICS
from aflow_tune.scoring import find, score_both, with_form
from aflow_tune.scoring.rewards import Unscored, logged, scored
from aflow_tune.sections import ModelSettings, WriterSection
from aflow_tune.trace import POLICY, ModelCall, Trace, note
from aflow_tune.writer.check import check_written
from aflow_tune.writer.prompting import policy_messages, template_faults
from aflow_tune.writer.results import (
    START,
    TurnResult,
    WriterRun,
    keeps,
    raise_if_models_failed,
    record_of,
    run_metrics,
    run_written,
    usage_of,
)
from aflow_tune.writer.templates import default_graph
from aflow_tune.writer.types import PROBLEM_TYPES, CheckLimits, Level, ProblemType, did_you_mean

if TYPE_CHECKING:
    from aflow_tune.models.chat_model import TrinityChatModel


CALLER = "writer"
"""Caller of the policy's calls."""
EXECUTOR_ROLE = "executor"
"""The role under which an auxiliary executor's calls are counted."""
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
    """`async def f(task: Dict, model: TrinityChatModel, auxiliary_models) -> float`.

    `score`, else a row's field `benchmark`, else the argument `benchmark` scores the answer.

    Args:
        executor: an auxiliary model's name, or a role of `clients` or of the configuration's
            `models:`.
        models: role by operator, for those that do not use the executor.
        problem_type: of rows without a field `problem_type`. None: by their benchmark.
        problem: field of the question. None: the benchmark's, or the first usual name.
        entry_point: field with the name of the function to write, for code problems.
        test_cases: what the operator Test may use.
        template: the policy's prompt. None: the shipped one.
        turns: how often the policy is asked at most.
        check: what a graph may use at worst; one that could use more is refused, or stopped.
        seconds: for the execution of one graph, including fallbacks.
        limited: roles with a `max_tokens` of their own; others get `check.call_completion_tokens`.
        fallbacks: as in `run_written`. False only for trying graphs out, never for training.
        clients: by role, before auxiliary and configured models. They are pickled without keys.
    """

    executor: str
    operators: Mapping[str, type[Operator]] = field(default_factory=lambda: dict(OPERATORS))
    models: Mapping[str, str] = field(default_factory=dict)
    benchmark: str | None = None
    score: ScoreFunction | None = None
    problem_type: ProblemType | None = None
    problem: str | None = None
    entry_point: str = "entry_point"
    test_cases: TestCases = field(default_factory=TestCases)
    template: str | None = None
    turns: int = 1
    check: CheckLimits = field(default_factory=CheckLimits)
    seconds: float = 180.0
    sandbox: str = "auto"
    limited: tuple[str, ...] = ()
    fallbacks: bool = True
    clients: Mapping[str, ModelClient] = field(default_factory=dict)

    @property
    def carries(self) -> tuple[Callable[..., Any], ...]:
        """The user's functions and classes, whose code has to be sent to workers too."""
        scores = () if self.score is None else (self.score,)
        return (*scores, *(kind for name, kind in self.operators.items() if name not in OPERATORS))

    @property
    def reads(self) -> tuple[FieldRead, ...]:
        """The fields that every row must have."""
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
        """The reward of one rollout.

        Raises:
            ExecutorFailed: the frozen models did not answer.
            Unscored: the scorer could not decide.
            ModelError, SandboxUnavailable, BudgetReached: as `write`.
            BadInput: the row has no problem, or its type or benchmark is unknown.
        """
        benchmark = self._benchmark_of(task)
        entry_point = task.get(self.entry_point)
        run = await self.write(
            self.problem_of(task),
            self.type_of(task),
            model,
            entry_point=entry_point if isinstance(entry_point, str) else None,
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
        return reward.reward

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
        """Let the policy write for a problem and execute what it writes, without scoring.
        `answer_form` is in the policy's prompt and, after the problem, in the graph's input.

        Raises:
            ModelError: the policy itself did not answer.
            SandboxUnavailable, BudgetReached: as `run_written`.
        """
        policy = as_client(model)
        results: list[TurnResult] = []
        asked = 0
        while asked < self.turns:
            messages = self.messages(problem, problem_type, entry_point, results, answer_form)
            try:
                with caller(CALLER), state_key(results[-1].state if results else START):
                    text = (await policy.complete(messages)).text
            except ModelError as error:
                if results and error.failure is ModelFailure.REFUSED:
                    break  # the conversation exceeds its context: the last graph counts
                raise
            asked += 1
            if results and keeps(text):
                break
            asked_for = with_form(problem, answer_form)
            results.append(
                await self._run(text, asked_for, problem_type, entry_point, auxiliary_models or {})
            )
        return WriterRun(problem, problem_type, asked, tuple(results))

    def messages(
        self,
        problem: str,
        problem_type: ProblemType,
        entry_point: str | None = None,
        results: list[TurnResult] | None = None,
        answer_form: str = "",
    ) -> list[dict[str, str]]:
        """The prompt of the policy after these turns."""
        return policy_messages(
            problem,
            operators=self.operators,
            problem_type=problem_type,
            limits=self.check,
            entry_point=entry_point,
            template=self.template,
            answer_form=answer_form,
            earlier=[(result.text, result.told()) for result in results or ()],
        )

    def problem_of(self, task: Mapping[str, Any]) -> str:
        """The problem's text. Raises `BadInput` if the row has none."""
        return problem_of(task, self.problem, self._benchmark_of(task), "writer")

    def answer_form_of(self, task: Mapping[str, Any]) -> str:
        """The benchmark's description of an answer's form; empty if a function scores."""
        benchmark = self._benchmark_of(task)
        return "" if benchmark is None else find(benchmark).answer_form

    def type_of(self, task: Mapping[str, Any]) -> ProblemType:
        """The problem's type: from the row, else the configuration, else the benchmark. Raises
        `BadInput` if none has it, or the one found is not in PROBLEM_TYPES."""
        said = task.get("problem_type")
        benchmark = self._benchmark_of(task)
        found = said or self.problem_type
        if found is None and benchmark is not None:
            found = TYPE_OF_BENCHMARK.get(find(benchmark).name)
        if found in PROBLEM_TYPES:
            return found
        raise BadInput.of(
            "A row's type of problem is not known.",
            "problem_type",
            " | ".join(PROBLEM_TYPES),
            "none" if found is None else f"{found!r:.40}",
            "set `writer: {problem_type: math}`, or give the rows a field `problem_type`",
        )

    def row_faults(self, row: Mapping[str, Any]) -> list[Fault]:
        """Why a row cannot be used or scored; empty if it can."""
        try:
            benchmark = self._benchmark_of(row)
            if benchmark is not None:
                fields = find(benchmark).fields
                lacking = [n for n, kind in fields.items() if not isinstance(row.get(n), kind)]
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
        if self.score is not None:
            return None
        name = task.get("benchmark") or self.benchmark
        if not isinstance(name, str):
            raise BadInput.of(
                "A row without a benchmark cannot be scored.",
                "benchmark",
                "the name of a benchmark",
                f"{name!r:.40}",
                "set `writer: {benchmark: gsm8k}`, or give the rows a field `benchmark`",
            )
        return find(name).name

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
        clients = {}
        for role in {self.executor, *self.models.values()}:
            client = self.clients.get(role)
            if client is None and role in auxiliary_models:
                name = EXECUTOR_ROLE if role == self.executor else role
                client = as_client(auxiliary_models[role], role=name)
            client = client or client_for(role)
            clients[role] = client if role in self.limited else _Limited(client, self.check)
        # Without a static bound, `usd` was not checked: limit the calls by it.
        bounded = verdict.bound is not None
        limits = GraphLimits(
            seconds=self.seconds,
            model_calls=self.check.model_calls if bounded else self.check.affordable_calls,
            tokens=self.check.tokens,
            answer_tokens=self.check.call_completion_tokens,
            call_prompt_tokens=self.check.call_prompt_tokens,
            retries=self.check.retries,
        )
        trace = Trace()
        try:
            libraries = MATHEMATICS if problem_type == "math" else ()
            with trace.activate(), use_test_cases(self.test_cases), use_libraries(libraries):
                executed = await run_written(
                    verdict,
                    problem,
                    entry_point,
                    executor=clients[self.executor],
                    clients=clients,
                    models=self.models,
                    limits=limits,
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

    async def _score(
        self, task: Mapping[str, Any], run: WriterRun, benchmark: str | None
    ) -> tuple[float, dict[str, float]]:
        """The score of the answer in [0, 1], and the scores by both rules for the metrics."""
        if not run.last.executed.run.ok:
            return 0.0, {}  # no answer to score
        if benchmark is not None:
            scores = await score_both(benchmark, task, run.text, policy=self.sandbox)
            return scored(scores["strict"]), logged(scores)
        assert self.score is not None
        value = self.score(task, run.answer)
        value = await value if isinstance(value, Awaitable) else value
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0.0 <= number <= 1.0:
            raise Unscored(f"writer.score returned {value!r:.80}; a score is a number from 0 to 1")
        return number, {}


class _Limited:
    """A client that caps `max_tokens` at the value that the check has counted with."""

    def __init__(self, client: ModelClient, limits: CheckLimits) -> None:
        self._client, self._most = client, limits.call_completion_tokens
        self.role, self.model = client.role, client.model

    async def complete(self, messages: Sequence[Message], **settings: Any) -> Reply:
        """As the wrapped client, with `max_tokens` capped."""
        asked = settings.pop("max_tokens", None)
        most = self._most if asked is None else min(asked, self._most)
        return await self._client.complete(messages, max_tokens=most, **settings)


Settings = Mapping[str, ModelSettings]
_MAX_TURNS = 16
_ABOVE_0 = 5e-324
"""The smallest float above 0."""


@dataclass(frozen=True)
class AuxiliaryModel:
    """Limits of one of `explorer.auxiliary_models`: the most tokens of one answer (None: no limit)
    and of one prompt (None: unknown)."""

    answer_tokens: int | None = None
    prompt_tokens: int | None = None


def writer_from_config(
    section: WriterSection,
    settings: Settings,
    *,
    auxiliary: Mapping[str, AuxiliaryModel] | None = None,
    operators: Mapping[str, type[Operator]] | None = None,
    score: ScoreFunction | None = None,
    test_cases: Path | None = None,
    prompt: Path | None = None,
    sandbox: str = "auto",
    where: Callable[[str], str] = str,
) -> WriterWorkflow:
    """The workflow function of a configuration's `writer:` section.

    Args:
        settings, auxiliary: the configuration's `models:`, and its auxiliary models by name.
        operators: its `operators:`, loaded; the shipped ones are added.
        score, test_cases, prompt: the function and the files that the section names.
        where: maps a key of the configuration to its place, for messages.

    Raises:
        BadInput: with every fault of the section.
    """
    known, others = {**OPERATORS, **(operators or {})}, auxiliary or {}
    faults = [
        replace(fault, where=where(fault.where))
        for fault in (
            *_role_faults(section, settings, others, known),
            *_value_faults(section, known, score),
            *_budget_faults(section, settings, others),
        )
    ]
    template, cases = None, TestCases()
    if prompt is not None:
        try:
            template = prompt.read_text(encoding="utf-8")
            faults += template_faults(template, where("writer.prompt"))
        except (OSError, UnicodeDecodeError) as error:
            cure = "name a file with {problem} in it"
            faults.append(Fault(where("writer.prompt"), "a file of text", str(error), cure))
    if test_cases is not None:
        try:
            cases = TestCases.load(test_cases)
        except BadInput as error:
            faults += error.faults
    if faults:
        raise BadInput("The writer section cannot be used.", faults)
    return WriterWorkflow(
        executor=section.executor or "",
        operators={name: known[name] for name in section.operators or known},
        models=dict(section.models),
        benchmark=section.benchmark,
        score=score,
        problem_type=cast(ProblemType | None, section.problem_type),
        problem=section.problem,
        entry_point=section.entry_point,
        test_cases=cases,
        template=template,
        turns=section.turns,
        check=_check_limits(section, settings, others),
        seconds=section.timeout,
        sandbox=sandbox,
        limited=tuple(r for r in _roles(section) if _answer_tokens(r, settings, others)),
    )


def _check_limits(
    section: WriterSection, settings: Settings, auxiliary: Mapping[str, AuxiliaryModel]
) -> CheckLimits:
    """What a graph may use at worst: the section's limits, and the models' limits per call."""
    roles, usual = _roles(section), CheckLimits()
    answers = [_answer_tokens(role, settings, auxiliary) for role in roles]
    prompts = [auxiliary[role].prompt_tokens if role in auxiliary else None for role in roles]
    prompt_tokens = max(tokens or usual.call_prompt_tokens for tokens in prompts)
    prices = [_prices(role, settings, prompt_tokens) for role in roles]
    dearest = [max(known) if None not in known else None for known in zip(*prices, strict=True)]
    return CheckLimits(
        model_calls=section.max_calls,
        tokens=section.max_tokens,
        usd=section.max_usd,
        retries=section.retries,
        call_prompt_tokens=prompt_tokens,
        call_completion_tokens=max(tokens or usual.call_completion_tokens for tokens in answers),
        usd_per_prompt_token=dearest[0],
        usd_per_completion_token=dearest[1],
    )


def _roles(section: WriterSection) -> list[str]:
    return list(dict.fromkeys([section.executor or "", *section.models.values()]))


def _answer_tokens(
    role: str, settings: Settings, auxiliary: Mapping[str, AuxiliaryModel]
) -> int | None:
    if role in auxiliary:
        return auxiliary[role].answer_tokens
    return settings[role].max_tokens if role in settings else None


def _prices(role: str, settings: Settings, prompt_tokens: int) -> tuple[Any, Any]:
    """US dollars for one token of a prompt and of an answer; None if unknown."""
    model = settings.get(role)
    if model is None or not model.model:
        return None, None
    price = price_of(model.provider, model.base_url, model.model, model.prices)
    if price is None:
        return None, None
    return price.cost(Usage(prompt_tokens, 0)) / prompt_tokens, price.cost(Usage(0, 1))


def _role_faults(
    section: WriterSection,
    settings: Settings,
    auxiliary: Mapping[str, AuxiliaryModel],
    operators: Mapping[str, type[Operator]],
) -> Iterator[Fault]:
    """Unknown roles and operators, and the tuned model used as a frozen one; `where` is a key."""
    named = {"writer.executor": section.executor or ""}
    named |= {f"writer.models.{name}": role for name, role in section.models.items()}
    there = [role for role in settings if role != POLICY] + list(auxiliary)
    for key, role in named.items():
        if role not in there or there.count(role) > 1:
            expected = "a frozen model: one role of `models:`, or the name of one auxiliary model"
            found = f"{role!r}; there is {', '.join(there) or 'none'}"
            cure = _near(role, there, f"models: {{{role or 'executor'}: {{model: NAME}}}}")
            cure = "rename one of the two" if role in there else cure
            yield Fault(key, expected, found, cure)
    allowed = section.operators or operators
    for name in section.models:
        if name not in operators or name not in allowed:
            cure = _near(name, allowed, "remove it, or add it to writer.operators")
            yield Fault(f"writer.models.{name}", f"one of {', '.join(allowed)}", name, cure)
    used = {role: settings[role] for role in named.values() if role in settings and role != POLICY}
    yield from check_models(used)


def _value_faults(
    section: WriterSection, operators: Mapping[str, type[Operator]], score: ScoreFunction | None
) -> Iterator[Fault]:
    """Faults of single values of the section."""
    unknown = [name for name in dict.fromkeys(section.operators) if name not in operators]
    for name in unknown:
        cure = _near(name, operators, "name one of them, or add it to `operators:`")
        yield Fault("writer.operators", f"one of {', '.join(operators)}", name, cure)
    if not unknown:
        allowed = {name: operators[name] for name in section.operators or operators}
        told = section.problem_type or TYPE_OF_BENCHMARK.get((section.benchmark or "").lower())
        try:
            for kind in [told] if told in PROBLEM_TYPES else PROBLEM_TYPES:
                default_graph(kind, allowed)
        except BadInput as error:
            yield from error.faults
    if section.benchmark is not None:
        if score is not None:
            expected = "a benchmark or a score function"
            yield Fault("writer.score", expected, "both", "remove one of them")
        try:
            find(section.benchmark)
        except BadInput as error:
            yield from (replace(fault, where="writer.benchmark") for fault in error.faults)
    if section.problem_type not in (None, *PROBLEM_TYPES):
        expected, found = " | ".join(PROBLEM_TYPES), repr(section.problem_type)
        yield Fault("writer.problem_type", expected, found, "problem_type: math")
    for name, low, high, expected, example in (
        ("turns", 1, _MAX_TURNS, f"from 1 to {_MAX_TURNS}", "1"),
        ("max_calls", 1, math.inf, "1 or more", "20"),
        ("max_tokens", 1, math.inf, "1 or more", "20000"),
        ("retries", 0, MAX_RETRIES, f"from 0 to {MAX_RETRIES}", "0"),
        ("timeout", _ABOVE_0, math.inf, "seconds above 0", "180"),
        ("max_usd", _ABOVE_0, math.inf, "US dollars above 0", "0.01"),
    ):
        value = getattr(section, name)
        if value is not None and not (low <= value <= high and value < math.inf):
            yield Fault(f"writer.{name}", expected, f"{value:g}", f"{name}: {example}")


def _budget_faults(
    section: WriterSection, settings: Settings, auxiliary: Mapping[str, AuxiliaryModel]
) -> Iterator[Fault]:
    """A limit on tokens needs `max_tokens` of each model; a limit on money also needs prices."""
    limit = "max_usd" if section.max_usd is not None else "max_tokens"
    if getattr(section, limit) is None:
        return
    for role in _roles(section):
        model = settings.get(role)
        if model is not None and model.max_tokens is None:
            expected = f"the most tokens of an answer, from which writer.{limit} is counted"
            yield Fault(f"models.{role}.max_tokens", expected, "nothing", "max_tokens: 1024")
        if limit == "max_usd" and role in auxiliary:
            expected, found = "models with known prices", f"{role}, an auxiliary model, has none"
            yield Fault("writer.max_usd", expected, found, "use writer.max_tokens instead")
        elif limit == "max_usd" and model is not None and None in _prices(role, settings, 1):
            expected = f"a price of {model.model}, for writer.max_usd"
            cure = "prices: {input: 0.15, output: 0.6}, in US dollars for a million tokens"
            yield Fault(f"models.{role}.prices", expected, "no known price", cure)


def _near(name: str, known: Iterable[str], otherwise: str) -> str:
    return did_you_mean(name, known).strip(" ()") or otherwise
