"""Trinity's explorer, which asks its samplers after every sync whether they have the weights.

The base of both explorers of ours; `training/sync_check.py` says what is compared and why.
"""

from __future__ import annotations

import asyncio
from typing import Any

from trinity.common.config import Config
from trinity.explorer.explorer import Explorer

from aflow_tune.engines.trinity.training.sync_check import (
    MISMATCH,
    SyncCheck,
    is_checked,
    published,
)
from aflow_tune.errors import RunFailed


class CheckedExplorer(Explorer):
    """Trinity's explorer with the sync check.

    Args:
        sixteen_bit: whether sampler or trainer compute in bf16 or fp16.
    """

    def __init__(self, config: Config, sixteen_bit: bool) -> None:
        super().__init__(config)
        self.model_version: int = -1
        self._checks = [
            SyncCheck(sixteen_bit) for _ in range(config.explorer.rollout_model.engine_num)
        ]
        self._checked = -1
        self._failure: Exception | None = None

    async def explore_step(self) -> bool:
        """As upstream's. Raises what the watcher of a fully asynchronous run only logged."""
        if self._failure is not None:
            raise self._failure
        went_on: bool = await super().explore_step()
        return went_on

    async def _pull_latest_weights(self) -> None:
        await super()._pull_latest_weights()
        await self._check_sync()

    async def _nccl_weights_update(self) -> None:
        await super()._nccl_weights_update()
        await self._check_sync()

    async def _check_sync(self) -> None:
        """Compare what samplers and trainer say of the version that was just synced, once.

        Raises:
            RunFailed: as `SyncCheck.compare`; the trainer or a sampler says nothing.
        """
        version = self.model_version
        if version <= self._checked or not is_checked(self.config):
            return
        self._checked = version
        try:
            mismatch = await self._mismatch(version)
        except Exception as error:
            self._failure = error
            raise
        if self.monitor is not None:
            self.monitor.log({MISMATCH: mismatch}, step=version)

    async def _mismatch(self, version: int) -> float:
        timeout = float(self.config.synchronizer.sync_timeout)
        said = await asyncio.to_thread(published, self.config.ray_namespace, version, timeout)
        if said is None:
            raise RunFailed(
                f"the trainer did not say within {timeout:.0f} s (synchronizer.sync_timeout) how "
                f"its weights of version {version} score the fixed text of the sync check"
            )
        tokens, trainer = said
        actors: list[Any] = [wrapper.model for wrapper in self.models]
        scores = [
            actor.served_logprobs.remote(tokens, self.config.model.temperature) for actor in actors
        ]
        return max(
            check.compare(version, sampler, trainer)
            for check, sampler in zip(self._checks, await asyncio.gather(*scores), strict=True)
        )
