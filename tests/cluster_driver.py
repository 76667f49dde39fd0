"""The driver of the test cluster: joins the Ray of RAY_ADDRESS as a run does, calls every function
on every node, and prints what came back as JSON on the last line.

`python train.py cluster_driver` in a folder that workers do not see; SHARED names one that they do.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any


def call(function: Any, folder: str) -> dict[str, Any]:
    from aflow_tune.cluster.sent_function import received

    try:
        result: Any = asyncio.run(received(function)({}, None))
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    return {"result": result, "seen": os.path.exists(os.path.join(folder, "train.py"))}


def send(functions: Mapping[str, Any]) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from aflow_tune.cluster.ray_for_run import ray_for_run
    from aflow_tune.cluster.sent_function import send as as_sent
    from aflow_tune.config.load import load_config
    from aflow_tune.config.prepare import set_namespace

    shared, here = os.environ["SHARED"], os.getcwd()
    config = load_config(None, [f"checkpoint_root_dir={shared}", "project=p", "name=cases"])
    set_namespace(config)
    config.checkpoint_job_dir = f"{shared}/p/cases"
    results = {}
    sent = dict(zip(functions, as_sent(*functions.values()), strict=True))
    with ray_for_run(config, functions.values(), {"PLAIN": "1"}, print):
        for node in ray.nodes():
            at = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            remote = ray.remote(call).options(num_cpus=0, scheduling_strategy=at)
            asked = {name: remote.remote(function, here) for name, function in sent.items()}
            results[node["NodeManagerAddress"]] = {
                name: ray.get(reference) for name, reference in asked.items()
            }
    print(json.dumps(results))
