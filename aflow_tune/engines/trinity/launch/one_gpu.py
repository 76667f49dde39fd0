"""Trinity's `mode: colocate` (sampler and trainer on the only GPU), repaired from outside.

In Trinity 0.6.0 it never gets past its start (its issue 602). The trainer is made first, and
verl reserves the GPU for it in a placement group. The explorer then asks Ray for a placement
group with a GPU of its own, since the validator insists on `gpu_per_engine: 1`, and waits for it
without a limit. Setting `gpu_per_engine` to 0 afterwards is no cure: the explorer takes the size
of the group that receives weights from the same number, and a group of 0 cannot be made.

So the number stays 1, and only what the sampler asks of Ray changes: `OneGpuAllocator` reserves a
processor of the node that has the GPU, and no GPU. A process that reserves none sees none, so it is
told which to use; that is asked of Ray before the trainer takes it, because the first GPU of the
machine need not be the one that Ray was given.

Both answers hold only where the cluster has a single GPU: of several, verl takes whichever is free
when it asks, on any node. What the cluster has decides and not what is free at the moment, since
others may give theirs back in between. So another cluster is refused.

What it leaves to whom: memory is divided by `gpu_memory_utilization`, which Trinity lowers to
0.25 in this mode; what each side takes of it is theirs.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import ray
from trinity.common.config import Config, InferenceModelConfig
from trinity.common.models.allocator import Allocator, BundleResult
from trinity.common.models.model import ModelWrapper

from aflow_tune.engines.trinity.rollout.vllm_explorer import VllmExplorer
from aflow_tune.errors import RunFailed

MODE = "colocate"
CPUS = 5
"""Three that verl reserves beside a GPU, one for the sampler, one for all other actors."""

_ON_NODE = 0.001
"""Of the 1 that every node has of a resource with its own name: only to be placed there."""
_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.2


class OneGpuAllocator(Allocator):
    """Trinity's, for a sampler that uses the GPU which the trainer reserved."""

    def allocate_bundles(self) -> BundleResult:
        """As Trinity's, without GPUs and on the node that has one. Ray must be running."""
        result = super().allocate_bundles()
        node = gpu_node()
        for bundle in result.bundles:
            bundle.pop("GPU")
            bundle[node] = _ON_NODE
        return result

    async def create_engine(
        self, config: InferenceModelConfig, role: str, engine_id: int
    ) -> ModelWrapper:
        """As Trinity's; the actor reserves no GPU."""
        shared = dataclasses.replace(config, gpu_per_engine=0)
        return await super().create_engine(shared, role, engine_id)


class OneGpuExplorer(VllmExplorer):
    """With `OneGpuAllocator`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model_allocator = OneGpuAllocator(config.explorer)


def share_the_gpu(config: Config) -> None:
    """Tell the sampler which GPU the trainer will get. Ray must be running.

    Raises:
        RunFailed: the cluster has too few processors, or not one GPU, or that is not free.
    """
    resources = ray.cluster_resources()
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    if gpus != 1:
        raise RunFailed(
            f"`mode: colocate` needs a Ray cluster with one GPU, and this one has {gpus:g}: "
            "sampler and trainer could be given different ones. Use `mode: both` on two or more, "
            "let the run see one (`physical_gpus: [0]`, or CUDA_VISIBLE_DEVICES=0), or start a "
            "Ray with one and name its address in cluster.ray_address: "
            f"`CUDA_VISIBLE_DEVICES=0 ray start --head --num-gpus=1 --num-cpus={CPUS}`"
        )
    if cpus < CPUS:
        raise RunFailed(
            f"`mode: colocate` reserves {CPUS} processors in Ray, and this cluster has "
            f"{cpus:g}: it would wait for ever. Start Ray with --num-cpus={CPUS} or more; it "
            "counts processors and does not bind to them."
        )
    config.explorer.rollout_model.cuda_visible_devices = _free_gpu()


def gpu_node() -> str:
    """The resource by which Ray names the node that has the GPU.

    Raises:
        RunFailed: that node has left the cluster.
    """
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("GPU"):
            return f"node:{node['NodeManagerAddress']}"
    raise RunFailed("no node of the Ray cluster has a GPU any more (`ray status` shows them)")


def _free_gpu() -> str:
    """The device that Ray hands out, by the name by which CUDA finds it; free again after."""
    reference = ray.remote(num_gpus=1, num_cpus=0, max_retries=0)(_visible_devices).remote()
    ready, _ = ray.wait([reference], timeout=_WAIT_SECONDS)
    if not ready:
        ray.cancel(reference, force=True)
        raise RunFailed(
            f"no GPU of the Ray cluster became free within {_WAIT_SECONDS:.0f} s: another run "
            "holds it (`ray status` shows what is in use)"
        )
    device: str = ray.get(reference)
    deadline = time.monotonic() + _WAIT_SECONDS
    # verl looks at what is available once, and gives up where the GPU is not back yet.
    while ray.available_resources().get("GPU", 0) < 1 and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return device


def _visible_devices() -> Any:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")
