"""The Ray of one run: a running one that was found, or one of its own."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ray

from aflow_tune.cluster import worker_setup
from aflow_tune.cluster.attached_ray import attached_ray
from aflow_tune.cluster.local_ray import local_ray
from aflow_tune.cluster.ship import trace_run
from aflow_tune.config import on_processors
from aflow_tune.config.settings import AflowConfig, logical_gpus
from aflow_tune.errors import BadInput, Fault
from aflow_tune.find_ray import find_ray
from aflow_tune.ray_folder import ray_base
from aflow_tune.shipping import arrival
from aflow_tune.shipping.bundle import manifest_of

Function = Callable[..., Any]


@contextlib.contextmanager
def ray_for_run(
    config: AflowConfig,
    functions: Iterable[Function | None],
    env_vars: dict[str, str],
    phase: Callable[[str], None],
) -> Iterator[None]:
    """Be on the run's Ray for the block, with the user's code in every worker.

    Raises:
        BadInput: the Ray cannot be joined, or the functions cannot be sent, or this process is on
            a Ray already.
    """
    _refuse_joined()
    code, content = trace_run(config, functions)
    found = find_ray(config)
    if found is not None:
        phase(f"joining the Ray at {found.address} ({found.source})")
        for warning in code.warnings:
            print(f"warning: {warning}", flush=True)
        with attached_ray(found, config, code, content, env_vars):
            yield
        return
    base, moved = ray_base()
    phase(f"starting Ray{f', with its files in {base}: {moved}' if moved else ''}")
    with tempfile.TemporaryDirectory(prefix="aflow-tune-") as folder:
        manifest = Path(folder) / arrival.MANIFEST
        manifest.write_text(json.dumps(manifest_of(code)), encoding="utf-8")
        own = {**config.runtime_env.env_vars, **env_vars, arrival.VARIABLE: str(manifest)}
        for_gpus = config.engine == "trinity"
        logical = logical_gpus(config) if for_gpus and on_processors() else None
        with local_ray(config.ray_namespace, own, worker_setup.HOOK, for_gpus, logical):
            yield


def _refuse_joined() -> None:
    """The code and keys of a run are part of how a process joins Ray, which happens once."""
    if ray.is_initialized():
        raise BadInput(
            "This process is on a Ray already.",
            [
                Fault(
                    "ray.init()",
                    "a process that has not joined Ray: the run does that, with its code and keys",
                    "it was called before tune()",
                    "take `ray.init()` out and name the cluster with `cluster.ray_address` or "
                    "RAY_ADDRESS; or call `ray.shutdown()` before tune()",
                )
            ],
        )
