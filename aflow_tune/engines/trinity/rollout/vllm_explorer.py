"""Trinity's explorer actor over vLLM, with what 0.6.0 leaves out.

- **Its samplers are `VllmSampler`s**, whose rollouts come from the trained adapter.
- **An error ends the run.** Upstream logs it, stops exploring, and leaves the trainer waiting.
- **An evaluation belongs to the weights of its step**: it follows the sync, where upstream's comes
  before it, and the last step is always evaluated.
- **A killed run resumes** from the tasks that follow the trainer's checkpoint.
- **`mode: colocate`** (sampler and trainer on the only GPU) waits for ever there (Trinity's issue
  602): verl reserves the GPU, and the explorer asks for one of its own. `OneGpuAllocator` reserves
  a processor of its node and no GPU, and the sampler is told which GPU to use, which is certain
  only if the cluster has a single one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import ray
from trinity.common.config import Config, InferenceModelConfig
from trinity.common.models.allocator import Allocator, BundleResult
from trinity.common.models.model import ModelWrapper

from aflow_tune.engines.trinity.rollout.explorer import CheckedExplorer
from aflow_tune.engines.trinity.training.run_state import save_taskset_state
from aflow_tune.errors import RunFailed

ONE_GPU_MODE = "colocate"
CPUS = 5
"""Three that verl reserves beside a GPU, one for the sampler, one for all other actors."""
_LAST_SECONDS, _FREE_SECONDS = 30.0, 60.0
_POLL_SECONDS = 0.5


class VllmExplorer(CheckedExplorer):
    """See the module's docstring for what it adds."""

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
        return str(self.config.explorer.name)

    async def explore_step(self) -> bool:
        went_on = await super().explore_step()
        if went_on:
            state, folder = self.taskset.state_dict(), Path(self.config.checkpoint_job_dir)
            save_taskset_state(folder, self.explore_step_num, state)
        return went_on

    async def _pull_latest_weights(self) -> None:
        """As upstream's, and the last ones too: the trainer says that it has stopped, which ends
        upstream's wait, a moment before its last checkpoint."""
        before, deadline = self.model_version, time.monotonic() + _LAST_SECONDS
        await super()._pull_latest_weights()
        while self._is_last() and self.model_version == before and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
            if await self.synchronizer.get_latest_model_version.remote() > before:
                await super()._pull_latest_weights()

    def need_eval(self) -> bool:
        return self._is_last() or super().need_eval()

    def _is_last(self) -> bool:
        return bool(self.explore_step_num == self.config.trainer.total_steps)


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


class OneGpuAllocator(Allocator):
    """Trinity's, for a sampler on the GPU which the trainer reserved. Ray must be running."""

    def allocate_bundles(self) -> BundleResult:
        result = super().allocate_bundles()
        nodes = [it for it in ray.nodes() if it["Alive"] and it["Resources"].get("GPU")]
        if not nodes:
            raise RunFailed("no node of the Ray cluster has a GPU any more (see `ray status`)")
        for bundle in result.bundles:
            bundle.pop("GPU")
            # Every node has 1 of a resource with its own name: only to be placed there.
            bundle[f"node:{nodes[0]['NodeManagerAddress']}"] = 0.001
        return result

    async def create_engine(
        self, config: InferenceModelConfig, role: str, engine_id: int
    ) -> ModelWrapper:
        shared = dataclasses.replace(config, gpu_per_engine=0)
        return await super().create_engine(shared, role, engine_id)


class OneGpuExplorer(VllmExplorer):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model_allocator = OneGpuAllocator(config.explorer)


def share_the_gpu(config: Config) -> None:
    """Tell the sampler which GPU the trainer will get; Ray must be running. RunFailed: the cluster
    has too few processors, or not one GPU, or it is not free."""
    resources = ray.cluster_resources()
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    if gpus != 1 or cpus < CPUS:
        raise RunFailed(
            f"`mode: colocate` needs a Ray cluster with one GPU and {CPUS} processors, not "
            f"{gpus:g} and {cpus:g}. Use `mode: both` on two GPUs, let the run see one "
            "(`physical_gpus: [0]`), or name in cluster.ray_address what this starts: "
            f"`CUDA_VISIBLE_DEVICES=0 ray start --head --num-gpus=1 --num-cpus={CPUS}`"
        )
    on_gpu = ray.remote(num_gpus=1, num_cpus=0, max_retries=0)
    reference = on_gpu(lambda: os.environ.get("CUDA_VISIBLE_DEVICES", "")).remote()
    if not ray.wait([reference], timeout=_FREE_SECONDS)[0]:
        ray.cancel(reference, force=True)
        held = f"the GPU of the Ray cluster is in use after {_FREE_SECONDS:.0f} s"
        raise RunFailed(f"{held}: another run holds it (see `ray status`)")
    config.explorer.rollout_model.cuda_visible_devices = ray.get(reference)
    deadline = time.monotonic() + _FREE_SECONDS
    # verl looks at what is available once, and gives up if the GPU is not back yet.
    while ray.available_resources().get("GPU", 0) < 1 and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
