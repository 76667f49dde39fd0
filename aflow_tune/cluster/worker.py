"""What a worker does for us: it gets the user's code, then the keys; and it may start a run.

Ray calls `set_up` in each worker process (`worker_process_setup_hook`). Nothing heavy is imported
here.
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
# What is set for the worker, which a run beside it must not take for its own.
_OF_THE_WORKER = ("OMP_NUM_THREADS", "RAY_", keys.VARIABLE, shipping.VARIABLE)


def set_up() -> None:
    """Called by Ray at the start of each worker."""
    import_quickly()
    shipping.arrive()
    keys.take_keys()


def tell(needs: list[str], mark: str | None) -> dict[str, Any]:
    """What `lacking_on_nodes` asks; `mark` is a file that this node should see."""
    clashes = known_clashes(installed_versions())
    return {
        "version": importlib.metadata.version("aflow-tune"),
        "clashes": [(found, clash.reason, cure_of(clash)) for clash, found in clashes],
        "missing": [name for name in needs if importlib.util.find_spec(name) is None],
        "conflicts": shipping.conflicts(),
        "sees": mark is None or os.path.exists(mark),
    }


class RunOnNode:
    """The actor that starts one run of a sweep on its node, with the keys that this process has.
    Its methods are called in the worker's main thread, the run's parent."""

    def __init__(self) -> None:
        self._process: RunProcess | None = None

    def start(self, arguments: list[str], output: str, cwd: str) -> str | None:
        """Begin `aflow-tune` with these arguments; returns what is missing here, if anything is."""
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
