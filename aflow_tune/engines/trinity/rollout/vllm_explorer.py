"""Trinity's explorer actor over vLLM, with what 0.6.0 leaves out.

- **Its samplers are `VllmSampler`s**, whose rollouts come from the trained adapter.
- **An error ends the run.** Upstream logs it, stops exploring, and leaves the trainer waiting.
- **An evaluation belongs to the weights of its step**: it follows the sync, where upstream's comes
  before it, and the last step is always evaluated.
- **A killed run resumes** from the tasks that follow the trainer's checkpoint.
- **The sync check** of `CheckedExplorer`.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from trinity.common.config import Config

from aflow_tune.engines.trinity.rollout.checked_explorer import CheckedExplorer
from aflow_tune.engines.trinity.training.run_state import save_taskset_state

_LAST_SECONDS = 30.0
_POLL_SECONDS = 0.5


class VllmExplorer(CheckedExplorer):
    """Trinity's; see the module's docstring for what it adds."""

    def __init__(self, config: Config) -> None:
        from trinity.common.models import vllm_model

        from aflow_tune.engines.trinity.rollout.vllm_sampler import VllmSampler

        # Trinity's allocator asks that module for the class of its actors, in this process.
        vllm_model.vLLMRolloutModel = VllmSampler
        super().__init__(config, _computes_in_16_bits(config))

    async def explore(self) -> str:
        """Roll out, sync, evaluate, until the tasks are used up. Raises what a step raised."""
        while await self.explore_step():
            if await self.need_sync():
                await self.sync_weight()
            if self.need_eval():
                await self.finish_current_steps()
                await self.eval()
                await self._finish_eval_step(step=self.explore_step_num)
        name: str = self.config.explorer.name
        return name

    async def explore_step(self) -> bool:
        went_on = await super().explore_step()
        if went_on:
            state, folder = self.taskset.state_dict(), Path(self.config.checkpoint_job_dir)
            save_taskset_state(folder, self.explore_step_num, state)
        return went_on

    async def _pull_latest_weights(self) -> None:
        """As upstream's, and the last ones too: that the trainer has stopped ends the wait for
        them, and is told a moment before its last checkpoint is."""
        before, deadline = self.model_version, time.monotonic() + _LAST_SECONDS
        await super()._pull_latest_weights()
        while self._is_last() and self.model_version == before and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
            if await self.synchronizer.get_latest_model_version.remote() > before:
                await super()._pull_latest_weights()

    def need_eval(self) -> bool:
        return self._is_last() or super().need_eval()

    def _is_last(self) -> bool:
        last: bool = self.explore_step_num == self.config.trainer.total_steps
        return last


def _computes_in_16_bits(config: Config) -> bool:
    """Whether sampler or trainer do. verl's autocast does unless told otherwise, and it sends full
    weights in bf16 whatever it is told."""
    if config.explorer.rollout_model.dtype != "float32" or config.model.lora_configs is None:
        return True
    settings: Any = config.trainer.trainer_config or {}
    settings = settings.get("actor_rollout_ref") or settings
    for name in ("actor", "fsdp_config", "mixed_precision"):
        settings = settings.get(name) or {}
    return settings.get("param_dtype", "bf16") not in ("fp32", "float32")
