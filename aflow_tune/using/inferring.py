"""Asks a trained policy: problem in, the workflow it writes run by its executor, answer out.

    async with open_trained(Path("runs/my_project/my_run")) as inferer:
        solved = await inferer.solve(Problem("What is 17 * 23?", "math"))

The policy is sampled as held-out tasks are, on the local sampler or behind an endpoint; the
workflow is the run's own `writer:`, so it is asked, checked, run and rewarded here as it was
while it trained, fallbacks included. Problems may be solved side by side. The budget of the run
is not charged: what one problem may cost at most is what `writer.max_calls`, `max_tokens` and
`max_usd` let one graph use.

`evaluation/trained.py` says which weights a folder means.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aflow_tune.config.accounting import say_prices
from aflow_tune.config.load import load_config
from aflow_tune.config.validate import check_run_prompts, resolve_functions
from aflow_tune.context import RolloutContext
from aflow_tune.engines.local.saved_weights import fingerprint
from aflow_tune.engines.trinity.rollout.endpoint import base_url, check_endpoint
from aflow_tune.engines.trinity.rollout.recording import (
    RecordingClient,
    RolloutRecorder,
    recording_client,
)
from aflow_tune.errors import AflowTuneError, BadInput, Fault
from aflow_tune.evaluation.evaluating import LocalModels, endpoint_model
from aflow_tune.evaluation.trained import config_source, find_weights, make_ready
from aflow_tune.graph.draw import to_mermaid, to_svg
from aflow_tune.models.clients import RunSpend
from aflow_tune.operators.prompts import use_prompts
from aflow_tune.sandbox.policy import use_policy
from aflow_tune.scoring import score_answer
from aflow_tune.scoring.numbers import last_number
from aflow_tune.scoring.rewards import Unscored, scored
from aflow_tune.sections import BudgetSection
from aflow_tune.trace import Trace
from aflow_tune.using.solved import Problem, Solved, call_entries, spent_in
from aflow_tune.writer.results import raise_if_models_failed
from aflow_tune.writer.workflow import TYPE_OF_BENCHMARK, WriterRun, WriterWorkflow

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig
    from aflow_tune.graph.graph import Graph

MAX_DRAWN = 200
"""Calls in the source of a graph that is drawn; a picture of more tells nothing."""


def open_trained(
    checkpoint: Path | None,
    *,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    endpoint: str | None = None,
    served_model: str | None = None,
    key_variable: str | None = None,
    temperature: float | None = None,
) -> Inferer:
    """What a folder, a configuration or an endpoint means, checked and not yet loaded.

    Args:
        checkpoint: see `trained.find_weights`. None: the base model of `config`, or the one at
            the endpoint.
        config: the YAML to go by. None: that of the run that the checkpoint belongs to.
        endpoint: base URL of an OpenAI-compatible API that serves the policy as `served_model`.
        temperature: of the policy. None: as held-out tasks are sampled.

    Raises:
        BadInput: nothing trained is there, or the configuration cannot be used for asking.
    """
    found = None
    if checkpoint is not None and (endpoint is None or config is None):
        found = find_weights(checkpoint)
    file = config_source(found, config)
    weights = found.weights if found is not None and endpoint is None else None
    ready = load_config(file, overrides)
    if not ready.writer.executor:
        fault = Fault(
            ready.positions.where("writer.executor"),
            "`writer: {executor: ROLE}`: the policy writes, the executor runs",
            str(ready.workflow or ready.graph.path or "no workflow"),
            f"measure it with `aflow-tune eval {file.name}`, or name another --config",
        )
        raise BadInput("This model was not trained to write workflows.", [fault])
    say_prices(ready, ready.models)
    sampling = make_ready(ready, weights=weights, local_model=endpoint is None)
    if temperature is not None:
        sampling["temperature"] = temperature
    if endpoint is not None:
        check_endpoint(endpoint, [served_model or ""], key_variable)
    check_run_prompts(ready)
    workflow, _ = resolve_functions(ready)
    if not isinstance(workflow, WriterWorkflow):
        place = ready.positions.file
        raise BadInput(f"{place}: `writer` is not what this configuration is tuned by")
    return Inferer(
        ready,
        weights,
        workflow=workflow,
        title=served_model or (found.name if found else Path(ready.model.model_path).name),
        endpoint=endpoint,
        served_model=served_model,
        key_variable=key_variable,
        sampling=sampling,
    )


@dataclass
class Inferer:
    """A policy with its executor, loaded while the context is open.

    Args:
        config: made ready by `trained.make_ready`.
        weights: a checkpoint, adapter or model folder; None for the base model.
        workflow: what the policy's answers are run by.
        title: what to call the policy.
        sampling: of the policy: temperature, top_p, top_k, max_tokens.

    `seconds` bounds the solving of one problem: `rollout.run_timeout`, unless it is set.
    """

    config: AflowConfig
    weights: Path | None
    workflow: WriterWorkflow
    title: str
    sampling: dict[str, float]
    endpoint: str | None = None
    served_model: str | None = None
    key_variable: str | None = None

    def __post_init__(self) -> None:
        self.seconds: float = self.config.rollout.run_timeout
        self._books = RunSpend("", BudgetSection(), self.config.models)
        self._stack = contextlib.AsyncExitStack()
        self._policy: RecordingClient | None = None
        self._auxiliary: dict[str, Any] = {}

    @property
    def warnings(self) -> list[str]:
        """What was found doubtful about the configuration."""
        return self.config.warnings

    @property
    def make(self) -> str:
        """Changes with whatever decides results beside the problem, as far as it is seen here."""
        config = self.config
        weights = None if self.weights is None else fingerprint(self.weights)
        policy = (self.endpoint and base_url(self.endpoint), self.served_model)
        auxiliary = [model.model_path for model in config.explorer.auxiliary_models]
        settings = (config.writer, sorted(config.models.items()), config.prompts, config.operators)
        parts = (config.model.model_path, weights, policy, self.sampling, config.seed)
        return repr((*parts, auxiliary, settings))

    @property
    def private(self) -> dict[str, str]:
        """What others need not know, with what to say instead: folders and addresses of models.

        They can stand in the reasons of failures, which a graph may return as its answer.
        """
        config = self.config
        models = [
            config.model.model_path,
            *(m.model_path for m in config.explorer.auxiliary_models),
        ]
        folders = [*models, self.weights, config.checkpoint_root_dir, Path.home(), Path.cwd()]
        names = {
            str(folder): Path(str(folder)).name or "a folder"
            for folder in folders
            if folder and Path(str(folder)).is_absolute() and len(str(folder)) > 1
        }
        urls = [self.endpoint, *(settings.base_url for settings in config.models.values())]
        for url in filter(None, urls):
            for part in (base_url(url), url.rstrip("/"), urlsplit(url).netloc.rpartition("@")[2]):
                names[part] = "(an address)"
        return dict(sorted(names.items(), key=lambda item: -len(item[0])))

    async def __aenter__(self) -> Inferer:
        """Load policy and auxiliary models.

        Raises:
            BadInput: a model cannot be loaded, or the weights do not fit it.
        """
        await self._stack.__aenter__()
        try:
            local = await self._stack.enter_async_context(LocalModels())
            if self.endpoint is None:
                policy = await local.take(self.config, self.weights)
            else:
                policy = endpoint_model(
                    self.config, self.endpoint, self.served_model or "", self.key_variable
                )
            self._policy = await recording_client(policy)
            self._auxiliary = await self._stack.enter_async_context(
                local.auxiliary_chat_models(self.config)
            )
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._policy = None
        self._auxiliary = {}
        await self._stack.aclose()

    async def solve(self, problem: Problem, sample: int = 0) -> Solved:
        """Ask the policy, run what it writes, and where the truth is known, score the answer.

        Args:
            sample: another number draws other random numbers, the same one the same.

        Raises:
            ModelError: the policy did not answer.
            TimeoutError: it took longer than `seconds`.
            SandboxUnavailable: no sandbox can be built here, so nothing was run.
        """
        if self._policy is None:
            raise RuntimeError("the models are not loaded: use `async with inferer:`")
        generate_kwargs: dict[str, Any] = dict(self.sampling)
        top_k = generate_kwargs.pop("top_k", None)
        if top_k and top_k > 0:
            generate_kwargs["extra_body"] = {"top_k": top_k}
        context, trace = RolloutContext(rewards=self.config.rewards), Trace()
        recorder = RolloutRecorder(
            self._policy,
            context,
            task_id="inference",
            seed=f"{self.config.seed}|inference|{sample}",
            generate_kwargs=generate_kwargs,
        )
        started = time.monotonic()
        try:
            with (
                use_policy(self.config.sandbox),
                use_prompts(self.config.prompts),
                self._books.open(),
                context.activate(),
                trace.activate(),
            ):
                async with asyncio.timeout(self.seconds):
                    run = await self.workflow.write(
                        problem.text,
                        problem.type,
                        recorder.chat_model(),
                        entry_point=problem.entry_point,
                        auxiliary_models=self._auxiliary,
                    )
                seconds = time.monotonic() - started
                solved = _solved(problem, run, trace, started, seconds)
                if problem.truth is not None:
                    solved = await self._rewarded(solved, run)
        finally:
            recorder.close()
        return solved

    async def _rewarded(self, solved: Solved, run: WriterRun) -> Solved:
        """With score and reward, or with why there is none."""
        executed = run.last.executed
        benchmark, row = benchmark_row(solved.problem, self.workflow.benchmark)
        score, reason = 0.0, "there is no answer"
        try:
            raise_if_models_failed(run.last)
            if executed.run.ok:
                found = await score_answer(benchmark, row, run.text, policy=self.config.sandbox)
                score, reason = scored(found), found.reason
            reward = run.reward(score, benchmark)
        except (Unscored, AflowTuneError) as error:
            return replace(solved, score_reason=str(error))
        parts = dict(reward.parts)
        return replace(solved, score=score, score_reason=reason, reward=reward.reward, parts=parts)


def benchmark_row(problem: Problem, configured: str | None) -> tuple[str, dict[str, Any]]:
    """The benchmark whose rule scores a problem, and the problem as a row of it.

    The configured benchmark counts where it has the problem's type; else math goes by GSM8K's
    rule for a number and by MATH's for anything else, code by HumanEval's, qa by HotpotQA's.
    """
    text, truth = problem.text, problem.truth or ""
    name = (configured or "").lower()
    if TYPE_OF_BENCHMARK.get(name) != problem.type:
        math = "gsm8k" if _is_number(truth) else "math"
        name = {"math": math, "code": "humaneval", "qa": "hotpotqa"}[problem.type]
    rows: dict[str, dict[str, Any]] = {
        "gsm8k": {"question": text, "answer": f"#### {truth}"},
        "math": {"problem": text, "solution": truth},
        "hotpotqa": {"question": text, "answer": truth, "context": []},
        "drop": {"context": text, "ref_text": truth},
    }
    code = {"prompt": text, "entry_point": problem.entry_point or "", "test": truth}
    gold = "code" if name == "mbpp" else "canonical_solution"
    return name, rows.get(name) or {**code, gold: ""}


def _is_number(text: str) -> bool:
    try:
        return float(text.strip().replace(",", "")) == last_number(text)
    except ValueError:
        return False


def _solved(
    problem: Problem, run: WriterRun, trace: Trace, started: float, seconds: float
) -> Solved:
    verdict, executed = run.last.verdict, run.last.executed
    written, ran = verdict.written, executed.run
    drawn = verdict.graph if verdict.graph is not None and _drawable(verdict.graph) else None
    instead = executed.graph if executed.level and _drawable(executed.graph) else None
    return Solved(
        problem=problem,
        text=run.last.text,
        turns=run.turns,
        form=None if written is None else written.form.value,
        code="" if written is None else written.code,
        prompts={} if written is None else dict(written.prompts),
        refusals=verdict.refusals,
        bound=verdict.bound,
        level=executed.level,
        ran_code=executed.graph.sources["graph.py"],
        ran_prompts=dict(executed.graph.instructions),
        ending=ran.ending.value,
        reason=ran.reason,
        answer=ran.text if ran.ok else None,
        attempts=[
            {
                "level": int(attempt.level),
                "ending": attempt.run.ending.value,
                "reason": attempt.run.reason,
            }
            for attempt in executed.attempts
        ],
        calls=call_entries(trace, started),
        model_calls=run.model_calls,
        seconds=seconds,
        mermaid="" if drawn is None else to_mermaid(drawn.flow),
        svg="" if drawn is None else to_svg(drawn.flow, title="the workflow that was written"),
        ran_svg="" if instead is None else to_svg(instead.flow, title="the workflow that answered"),
        **spent_in(trace),
    )


def _drawable(graph: Graph) -> bool:
    return 0 < len(graph.flow.nodes) <= MAX_DRAWN
