"""Trinity's Trainer on the local engine, with a loop that ends in an error when a step fails.

Every process that gets a handle of an actor imports its class, so what only the trainer needs
(`train_engine.py`, and with it PEFT and the models) is imported where it is made.
"""

from __future__ import annotations

import asyncio

from trinity.common.constants import RunningStatus
from trinity.common.experience import Experience
from trinity.trainer import trainer as trinity_trainer
from trinity.trainer.trainer import Trainer

from aflow_tune.config.load import AflowConfig
from aflow_tune.engines.trinity.training.sync_check import forget, publish


class LocalTrainActor(Trainer):
    """Trinity's Trainer on the local engine."""

    def __init__(self, config: AflowConfig) -> None:
        from aflow_tune.engines.trinity.training.train_engine import LocalTrainEngine

        # Trinity's constructor asks a function of its own module for the engine. The swap
        # lasts for this call and touches this actor's process only.
        original = trinity_trainer.get_trainer_wrapper
        trinity_trainer.get_trainer_wrapper = LocalTrainEngine
        try:
            super().__init__(config)
        finally:
            trinity_trainer.get_trainer_wrapper = original
        self._stop_requested = False

    async def prepare(self) -> None:
        await super().prepare()
        await self._publish()

    async def train_step(self, exps: list[Experience]) -> dict[str, float]:
        metrics: dict[str, float] = await super().train_step(exps)
        await self._publish()
        return metrics

    async def shutdown(self) -> None:
        await super().shutdown()
        forget(self.config.ray_namespace)

    async def _publish(self) -> None:
        """Say what the weights of this step score the text of the sync check."""
        publish(self.config.ray_namespace, self.train_step_num, *await self.engine.probe())

    def request_stop(self) -> None:
        """Finish the step under way, save, and end `train()`."""
        self._stop_requested = True

    async def train(self) -> str:
        """Train until the target, until the explorer has no more, or until asked to stop.

        Always leaves a checkpoint of the last finished step. Raises what a step raised.
        """
        try:
            while self.train_step_num < self.total_steps and not self._stop_requested:
                experiences = await self._next_batch()
                if experiences is None:
                    break
                await self._step(*experiences)
        finally:
            await self.synchronizer.set_trainer_status.remote(RunningStatus.STOPPED)
            if self.train_step_num > 0:
                await self.save_checkpoint(block_until_saved=True)
        return self.config.trainer.name

    async def finish(self) -> int:
        """Export the trained model; returns the step that was reached."""
        if self.train_step_num > 0 and self.config.trainer.save_hf_checkpoint != "never":
            await self.save_checkpoint(block_until_saved=True, save_as_hf=True)
        return self.train_step_num

    async def _next_batch(self) -> tuple[list[Experience], dict[str, float]] | None:
        """Wait for a batch, or None when there is none or a stop was asked for."""
        sampling = asyncio.ensure_future(self._sample_data())
        while not sampling.done():
            if self._stop_requested:
                sampling.cancel()
                return None
            if await self.need_sync():
                await self.sync_weight()
            await asyncio.wait([sampling], timeout=0.5)
        try:
            experiences, metrics, _ = await sampling
        except StopAsyncIteration:
            return None
        return experiences, metrics

    async def _step(self, experiences: list[Experience], metrics: dict[str, float]) -> None:
        metrics.update(await self.train_step(experiences))
        if await self.need_sync() or self.train_step_num >= self.total_steps:
            metrics.update(await self.sync_weight())
        # Before the checkpoint: a resumed run does not do the step again, and cannot log it.
        self.monitor.log(metrics, self.train_step_num)
        if self.need_save():
            self.monitor.log(await self.save_checkpoint(), self.train_step_num)
