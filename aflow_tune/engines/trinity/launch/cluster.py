"""`engine: trinity`: Trinity's own vLLM and verl, launched by Trinity's own stage runner.

We add only what upstream leaves out: the run's Ray is joined or started before, with the user's
code and keys in every worker; and a stage that failed, or a trainer that ended early, is an error
here instead of exit code 0. Two of its actors are made from subclasses of ours that repair what
does not work in 0.6.0 (`our_actors`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from aflow_tune.cluster.ray_for_run import ray_for_run
from aflow_tune.config.load import AflowConfig
from aflow_tune.errors import RunFailed


def run_cluster(
    config: AflowConfig,
    functions: Sequence[Callable[..., Any] | None],
    target: int,
    phase: Callable[[str], None],
) -> int:
    """Run one stage on the run's Ray; returns the step reached.

    Raises:
        BadInput: there is no Ray that can be used, or the functions cannot be sent.
        RunFailed: the stage failed; its traceback is in the message.
    """
    from trinity.cli.launcher import run_stage

    with ray_for_run(config, functions, config.get_envs(), phase):
        phase(f"running on Trinity's engines, target step {target}")
        with our_actors(config), _connection_kept():
            status = run_stage(config)
    if not status.success:
        detail = status.error.traceback_text if status.error else "no cause was given"
        raise RunFailed(f"Trinity's stage {status.stage!r} failed:\n{detail}")
    state = Path(config.checkpoint_job_dir) / f"{config.trainer.name}_meta.json"
    if not state.exists():
        return 0
    return int(json.loads(state.read_text(encoding="utf-8"))["latest_iteration"])


@contextlib.contextmanager
def our_actors(config: AflowConfig) -> Iterator[None]:
    """For the length of the block Trinity's launcher makes our explorer and trainer. Ray must be
    joined.

    Raises:
        RunFailed: the cluster has no room for a run on one GPU.
    """
    from trinity.explorer import explorer
    from trinity.trainer import trainer

    from aflow_tune.engines.trinity.launch.one_gpu import MODE, OneGpuExplorer, share_the_gpu
    from aflow_tune.engines.trinity.rollout.vllm_explorer import VllmExplorer
    from aflow_tune.engines.trinity.training.verl_trainer import VerlTrainer

    explorer_class, trainer_class = explorer.Explorer, trainer.Trainer
    explorer.Explorer, trainer.Trainer = VllmExplorer, VerlTrainer
    if config.mode == MODE:
        share_the_gpu(config)
        explorer.Explorer = OneGpuExplorer
    try:
        yield
    finally:
        explorer.Explorer, trainer.Trainer = explorer_class, trainer_class


@contextlib.contextmanager
def _connection_kept() -> Iterator[None]:
    """Upstream's stage runner begins with `ray.init()`, which would replace the handler that saves
    on SIGTERM (it uses nothing of what that returns), and ends with `ray.shutdown()`; what the run
    leaves on a cluster of others is cleared away after it, over this connection."""
    init, shutdown = ray.init, ray.shutdown

    def nothing(*_: Any, **__: Any) -> Any:
        """In place of both."""

    ray.init = ray.shutdown = nothing
    try:
        yield
    finally:
        ray.init, ray.shutdown = init, shutdown
