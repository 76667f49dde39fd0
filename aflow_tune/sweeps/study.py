"""Optuna's side of a sweep: what is tried next, what is pruned, and the record in SQLite.

The study asks and is told; nothing runs inside of Optuna. A trial that is RUNNING in the study was
not brought to an end: its command goes on with it, or the next command does. The score is
maximised.

Samplers are made anew for every trial from the sweep's seed and the trial's number: one that was
made once would begin its random numbers again after a resume, and draw the same settings twice.
A grid is our own order of combinations, each handed over as a fixed trial, because Optuna's
`GridSampler` stops a loop of Optuna's own that is not there (`Study.stop` raises).
"""

from __future__ import annotations

import random
import sqlite3
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aflow_tune.errors import RunFailed
from aflow_tune.sweeps import STUDY_FILE
from aflow_tune.sweeps.space import Axis, combination, grid_order

_NAME = "sweep"
_WAIT_SECONDS = 60
_MEDIAN_AFTER = 3
"""Trials that must be complete before the median of so few says anything."""
_MOST_RANDOM = 10
"""TPE draws as many at random before it models anything; fewer where there are few trials."""


@dataclass(frozen=True)
class TrialRecord:
    """A trial as the study keeps it.

    `state`: running, complete, pruned or failed. `value` is what was told, or of a pruned trial
    the last report. `reported`: mean score by training step. `notes`: what `note` was given.
    """

    number: int
    state: str
    values: dict[str, str]
    value: float | None = None
    reported: dict[int, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


class SweepStudy:
    """The study in a sweep's folder; made if it is not there.

    Args:
        trials: how many there will be, for TPE's random beginning.
        first_report: the training step of the first evaluation: halving begins there.
        together: whether trials run side by side, so that TPE must not draw the same twice.
    """

    def __init__(
        self,
        folder: Path,
        axes: Sequence[Axis],
        *,
        sampler: str,
        pruner: str,
        seed: int,
        trials: int,
        first_report: int,
        together: bool,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._axes = {axis.key: axis for axis in axes}
        self._distributions = {axis.key: axis.distribution() for axis in axes}
        self._sampler, self._seed = sampler, seed
        self._trials, self._together = trials, together
        self._order = grid_order(axes, seed) if sampler == "grid" else []
        folder.mkdir(parents=True, exist_ok=True)
        with _calm():
            self._storage = optuna.storages.RDBStorage(
                "sqlite:///study", engine_kwargs={"creator": lambda: _connect(folder / STUDY_FILE)}
            )
            self._study = optuna.create_study(
                study_name=_NAME,
                storage=self._storage,
                direction="maximize",
                sampler=self._sampler_of(0),
                pruner=_pruner(optuna, pruner, first_report),
                load_if_exists=True,
            )

    def close(self) -> None:
        """Let go of the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def records(self) -> list[TrialRecord]:
        """All trials that were begun, by number."""
        states = self._optuna.trial.TrialState
        words = {
            states.RUNNING: "running",
            states.COMPLETE: "complete",
            states.PRUNED: "pruned",
            states.FAIL: "failed",
        }
        return [
            TrialRecord(
                trial.number,
                words[trial.state],
                {key: axis.text(trial.params[key]) for key, axis in self._axes.items()},
                trial.value,
                dict(sorted(trial.intermediate_values.items())),
                dict(trial.user_attrs),
            )
            for trial in self._study.get_trials(deepcopy=False)
            # A kill between two writes leaves one without all of its settings: it never began.
            if trial.state in words and self._axes.keys() <= trial.params.keys()
        ]

    def next(self) -> TrialRecord | None:
        """Begin a trial: its number and settings; None where a grid has no more.

        What was handed over and not begun by a command that was killed comes first.
        """
        trials = self._study.get_trials(deepcopy=False)
        waiting = any(t.state == self._optuna.trial.TrialState.WAITING for t in trials)
        number = len(trials)
        with _calm():
            if self._sampler == "grid" and not waiting:
                left = self._not_tried(trials)
                if left is None:
                    return None
                self._study.enqueue_trial(
                    {key: self._axes[key].value(text) for key, text in left.items()}
                )
            self._study.sampler = self._sampler_of(number)
            trial = self._study.ask(self._distributions)
        texts = {key: axis.text(trial.params[key]) for key, axis in self._axes.items()}
        return TrialRecord(trial.number, "running", texts)

    def _not_tried(self, trials: Sequence[Any]) -> dict[str, str] | None:
        """The next combination of the grid that no trial has."""
        axes = list(self._axes.values())
        tried = {
            tuple(axis.text(trial.params[axis.key]) for axis in axes)
            for trial in trials
            if self._axes.keys() <= trial.params.keys()
        }
        for index in self._order:
            found = combination(axes, index)
            if tuple(found.values()) not in tried:
                return found
        return None

    def report(self, number: int, step: int, value: float) -> bool:
        """Record a trial's score at a training step; whether it is to be pruned."""
        trial = self._trial(number)
        trial.report(value, step)
        return bool(trial.should_prune())

    def note(self, number: int, **notes: Any) -> None:
        """Keep plain data with a trial that is running."""
        trial = self._trial(number)
        for name, value in notes.items():
            trial.set_user_attr(name, value)

    def complete(self, number: int, value: float) -> None:
        """A trial came to its end with this score."""
        self._study.tell(number, value)

    def prune(self, number: int) -> None:
        """A trial was stopped because others were better."""
        self._study.tell(number, state=self._optuna.trial.TrialState.PRUNED)

    def fail(self, number: int) -> None:
        """A trial has no score."""
        self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)

    def _trial(self, number: int) -> Any:
        study_id = self._storage.get_study_id_from_name(_NAME)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
        return self._optuna.trial.Trial(self._study, trial_id)

    def _sampler_of(self, number: int) -> Any:
        samplers = self._optuna.samplers
        seed = random.Random(f"{self._seed} {number}").getrandbits(32)
        if self._sampler != "tpe":  # of a grid nothing is drawn
            return samplers.RandomSampler(seed=seed)
        startup = min(_MOST_RANDOM, max(2, self._trials // 3))
        return samplers.TPESampler(
            seed=seed, n_startup_trials=startup, constant_liar=self._together
        )


def _pruner(optuna: Any, name: str, first_report: int) -> Any:
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=_MEDIAN_AFTER)
    if name == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(
            min_resource=max(1, first_report), reduction_factor=2
        )
    return optuna.pruners.NopPruner()


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Tell in words that the study of a sweep cannot be read or written, such as on a full disk.

    Raises:
        RunFailed: it cannot.
    """
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (StorageInternalError, SQLAlchemyError, sqlite3.Error) as error:
        cause = error.__cause__ or error
        said = str(getattr(cause, "orig", None) or cause).splitlines()[0]
        raise RunFailed(
            f"the record of the sweep, {folder / STUDY_FILE}, cannot be read or written: {said}. "
            "The runs are whole; the same command goes on once it can."
        ) from error


def _connect(path: Path) -> sqlite3.Connection:
    # In place of an address, in which some characters of a path would mean something else.
    return sqlite3.connect(path, timeout=_WAIT_SECONDS, check_same_thread=False)


@contextmanager
def _calm() -> Iterator[None]:
    """Without Optuna's notes that a part of it may change in a later version."""
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield
