"""The whole run in one process, without Ray.

Trinity's own parts do the same work as in the split: its runner runs the workflows, its task
sets are read by its readers, its pipeline computes advantages with its registered functions,
its metric functions aggregate. Only what needs actors is replaced: the pipeline writes to a
list, and `InlineLoop` takes the place of Explorer, Trainer, Synchronizer and queue. What it
trains on is a subclass's matter: rollouts here, a data set in `data_training.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trinity.buffer.operators.experience_operator import create_operators
from trinity.buffer.pipelines.experience_pipeline import ExperiencePipeline
from trinity.buffer.task_scheduler import get_taskset_scheduler
from trinity.common.experience import Experience
from trinity.utils.metrics import aggregate_metrics

from aflow_tune.config.engine import computes_in_16_bits, sampling_speed
from aflow_tune.config.load import AflowConfig
from aflow_tune.engines.trinity.rollout.inline_rollouts import InlineRollouts, make_monitor
from aflow_tune.engines.trinity.training.run_state import save_taskset_state
from aflow_tune.engines.trinity.training.sync_check import MISMATCH, SyncCheck
from aflow_tune.engines.trinity.training.train_engine import LocalTrainEngine
from aflow_tune.errors import BudgetReached


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


class InlineLoop(ABC):
    """Train, evaluate and save in turns until the target step.

    Args:
        config: a prepared configuration.
        target: the step to reach.
        phase: told in words what is going on.
        stop: asked between steps whether to stop.
        rolls_out: whether there is a workflow to run, for training or for evaluation.
    """

    def __init__(
        self,
        config: AflowConfig,
        target: int,
        phase: Callable[[str], None],
        stop: Callable[[], bool],
        logger: Any,
        *,
        rolls_out: bool = True,
    ) -> None:
        self.config = config
        self.target = target
        self.phase = phase
        self.stop = stop
        self.logger = logger
        self.run_dir = Path(config.checkpoint_job_dir)
        self.engine = LocalTrainEngine(config)
        self.rollouts = InlineRollouts(config, phase, logger) if rolls_out else None
        self.monitors: dict[str, Any] = {}
        self._evaluated = -1
        self._check = SyncCheck(computes_in_16_bits(config))

    async def run(self) -> int:
        """Train; returns the step reached. Raises what a step raised."""
        try:
            self.phase("loading the model")
            if self.rollouts is not None:
                await self.rollouts.prepare()
            await self.engine.prepare()
            for role in (self.config.explorer.name, self.config.trainer.name):
                self.monitors[role] = make_monitor(self.config, role)
            await self._open(_explorer_state(self.run_dir, self.config.explorer.name))
            await self._loop()
            return self.engine.train_step_num
        finally:
            await self._close()

    @abstractmethod
    async def _open(self, state: dict[str, Any]) -> None:
        """Open what is trained on, at the position that the explorer's state tells."""

    @abstractmethod
    async def _batch(self, step: int) -> list[Experience] | None:
        """The experiences of `step`; None when there are no more. Saves the position first."""

    async def _loop(self) -> None:
        engine, rollouts = self.engine, self.rollouts
        step = engine.train_step_num
        if rollouts is not None:
            if step:
                await rollouts.sync(engine)
            await self._check_sync()
        self._evaluated = step if rollouts is None or rollouts.is_evaluated(step) else -1
        if rollouts is not None and rollouts.is_due(step):
            await self._evaluate(step)
        while step < self.target and not self.stop():
            try:
                experiences = await self._batch(step + 1)
                if experiences is None:
                    break
                step = await self._train(experiences)
                if step % self.config.explorer.eval_interval == 0:
                    await self._evaluate(step)
            except BudgetReached:
                break
            except Exception:
                # What was learned since the last save need not be learned again. If this fails
                # as well, the first failure is the one to tell.
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

    async def _train(self, experiences: list[Experience]) -> int:
        self.phase("training")
        started = time.time()
        metrics = await self.engine.train_step(experiences)
        metrics["time/train_step"] = time.time() - started
        if self.rollouts is not None:
            started = time.time()
            await self.rollouts.sync(self.engine)
            metrics["time/sync_weight"] = time.time() - started
            metrics[MISMATCH] = await self._check_sync()
        step = self.engine.train_step_num
        # Before the checkpoint: a resumed run does not do the step again, and cannot log it.
        self.monitors[self.config.trainer.name].log(metrics, step)
        interval = self.config.trainer.save_interval
        if interval > 0 and step % interval == 0:
            await self.engine.save_checkpoint()
        return step

    async def _check_sync(self) -> float:
        """How far the sampler is from the trainer's weights; raises as `SyncCheck.compare`."""
        assert self.rollouts is not None
        tokens, trainer = await self.engine.probe()
        sampler = await asyncio.to_thread(
            self.rollouts.sampler.token_logprobs, tokens, self.config.model.temperature
        )
        return self._check.compare(self.engine.train_step_num, sampler, trainer)

    async def _evaluate(self, step: int) -> None:
        """Evaluate the current weights, unless that was done already."""
        if self.rollouts is None or self._evaluated >= step:
            return
        metrics = await self.rollouts.evaluate(step)
        if metrics:
            self.monitors[self.config.explorer.name].log(metrics, step)
        self._evaluated = step

    async def _close(self) -> None:
        for monitor in self.monitors.values():
            monitor.close()
        await asyncio.to_thread(self.engine.close)
        if self.rollouts is not None:
            await self.rollouts.close()


class InlineRun(InlineLoop):
    """Trains on rollouts of the workflow function."""

    rollouts: InlineRollouts

    async def _open(self, state: dict[str, Any]) -> None:
        self.pipeline = InlinePipeline(self.config, self.logger)
        await self.pipeline.prepare()
        self.taskset = get_taskset_scheduler(explorer_state=state, config=self.config)

    async def _batch(self, step: int) -> list[Experience] | None:
        self.phase("rolling out")
        try:
            tasks = await self.taskset.read()
        except StopAsyncIteration:
            return None
        save_taskset_state(self.run_dir, step, self.taskset.state_dict())
        sampler = self.rollouts.sampler
        started, totals = time.time(), sampler.stats()
        results = await self.rollouts.run_tasks(tasks, step, self.config.algorithm.repeat_times)
        payloads = [payload for _, payload in results if payload]
        metrics = await self.pipeline.process_serialized_chunks(payloads)
        self.taskset.feedback(metrics)
        metrics.update(
            aggregate_metrics([status.metrics[0] for status, _ in results], prefix="rollout")
        )
        metrics["explorer/time/wait_explore_step"] = time.time() - started
        metrics["rollout/model_version"] = sampler.version
        metrics["rollout/finished_task_count"] = float(len(results))
        metrics.update(sampling_speed(totals, sampler.stats()))
        self.monitors[self.config.explorer.name].log(metrics, step)
        return self.pipeline.output.experiences


def _explorer_state(run_dir: Path, explorer_name: str) -> dict[str, Any]:
    path = run_dir / f"{explorer_name}_meta.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
