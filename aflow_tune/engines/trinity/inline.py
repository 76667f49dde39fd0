"""The whole run in one process, without Ray.

Trinity's own parts do the same work as in the split: its runner runs the workflows, its task
sets are read by its readers, its pipeline computes advantages with its registered functions,
its metric functions aggregate. Only what needs actors is replaced: the model wrapper asks the
sampler directly for its version, the pipeline writes to a list, and the loop below takes the
place of Explorer, Trainer, Synchronizer and queue.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity.buffer.operators.experience_operator import create_operators
from trinity.buffer.pipelines.experience_pipeline import ExperiencePipeline
from trinity.buffer.task_scheduler import get_taskset_scheduler
from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows import Task
from trinity.explorer.workflow_runner import Status, WorkflowRunner
from trinity.utils.metrics import (
    aggregate_eval_metrics,
    aggregate_metrics,
    calculate_task_level_metrics,
)
from trinity.utils.monitor import MONITOR

from aflow_tune.engines.trinity.accounting import stop_at_limit
from aflow_tune.engines.trinity.config import AflowConfig
from aflow_tune.engines.trinity.mixes import quick_tasksets
from aflow_tune.engines.trinity.readers import read_all
from aflow_tune.engines.trinity.run_state import (
    forget_evaluation,
    is_evaluated,
    save_taskset_state,
)
from aflow_tune.engines.trinity.sampler_host import InlineModel, SamplerHost, sampling_speed
from aflow_tune.engines.trinity.train_engine import LocalTrainEngine
from aflow_tune.errors import BudgetReached, RunFailed


class InlineRunner(WorkflowRunner):
    """Trinity's workflow runner, given its models instead of looking actors up."""

    def __init__(
        self, config: AflowConfig, model: ModelWrapper, auxiliary: list[ModelWrapper], logger: Any
    ) -> None:
        self.name = f"{config.explorer.name}_runner_0"
        self.logger = logger
        self.config = config
        self.model_wrapper = model
        self.auxiliary_model_wrappers = auxiliary
        self.workflow_instance = None
        self.runner_id = 0
        self.runner_state = {
            "workflow_id": None,
            "model_version": None,
            "begin_time": 0,
            "terminate_time": 0,
        }
        self.concurrent_mode = "asynchronous"
        self.concurrent_run_fn = self._asynchronous_run


class _Collected:
    """The pipeline's output buffer: a list."""

    def __init__(self) -> None:
        self.experiences: list[Experience] = []

    async def write(self, experiences: list[Experience]) -> None:
        self.experiences = list(experiences)


class InlinePipeline(ExperiencePipeline):
    """Trinity's experience pipeline with its operators, written to a list."""

    def __init__(self, config: AflowConfig, logger: Any) -> None:
        self.logger = logger
        self.config = config
        self.input_store = None
        self.output = _Collected()
        self.auxiliary_models: dict[Any, Any] = {}

    async def prepare(self) -> None:
        self.operators = create_operators(
            self.config.data_processor.experience_pipeline.operators, self.auxiliary_models
        )
        self._set_algorithm_operators(self.config.algorithm)
        for operator in self.operators:
            await operator.prepare()


class InlineRun:
    """One run: `await InlineRun(config, ...).run()` trains to the target step.

    Args:
        config: a prepared configuration.
        target: the step to reach.
        phase: told in words what is going on.
        stop: asked between steps whether to stop.
    """

    def __init__(
        self,
        config: AflowConfig,
        target: int,
        phase: Callable[[str], None],
        stop: Callable[[], bool],
        logger: Any,
    ) -> None:
        self.config = config
        self.target = target
        self.phase = phase
        self.stop = stop
        self.logger = logger
        self.run_dir = Path(config.checkpoint_job_dir)
        self.engine = LocalTrainEngine(config)
        self._hosts: list[SamplerHost] = []

    async def run(self) -> int:
        """Train; returns the step reached. Raises what a step raised."""
        try:
            await self._prepare()
            await self._loop()
            return self.engine.train_step_num
        finally:
            await self._close()

    async def _prepare(self) -> None:
        config = self.config
        self.phase("loading the model")
        model_config = config.explorer.rollout_model
        host = await self._host(model_config)
        self.sampler = host.sampler
        auxiliary = [
            InlineModel(await self._host(auxiliary_config), auxiliary_config)
            for auxiliary_config in config.explorer.auxiliary_models
        ]
        self.runner = InlineRunner(config, InlineModel(host, model_config), auxiliary, self.logger)
        self.pipeline = InlinePipeline(config, self.logger)
        await self.pipeline.prepare()
        await self.engine.prepare()
        state = _explorer_state(self.run_dir, config.explorer.name)
        self.taskset = get_taskset_scheduler(explorer_state=state, config=config)
        self.monitors = {
            role: MONITOR.get(config.monitor.monitor_type)(
                project=config.project,
                group=config.group,
                name=config.name,
                role=role,
                config=config,
            )
            for role in (config.explorer.name, config.trainer.name)
        }

    async def _host(self, model_config: Any) -> SamplerHost:
        host = await asyncio.to_thread(SamplerHost.from_model_config, model_config)
        self._hosts.append(host)
        return host

    async def _loop(self) -> None:
        config, engine = self.config, self.engine
        step = engine.train_step_num
        tasksets = [taskset.name for taskset in config.buffer.explorer_input.eval_tasksets]
        # The run that is resumed may have been killed while it evaluated these weights.
        evaluated = step if is_evaluated(self.run_dir, step, tasksets) else -1
        if step:
            await self._sync()
        due = step % config.explorer.eval_interval == 0 if step else config.explorer.eval_on_startup
        if due and evaluated < step:
            await self._evaluate(step)
            evaluated = step
        while step < self.target and not self.stop():
            try:
                experiences = await self._explore(step + 1)
                if experiences is None:
                    break
                step = await self._train(experiences)
                if step % config.explorer.eval_interval == 0:
                    await self._evaluate(step)
                    evaluated = step
            except BudgetReached:
                break
        if step == 0:
            return
        self.phase("saving")
        await engine.save_checkpoint(block_until_saved=True)
        if step >= self.target:
            if evaluated < step:
                await self._evaluate(step)
            save_model = config.trainer.save_hf_checkpoint != "never"
            await engine.save_checkpoint(block_until_saved=True, save_as_hf=save_model)

    async def _explore(self, step: int) -> list[Experience] | None:
        """Roll out batch `step`; None when the task set is used up."""
        self.phase("rolling out")
        try:
            tasks = await self.taskset.read()
        except StopAsyncIteration:
            return None
        save_taskset_state(self.run_dir, step, self.taskset.state_dict())
        started, totals = time.time(), self.sampler.stats()
        results = await self._run_tasks(tasks, step, self.config.algorithm.repeat_times)
        payloads = [payload for _, payload in results if payload]
        metrics = await self.pipeline.process_serialized_chunks(payloads)
        self.taskset.feedback(metrics)
        metrics.update(
            aggregate_metrics([status.metrics[0] for status, _ in results], prefix="rollout")
        )
        metrics["explorer/time/wait_explore_step"] = time.time() - started
        metrics["rollout/model_version"] = self.sampler.version
        metrics["rollout/finished_task_count"] = float(len(results))
        metrics.update(sampling_speed(totals, self.sampler.stats()))
        self.monitors[self.config.explorer.name].log(metrics, step)
        return self.pipeline.output.experiences

    async def _train(self, experiences: list[Experience]) -> int:
        self.phase("training")
        started = time.time()
        metrics = await self.engine.train_step(experiences)
        metrics["time/train_step"] = time.time() - started
        started = time.time()
        await self._sync()
        metrics["time/sync_weight"] = time.time() - started
        step = self.engine.train_step_num
        interval = self.config.trainer.save_interval
        if interval > 0 and step % interval == 0:
            await self.engine.save_checkpoint()
        self.monitors[self.config.trainer.name].log(metrics, step)
        return step

    async def _sync(self) -> None:
        weights = await asyncio.to_thread(self.engine.trainer.weights)
        await asyncio.to_thread(self.sampler.update_weights, weights, self.engine.train_step_num)

    async def _evaluate(self, step: int) -> None:
        """Run the held-out task sets with the current weights."""
        metrics: dict[str, float] = {}
        started = time.time()
        for taskset in quick_tasksets(self.config, step):
            self.phase(f"evaluating on {taskset.name}")
            forget_evaluation(taskset, step)
            tasks = await read_all(taskset)
            batch_id = f"{step}/{taskset.name}"
            results = await self._run_tasks(tasks, batch_id, taskset.repeat_times)
            metrics.update(
                aggregate_eval_metrics(
                    [status.metrics[0] for status, _ in results],
                    prefix=f"eval/{taskset.name}",
                    detailed_stats=self.config.monitor.detailed_stats,
                )
            )
            metrics[f"eval/{taskset.name}/finished_task_count"] = float(len(results))
            stop_at_limit(self.config)
        if metrics:
            metrics["time/eval"] = time.time() - started
            self.monitors[self.config.explorer.name].log(metrics, step)

    async def _run_tasks(
        self, tasks: list[Task], batch_id: int | str, repeat_times: int
    ) -> list[tuple[Status, bytes]]:
        """Run every task `repeat_times` times; results in the order of the tasks.

        Raises:
            RunFailed: a task failed outside of the user's function, which the adapter shields.
        """
        # As many tasks at once as keep every slot of the sampler busy.
        slots = asyncio.Semaphore(math.ceil(self.config.local.max_batch / max(1, repeat_times)))

        async def run(index: int, task: Task) -> tuple[Status, bytes]:
            numbered = replace(
                task,
                batch_id=batch_id,
                task_id=index,
                rollout_args=replace(task.rollout_args, n=repeat_times),
            )
            started = time.time()
            async with slots:
                status, payload = await self.runner.run_task(
                    numbered, str(batch_id), repeat_times=repeat_times, collect_partial_runs=False
                )
            if not status.ok:
                raise RunFailed(f"a task of batch {batch_id} failed:\n{status.message}")
            run_metrics = [*status.metrics, {"time/task_execution": time.time() - started}]
            task_metrics = calculate_task_level_metrics(run_metrics, task.is_eval)
            return replace(status, metrics=[task_metrics]), payload

        return await asyncio.gather(*(run(index, task) for index, task in enumerate(tasks)))

    async def _close(self) -> None:
        for monitor in getattr(self, "monitors", {}).values():
            monitor.close()
        await asyncio.to_thread(self.engine.close)
        for host in self._hosts:
            await asyncio.to_thread(host.close)


def _explorer_state(run_dir: Path, explorer_name: str) -> dict[str, Any]:
    path = run_dir / f"{explorer_name}_meta.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
