"""Trinity's explorer/trainer split on the run's Ray: start, watch, stop in order.

Upstream's launcher swallows errors, lets both sides synchronise at once and cannot be asked
to save and stop. This one awaits the trainer's first weights before the explorer's, ends on
the first error with its cause, and turns Ctrl-C and SIGTERM into a saved state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from aflow_tune.cluster.ray_for_run import ray_for_run
from aflow_tune.config.load import AflowConfig
from aflow_tune.engines.trinity.rollout.explorer import LocalExplorer
from aflow_tune.engines.trinity.training.train_actor import LocalTrainActor
from aflow_tune.errors import AflowTuneError, BudgetReached, RunFailed, disk_fault

STOP_SECONDS = 180.0
"""How long a stop waits for the trainer's step under way and its checkpoint."""

_POLL_SECONDS = 0.5


def run_split(
    config: AflowConfig,
    functions: Sequence[Callable[..., Any] | None],
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
    env_vars = {
        **config.get_envs(),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with ray_for_run(config, functions, env_vars, phase):
        split = _Split(config, target, phase, stop)
        try:
            return split.run()
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
        self.config = config
        self.target = target
        self.phase = phase
        self.stop = stop

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
                if training in pending:
                    self._save_before_failing(training, trainer)
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

    def _save_before_failing(self, training: Any, trainer: Any) -> None:
        """The explorer failed; what the trainer has learned since its last save is not lost."""
        self.phase("stopping: saving the state")
        trainer.request_stop.remote()
        ray.wait([training], timeout=STOP_SECONDS)

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
