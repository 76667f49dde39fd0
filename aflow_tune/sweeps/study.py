"""Optuna's part of a sweep: which settings are next, which trials are pruned, the SQLite record.

Optuna is used by ask and tell. A trial that is RUNNING in the study has not ended: this or the next
command resumes it. The score is maximised. Each trial has a new sampler, seeded with the sweep's
seed and the trial's number, so that a resumed sweep does not draw the same settings twice; a grid's
combinations are added as trials.
"""

from __future__ import annotations

import random
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.trial import TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from aflow_tune.errors import RunFailed
from aflow_tune.sweeps.plan import STUDY_FILE, Plan, grid

_STATES = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


@dataclass(frozen=True)
class TrialRecord:
    """A trial in the study. `value`: its final score. `reported`: mean score over its runs by
    training step. `notes`: from `SweepStudy.note`."""

    number: int
    state: str
    values: dict[str, str]
    value: float | None = None
    reported: dict[int, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


class SweepStudy:
    """The study in a sweep's folder, created if it is missing."""

    def __init__(self, plan: Plan) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Optuna warns of features that may change in a later version.
        warnings.simplefilter("ignore", ExperimentalWarning)
        self._plan, request = plan, plan.request
        self._axes = {axis.key: axis for axis in plan.axes}
        self._grid = grid(plan.axes, request.seed) if request.sampler == "grid" else None
        plan.folder.mkdir(parents=True, exist_ok=True)
        # Not a URL: some characters of a path have a meaning there.
        engine = {
            "creator": lambda: sqlite3.connect(
                plan.folder / STUDY_FILE, timeout=60, check_same_thread=False
            )
        }
        pruners = {
            "none": optuna.pruners.NopPruner(),
            "median": optuna.pruners.MedianPruner(n_startup_trials=3),
            "halving": optuna.pruners.SuccessiveHalvingPruner(plan.first_report, 2),
        }
        self._storage = optuna.storages.RDBStorage("sqlite:///study", engine_kwargs=engine)
        self._study = optuna.create_study(
            study_name="sweep",
            storage=self._storage,
            direction="maximize",
            pruner=pruners[request.prune],
            load_if_exists=True,
        )

    def close(self) -> None:
        self._storage.remove_session()
        self._storage.engine.dispose()

    def records(self) -> list[TrialRecord]:
        """All trials that have begun, in order of their numbers."""
        return [
            TrialRecord(
                trial.number,
                _STATES[trial.state],
                {key: axis.text(trial.params[key]) for key, axis in self._axes.items()},
                trial.value,
                dict(sorted(trial.intermediate_values.items())),
                dict(trial.user_attrs),
            )
            for trial in self._study.get_trials(deepcopy=False)
            # A kill between two writes leaves a trial without all settings: it never began.
            if self._axes.keys() <= trial.params.keys()
        ]

    def next(self) -> TrialRecord | None:
        """Begin a trial and return it; None when the grid is exhausted."""
        distributions: Any = {key: axis.distribution for key, axis in self._axes.items()}
        number = len(self._study.get_trials(deepcopy=False))
        if self._grid is not None:
            tried = [record.values for record in self.records()]
            left = next((values for values in self._grid if values not in tried), None)
            if left is None:
                return None
            params = {k: text if self._axes[k].choices else int(text) for k, text in left.items()}
            self._study.add_trial(
                create_trial(state=TrialState.RUNNING, params=params, distributions=distributions)
            )
        else:
            self._study.sampler = self._sampler(number)
            self._study.ask(distributions)
        return self.records()[-1]

    def report(self, number: int, step: int, value: float) -> bool:
        """Record a trial's score at a training step; returns whether to prune it."""
        trial = self._trial(number)
        trial.report(value, step)
        return bool(trial.should_prune())

    def note(self, number: int, **notes: Any) -> None:
        trial = self._trial(number)
        for name, value in notes.items():
            trial.set_user_attr(name, value)

    def end(self, number: int, value: float | None = None, *, pruned: bool = False) -> None:
        """End a trial: with a score, as pruned, or (with neither) as failed."""
        state = TrialState.PRUNED if pruned else TrialState.FAIL
        self._study.tell(number, value, None if value is not None else state)

    def _trial(self, number: int) -> optuna.Trial:
        trials = self._study.get_trials(deepcopy=False)
        return optuna.Trial(self._study, trials[number]._trial_id)

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        request = self._plan.request
        seed = random.Random(f"{request.seed} {number}").getrandbits(32)
        if request.sampler != "tpe":  # a grid draws nothing
            return optuna.samplers.RandomSampler(seed=seed)
        startup = min(10, max(2, self._plan.trials // 3))  # trials drawn at random first
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=startup, constant_liar=request.parallel > 1
        )


@contextmanager
def opened(plan: Plan) -> Iterator[SweepStudy]:
    """The study for the block. RunFailed: it cannot be read or written (e.g. the disk is full)."""
    try:
        with closing(SweepStudy(plan)) as study:
            yield study
    except (StorageInternalError, SQLAlchemyError, sqlite3.Error) as error:
        said = str(error.__cause__ or error).splitlines()[0]
        what = f"the record of the sweep, {plan.folder / STUDY_FILE}, cannot be read or written"
        raise RunFailed(f"{what}: {said}. The runs are whole; the same command goes on.") from error
