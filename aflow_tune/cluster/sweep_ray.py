"""The runs of a sweep as Ray actors, each reserving the CPUs and GPU that its run needs.

An actor starts on its node the command that would otherwise run here. Ray queues runs until there
is room. A run with `engine: local` starts a Ray of its own inside; one with `engine: trinity` joins
the cluster and reserves its GPUs there, so its actor holds none. The code does not travel:
configuration, code, data and run folders must have the same paths on every node.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from aflow_tune.cluster.ray_for_run import attached_ray, code_of
from aflow_tune.cluster.worker import RunOnNode
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.validate import functions_of
from aflow_tune.errors import BadInput, ExitCode, Fault
from aflow_tune.files import append_line
from aflow_tune.find_ray import FoundRay, find_ray
from aflow_tune.shipping import Code

_KEY = "cluster.ray_address"
_ANSWER_SECONDS = 10.0


def cluster_for(config: AflowConfig) -> FoundRay | None:
    """The Ray to start runs through, if the configuration or RAY_ADDRESS names one; None: start
    them as processes of this machine. BadInput: as `find_ray`."""
    if not config.positions.given(_KEY) and not os.environ.get("RAY_ADDRESS"):
        return None
    named = copy.copy(config)
    named.inline = False  # inline runs are one process each, which may be on any node
    return find_ray(named)


@contextlib.contextmanager
def ray_starter(
    config: AflowConfig, found: FoundRay, folder: Path, parallel: int
) -> Iterator[Callable[[Sequence[str], Path], RayProcess]]:
    """Join the cluster for the block. Yields a function that queues a run, given the arguments of
    its command and the file for its output. `folder`: of the sweep, which every node must see.
    `parallel`: runs at once. BadInput: the cluster cannot be used, or can never fit these runs."""
    if config.engine not in ("local", "trinity"):
        expected = "local or trinity: what `auto` finds may differ from node to node"
        title, where = "Through Ray the engine must be named.", config.positions.where("engine")
        raise BadInput.of(title, where, expected, config.engine, "engine=local, or engine=trinity")
    found_code, _ = code_of(config, functions_of(config))
    # Packages that the code imports must be installed there; its files are on the shared disk.
    code = Code(needs=found_code.needs, variables=found_code.variables)
    joining = copy.copy(config)
    joining.checkpoint_job_dir = str(folder)
    joining.ray_namespace = f"sweep {folder}"
    with attached_ray(found, joining, code, b"", {}):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        needs = needs_of(config, nodes)
        if faults := no_room(config, needs, nodes, parallel):
            raise BadInput("The Ray cluster has no room for these runs.", faults)
        # The address that nodes can reach: the one that was found may be loopback.
        address = ray.get_runtime_context().gcs_address
        setting = f"{_KEY}={'local' if config.engine == 'local' else address}"
        cwd = os.getcwd()

        def start(arguments: Sequence[str], output: Path) -> RayProcess:
            actor = ray.remote(RunOnNode).options(max_restarts=0, **needs).remote()
            began = actor.start.remote([*arguments, setting], str(output), cwd)
            return RayProcess(actor, began, output)

        yield start


def needs_of(config: AflowConfig, nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What the actor of a run reserves: `num_cpus` and `num_gpus`."""
    if config.engine == "trinity":
        return {"num_cpus": 1, "num_gpus": 0}
    there = any(node.get("GPU", 0) >= 1 for node in nodes)
    device = config.local.device
    gpu = device == "cuda" or (device == "auto" and there)
    return {"num_cpus": config.local.threads or 1, "num_gpus": int(gpu)}


def no_room(
    config: AflowConfig,
    needs: Mapping[str, float],
    nodes: Sequence[Mapping[str, float]],
    parallel: int,
) -> list[Fault]:
    """Why runs would wait for ever: no node fits one, or (`engine: trinity`) not `parallel` fit."""
    if config.engine == "trinity":
        each = config.cluster.node_num * config.cluster.gpu_per_node
        there = int(sum(node.get("GPU", 0) for node in nodes))
        if parallel > 1 and not each:
            where, cure = config.positions.where("cluster.gpu_per_node"), "set it, or --parallel 1"
            found = "not set: each run would take the whole cluster"
            return [Fault(where, "the GPUs of one run", found, cure)]
        if each * parallel > there:
            cure = f"--parallel {max(1, there // each)}, or fewer GPUs a run"
            expected = f"{parallel} runs of {each} GPUs at once"
            return [Fault("--parallel", expected, f"{there} GPUs in the cluster", cure)]
        return []
    cpus, gpus = needs["num_cpus"], needs["num_gpus"]
    if any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
        return []
    expected = f"a node with {cpus:g} CPUs and {gpus:g} GPUs"
    return [Fault("ray", expected, "none", "local.threads=1, local.device=cpu")]


class RayProcess:
    """A queued or running run, with the interface of `sweeps.sweep.Process`."""

    def __init__(self, actor: Any, began: Any, output: Path) -> None:
        self.output = output
        self._actor, self._began = actor, began
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative after a signal or a lost node; None until it has ended."""
        if self._code is not None:
            return self._code
        try:
            if self._began is not None:
                if not ray.wait([self._began], timeout=0)[0]:
                    return None
                if problem := ray.get(self._began):
                    return self._refused(problem)
                self._began = None
            code = ray.get(self._actor.poll.remote(), timeout=_ANSWER_SECONDS)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
            return None
        except ray.exceptions.RayActorError as error:
            if error.actor_init_failed:
                return self._refused(str(error))
            return self._end(-int(signal.SIGKILL))
        except ray.exceptions.RayError as error:  # such as a runtime_env that cannot be set up
            return self._refused(str(error))
        return None if code is None else self._end(code)

    def stop(self) -> None:
        """Ask it to save and stop; a run that is still queued is dropped."""
        if self._code is None and self._began and not ray.wait([self._began], timeout=0)[0]:
            self._end(-int(signal.SIGTERM))
        elif self._code is None:
            self._actor.stop.remote()

    def _refused(self, problem: str) -> int:
        """The run could not start: append the reason to its output."""
        append_line(self.output, f"aflow-tune: {problem}\n".encode(errors="replace"))
        return self._end(int(ExitCode.BAD_INPUT))

    def _end(self, code: int) -> int:
        self._code = code
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)
        return code
