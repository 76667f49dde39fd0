"""Trinity's explorer actor over vLLM, with what 0.6.0 leaves out.

- **Its samplers are `VllmSampler`s**, whose rollouts come from the trained adapter.
- **An error ends the run.** Upstream logs it, stops exploring, and leaves the trainer waiting.
- **An evaluation belongs to the weights of its step**: it follows the sync, where upstream's comes
  before it, and the last step is always evaluated.
- **A killed run resumes** from the tasks that follow the trainer's checkpoint.
- **`mode: colocate`** (sampler and trainer on the only GPU) waits for ever there (Trinity's issue
  602): verl reserves the GPU, and the explorer asks for one of its own. Here `OneGpuAllocator`
  reserves a processor of the node that has the GPU, and no GPU. A process that reserves none sees
  none, so it is told which to use, which is certain only if the cluster has a single GPU. Memory is
  divided by `gpu_memory_utilization`, which Trinity lowers to 0.25 in this mode.
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

_LAST_SECONDS = 30.0
_POLL_SECONDS = 0.5

ONE_GPU_MODE = "colocate"
CPUS = 5
"""Three that verl reserves beside a GPU, one for the sampler, one for all other actors."""

_FREE_SECONDS = 60.0
_FREE_POLL_SECONDS = 0.2


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
    has too few processors, or not one GPU, or that is not free."""
    resources = ray.cluster_resources()
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    if gpus != 1:
        raise RunFailed(
            f"`mode: colocate` needs a Ray cluster with one GPU, and this one has {gpus:g}. Use "
            "`mode: both` on two or more, let the run see one (`physical_gpus: [0]`), or name a "
            "Ray with one in cluster.ray_address: "
            f"`CUDA_VISIBLE_DEVICES=0 ray start --head --num-gpus=1 --num-cpus={CPUS}`"
        )
    if cpus < CPUS:
        raise RunFailed(
            f"`mode: colocate` reserves {CPUS} processors in Ray, and this cluster has "
            f"{cpus:g}: it would wait for ever. Start Ray with --num-cpus={CPUS} or more; it "
            "counts processors and does not bind to them."
        )
    visible = ray.remote(num_gpus=1, num_cpus=0, max_retries=0)(
        lambda: os.environ.get("CUDA_VISIBLE_DEVICES", "")
    )
    reference = visible.remote()
    ready, _ = ray.wait([reference], timeout=_FREE_SECONDS)
    if not ready:
        ray.cancel(reference, force=True)
        raise RunFailed(
            f"no GPU of the Ray cluster became free within {_FREE_SECONDS:.0f} s: another run "
            "holds it (`ray status` shows what is in use)"
        )
    config.explorer.rollout_model.cuda_visible_devices = ray.get(reference)
    deadline = time.monotonic() + _FREE_SECONDS
    # verl looks at what is available once, and gives up if the GPU is not back yet.
    while ray.available_resources().get("GPU", 0) < 1 and time.monotonic() < deadline:
        time.sleep(_FREE_POLL_SECONDS)
