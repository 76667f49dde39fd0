"""Trinity's explorer actor over vLLM, with what 0.6.0 leaves out.

- **Its samplers are `VllmSampler`s**, whose rollouts come from the trained adapter.
- **An error ends the run.** Upstream logs it, stops exploring, and leaves the trainer waiting.
- **The sync check** of `CheckedExplorer`.
"""

from __future__ import annotations

from typing import Any

from trinity.common.config import Config

from aflow_tune.engines.trinity.rollout.checked_explorer import CheckedExplorer


class VllmExplorer(CheckedExplorer):
    """Trinity's; see the module's docstring for what it adds."""

    def __init__(self, config: Config) -> None:
        from trinity.common.models import vllm_model

        from aflow_tune.engines.trinity.rollout.vllm_sampler import VllmSampler

        # Trinity's allocator asks that module for the class of its actors, in this process.
        vllm_model.vLLMRolloutModel = VllmSampler
        super().__init__(config, _computes_in_16_bits(config))

    async def explore(self) -> str:
        """As upstream's; raises what a step raised."""
        while await self.explore_step():
            if self.need_eval():
                await self.eval()
            if await self.need_sync():
                await self.sync_weight()
        name: str = self.config.explorer.name
        return name


def _computes_in_16_bits(config: Config) -> bool:
    """Whether sampler or trainer do; verl's autocast does, unless told otherwise."""
    if config.explorer.rollout_model.dtype != "float32":
        return True
    settings: Any = config.trainer.trainer_config or {}
    settings = settings.get("actor_rollout_ref") or settings
    for name in ("actor", "fsdp_config", "mixed_precision"):
        settings = settings.get(name) or {}
    return settings.get("param_dtype", "bf16") not in ("fp32", "float32")
