"""A driver on the test cluster: `python cluster_driver.py` in a folder that workers do not see.

Gathers the functions of all cases of `user_packages.CASES`, among them some of this very script
(`__main__`), joins the Ray of RAY_ADDRESS as a run does, calls every function on every node, and
prints what came back as JSON on the last line.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import sys
from pathlib import Path

HERE = Path(__file__).parent


async def of_the_script(task, model):
    from beside import one

    named = Path(__file__).with_name("one.txt")
    return one() * float((HERE / "one.txt").read_text()) * float(named.read_text())


def closure(scale, path):
    from beside import one

    async def flow(task, model):
        return scale * one() * float(Path(path).read_text())

    return flow


async def bound(task, model, scale, path):
    return scale * float(path.read_text())


def call(function, folder):
    from aflow_tune.shipping.arrival import settle

    try:
        os.listdir(folder)
        (Path(folder) / "cluster_driver.py").read_text()
        seen = True
    except OSError:
        seen = False
    try:
        result = asyncio.run(settle(function)({}, None))
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    return {"result": result, "seen": seen, "host": socket.gethostname()}


def main() -> None:
    from user_packages import CASES

    import aflow_tune.engines.trinity  # noqa: F401  (the stand-in for vLLM)
    from aflow_tune.cluster.ray_for_run import ray_for_run
    from aflow_tune.config.load import load_config
    from aflow_tune.config.prepare import set_namespace
    from aflow_tune.contract.plugins import resolve

    functions = {
        "__main__": of_the_script,
        "closure": closure(1.0, str(HERE / "one.txt")),
        "partial": functools.partial(bound, scale=1.0, path=HERE / "one.txt"),
    }
    for name, case in CASES.items():
        if not case.is_script:
            folder = HERE / "cases" / name
            os.chdir(folder)
            sys.path.append(str(folder))
            spec = str(folder / case.spec) if ".py:" in case.spec else case.spec
            functions[name] = resolve(spec, folder)
    os.chdir(HERE / "cases" / "from_the_current_folder")
    config = load_config(None, [f"checkpoint_root_dir={sys.argv[1]}", "project=p", "name=cases"])
    set_namespace(config)
    config.checkpoint_job_dir = f"{sys.argv[1]}/p/cases"
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    results = {}
    with ray_for_run(config, functions.values(), {"PLAIN": "1"}, print):
        for node in ray.nodes():
            at = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            remote = ray.remote(call).options(num_cpus=0, scheduling_strategy=at)
            asked = {
                name: remote.remote(function, str(HERE)) for name, function in functions.items()
            }
            results[node["NodeManagerAddress"]] = {
                name: ray.get(reference) for name, reference in asked.items()
            }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
