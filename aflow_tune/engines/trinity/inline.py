"""A whole run in one process, without Ray: rollouts or a data set, training, evaluation.

Trinity's own runner, readers, pipeline and metric functions do the work; `InlineRun` replaces
Explorer, Trainer, Synchronizer and queue. `mode: train` takes its batches from `readers.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from aflow_tune.config.accounting import stop_at_limit
from aflow_tune.config.engine import computes_in_16_bits, sampling_speed
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.tasksets import quick_tasksets
from aflow_tune.engines.trinity.memory import REPLAYED, Rehearsal
from aflow_tune.engines.trinity.readers import Experiences, read_all
from aflow_tune.engines.trinity.rollout.rollout_model import InlineModel, SamplerHost
from aflow_tune.engines.trinity.training.off_policy import BatchFiles
from aflow_tune.engines.trinity.training.run_state import (
    forget_evaluation,
    is_evaluated,
    save_taskset_state,
)
from aflow_tune.engines.trinity.training.sync_check import SyncCheck
from aflow_tune.engines.trinity.training.trainer import LocalTrainEngine
from aflow_tune.errors import BudgetReached, RunFailed
from aflow_tune.report.quantities import MISMATCH

if TYPE_CHECKING:
    from aflow_tune.engines.local.trainer import LocalTrainer

logger = logging.getLogger("trinity")


class InlineRunner(WorkflowRunner):
    def __init__(
        self, config: AflowConfig, model: ModelWrapper, auxiliary: list[ModelWrapper]
    ) -> None:
        self.name = f"{config.explorer.name}_runner_0"
        self.logger = logger
        self.config = config
        self.model_wrapper = model
        self.auxiliary_model_wrappers = auxiliary
        self.workflow_instance = None
        self.runner_id = 0
        self.runner_state: dict[str, Any] = {}
        self.concurrent_mode = "asynchronous"
        self.concurrent_run_fn = self._asynchronous_run


class InlineRollouts:
    """The sampler of the policy, the auxiliary models and the workflow runner."""

    def __init__(self, config: AflowConfig) -> None:
        self.config = config
        self._hosts: list[SamplerHost] = []

    async def prepare(self) -> None:
        explorer = self.config.explorer
        host = await self._host(explorer.rollout_model)
        self.sampler = host.sampler
        model = InlineModel(host, explorer.rollout_model)
        auxiliary = [InlineModel(await self._host(it), it) for it in explorer.auxiliary_models]
        self.runner = InlineRunner(self.config, model, auxiliary)

    async def _host(self, model_config: Any) -> SamplerHost:
        host = await asyncio.to_thread(SamplerHost.from_model_config, model_config)
        self._hosts.append(host)
        return host

    async def run_tasks(
        self, tasks: list[Task], batch_id: int | str, repeat_times: int
    ) -> list[tuple[Status, bytes]]:
        """Run every task `repeat_times` times; results in the order of the tasks, with metrics
        aggregated per task. Raises RunFailed: a task failed outside of the user's function."""
        # As many concurrent tasks as fill the sampler's batch.
        slots = asyncio.Semaphore(math.ceil(self.config.local.max_batch / max(1, repeat_times)))

        async def run(index: int, task: Task) -> tuple[Status, bytes]:
            arguments = replace(task.rollout_args, n=repeat_times)
            numbered = replace(task, batch_id=batch_id, task_id=index, rollout_args=arguments)
            started = time.time()
            async with slots:
                status, payload = await self.runner.run_task(
                    numbered, str(batch_id), repeat_times=repeat_times, collect_partial_runs=False
                )
            if not status.ok:
                raise RunFailed(f"a task of batch {batch_id} failed:\n{status.message}")
            metrics = [*status.metrics, {"time/task_execution": time.time() - started}]
            task_metrics = calculate_task_level_metrics(metrics, task.is_eval)
            return replace(status, metrics=[task_metrics]), payload

        return await asyncio.gather(*(run(index, task) for index, task in enumerate(tasks)))

    async def close(self) -> None:
        for host in self._hosts:
            await asyncio.to_thread(host.close)


class InlinePipeline(ExperiencePipeline):
    """Trinity's experience pipeline; it writes to the list `experiences` instead of a buffer."""

    def __init__(self, config: AflowConfig) -> None:
        self.logger = logger
        self.config = config
        self.input_store = None
        self.output = self
        self.auxiliary_models: dict[Any, Any] = {}
        self.experiences: list[Experience] = []

    async def prepare(self) -> None:
        configured = self.config.data_processor.experience_pipeline.operators
        self.operators = create_operators(configured, self.auxiliary_models)
        self._set_algorithm_operators(self.config.algorithm)
        for operator in self.operators:
            await operator.prepare()

    async def write(self, experiences: list[Experience]) -> None:
        self.experiences = list(experiences)


class InlineRun:
    """Train, evaluate and save in turns until the step `target`, on the data set of `reader` or on
    rollouts. Calls `phase` with a description of each activity, `stop` between steps, and `choose`
    with the policy before the first row is read."""

    def __init__(
        self,
        config: AflowConfig,
        target: int,
        phase: Callable[[str], None],
        stop: Callable[[], bool],
        reader: Experiences | BatchFiles | Rehearsal | None = None,
        choose: Callable[[LocalTrainer], None] | None = None,
    ) -> None:
        self.config, self.target, self.phase, self.stop = config, target, phase, stop
        self.reader, self.choose = reader, choose
        self.run_dir = Path(config.checkpoint_job_dir)
        self.engine = LocalTrainEngine(config)
        self.tasksets = [taskset.name for taskset in config.buffer.explorer_input.eval_tasksets]
        self.rollouts: InlineRollouts | None = None
        if reader is None or self.tasksets:
            self.rollouts = InlineRollouts(config)
        self.monitors: dict[str, Any] = {}
        self._evaluated = -1
        self._check = SyncCheck(computes_in_16_bits(config))

    async def run(self) -> int:
        """Train; returns the step reached. Raises what a step raised, except BudgetReached."""
        try:
            self.phase("loading the model")
            if self.rollouts is not None:
                await self.rollouts.prepare()
            await self.engine.prepare()
            if (choose := self.choose) is not None:
                self.phase("choosing the rows to learn from")
                await self.engine.compute(lambda: choose(self.engine.trainer))
            for role in (self.config.explorer.name, self.config.trainer.name):
                self.monitors[role] = make_monitor(self.config, role)
            # Continue in the training data where an earlier command stopped.
            path = self.run_dir / f"{self.config.explorer.name}_meta.json"
            state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if self.reader is None:
                self.pipeline = InlinePipeline(self.config)
                await self.pipeline.prepare()
                self.taskset = get_taskset_scheduler(explorer_state=state, config=self.config)
            elif position := state.get("taskset_states"):
                self.reader.load_state_dict(position[0])
            await self._loop()
            return self.engine.train_step_num
        finally:
            for monitor in self.monitors.values():
                monitor.close()
            await asyncio.to_thread(self.engine.close)
            if self.rollouts is not None:
                await self.rollouts.close()

    async def _loop(self) -> None:
        engine, rollouts, explorer = self.engine, self.rollouts, self.config.explorer
        step = engine.train_step_num
        if rollouts is not None:
            await self._sync(rollouts)
            # A resumed run may have been killed while it evaluated these weights.
            self._evaluated = step if is_evaluated(self.run_dir, step, self.tasksets) else -1
            if step % explorer.eval_interval == 0 if step else explorer.eval_on_startup:
                await self._evaluate(step)
        while step < self.target and not self.stop():
            try:
                experiences = await self._batch(step + 1)
                if experiences is None:
                    break
                step = await self._train(experiences)
                if step % explorer.eval_interval == 0:
                    await self._evaluate(step)
            except BudgetReached:
                break
            except Exception:
                # Save what was trained; if that fails too, report the first failure.
                if engine.train_step_num > 0:
                    with contextlib.suppress(Exception):
                        await engine.save_checkpoint(block_until_saved=True)
                raise
        if step == 0:
            return
        self.phase("saving")
        await engine.save_checkpoint(block_until_saved=True)
        if step >= self.target:
            await self._evaluate(step)
            save_model = self.config.trainer.save_hf_checkpoint != "never"
            await engine.save_checkpoint(block_until_saved=True, save_as_hf=save_model)

    async def _batch(self, step: int) -> list[Experience] | None:
        """The experiences of `step`, None at the end of the data. First saves the data position."""
        source = self.taskset if self.reader is None else self.reader
        try:
            batch: Any = await source.read()
        except StopAsyncIteration:
            return None
        position: Any = source.state_dict()
        save_taskset_state(self.run_dir, step, position if self.reader is None else [position])
        if self.reader is not None:
            return list(batch)
        assert self.rollouts is not None
        self.phase("rolling out")
        sampler = self.rollouts.sampler
        started, totals = time.time(), sampler.stats()
        results = await self.rollouts.run_tasks(batch, step, self.config.algorithm.repeat_times)
        metrics = await self.pipeline.process_serialized_chunks([it for _, it in results if it])
        self.taskset.feedback(metrics)
        metrics |= aggregate_metrics([status.metrics[0] for status, _ in results], prefix="rollout")
        metrics["explorer/time/wait_explore_step"] = time.time() - started
        metrics["rollout/model_version"] = sampler.version
        metrics["rollout/finished_task_count"] = float(len(results))
        metrics |= sampling_speed(totals, sampler.stats())
        self.monitors[self.config.explorer.name].log(metrics, step)
        return self.pipeline.experiences

    async def _train(self, experiences: list[Experience]) -> int:
        self.phase("training")
        started = time.time()
        metrics = await self.engine.train_step(experiences)
        metrics["time/train_step"] = time.time() - started
        if isinstance(self.reader, Rehearsal):
            old = sum(REPLAYED in experience.info for experience in experiences)
            metrics["replay/old_rows"] = float(old)
        if self.rollouts is not None:
            metrics |= await self._sync(self.rollouts)
        step = self.engine.train_step_num
        # Before the checkpoint: a run resumed from it does not repeat the step and cannot log it.
        self.monitors[self.config.trainer.name].log(metrics, step)
        interval = self.config.trainer.save_interval
        if interval > 0 and step % interval == 0:
            await self.engine.save_checkpoint()
        return step

    async def _sync(self, rollouts: InlineRollouts) -> dict[str, float]:
        """Copy the trainer's weights to the sampler, then check: raises as `SyncCheck.compare`."""
        step, started = self.engine.train_step_num, time.time()
        if step:
            weights = await self.engine.compute(self.engine.trainer.weights)
            await asyncio.to_thread(rollouts.sampler.update_weights, weights, step)
        seconds = time.time() - started
        tokens, trainer = await self.engine.probe()
        sampler = await asyncio.to_thread(
            rollouts.sampler.token_logprobs, tokens, self.config.model.temperature
        )
        mismatch = self._check.compare(step, sampler, trainer)
        return {"time/sync_weight": seconds, MISMATCH: mismatch}

    async def _evaluate(self, step: int) -> None:
        """Run the held-out task sets with the current weights, unless that was done already.
        Raises BudgetReached: the evaluation is incomplete and not logged."""
        if self.rollouts is None or self._evaluated >= step:
            return
        metrics: dict[str, float] = {}
        started = time.time()
        for taskset in quick_tasksets(self.config, step):
            self.phase(f"evaluating on {taskset.name}")
            forget_evaluation(taskset, step)
            tasks, batch_id = await read_all(taskset), f"{step}/{taskset.name}"
            results = await self.rollouts.run_tasks(tasks, batch_id, taskset.repeat_times)
            found, prefix = [status.metrics[0] for status, _ in results], f"eval/{taskset.name}"
            detailed = self.config.monitor.detailed_stats
            metrics |= aggregate_eval_metrics(found, prefix=prefix, detailed_stats=detailed)
            metrics[f"{prefix}/finished_task_count"] = float(len(results))
            stop_at_limit(self.config)
        if metrics:
            metrics["time/eval"] = time.time() - started
            self.monitors[self.config.explorer.name].log(metrics, step)
        self._evaluated = step


def make_monitor(config: AflowConfig, role: str) -> Any:
    return MONITOR.get(config.monitor.monitor_type)(
        project=config.project, group=config.group, name=config.name, role=role, config=config
    )
