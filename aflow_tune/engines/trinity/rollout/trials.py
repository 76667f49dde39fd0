"""Runs the trials of a search or an ablation: with which model and which random numbers, in this
process (`TrialRunner`) or in actors on Ray (`RayTrials`), with the same results.

Nothing is written here: results go back to the caller, who keeps them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from trinity.common.config import InferenceModelConfig
from trinity.common.models.model import ModelWrapper

from aflow_tune.cluster.sent_function import received, send
from aflow_tune.config.settings import AflowConfig
from aflow_tune.context import RolloutContext
from aflow_tune.engines.trinity.rollout.recording import (
    RolloutRecorder,
    load_agentscope,
    recording_client,
)
from aflow_tune.engines.trinity.rollout.rollout_model import LocalRolloutModel
from aflow_tune.errors import AflowTuneError, RunFailed
from aflow_tune.graph.workflow import GraphWorkflow
from aflow_tune.models.clients import RunSpend, client_for
from aflow_tune.operators.prompts import use_prompts
from aflow_tune.sandbox import use_policy
from aflow_tune.search.pool import Trial
from aflow_tune.search.state import WorkflowState
from aflow_tune.search.trials import run_trial

_MAX_CONCURRENCY = 1000
_DEATHS = 3
"""How often a worker is replaced, and a trial run again because its worker died."""
_WORKERS = 2, 16
"""Fewest and most actors; between them one for two processors of the cluster."""


@dataclass(frozen=True)
class TrialSettings:
    """What all trials of a search have in common; travels to workers.

    `role`: of `models`, that answers as the graph's model; None: a model of this machine does, with
    `sampling` (None: its own), or the graphs ask their roles only."""

    config: AflowConfig
    spend: RunSpend
    role: str | None = None
    sampling: Mapping[str, Any] | None = None


class TrialRunner:
    """Runs trials in this process and event loop. `model`: None if `settings.role` answers."""

    def __init__(
        self,
        workflows: Mapping[str, GraphWorkflow],
        settings: TrialSettings,
        model: ModelWrapper | None,
    ) -> None:
        self.workflows, self.settings, self.model = workflows, settings, model

    async def run(
        self, name: str, state: WorkflowState, problem: str, row: Mapping[str, Any]
    ) -> Trial:
        """Run a workflow, with the settings of the one called `name`, on the row of a problem.
        Raises as `run_trial`.

        The seed of a call depends on problem, caller and prompt: what two workflows ask alike is
        answered alike, so their difference is not of random numbers."""
        settings, workflow = self.settings, self.workflows[name]
        config = settings.config
        graph = state.graph(workflow.graph.operators)
        with use_policy(config.sandbox), use_prompts(config.prompts), settings.spend.open():
            if self.model is None:
                client = (
                    next(iter(workflow.clients.values()))
                    if settings.role is None
                    else client_for(settings.role)
                )
                return await run_trial(workflow, graph, row, client, config.rewards)
            recorder = RolloutRecorder(
                await recording_client(self.model),
                RolloutContext(),
                task_id=problem,
                seed=f"{config.seed}|{problem}",
                generate_kwargs=settings.sampling or self.model.generate_kwargs,
            )
            try:
                model = recorder.chat_model()
                return await run_trial(workflow, graph, row, model, config.rewards, local=True)
            finally:
                recorder.close()


class RayTrials:
    """Runs trials in actors on the Ray that this process is connected to. A trial whose actor died
    runs again in a new one.

    Args:
        executor: the model of this machine that answers, which gets an actor of its own; None if
            `settings.role` answers.
    """

    def __init__(
        self,
        workflows: Mapping[str, GraphWorkflow],
        settings: TrialSettings,
        executor: InferenceModelConfig | None,
    ) -> None:
        self.workflows, self.settings, self.executor = workflows, settings, executor
        self._workers: list[Any] = []
        self._models: list[Any] = []
        self._held: list[int] = []

    async def start(self) -> int:
        """Start the model and the workers; returns how many workers."""
        namespace = self.settings.config.ray_namespace
        model = None
        if self.executor is not None:
            told = replace(deepcopy(self.executor), ray_namespace=namespace, enable_history=True)
            options = {"namespace": namespace, "max_concurrency": _MAX_CONCURRENCY, "num_cpus": 0}
            actor = ray.remote(LocalRolloutModel).options(**options).remote(config=told)
            self._models.append(actor)
            await actor.prepare.remote()
            told.api_key = await actor.get_api_key.remote()
            model = told, await actor.get_api_server_url.remote()
        processors = ray.cluster_resources().get("CPU", 2.0)
        count = int(min(max(processors // 2, _WORKERS[0]), _WORKERS[1]))
        options = {
            "max_concurrency": _MAX_CONCURRENCY,
            "num_cpus": 0,
            "max_restarts": _DEATHS,
            "scheduling_strategy": "SPREAD",
        }
        sent = dict(zip(self.workflows, send(*self.workflows.values()), strict=True))
        kind = ray.remote(_Worker).options(**options)
        self._workers = [kind.remote(sent, self.settings, model) for _ in range(count)]
        self._held = [0] * count
        await asyncio.gather(*(worker.__ray_ready__.remote() for worker in self._workers))
        return count

    def close(self) -> None:
        """End the actors; trials under way are lost."""
        for actor in [*self._workers, *self._models]:
            ray.kill(actor)

    async def run(
        self, name: str, state: WorkflowState, problem: str, row: Mapping[str, Any]
    ) -> Trial:
        """As `TrialRunner.run`, in the worker that has the least to do."""
        for died in range(_DEATHS + 1):
            least = min(range(len(self._held)), key=self._held.__getitem__)
            self._held[least] += 1
            try:
                worker = self._workers[least]
                trial: Trial = await worker.run.remote(name, state, problem, dict(row))
                return trial
            except RayTaskError as error:
                cause: Any = error
                while isinstance(cause, RayTaskError):
                    cause = cause.cause
                if isinstance(cause, AflowTuneError):
                    raise cause from None
                raise RunFailed(str(error)) from error
            except RayActorError as error:
                if died == _DEATHS:
                    told = "a process that runs trials died again and again"
                    raise RunFailed(f"{told}: {error}") from error
            finally:
                self._held[least] -= 1
        raise AssertionError("unreachable")


class _Worker:
    """An actor of `RayTrials`."""

    def __init__(
        self,
        sent: Mapping[str, Any],
        settings: TrialSettings,
        model: tuple[InferenceModelConfig, str] | None,
    ) -> None:
        self._sent, self._settings, self._model = sent, settings, model
        self._starting: asyncio.Task[TrialRunner] | None = None

    async def run(
        self, name: str, state: WorkflowState, problem: str, row: Mapping[str, Any]
    ) -> Trial:
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return await (await self._starting).run(name, state, problem, row)

    async def _start(self) -> TrialRunner:
        load_agentscope()
        workflows = {name: received(sent) for name, sent in self._sent.items()}
        model = None
        if self._model is not None:
            config, url = self._model
            model = ModelWrapper(models=[], config=config, api_address=url)
        return TrialRunner(workflows, self._settings, model)
