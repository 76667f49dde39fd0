"""A run on Ray: explorer and trainer of the local engine, or Trinity's own stage runner.

`run_split` starts, watches and stops the explorer/trainer split on the local engine. Upstream's
launcher swallows errors, lets both sides synchronise at once and cannot be asked to save and stop.
This one awaits the trainer's first weights before the explorer's, ends on the first error with its
cause, and turns Ctrl-C and SIGTERM into a saved state.

`run_cluster` (`engine: trinity`) leaves vLLM and verl to Trinity's stage runner and adds what it
leaves out: a stage that failed, or a trainer that ended early, is an error here instead of exit
code 0, and two of its actors are made from subclasses of ours that repair what does not work in
0.6.0 (`our_actors`).

Both join or start the run's Ray before, with the user's code and keys in every worker.
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
from aflow_tune.engines.trinity.rollout.explorer import LocalExplorer
from aflow_tune.engines.trinity.training.trainer import LocalTrainActor
from aflow_tune.errors import AflowTuneError, BudgetReached, RunFailed, disk_fault

STOP_SECONDS = 180.0
"""How long a stop waits for the trainer's step under way and its checkpoint."""

_POLL_SECONDS = 0.5

Functions = Sequence[Callable[..., Any] | None]


def run_split(
    config: AflowConfig,
    functions: Functions,
    target: int,
    phase: Callable[[str], None],
    stop: Callable[[], bool],
) -> int:
    """Train through explorer and trainer actors; returns the step that was reached.

    Args:
        config: a prepared configuration that holds its functions.
        functions: those functions, whose code every worker needs.
        target: the step to reach.
        phase: told in words what is going on.
        stop: asked twice a second whether to save and stop.

    Raises:
        BadInput: there is no Ray that can be used, or the functions cannot be sent.
        RunFailed: either side failed; the message is its first cause.
    """
    # Spinning OpenMP threads of one actor would take the cores from the other.
    passive = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    with ray_for_run(config, functions, {**config.get_envs(), **passive}, phase):
        try:
            return _Split(config, target, phase, stop).run()
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from error
        except ray.exceptions.RayActorError as error:
            raise _died(error) from error


class _Split:
    def __init__(
        self,
        config: AflowConfig,
        target: int,
        phase: Callable[[str], None],
        stop: Callable[[], bool],
    ) -> None:
        self.config, self.target, self.phase, self.stop = config, target, phase, stop

    def run(self) -> int:
        self.phase("starting explorer and trainer")
        explorer = LocalExplorer.get_actor(self.config)
        trainer = LocalTrainActor.get_actor(self.config)
        self._wait([explorer.prepare.remote(), trainer.prepare.remote()])
        self._wait([trainer.sync_weight.remote()])
        self._wait([explorer.sync_weight.remote()])
        if self.stop():
            return ray.get(trainer.finish.remote())
        exploring, training = explorer.explore.remote(), trainer.train.remote()
        self.phase("rolling out and training")
        stopped = self._watch(exploring, training, explorer, trainer)
        self.phase("saving")
        reached: int = ray.get(trainer.finish.remote())
        if reached >= self.target and not stopped:
            self.phase("evaluating the trained model")
            self._wait([explorer.evaluate_last.remote(reached)])
        if not stopped:
            self._wait([explorer.shutdown.remote(), trainer.shutdown.remote()])
        return reached

    def _watch(self, exploring: Any, training: Any, explorer: Any, trainer: Any) -> bool:
        """Until both sides ended; True if they were asked to. Raises the first error."""
        pending, deadline = [exploring, training], None
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=_POLL_SECONDS)
            try:
                spent = _ended_by_budget(ready)
            except ray.exceptions.RayError:
                # The explorer failed; what the trainer learned since its last save is not lost.
                if training in pending:
                    self.phase("stopping: saving the state")
                    trainer.request_stop.remote()
                    ray.wait([training], timeout=STOP_SECONDS)
                raise
            if deadline is None and (spent or self.stop()):
                self.phase("stopping: saving the state")
                trainer.request_stop.remote()
                explorer.request_stop.remote()
                deadline = time.monotonic() + STOP_SECONDS
                pending = [training] if training in pending else []
            elif deadline is not None and time.monotonic() > deadline:
                raise RunFailed(f"the trainer did not save its state within {STOP_SECONDS:.0f} s")
        return deadline is not None

    def _wait(self, references: list[Any]) -> None:
        """Until all are done; the first error is raised as soon as it happens."""
        pending = references
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=_POLL_SECONDS)
            ray.get(ready)


def _ended_by_budget(ready: list[Any]) -> bool:
    """Whether these ended because the budget did. Raises any other error."""
    try:
        ray.get(ready)
    except ray.exceptions.RayTaskError as error:
        if not isinstance(_cause(error), BudgetReached):
            raise
        return True
    return False


def _cause(error: ray.exceptions.RayTaskError) -> Exception:
    """The error of ours that a worker raised, or its first cause as ours."""
    cause: Any = error
    while isinstance(cause, ray.exceptions.RayTaskError):
        cause = cause.cause
    if isinstance(cause, AflowTuneError) or disk_fault(cause) is not None:
        return cause
    if isinstance(cause, ray.exceptions.RayActorError):
        return _died(cause)
    return RunFailed(str(error))


def _died(error: ray.exceptions.RayActorError) -> RunFailed:
    return RunFailed(f"a worker process died: {error}")


def run_cluster(
    config: AflowConfig, functions: Functions, target: int, phase: Callable[[str], None]
) -> int:
    """Run one stage by Trinity's stage runner; returns the step reached.

    Raises:
        BadInput: there is no Ray that can be used, or the functions cannot be sent.
        RunFailed: the stage failed; its traceback is in the message.
    """
    from trinity.cli.launcher import run_stage

    with ray_for_run(config, functions, config.get_envs(), phase):
        phase(f"running on Trinity's engines, target step {target}")
        with our_actors(config), connection_kept():
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

    from aflow_tune.engines.trinity.rollout import vllm_explorer
    from aflow_tune.engines.trinity.training.verl_trainer import VerlTrainer

    classes = explorer.Explorer, trainer.Trainer
    explorer.Explorer, trainer.Trainer = vllm_explorer.VllmExplorer, VerlTrainer
    if config.mode == vllm_explorer.ONE_GPU_MODE:
        vllm_explorer.share_the_gpu(config)
        explorer.Explorer = vllm_explorer.OneGpuExplorer
    try:
        yield
    finally:
        explorer.Explorer, trainer.Trainer = classes


@contextlib.contextmanager
def connection_kept() -> Iterator[None]:
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
