"""The actor that starts one run on a Ray node and stands for it (`sweep_ray.py`).

In a module of its own that imports little: it is loaded on the node, beside the run. The keys of
the run are in its process's environment already (`worker_setup.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import ray

from aflow_tune.cluster import keys
from aflow_tune.runs.process import RunProcess, own_program
from aflow_tune.shipping import arrival

_OF_THE_WORKER = ("OMP_NUM_THREADS", "RAY_", keys.VARIABLE, arrival.VARIABLE)
"""What Ray and we set for the worker, which a run beside it must not take for its own."""
_AUTHENTICATION = "RAY_AUTH"


class RunOnNode:
    """Lives on a node while its run does.

    Its methods are called one after the other, in the worker's main thread: the run's parent.
    """

    def __init__(self) -> None:
        self._process: RunProcess | None = None

    def start(self, arguments: list[str], output: str, cwd: str) -> str | None:
        """Begin `aflow-tune` with these arguments; returns what is missing on this node, if
        anything is."""
        here = f"on node {ray.util.get_node_ip_address()}"
        if not os.path.isdir(cwd):
            return f"{here} there is no folder {cwd}: all nodes must see it"
        if not os.path.isfile(os.path.join(cwd, arguments[0])):
            return f"{here} there is no file {arguments[0]}: all nodes must see it"
        try:
            self._process = RunProcess(
                [*own_program(), *arguments],
                Path(output),
                cwd=Path(cwd),
                environment=of_a_run(os.environ),
            )
        except OSError as error:
            return f"{here}: {error}"
        return None

    def poll(self) -> int | None:
        """The run's exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Ask it to save and stop."""
        if self._process is not None:
            self._process.stop()


def of_a_run(environment: Mapping[str, str]) -> dict[str, str]:
    """A worker's environment without what was set for the worker itself."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_AUTHENTICATION) or not name.startswith(_OF_THE_WORKER)
    }
