"""Runs on Ray: explorer and trainer of the local engine, or Trinity's own stage runner.

`run_split` drives the two actors of the local engine, ends on the first error with its cause, and
saves the state on a stop. `run_cluster` (`engine: trinity`) leaves vLLM and verl to Trinity's stage
runner, but with our explorer and trainer classes and with time for the last evaluation.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from aflow_tune.cluster.ray_for_run import ray_for_run
from aflow_tune.config.load import AflowConfig
from aflow_tune.engines.trinity.rollout import explorer as ours
from aflow_tune.engines.trinity.training.run_state import is_evaluated
from aflow_tune.engines.trinity.training.trainer import LocalTrainActor
from aflow_tune.errors import AflowTuneError, BudgetReached, RunFailed, disk_fault

STOP_SECONDS = 180.0  # how long a stop waits for the step under way and its checkpoint
_POLL_SECONDS = 0.5
Functions = Sequence[Callable[..., Any] | None]


def run_split(
    config: AflowConfig,
    functions: Functions,
    target: int,
    phase: Callable[[str], None],
    stop: Callable[[], bool],
) -> int:
    """Train with explorer and trainer actors; returns the step reached. Calls `phase` with each
    activity, and `stop` twice a second: if true, saves and stops. Raises BadInput: no usable Ray,
    or the functions cannot be sent; RunFailed or our own error of a worker: either side failed."""
    # Otherwise one actor's OpenMP threads spin on the cores that the other needs.
    passive = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    with ray_for_run(config, functions, {**config.get_envs(), **passive}, phase):
        try:
            return _split(config, target, phase, stop)
        except ray.exceptions.RayError as error:
            raise _cause(error) from error


def _split(
    config: AflowConfig, target: int, phase: Callable[[str], None], stop: Callable[[], bool]
) -> int:
    phase("starting explorer and trainer")
    explorer, trainer = ours.LocalExplorer.get_actor(config), LocalTrainActor.get_actor(config)
    _wait([explorer.prepare.remote(), trainer.prepare.remote()])
    _wait([trainer.sync_weight.remote()])
    _wait([explorer.sync_weight.remote()])
    if stop():
        return int(ray.get(trainer.finish.remote()))
    exploring, training = explorer.explore.remote(), trainer.train.remote()
    phase("rolling out and training")
    pending, deadline = [exploring, training], None
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=_POLL_SECONDS)
        spent = False
        try:
            ray.get(ready)
        except ray.exceptions.RayError as error:
            spent = isinstance(_cause(error), BudgetReached)
            if not spent and training in pending:
                # The explorer failed: save what the trainer trained since its last checkpoint.
                phase("stopping: saving the state")
                trainer.request_stop.remote()
                ray.wait([training], timeout=STOP_SECONDS)
            if not spent:
                raise
        if deadline is None and (spent or stop()):
            phase("stopping: saving the state")
            trainer.request_stop.remote()
            explorer.request_stop.remote()
            deadline = time.monotonic() + STOP_SECONDS
            pending = [training] if training in pending else []
        elif deadline is not None and time.monotonic() > deadline:
            raise RunFailed(f"the trainer did not save its state within {STOP_SECONDS:.0f} s")
    phase("saving")
    reached = int(ray.get(trainer.finish.remote()))
    if deadline is None:  # not stopped early
        if reached >= target:
            phase("evaluating the trained model")
            _wait([explorer.evaluate_last.remote(reached)])
        _wait([explorer.shutdown.remote(), trainer.shutdown.remote()])
    return reached


def _wait(pending: list[Any]) -> None:
    """Wait for all; raise the first error as soon as it happens."""
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=_POLL_SECONDS)
        ray.get(ready)


def _cause(error: Any) -> Exception:
    """The `AflowTuneError` or disk error that a worker raised; anything else as a RunFailed."""
    cause = error
    while isinstance(cause, ray.exceptions.RayTaskError):
        cause = cause.cause
    if isinstance(cause, AflowTuneError) or disk_fault(cause) is not None:
        return cause
    if isinstance(cause, ray.exceptions.RayActorError):
        return RunFailed(f"a worker process died: {cause}")
    return RunFailed(str(error))


def run_cluster(
    config: AflowConfig, functions: Functions, target: int, phase: Callable[[str], None]
) -> int:
    """Run one stage by Trinity's stage runner; returns the step reached, and prints a warning if
    the last evaluation is incomplete. Raises as `run_split`."""
    from trinity.cli.launcher import run_stage

    init, shutdown, wait = ray.init, ray.shutdown, ray.wait
    longest = config.synchronizer.sync_timeout

    def patient(*refs: Any, timeout: float | None = None, **more: Any) -> Any:
        return wait(*refs, timeout=None if timeout is None else max(timeout, longest), **more)

    with ray_for_run(config, functions, config.get_envs(), phase):
        phase(f"running on Trinity's engines, target step {target}")
        with our_actors(config):
            # Its `ray.init()` would replace our SIGTERM handler, which saves; its `ray.shutdown()`
            # would close the connection that our cleanup needs; and its 5 s wait after the
            # trainer's end would cut off the last evaluation.
            ray.init = ray.shutdown = lambda *_, **__: None
            ray.wait = patient
            try:
                status = run_stage(config)
            finally:
                ray.init, ray.shutdown, ray.wait = init, shutdown, wait
    if not status.success:
        detail = status.error.traceback_text if status.error else "no cause was given"
        raise RunFailed(f"Trinity's stage {status.stage!r} failed:\n{detail}")
    run_dir = Path(config.checkpoint_job_dir)
    state = run_dir / f"{config.trainer.name}_meta.json"
    if not state.exists():
        return 0
    reached = int(json.loads(state.read_text(encoding="utf-8"))["latest_iteration"])
    held_out = [taskset.name for taskset in config.buffer.explorer_input.eval_tasksets]
    if (
        config.mode != "train"
        and reached >= target
        and not is_evaluated(run_dir, reached, held_out)
    ):
        print(
            f"warning: the evaluation of step {reached} did not end on every held-out task set "
            f"({', '.join(held_out)}). The weights are saved; `aflow-tune eval` measures them.",
            flush=True,
        )
    return reached


@contextlib.contextmanager
def our_actors(config: AflowConfig) -> Iterator[None]:
    """Within the block Trinity's launcher creates our explorer and trainer. Ray must be connected.
    Raises RunFailed: `mode: colocate` does not fit the cluster."""
    from trinity.explorer import explorer
    from trinity.trainer import trainer

    from aflow_tune.engines.trinity.training.trainer import VerlTrainer

    classes = explorer.Explorer, trainer.Trainer
    explorer.Explorer, trainer.Trainer = ours.VllmExplorer, VerlTrainer
    if config.mode == ours.ONE_GPU_MODE:
        ours.share_the_gpu(config)
        explorer.Explorer = ours.OneGpuExplorer
    try:
        yield
    finally:
        explorer.Explorer, trainer.Trainer = classes
