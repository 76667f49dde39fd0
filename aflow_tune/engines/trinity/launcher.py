"""Trinity's explorer/trainer split on a Ray of our own: start, watch, stop in order.

Upstream's launcher swallows errors, lets both sides synchronise at once and cannot be asked
to save and stop. This one awaits the trainer's first weights before the explorer's, ends on
the first error with its cause, and turns Ctrl-C and SIGTERM into a saved state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

from aflow_tune.engines.trinity.config import AflowConfig
from aflow_tune.engines.trinity.explorer import LocalExplorer
from aflow_tune.engines.trinity.local_ray import local_ray
from aflow_tune.engines.trinity.train_engine import LocalTrainActor
from aflow_tune.errors import AflowTuneError, BudgetReached, RunFailed

STOP_SECONDS = 180.0
"""How long a stop waits for the trainer's step under way and its checkpoint."""

_POLL_SECONDS = 0.5


def run_split(
    config: AflowConfig, target: int, phase: Callable[[str], None], stop: Callable[[], bool]
) -> int:
    """Train through explorer and trainer actors; returns the step that was reached.

    Args:
        config: a prepared configuration whose functions were shipped.
        target: the step to reach.
        phase: told in words what is going on.
        stop: asked twice a second whether to save and stop.

    Raises:
        RunFailed: either side failed; the message is its first cause.
    """
    phase("starting Ray")
    # Spinning OpenMP threads of one actor would take the cores from the other.
    env_vars = {
        **config.get_envs(),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with local_ray(config.ray_namespace, env_vars):
        split = _Split(config, target, phase, stop)
        try:
            return split.run()
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from error
        except ray.exceptions.RayActorError as error:
            raise RunFailed(f"a worker process died: {error}") from error


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
            spent = _ended_by_budget(ready)
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
    if isinstance(cause, AflowTuneError):
        return cause
    return RunFailed(str(error))
