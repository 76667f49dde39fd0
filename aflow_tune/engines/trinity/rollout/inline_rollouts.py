"""Workflows run in this process on the local sampler, without Ray: rollouts and evaluations.

Trinity's own runner runs the workflows, its readers read the task sets, its metric functions
aggregate; only the model wrapper is ours, which asks the sampler directly for its version. Used
by every run in one process, whatever it trains on (`inline.py`, `data_training.py`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity.common.models.model import ModelWrapper
from trinity.common.workflows import Task
from trinity.explorer.workflow_runner import Status, WorkflowRunner
from trinity.utils.metrics import aggregate_eval_metrics, calculate_task_level_metrics
from trinity.utils.monitor import MONITOR

from aflow_tune.config.accounting import stop_at_limit
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.mixes import quick_tasksets
from aflow_tune.engines.trinity.readers import read_all
from aflow_tune.engines.trinity.rollout.sampler_host import InlineModel, SamplerHost
from aflow_tune.engines.trinity.training.run_state import forget_evaluation, is_evaluated
from aflow_tune.engines.trinity.training.train_engine import LocalTrainEngine
from aflow_tune.errors import RunFailed


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


class InlineRollouts:
    """A sampler, the auxiliary models and a runner; `prepare()` loads them, `close()` frees them.

    Args:
        config: a prepared configuration.
        phase: told in words what is going on.
    """

    def __init__(self, config: AflowConfig, phase: Callable[[str], None], logger: Any) -> None:
        self.config = config
        self.phase = phase
        self.logger = logger
        self.run_dir = Path(config.checkpoint_job_dir)
        self._hosts: list[SamplerHost] = []

    async def prepare(self) -> None:
        config = self.config
        model_config = config.explorer.rollout_model
        host = await self._host(model_config)
        self.sampler = host.sampler
        auxiliary = [
            InlineModel(await self._host(auxiliary_config), auxiliary_config)
            for auxiliary_config in config.explorer.auxiliary_models
        ]
        self.runner = InlineRunner(config, InlineModel(host, model_config), auxiliary, self.logger)

    async def _host(self, model_config: Any) -> SamplerHost:
        host = await asyncio.to_thread(SamplerHost.from_model_config, model_config)
        self._hosts.append(host)
        return host

    async def sync(self, engine: LocalTrainEngine) -> None:
        """Give the trainer's weights to the sampler."""
        weights = await asyncio.to_thread(engine.trainer.weights)
        await asyncio.to_thread(self.sampler.update_weights, weights, engine.train_step_num)

    def is_due(self, step: int) -> bool:
        """Whether the weights of `step` are to be evaluated before the next step."""
        explorer = self.config.explorer
        return step % explorer.eval_interval == 0 if step else explorer.eval_on_startup

    def is_evaluated(self, step: int) -> bool:
        """Whether the weights of `step` were evaluated to the end on every held-out task set.

        The run that is resumed may have been killed while it evaluated them.
        """
        tasksets = [taskset.name for taskset in self.config.buffer.explorer_input.eval_tasksets]
        return is_evaluated(self.run_dir, step, tasksets)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Run the held-out task sets with the current weights; the metrics to log for `step`.

        Raises:
            BudgetReached: a limit was reached; the evaluation does not count.
        """
        metrics: dict[str, float] = {}
        started = time.time()
        for taskset in quick_tasksets(self.config, step):
            self.phase(f"evaluating on {taskset.name}")
            forget_evaluation(taskset, step)
            tasks = await read_all(taskset)
            batch_id = f"{step}/{taskset.name}"
            results = await self.run_tasks(tasks, batch_id, taskset.repeat_times)
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
        return metrics

    async def run_tasks(
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

    async def close(self) -> None:
        """Stop every sampler with its server."""
        for host in self._hosts:
            await asyncio.to_thread(host.close)


def make_monitor(config: AflowConfig, role: str) -> Any:
    """The configured monitor of one role."""
    return MONITOR.get(config.monitor.monitor_type)(
        project=config.project, group=config.group, name=config.name, role=role, config=config
    )
