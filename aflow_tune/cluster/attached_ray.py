"""A run on a Ray that others started: joined with the run's code and keys, left clean.

Before the run starts every node is asked, in the very environment that the run's workers get:
is our package there in this version, are the packages there that the user's code imports, does
it see the run folder. What is missing is refused with all nodes at once.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from aflow_tune.cluster import keys, worker_setup
from aflow_tune.cluster.open_sessions import refuse_open_sessions
from aflow_tune.cluster.ship import (
    NAME_IT,
    READ_INSIDE,
    is_submitted,
    refuse_secrets,
)
from aflow_tune.config.load import AflowConfig
from aflow_tune.errors import BadInput, Fault
from aflow_tune.find_ray import (
    FoundRay,
    greet,
    handlers_kept,
    refused_connection,
)
from aflow_tune.shipping import arrival
from aflow_tune.shipping.bundle import write_bundle
from aflow_tune.shipping.tracing import Trace

_LASTING = "synchronizer"
_LEAVE_SECONDS = 15.0
"""How long the actors of a command that was just killed may take to go."""
_ASK_SECONDS = 300.0
"""For the first workers of all nodes: `runtime_env.pip` is installed then."""


@contextlib.contextmanager
def attached_ray(
    found: FoundRay,
    config: AflowConfig,
    code: Trace,
    content: bytes,
    env_vars: Mapping[str, str],
) -> Iterator[None]:
    """Join a running Ray for the block; afterwards nothing of the run is left there.

    Args:
        content: the functions as they are sent.
        env_vars: plain environment of the workers. Ray logs it: never a place for keys.

    Raises:
        BadInput: it cannot be joined, the code cannot travel or could be changed by other users
            of a node, or nodes lack something.
    """
    if code.faults:
        raise BadInput("The code of this run cannot travel to the workers.", code.faults)
    refuse_secrets(content, keys.secrets_of(config, code), "the functions", READ_INSIDE)
    greet(found)
    if not config.runtime_env.trust_users:
        refuse_open_sessions(found)
    names = keys.names_of_keys(config, code)
    with tempfile.TemporaryDirectory(prefix="aflow-tune-") as folder, handlers_kept():
        runtime_env = runtime_env_of(config, code, Path(folder), env_vars, bool(names))
        before = os.getcwd()
        os.chdir(folder)  # Ray puts it in front of the workers' sys.path: here it is nothing
        try:
            ray.init(
                address=found.address,
                namespace=config.ray_namespace,
                runtime_env=runtime_env,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise refused_connection(found, error) from error
        finally:
            os.chdir(before)
    try:
        _take_namespace(config)
        with contextlib.ExitStack() as stack:
            if names:
                stack.enter_context(keys.handing_over(names, config.ray_namespace))
            _ask_nodes(config, code)
            try:
                yield
            finally:
                with contextlib.suppress(Exception):  # the cluster may be gone
                    _end_actors(config.ray_namespace)
    finally:
        with handlers_kept():
            ray.shutdown()


def runtime_env_of(
    config: AflowConfig,
    code: Trace,
    folder: Path,
    env_vars: Mapping[str, str],
    with_keys: bool,
    extra: Mapping[str, bytes] | None = None,
) -> dict[str, Any]:
    """The environment of a run's workers; writes what travels into `folder`.

    A job that `aflow-tune submit` sent has one already, which Ray merges with this one: then only
    what differs from run to run is in it.

    Raises:
        BadInput: a file cannot be read, or the value of a key would travel in clear.
    """
    given = {**config.runtime_env.env_vars, **env_vars}
    if with_keys:
        given[keys.VARIABLE] = config.ray_namespace
    if is_submitted():
        known = {*config.runtime_env.env_vars, arrival.VARIABLE}
        return {"env_vars": {name: text for name, text in given.items() if name not in known}}
    secrets = keys.secrets_of(config, code)
    plain = "\n".join(given.values()).encode()
    refuse_secrets(plain, secrets, config.positions.where("runtime_env.env_vars"), NAME_IT)
    bundle = write_bundle(code, folder, extra, secrets)
    given[arrival.VARIABLE] = bundle.name
    environment: dict[str, Any] = {
        "py_modules": [str(bundle)],
        "env_vars": given,
        "worker_process_setup_hook": worker_setup.HOOK,
    }
    if config.runtime_env.pip:
        environment["pip"] = list(config.runtime_env.pip)
    return environment


def spans_nodes() -> bool:
    """Whether the Ray of this process has more than one node."""
    return sum(bool(node["Alive"]) for node in ray.nodes()) > 1


def _ask_nodes(config: AflowConfig, code: Trace) -> None:
    folder = Path(config.checkpoint_job_dir)
    mark = folder / f".seen-{uuid.uuid4().hex[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    needs = sorted(code.needs)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    try:
        asked = {
            ray.remote(worker_setup.tell)
            .options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            .remote(needs, str(mark)): node
            for node in nodes
        }
        faults: list[Fault] = []
        _, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ASK_SECONDS)
        for reference, node in asked.items():
            name = f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
            if reference in silent:
                ray.cancel(reference, force=True)
                faults.append(_silent(name))
            else:
                faults += _faults_of(name, reference, config, code)
    finally:
        mark.unlink(missing_ok=True)
    if faults:
        raise BadInput("The cluster lacks what this run needs.", faults)


def _faults_of(name: str, reference: Any, config: AflowConfig, code: Trace) -> Iterator[Fault]:
    try:
        told = ray.get(reference)
    except ray.exceptions.RayError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        found = (lines[-1] if lines else type(error).__name__).strip()
        cure = "install aflow-tune there, in the Python that Ray runs with; see its logs"
        yield Fault(name, "a worker that starts with our code", found[:600], cure)
        return
    here = importlib.metadata.version("aflow-tune")
    if told["version"] != here:
        found = f"aflow-tune {told['version']}"
        yield Fault(name, f"aflow-tune {here}, as here", found, "install the same version there")
    for found in told.get("conflicts", ()):  # another version may not tell
        cure = "rename your module: the worker has that name from elsewhere"
        yield Fault(name, "your modules under their own names", found, cure)
    for missing in told["missing"]:
        cure = f"`runtime_env: {{pip: [{_requirement(missing)}]}}`, or install it there"
        yield Fault(f"{name}: {code.needs[missing]}", f"`{missing}`", "not installed there", cure)
    if not told["sees"]:
        yield Fault(
            f"{name}: {config.positions.where('checkpoint_root_dir')}",
            "a folder that every node sees",
            f"{config.checkpoint_job_dir} is not there",
            "give a path on a shared disk: `checkpoint_root_dir: /shared/runs`",
        )


def _silent(name: str) -> Fault:
    return Fault(
        name,
        f"a worker with our code within {_ASK_SECONDS:.0f} s",
        "none",
        "look at that node in `ray status`; if `runtime_env.pip` takes longer there, install it "
        "before",
    )


def _requirement(module: str) -> str:
    """The installed distribution that brings a module, with its version."""
    names = importlib.metadata.packages_distributions().get(module, [module])
    try:
        return f"{names[0]}=={importlib.metadata.version(names[0])}"
    except importlib.metadata.PackageNotFoundError:
        return names[0]


def _take_namespace(config: AflowConfig) -> None:
    """Make sure that no other run works under this name, and end what a killed one left.

    Trinity's synchronizer outlives its command; all other actors go when that does.
    """
    deadline = time.monotonic() + _LEAVE_SECONDS
    while working := _names_in(config.ray_namespace) - {_LASTING}:
        if time.monotonic() > deadline:
            raise BadInput(
                "A run of this name is working on the cluster.",
                [
                    Fault(
                        config.positions.where("name"),
                        f"a name that is free: {config.ray_namespace!r} has actors",
                        ", ".join(sorted(working)),
                        "give another `name=`, or stop the other run first",
                    )
                ],
            )
        time.sleep(0.5)
    _end_actors(config.ray_namespace)


def _names_in(namespace: str) -> set[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if actor["namespace"] == namespace}


def _end_actors(namespace: str) -> None:
    for name in _names_in(namespace):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=namespace))
