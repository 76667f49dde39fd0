"""Runs a workflow on held-out tasks without training: no Ray, no trainer, no queue.

Adapter, recording model and records are those of a training run, so that its evaluations and these
are comparable. Seeds depend on task set, task, rollout and prompt, never on the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity.common.config import InferenceModelConfig
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows import Task

from aflow_tune.engines.local.checkpoint import Kind, kind_of, read_weights
from aflow_tune.engines.trinity.readers import read_all
from aflow_tune.engines.trinity.rollout.endpoint import EndpointModel
from aflow_tune.engines.trinity.rollout.recording import auxiliary_chat_models
from aflow_tune.engines.trinity.rollout.rollout_model import InlineModel, SamplerHost
from aflow_tune.errors import BudgetReached, RunFailed
from aflow_tune.files import drop_torn_line
from aflow_tune.report.records import read_records, record_path
from aflow_tune.types import Failure

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

TaskSets = Mapping[str, Sequence[Task]]
"""Tasks by the name of their task set, in the order of its rows."""
RolloutKey = tuple[str, int, int]
"""(task set, index of the task in it, index of the rollout of that task)."""


class LocalModels:
    """The local sampler with the weights asked for; holds one base model at a time."""

    def __init__(self) -> None:
        self._model: tuple[SamplerHost, InlineModel] | None = None
        self._key: str | None = None
        self._pristine = True
        self._auxiliary: dict[str, tuple[SamplerHost, InlineModel]] = {}

    async def __aenter__(self) -> LocalModels:
        return self

    async def __aexit__(self, *_: object) -> None:
        loaded = [*self._auxiliary.values(), *([self._model] if self._model else [])]
        for host, _ in loaded:
            await asyncio.to_thread(host.close)

    async def take(self, config: AflowConfig, weights: Path | None) -> InlineModel:
        """The configured model with `weights`; None: the base model. Raises `BadInput` if they do
        not fit it, `CheckpointError` if they are damaged, `RunFailed` if there are none."""
        model_config = config.explorer.rollout_model
        if weights is not None and kind_of(weights) is Kind.MODEL:
            model_config = replace(model_config, model_path=str(weights))
            weights = None
        # Full weights overwrite the base model, which then has to be loaded anew.
        key = repr(model_config)
        if self._model is None or self._key != key or not (self._pristine or weights):
            loaded, self._model = self._model, None
            if loaded is not None:
                await asyncio.to_thread(loaded[0].close)
            self._model = await _load(model_config)
            self._key, self._pristine = key, True
        host, model = self._model
        sampler = host.sampler
        if weights is None:
            await asyncio.to_thread(sampler.update_weights, {}, 0)
        else:
            state, sampler.lora = await asyncio.to_thread(read_weights, weights)
            if not state:  # the sampler would use the base model
                raise RunFailed(f"{weights} holds no weights")
            self._pristine = sampler.lora is not None
            await asyncio.to_thread(sampler.update_weights, state, sampler.version + 1)
        return model

    @contextlib.asynccontextmanager
    async def auxiliary_chat_models(self, config: AflowConfig) -> AsyncIterator[dict[str, Any]]:
        """The auxiliary models by name, as workflow functions get them, inside the context."""
        async with contextlib.AsyncExitStack() as stack:
            wrappers = await self.auxiliary(config)
            clients = [wrapper.get_openai_async_client() for wrapper in wrappers]
            for client in clients:
                stack.push_async_callback(client.close)
            yield auxiliary_chat_models(wrappers, clients, asyncio.get_running_loop())

    async def auxiliary(self, config: AflowConfig) -> list[ModelWrapper]:
        """The auxiliary models of a configuration, each loaded once."""
        configs = {repr(one): one for one in config.explorer.auxiliary_models}
        for key, one in configs.items():
            if key not in self._auxiliary:
                self._auxiliary[key] = await _load(one)
        return [self._auxiliary[repr(one)][1] for one in config.explorer.auxiliary_models]


async def _load(config: InferenceModelConfig) -> tuple[SamplerHost, InlineModel]:
    host = await asyncio.to_thread(SamplerHost.from_model_config, config)
    return host, InlineModel(host, config)


def endpoint_model(
    config: AflowConfig, url: str, name: str, key_variable: str | None
) -> ModelWrapper:
    """The model `name` at `url`, with the sampling of the configuration."""
    model_config = replace(
        config.explorer.rollout_model, model_path=name, engine_type="external", name=None
    )
    return EndpointModel(model_config, url, key_variable)


async def read_tasks(config: AflowConfig) -> dict[str, list[Task]]:
    """All tasks of every held-out task set."""
    tasksets = config.buffer.explorer_input.eval_tasksets
    return {taskset.name: await read_all(taskset) for taskset in tasksets}


@dataclass
class Batch:
    """One workflow with one model on all tasks. `arguments`: the adapter's `workflow_args`;
    `sampling` overrides the tasks' `rollout_args`; records of `step` are written to `folder`."""

    model: ModelWrapper
    auxiliary: list[ModelWrapper]
    arguments: Mapping[str, Any]
    folder: Path
    step: int = 0
    sampling: Mapping[str, float] = field(default_factory=dict)

    def rollouts_left(self, tasks: TaskSets, samples: int, *, again: bool) -> list[RolloutKey]:
        """The rollouts without a record or stopped by the budget; with `again` all failed ones."""
        left = []
        for name, of_set in tasks.items():
            path = record_path(self.folder, name, self.step)
            drop_torn_line(path)
            records = read_records(path) if path.exists() else []
            failures = {(record.item, record.run): record.failure for record in records}
            for number, task in enumerate(of_set):
                for rollout in range(samples):
                    failure = failures.get((_item(task, number), rollout), Failure.BUDGET_REACHED)
                    if failure == Failure.BUDGET_REACHED or (again and failure):
                        left.append((name, number, rollout))
        return left

    async def run(
        self,
        tasks: TaskSets,
        left: list[RolloutKey],
        samples: int,
        at_once: int,
        done: Callable[[], None],
    ) -> None:
        """Make the rollouts in `left`, at most `at_once` concurrently; call `done` after each.

        Raises:
            BudgetReached: a limit on money, tokens or calls was reached; no rollout is in flight.
            RunFailed: something outside the user's functions failed.
        """
        slots = asyncio.Semaphore(at_once)
        spend = self.arguments["spend"]

        async def one(name: str, number: int, rollout: int) -> None:
            async with slots:
                if spend.reached():
                    return
                given = tasks[name][number]
                # One task for each rollout, numbered as in the evaluation of a training run.
                task = replace(
                    given,
                    batch_id=f"{self.step}/{name}",
                    task_id=number,
                    repeat_times=samples,
                    workflow_args={**given.workflow_args, **self.arguments, "first_run": rollout},
                    rollout_args=replace(given.rollout_args, n=samples, **self.sampling),
                    raw_task=copy.deepcopy(given.raw_task),
                )
                model = self.model.clone_with_isolated_history()
                await task.to_workflow(model, self.auxiliary).run_async()
            done()

        try:
            async with asyncio.TaskGroup() as group:
                for key in left:
                    group.create_task(one(*key))
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            told = f"the evaluation met an error: {type(first).__name__}: {first}"
            raise RunFailed(told) from first
        reason = spend.reached()
        if reason is not None:
            raise BudgetReached(reason)


def rows_by_item(tasks: Sequence[Task]) -> dict[int, dict[str, Any]]:
    """The rows by the `item` of their records."""
    return {_item(task, number): dict(task.raw_task or {}) for number, task in enumerate(tasks)}


def _item(task: Task, number: int) -> int:
    return int(task.index.get("index", number))
