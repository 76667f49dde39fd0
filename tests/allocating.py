"""Reserves in a Ray of logical GPUs what a recipe reserves; prints one JSON object a recipe.

Run by test_cluster_allocation.py in a process of its own: Ray keeps settings of its process. First
a node of one GPU, on which the colocated recipes run; then two of eight join it. None of these GPUs
is there; what a recipe does not have is held by somebody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.engines.trinity.rollout.explorer import ONE_GPU_MODE as MODE
from aflow_tune.engines.trinity.rollout.explorer import OneGpuAllocator, share_the_gpu
from aflow_tune.errors import RunFailed

# isort: split
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from trinity.common.models.allocator import Allocator
from verl.single_controller.ray.base import ResourcePoolManager

ONE = {"num_cpus": 40, "num_gpus": 1}
NODE = {"num_cpus": 40, "num_gpus": 8}
SECONDS = 60.0
HANG_SECONDS = 5.0


def main(paths: list[str]) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**ONE, "resources": {"alone": 1}, "include_dashboard": False},
    )
    ray.init(address=cluster.address, namespace="recipes", log_to_driver=False)
    try:
        configs = {}
        for path in paths:  # by Trinity's own validators
            config = load_config(path, ["cluster.ray_address=10.0.0.1:6379"])
            prepare(config, Purpose.CHECK)
            configs[Path(path).stem] = config
        colocated = {name: config for name, config in configs.items() if config.mode == MODE}
        for name, config in colocated.items():
            show(name, reserved(config))
        cluster.add_node(**NODE, resources={"first": 1})
        cluster.add_node(**NODE, resources={"second": 1})
        wait_for_gpus(all_gpus())
        for name, config in colocated.items():
            try:
                share_the_gpu(config)
            except RunFailed as error:
                show(f"{name} beside others", {"refusal": str(error)})
        for name in configs.keys() - colocated.keys():
            show(name, reserved(configs[name]))
    finally:
        ray.shutdown()
        cluster.shutdown()


def show(name: str, found: dict[str, Any]) -> None:
    print(json.dumps({"recipe": name, **found}), flush=True)


def reserved(config: AflowConfig) -> dict[str, Any]:
    held = others(config)
    of_recipe = config.cluster.node_num * config.cluster.gpu_per_node
    found: dict[str, Any] = {"free": settled_gpus(of_recipe)}
    if config.mode == MODE:
        share_the_gpu(config)
        found["device_of_sampler"] = config.explorer.rollout_model.cuda_visible_devices
    groups: list[PlacementGroup] = []
    if config.mode in ("both", MODE):
        groups += trainer_groups(config)
        found["trainer"] = [group.bundle_count for group in groups]
    if config.mode == MODE:
        found["device_of_trainer"] = device_in(groups[0])
        stock = placement_group(Allocator(config.explorer).allocate_bundles().bundles)
        found["stock_starts"] = stock.wait(HANG_SECONDS)
        remove_placement_group(stock)
        try:  # where making the engine ends on a machine without CUDA
            asyncio.run(OneGpuAllocator(config.explorer).create_all_models())
        except Exception as error:
            found["engine_needs"] = f"{type(error).__name__}: {error}"
    kind = OneGpuAllocator if config.mode == MODE else Allocator
    found["bundles"] = kind(config.explorer).allocate_bundles().bundles
    sampler = placement_group(found["bundles"], strategy="PACK")
    found["sampler"] = sampler.wait(SECONDS)
    found["left"] = settled_gpus(0)
    for group in [*groups, sampler, *held]:
        remove_placement_group(group)
    wait_for_gpus(all_gpus())
    return found


def others(config: AflowConfig) -> list[PlacementGroup]:
    """Hold the GPUs that the recipe's cluster does not have."""
    if config.mode == MODE:
        return []
    total, cluster = NODE["num_gpus"], config.cluster
    second = total - (cluster.gpu_per_node if cluster.node_num > 1 else 0)
    spare = {"alone": 1, "first": total - cluster.gpu_per_node, "second": second}
    groups = [placement_group([{"GPU": n, name: 0.01}]) for name, n in spare.items() if n]
    assert all(group.wait(SECONDS) for group in groups)
    wait_for_gpus(cluster.node_num * cluster.gpu_per_node)
    return groups


def trainer_groups(config: AflowConfig) -> list[PlacementGroup]:
    """What verl reserves, by its own manager, as Trinity's trainer calls it."""
    cluster = config.cluster
    pool = [cluster.trainer_gpu_num_per_node] * cluster.trainer_node_num
    manager = ResourcePoolManager(resource_pool_spec={"global_pool": pool}, mapping={})
    manager.create_resource_pool()
    groups: list[PlacementGroup] = manager.resource_pool_dict["global_pool"].get_placement_groups()
    return groups


def device_in(group: PlacementGroup) -> str:
    @ray.remote(num_gpus=1, num_cpus=1)
    def visible() -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    inside = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    device: str = ray.get(visible.options(scheduling_strategy=inside).remote())
    return device


def all_gpus() -> float:
    return ray.cluster_resources().get("GPU", 0.0)


def wait_for_gpus(number: float) -> None:
    """Ray's view of what is free comes a little later."""

    async def come() -> None:
        while ray.available_resources().get("GPU", 0.0) != number:
            await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(come(), SECONDS))


def settled_gpus(expected: float) -> float:
    """What is free, once Ray's view has had the time to become what is expected."""
    with contextlib.suppress(TimeoutError):
        wait_for_gpus(expected)
    return ray.available_resources().get("GPU", 0.0)


if __name__ == "__main__":
    main(sys.argv[1:])
