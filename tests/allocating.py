"""Reserves in a Ray of one logical GPU what a colocated recipe reserves; prints one JSON object
a recipe. Run by test_cluster_allocation.py in a process of its own: Ray keeps settings of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.engines.trinity.rollout.explorer import OneGpuAllocator, share_the_gpu

# isort: split
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from trinity.common.models.allocator import Allocator
from verl.single_controller.ray.base import ResourcePoolManager

ONE = {"num_cpus": 40, "num_gpus": 1}
SECONDS = 60.0
HANG_SECONDS = 5.0


def main(paths: list[str]) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**ONE, "include_dashboard": False},
    )
    ray.init(address=cluster.address, namespace="recipes", log_to_driver=False)
    try:
        for path in paths:  # by Trinity's own validators
            config = load_config(path, ["cluster.ray_address=10.0.0.1:6379"])
            prepare(config, Purpose.CHECK)
            print(json.dumps({"recipe": Path(path).stem, **reserved(config)}), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


def reserved(config: AflowConfig) -> dict[str, Any]:
    share_the_gpu(config)
    found: dict[str, Any] = {
        "device_of_sampler": config.explorer.rollout_model.cuda_visible_devices
    }
    groups = trainer_groups(config)
    found["trainer"] = [group.bundle_count for group in groups]
    found["device_of_trainer"] = device_in(groups[0])
    stock = placement_group(Allocator(config.explorer).allocate_bundles().bundles)
    found["stock_starts"] = stock.wait(HANG_SECONDS)
    remove_placement_group(stock)
    try:  # where making the engine ends on a machine without CUDA
        asyncio.run(OneGpuAllocator(config.explorer).create_all_models())
    except Exception as error:
        found["engine_needs"] = f"{type(error).__name__}: {error}"
    found["bundles"] = OneGpuAllocator(config.explorer).allocate_bundles().bundles
    sampler = placement_group(found["bundles"], strategy="PACK")
    found["sampler"] = sampler.wait(SECONDS)
    for group in [*groups, sampler]:
        remove_placement_group(group)
    return found


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


if __name__ == "__main__":
    main(sys.argv[1:])
