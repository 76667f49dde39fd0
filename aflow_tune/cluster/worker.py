"""What runs in Ray's workers: setting up code and keys, a node's self-check, runs of a sweep.

Ray calls `set_up` in each worker process (`worker_process_setup_hook`), so imports here stay light.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
from aflow_tune import shipping
from aflow_tune.cluster import keys
from aflow_tune.config.clashes import cure_of, installed_versions, known_clashes
from aflow_tune.quick_start import import_quickly

if TYPE_CHECKING:
    from aflow_tune.runs.process import RunProcess

HOOK = f"{__name__}.set_up"
# Prefixes of variables that are set for the worker and must not reach a run that it starts.
_OF_THE_WORKER = ("OMP_NUM_THREADS", "RAY_", keys.VARIABLE, shipping.VARIABLE)


def set_up() -> None:
    """Called by Ray at the start of each worker: the user's code first, then the keys."""
    import_quickly()
    shipping.arrive()
    keys.take_keys()


def tell(needs: list[str], mark: str | None) -> dict[str, Any]:
    """This node's answer to `lacking_on_nodes`; `mark` is a file that it should see."""
    clashes = known_clashes(installed_versions())
    return {
        "version": importlib.metadata.version("aflow-tune"),
        "clashes": [(found, clash.reason, cure_of(clash)) for clash, found in clashes],
        "missing": [name for name in needs if importlib.util.find_spec(name) is None],
        "conflicts": shipping.conflicts(),
        "sees": mark is None or os.path.exists(mark),
    }


class RunOnNode:
    """The actor that starts one run of a sweep on its node and passes on the keys of this process.
    Ray calls its methods in the worker's main thread, which lives as long as the run."""

    def __init__(self) -> None:
        self._process: RunProcess | None = None

    def start(self, arguments: list[str], output: str, cwd: str) -> str | None:
        """Start `aflow-tune` with these arguments; returns why it could not, None if it did."""
        from aflow_tune.runs.process import RunProcess, own_program

        here = f"on node {ray.util.get_node_ip_address()}"
        config = os.path.join(cwd, arguments[0])
        if not os.path.isfile(config):
            return f"{here} there is no file {config}: all nodes must see it"
        environment = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("RAY_AUTH") or not name.startswith(_OF_THE_WORKER)
        }
        command = [*own_program(), *arguments]
        try:
            self._process = RunProcess(
                command, Path(output), cwd=Path(cwd), environment=environment
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
