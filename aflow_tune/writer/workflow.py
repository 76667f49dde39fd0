"""The policy writes a workflow, a frozen executor runs it, the answer is scored: one rollout.

`WriterWorkflow` is a workflow function like any other, and travels to a worker by value. Only the
policy's calls are recorded and trained. With `turns` above 1 the policy sees what became of its
graph and may write again, or keep it; the last workflow counts, and what all turns had the executor
do counts as spent. Where the executor does not answer, or the scorer cannot tell, the rollout fails
and says why. `writer_from_config` makes one from the section `writer:`; what needs the rest of the
configuration is asked in `config/file_rules.py`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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
from aflow_tune.scoring import find, five_part, score_both, with_form
from aflow_tune.scoring.rewards import Unscored, logged, scored
from aflow_tune.sections import ModelSettings, WriterSection
from aflow_tune.trace import POLICY, ModelCall, Trace, note
from aflow_tune.writer.check import check_written
from aflow_tune.writer.execute import run_written
from aflow_tune.writer.prompting import policy_messages, template_faults
from aflow_tune.writer.results import (
    START,
    TurnResult,
    WriterRun,
    keeps,
    raise_if_models_failed,
    record_of,
    run_metrics,
    usage_of,
)
from aflow_tune.writer.templates import default_graph
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


@dataclass(frozen=True)
class WriterWorkflow:
    """`async def f(task: Dict, model: TrinityChatModel) -> float`: the policy writes, others run.

    Exactly one of `benchmark`, `score` and a row's own field `benchmark` says what an answer is
    worth; the row's wins over `benchmark`, `score` over both.

    Args:
        executor: an auxiliary model's name, or a role of `clients` or of the configuration's
            `models:`.
        operators: that a graph may use, by name.
        models: role by operator, for those that do not use the executor.
        problem_type: of rows that do not say it. None: by their benchmark.
        problem: field with the question. None: the benchmark's own text, or the first usual name.
        test_cases: what the operator Test may use.
        template: the policy's prompt. None: the shipped one.
        check: what a graph may use at worst; one that could use more is refused, or stopped.
        seconds: for running one graph, fallbacks included.
        limited: roles whose models limit the length of their answers by themselves; to all others
            `check.call_completion_tokens` is given.
        fallbacks: False: as in `run_written`. For trying graphs out, never for training.
        clients: by role, where no configuration's `models:` answer. They travel without keys.
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
        """Functions and classes of the user's inside, which travel to a worker as well."""
        scores = () if self.score is None else (self.score,)
        return (*scores, *(kind for name, kind in self.operators.items() if name not in OPERATORS))

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
        """The reward of one rollout.

        Raises:
            ExecutorFailed: the frozen models did not answer.
            Unscored: the scorer could not tell.
            SandboxUnavailable: the graph would have to run, and no sandbox can be built here.
            BadInput: the row has no problem, or its type or benchmark is not known.
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
            messages = self.messages(problem, problem_type, entry_point, results, answer_form)
            try:
                with caller(CALLER), state_key(results[-1].state if results else START):
                    text = (await policy.complete(messages)).text
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
        usages = [result.usage for result in results]
        usage = five_part.Usage(
            usd=five_part.total([one.usd for one in usages]),
            tokens=five_part.total([one.tokens for one in usages]),
            seconds=sum(one.seconds for one in usages),
            operators=sum(one.operators for one in usages),
        )
        calls = sum(result.model_calls for result in results)
        return WriterRun(problem, problem_type, asked, results[-1], usage, calls)

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
        """The problem's text. Raises BadInput: the row has none."""
        return problem_of(task, self.problem, self._benchmark_of(task), "writer")

    def answer_form_of(self, task: Mapping[str, Any]) -> str:
        """What its benchmark says about the form of an answer; empty where a function scores."""
        benchmark = self._benchmark_of(task)
        return "" if benchmark is None else find(benchmark).answer_form

    def type_of(self, task: Mapping[str, Any]) -> ProblemType:
        """The problem's type: of the row, else of the configuration, else by its benchmark. Raises
        BadInput: none of them says it, or the row says another one."""
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
        """What keeps a row from being asked about or scored: one fault, or none."""
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
        roles = {self.executor, *self.models.values()}
        clients = {role: self._client(role, auxiliary_models) for role in roles}
        # Of a graph whose bound could not be told the calls are limited by the money too.
        bounded = verdict.bound is not None
        limits = GraphLimits(
            seconds=self.seconds,
            model_calls=self.check.model_calls if bounded else self.check.affordable_calls,
            tokens=self.check.tokens,
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

    def _client(self, role: str, auxiliary_models: Mapping[str, Any]) -> ModelClient:
        client = self.clients.get(role)
        if client is None and role in auxiliary_models:
            name = EXECUTOR_ROLE if role == self.executor else role
            client = as_client(auxiliary_models[role], role=name)
        client = client or client_for(role)
        return client if role in self.limited else _Limited(client, self.check)

    async def _score(
        self, task: Mapping[str, Any], run: WriterRun, benchmark: str | None
    ) -> tuple[float, dict[str, float]]:
        """The score of the answer in [0, 1], and the scores by both rules for the metrics."""
        if not run.last.executed.run.ok:
            return 0.0, {}  # no answer: there is nothing that a scorer could be asked
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
    """A client whose answers are as long as the check has counted with, and no longer."""

    def __init__(self, client: ModelClient, limits: CheckLimits) -> None:
        self._client, self._most = client, limits.call_completion_tokens
        self.role, self.model = client.role, client.model

    async def complete(self, messages: Sequence[Message], **settings: Any) -> Reply:
        """As the client's."""
        asked = settings.pop("max_tokens", None)
        most = self._most if asked is None else min(asked, self._most)
        return await self._client.complete(messages, max_tokens=most, **settings)


Where = Callable[[str], str]
_MAX_TURNS = 16
_ABOVE_0 = 5e-324
"""The smallest number above 0."""


@dataclass(frozen=True)
class AuxiliaryModel:
    """What the writer asks of one of `explorer.auxiliary_models`: the most tokens of one answer
    (None: nothing bounds it) and of one prompt (None: not known)."""

    answer_tokens: int | None = None
    prompt_tokens: int | None = None


def writer_from_config(
    section: WriterSection,
    settings: Mapping[str, ModelSettings],
    *,
    auxiliary: Mapping[str, AuxiliaryModel] | None = None,
    operators: Mapping[str, type[Operator]] | None = None,
    score: ScoreFunction | None = None,
    test_cases: Path | None = None,
    prompt: Path | None = None,
    sandbox: str = "auto",
    where: Where = str,
) -> WriterWorkflow:
    """The workflow function that a configuration's `writer:` section describes.

    Args:
        settings: the configuration's `models:`.
        auxiliary: its auxiliary models, by name.
        operators: its `operators:`, loaded; the shipped ones are known besides.
        score: the function that `section.score` names.
        test_cases: the file `section.test_cases`, found.
        prompt: the same for `section.prompt`.
        where: from a key of the configuration to its place, for messages.

    Raises:
        BadInput: with every fault of the section.
    """
    known = {**OPERATORS, **(operators or {})}
    faults = _Faults(section, settings, auxiliary or {}, known, where)
    faults.of_roles()
    faults.of_operators()
    faults.of_scoring(score)
    faults.of_numbers()
    faults.of_budgets()
    template = None if prompt is None else faults.of_template(prompt)
    cases = TestCases()
    if test_cases is not None:
        try:
            cases = TestCases.load(test_cases)
        except BadInput as error:
            faults.found += error.faults
    if faults.found:
        raise BadInput("The writer section cannot be used.", faults.found)
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
        check=check_limits(section, settings, auxiliary or {}),
        seconds=section.timeout,
        sandbox=sandbox,
        limited=tuple(
            role
            for role in _roles(section)
            if _answer_tokens(role, settings, auxiliary or {}) is not None
        ),
    )


def check_limits(
    section: WriterSection,
    settings: Mapping[str, ModelSettings],
    auxiliary: Mapping[str, AuxiliaryModel],
) -> CheckLimits:
    """What a graph may use at worst: the section's limits, and those of the models' calls."""
    roles, usual = _roles(section), CheckLimits()
    answers = [_answer_tokens(role, settings, auxiliary) for role in roles]
    prompts = [auxiliary[role].prompt_tokens for role in roles if role in auxiliary]
    prompts += [None] * (len(prompts) < len(roles))
    prompt_tokens = max(tokens or usual.call_prompt_tokens for tokens in prompts)
    prices = [_prices(role, settings, prompt_tokens) for role in roles]
    known = [price for price in prices if price is not None]
    whole = len(known) == len(prices)
    return CheckLimits(
        model_calls=section.max_calls,
        tokens=section.max_tokens,
        usd=section.max_usd,
        retries=section.retries,
        call_prompt_tokens=prompt_tokens,
        call_completion_tokens=max(tokens or usual.call_completion_tokens for tokens in answers),
        usd_per_prompt_token=max(price[0] for price in known) if whole else None,
        usd_per_completion_token=max(price[1] for price in known) if whole else None,
    )


def _roles(section: WriterSection) -> list[str]:
    return list(dict.fromkeys([section.executor or "", *section.models.values()]))


def _answer_tokens(
    role: str, settings: Mapping[str, ModelSettings], auxiliary: Mapping[str, AuxiliaryModel]
) -> int | None:
    if role in auxiliary:
        return auxiliary[role].answer_tokens
    return settings[role].max_tokens if role in settings else None


def _prices(
    role: str, settings: Mapping[str, ModelSettings], prompt_tokens: int
) -> tuple[float, float] | None:
    """US dollars for a token of a prompt and of an answer; None where they are not known."""
    model = settings.get(role)
    if model is None or not model.model:
        return None
    price = price_of(model.provider, model.base_url, model.model, model.prices)
    if price is None:
        return None
    prompt = price.cost(Usage(prompt_tokens, 0)) / prompt_tokens
    return prompt, price.cost(Usage(0, 1))


@dataclass
class _Faults:
    section: WriterSection
    settings: Mapping[str, ModelSettings]
    auxiliary: Mapping[str, AuxiliaryModel]
    operators: Mapping[str, type[Operator]]
    where: Where
    found: list[Fault] = field(default_factory=list)

    def add(self, key: str, expected: str, found: str, cure: str) -> None:
        self.found.append(Fault(self.where(key), expected, found, cure))

    def add_from(self, error: BadInput, key: str) -> None:
        self.found += [replace(fault, where=self.where(key)) for fault in error.faults]

    def of_roles(self) -> None:
        """Models that nobody has, the tuned one among the frozen, keys that are missing."""
        section, settings = self.section, self.settings
        named = {"writer.executor": section.executor or ""}
        named |= {f"writer.models.{name}": role for name, role in section.models.items()}
        there = [role for role in settings if role != POLICY] + list(self.auxiliary)
        for key, role in named.items():
            if role == POLICY:
                cure = "name a role of `models:` or of `explorer.auxiliary_models`"
                expected = "a frozen model: the policy writes workflows, it does not run them"
                self.add(key, expected, role, cure)
            elif role in settings and role in self.auxiliary:
                found = f"{role}, which is both under `models:` and an auxiliary model"
                self.add(key, "one model of that name", found, "rename one of them")
            elif role not in there:
                expected = "a role of `models:`, or the name of an auxiliary model"
                found = f"{role!r}; there is {', '.join(there) or 'none'}"
                self.add(
                    key, expected, found, _near(role, there, f"models: {{{role}: {{model: NAME}}}}")
                )
        for name in section.models:
            if name not in self.operators:
                self.unknown_operator(f"writer.models.{name}", name)
            elif section.operators and name not in section.operators:
                expected = f"an operator that graphs may use: {', '.join(section.operators)}"
                cure = "remove it, or add it to writer.operators"
                self.add(f"writer.models.{name}", expected, name, cure)
        used = {r: settings[r] for r in named.values() if r in settings and r != POLICY}
        self.found += [
            replace(fault, where=self.where(fault.where)) for fault in check_models(used)
        ]

    def of_operators(self) -> None:
        section, known = self.section, self.operators
        unknown = [name for name in section.operators if name not in known]
        for name in dict.fromkeys(unknown):
            self.unknown_operator("writer.operators", name)
        if unknown:
            return
        allowed = {name: known[name] for name in section.operators or known}
        told = section.problem_type or TYPE_OF_BENCHMARK.get((section.benchmark or "").lower())
        try:
            for kind in [told] if told in PROBLEM_TYPES else PROBLEM_TYPES:
                default_graph(kind, allowed)
        except BadInput as error:
            self.add_from(error, "writer.operators")

    def unknown_operator(self, key: str, name: str) -> None:
        cure = _near(name, self.operators, "name one of them, or add it to `operators:`")
        self.add(key, f"one of {', '.join(self.operators)}", name, cure)

    def of_scoring(self, score: ScoreFunction | None) -> None:
        """What scores is one thing; it may also be each row's own benchmark, which data tells."""
        section = self.section
        if section.benchmark is not None and score is not None:
            expected = "a benchmark or a score function"
            self.add("writer.score", expected, "both", "remove one of them")
        if section.benchmark is not None:
            try:
                find(section.benchmark)
            except BadInput as error:
                self.add_from(error, "writer.benchmark")
        if section.problem_type not in (None, *PROBLEM_TYPES):
            found, expected = repr(section.problem_type), " | ".join(PROBLEM_TYPES)
            self.add("writer.problem_type", expected, found, "problem_type: math")

    def of_numbers(self) -> None:
        for name, low, high, expected, example in (
            ("turns", 1, _MAX_TURNS, f"from 1 to {_MAX_TURNS}", "1"),
            ("max_calls", 1, math.inf, "1 or more", "20"),
            ("max_tokens", 1, math.inf, "1 or more", "20000"),
            ("retries", 0, MAX_RETRIES, f"from 0 to {MAX_RETRIES}", "0"),
            ("timeout", _ABOVE_0, math.inf, "seconds above 0", "180"),
            ("max_usd", _ABOVE_0, math.inf, "US dollars above 0", "0.01"),
        ):
            value = getattr(self.section, name)
            if value is not None and not (low <= value <= high and value < math.inf):
                self.add(f"writer.{name}", expected, f"{value:g}", f"{name}: {example}")

    def of_budgets(self) -> None:
        """A bound on tokens needs one on an answer, a bound on money needs prices too."""
        section, settings = self.section, self.settings
        limit = "max_usd" if section.max_usd is not None else "max_tokens"
        if section.max_usd is None and section.max_tokens is None:
            return
        for role in _roles(section):
            if role not in settings and role not in self.auxiliary:
                continue
            if role in settings and settings[role].max_tokens is None:
                expected = f"the most tokens of an answer, from which writer.{limit} is counted"
                self.add(f"models.{role}.max_tokens", expected, "nothing", "max_tokens: 1024")
            if section.max_usd is not None and role in self.auxiliary:
                expected = f"models with known prices; {role} is an auxiliary model, which has none"
                found = f"{section.max_usd:g}"
                self.add("writer.max_usd", expected, found, "use writer.max_tokens instead")
            elif section.max_usd is not None and _prices(role, settings, 1) is None:
                expected = f"a price of {settings[role].model}, for writer.max_usd"
                cure = "prices: {input: 0.15, output: 0.6}, in US dollars for a million tokens"
                self.add(f"models.{role}.prices", expected, "no known price", cure)

    def of_template(self, path: Path) -> str:
        """The user's prompt; empty where it cannot be read."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            found = " ".join(str(error).split())
            cure = "name a file with {problem} in it"
            self.add("writer.prompt", "a file of text", found, cure)
            return ""
        self.found += template_faults(text, self.where("writer.prompt"))
        return text


def _near(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}?" if near else otherwise
