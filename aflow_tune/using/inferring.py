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
from dataclasses import dataclass
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
from aflow_tune.errors import AflowTuneError, BadInput
from aflow_tune.evaluation.evaluating import LocalModels, endpoint_model
from aflow_tune.evaluation.trained import config_source, find_weights, make_ready
from aflow_tune.models.clients import RunSpend
from aflow_tune.operators.prompts import use_prompts
from aflow_tune.sandbox.policy import use_policy
from aflow_tune.scoring import score_answer
from aflow_tune.scoring.numbers import last_number
from aflow_tune.scoring.rewards import Unscored, scored
from aflow_tune.sections import BudgetSection
from aflow_tune.trace import Trace
from aflow_tune.using.solved import Problem, Solved, solved
from aflow_tune.writer.results import raise_if_models_failed
from aflow_tune.writer.workflow import TYPE_OF_BENCHMARK, WriterRun, WriterWorkflow

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig


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
        raise BadInput.of(
            "This model was not trained to write workflows.",
            ready.positions.where("writer.executor"),
            "`writer: {executor: ROLE}`: the policy writes, the executor runs",
            str(ready.workflow or ready.graph.path or "no workflow"),
            f"measure it with `aflow-tune eval {file.name}`, or name another --config",
        )
    say_prices(ready, ready.models)
    sampling = make_ready(ready, weights=weights, local_model=endpoint is None)
    if temperature is not None:
        sampling["temperature"] = temperature
    if endpoint is not None:
        check_endpoint(endpoint, [served_model or ""], key_variable)
    check_run_prompts(ready)
    workflow, _ = resolve_functions(ready)
    assert isinstance(workflow, WriterWorkflow)
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
        self._policy: RecordingClient | None = None
        self._auxiliary: dict[str, Any] = {}

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
        config = self.config
        async with contextlib.AsyncExitStack() as stack:
            local = await stack.enter_async_context(LocalModels())
            if self.endpoint is None:
                policy = await local.take(config, self.weights)
            else:
                name = self.served_model or ""
                policy = endpoint_model(config, self.endpoint, name, self.key_variable)
            self._policy = await recording_client(policy)
            models = local.auxiliary_chat_models(config)
            self._auxiliary = await stack.enter_async_context(models)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
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
        assert self._policy is not None, "use `async with inferer:`, which loads the models"
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
                got = solved(problem, run, trace, started, time.monotonic() - started)
                if problem.truth is not None:
                    got |= await self._reward(problem, run)
        finally:
            recorder.close()
        return got

    async def _reward(self, problem: Problem, run: WriterRun) -> dict[str, Any]:
        """Score and reward, or why there is none."""
        benchmark, row = benchmark_row(problem, self.workflow.benchmark)
        score, reason = 0.0, "there is no answer"
        try:
            raise_if_models_failed(run.last)
            if run.last.executed.run.ok:
                found = await score_answer(benchmark, row, run.text, policy=self.config.sandbox)
                score, reason = scored(found), found.reason
            reward = run.reward(score, benchmark)
        except (Unscored, AflowTuneError) as error:
            return {"score_reason": str(error)}
        told = {"score": score, "score_reason": reason}
        return {**told, "reward": reward.total, "parts": dict(reward.parts)}


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
