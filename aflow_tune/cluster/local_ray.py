"""A Ray of our own on this machine, on loopback, that ends with the command.

`ray.shutdown()` takes it down when the command ends normally. When the command is killed, a
watchdog process sees a pipe close that only the command holds open, and ends the session.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from aflow_tune.cluster._watchdog import end_session
from aflow_tune.errors import RunFailed
from aflow_tune.find_ray import handlers_kept, make_ray_base

OBJECT_STORE_BYTES = 256 * 2**20
"""Holds the weights of a laptop-size model and a step's experiences several times over."""


@contextlib.contextmanager
def local_ray(
    namespace: str,
    env_vars: dict[str, str],
    hook: str | None = None,
    for_gpus: bool = False,
    logical_gpus: int | None = None,
) -> Iterator[None]:
    """Start a local Ray for the block, whatever `RAY_ADDRESS` says, and stop it after. BadInput:
    no folder for its files is safe from other users. RunFailed: it did not start.

    Args:
        namespace: Ray namespace of the run's actors.
        env_vars: environment of the workers. Ray logs it, so it must hold no secrets.
        hook: dotted name of a function that every worker calls first.
        for_gpus: let Ray size the object store by the machine's memory.
        logical_gpus: how many GPUs Ray counts; None: those that it finds.
    """
    base = make_ray_base()
    runtime_env: dict[str, Any] = {"env_vars": env_vars}
    if hook is not None:
        runtime_env["worker_process_setup_hook"] = hook
    # More than a small machine has: Ray only counts CPUs, it does not bind processes to them.
    sizes = {"num_cpus": max(8, os.cpu_count() or 1)}
    if logical_gpus is not None:
        sizes["num_gpus"] = logical_gpus
        sizes["num_cpus"] += 4 * logical_gpus  # verl reserves three beside each of its GPUs
    if not for_gpus:
        sizes["object_store_memory"] = OBJECT_STORE_BYTES
    # Every Ray process inherits the marker; the watchdog finds them by it.
    marker = f"{os.getpid()}-{time.time_ns()}"
    os.environ["AFLOW_TUNE_RAY_SESSION"] = marker
    # Unless clusters are off, Ray opens its ports on every interface of a Linux machine. The
    # variable is for the processes that Ray starts; this process has read it already.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Workers that Ray starts in advance have no runtime_env, so the run could not use them.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    with _watchdog(marker):
        try:
            try:
                with handlers_kept():
                    ray.init(
                        address="local",
                        **sizes,
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level="ERROR",
                        namespace=namespace,
                        runtime_env=runtime_env,
                        _temp_dir=str(base / "ray"),
                    )
            except Exception as error:  # Ray raises many types, plain Exception too
                raise did_not_start(str(error) or type(error).__name__, base) from error
            yield
        finally:
            ray.shutdown()
            end_session(marker, spare=os.getpid())
            os.environ.pop("AFLOW_TUNE_RAY_SESSION", None)


def did_not_start(told: str, base: Path) -> RunFailed:
    """The error for a Ray that did not start: `told` is its output, `base` holds its files."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    last = lines[-1][:600] if lines else "it does not say why"
    logs = base / "ray/session_latest/logs"
    return RunFailed(
        f"Ray did not start: {last}\nIts logs are in {logs}; it needs room for some 400 processes "
        "and threads (`ulimit -u`; docker run --pids-limit). `--inline` runs without Ray."
    )


@contextlib.contextmanager
def _watchdog(marker: str) -> Iterator[None]:
    read_end, write_end = os.pipe()
    environment = {k: v for k, v in os.environ.items() if k != "AFLOW_TUNE_RAY_SESSION"}
    process = subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).with_name("_watchdog.py")), marker],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    os.close(read_end)
    try:
        yield
    finally:
        os.close(write_end)
        process.wait()
