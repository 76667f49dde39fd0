"""The sweep while it runs: which trial is next, what its runs have come to, how it ends.

A trial has one run for each seed, and a run is a process of its own that this one starts, looks at
twice a second and may ask to stop. A run that ends well is scored from its folder; one that fails
costs its trial and no more; one that was killed, or stopped by somebody else, leaves its trial
unfinished: the same command goes on with it, before anything new is begun.

What is to be tried and what is pruned is the study's matter (`study.py`), how a process is
started that of whoever gives the starter: on this machine, or through Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from aflow_tune.errors import (
    AlreadyFinished,
    BudgetReached,
    ExitCode,
    Interrupted,
    RunFailed,
)
from aflow_tune.report.statistics import mean
from aflow_tune.runs.folder import is_locked
from aflow_tune.sweeps.plan import Plan
from aflow_tune.sweeps.scores import Outcome, cost, outcome, reports, signature, together
from aflow_tune.sweeps.space import settings_of
from aflow_tune.sweeps.study import SweepStudy, TrialRecord
from aflow_tune.sweeps.trial import Run, Starter, Trial

POLL_SECONDS = 0.5
FIRST_FAILURES = 3
"""So many trials failing before any came to its end mean that it is not the settings."""
_LAST_SECONDS = 10.0
"""How long runs have to end after they were told to stop at once."""
_MAX_REASON = 600


class Sweep:
    """One command of a sweep.

    Args:
        stop: asked twice a second whether to save and stop.
        say: told in words what is going on.
        changed: called when a trial has ended, to write down how things stand.
    """

    def __init__(
        self,
        plan: Plan,
        study: SweepStudy,
        starter: Starter,
        *,
        stop: Callable[[], bool],
        say: Callable[[str], None] = print,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self.plan, self.study, self.starter = plan, study, starter
        self.stop, self.say, self.changed = stop, say, changed
        self.trials: list[Trial] = []
        self.endings: list[str | None] = []
        """Of the trials that ended in this command, in their order: why it failed, or None."""
        self.left: list[int] = []
        """Trials whose run was killed, or stopped by somebody else, in this command."""
        self._given_up = False

    def run(self) -> None:
        """Run until every trial has ended.

        Raises:
            Interrupted: asked to stop, or runs were killed; the same command goes on.
            BudgetReached: `--timeout` is over; the same command goes on.
            RunFailed: the first three trials failed, or none has a score.
            AlreadyFinished: there was nothing left to do.
        """
        begun = self._resume()
        limit = self.plan.request.timeout
        deadline = None if limit is None else time.monotonic() + limit
        try:
            while True:
                self._look()
                if self.stop():
                    self._stop_all()
                    raise Interrupted(f"stopped; {self._how_to_go_on()}")
                if deadline is not None and time.monotonic() > deadline:
                    self._stop_all()
                    raise BudgetReached(f"--timeout is over; {self._how_to_go_on()}")
                begun += self._fill(begun)
                if reason := self._hopeless():
                    raise RunFailed(reason)
                if not self.trials:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            self._stop_all()
        if self.left:
            numbers = ", ".join(map(str, sorted(self.left)))
            raise Interrupted(
                f"trials stopped or killed by somebody else: {numbers}; {self._how_to_go_on()}"
            )
        if not any(record.state in ("complete", "pruned") for record in self.study.records()):
            raise RunFailed(f"no trial has a score. {self._reasons()}")

    # -- what is begun ---------------------------------------------------------------------

    def _resume(self) -> int:
        """Take up the trials that an earlier command left; how many were begun in all."""
        records = self.study.records()
        self.trials = [self._trial(record) for record in records if record.state == "running"]
        if not self.trials and len(records) >= self.plan.trials:
            raise AlreadyFinished(
                f"All {len(records)} trials of the sweep in {self.plan.folder} have ended. Nothing "
                "was started. For more give a higher --trials."
            )
        for trial in self.trials:
            self.say(f"trial {trial.number}: going on with it")
        return len(records)

    def _fill(self, begun: int) -> int:
        """Start runs while there is room; how many trials were begun."""
        new = 0
        while self._room() > 0 and not self._hopeless():
            live = [trial for trial in self.trials if not trial.ending]
            waiting = [run for trial in live for run in trial.runs if run.waiting]
            if waiting:
                self._start(waiting[0])
                continue
            record = self.study.next() if begun + new < self.plan.trials else None
            if record is None:
                break
            new += 1
            self._begin(record)
        return new

    def _room(self) -> int:
        busy = sum(run.going or run.held for trial in self.trials for run in trial.runs)
        return self.plan.request.parallel - busy

    def _begin(self, record: TrialRecord) -> None:
        self.say(f"trial {record.number}: {' '.join(settings_of(record.values))}")
        refused = self.plan.refusal(record.number, record.values)
        if refused is not None:
            self._fail(record.number, str(refused), 0.0)
            self.changed()
            return
        self.trials.append(self._trial(record))

    def _trial(self, record: TrialRecord) -> Trial:
        runs = []
        for seed in self.plan.seeds:
            name = self.plan.run_name(record.number, seed)
            settings = self.plan.settings(record.number, seed, record.values)
            output = self.plan.folder / "output" / f"{name}.log"
            run = Run(self.plan.folder / name, [str(self.plan.request.config), *settings], output)
            run.note_earlier_end()
            runs.append(run)
        seconds = float(record.notes.get("seconds", 0.0))
        pruned = bool(record.notes.get("pruned"))
        return Trial(record, runs, set(record.reported), seconds, pruned)

    def _start(self, run: Run) -> None:
        if is_locked(run.folder):
            # An earlier command of this sweep was killed, and its run is still saving.
            self.say(f"waiting for the run in {run.folder}, which is still going on")
            run.held = True
            return
        run.start(self.starter)

    # -- what has become of it -------------------------------------------------------------

    def _look(self) -> None:
        """Notice scores and endings."""
        for trial in list(self.trials):
            for run in trial.runs:
                run.held = run.held and is_locked(run.folder)
            trial.look()
            self._report(trial)
            failed = next((run for run in trial.runs if run.failed), None)
            if failed is not None and not trial.ending:
                trial.failed = failed.reason()
                trial.ask()
            if trial.over:
                self.trials.remove(trial)
                self._settle(trial)
                self.changed()

    def _report(self, trial: Trial) -> None:
        """Tell the study the scores that all runs of a trial have by now; prune if it says so."""
        if self.plan.is_chain or trial.ending:
            return
        for run in trial.runs:
            seen = signature(run.folder)
            if seen != run.seen:
                run.seen, run.scores = seen, reports(run.folder)
        common = set.intersection(*(set(run.scores) for run in trial.runs))
        for step in sorted(common - trial.reported):
            score = mean([run.scores[step] for run in trial.runs])
            trial.reported.add(step)
            prune = self.study.report(trial.number, step, score)
            self.say(f"trial {trial.number}: {score:.3f} at step {step}")
            if prune and any(run.code is None for run in trial.runs):
                self.say(f"trial {trial.number}: pruned")
                self.study.note(trial.number, pruned=True)  # a killed command has decided it too
                trial.pruned = True
                trial.ask()
                return

    def _settle(self, trial: Trial) -> None:
        """Tell the study how a trial ended."""
        if trial.failed is not None:
            self._fail(trial.number, trial.failed, trial.seconds)
            return
        usd, about = cost(run.folder for run in trial.runs if run.folder.is_dir())
        self.study.note(trial.number, seconds=trial.seconds, usd=usd, about=about)
        if all(run.well for run in trial.runs):
            self._score(trial)
        elif trial.pruned:
            self.study.prune(trial.number)
            self.endings.append(None)
        elif not any(run.asked for run in trial.runs):
            self.left.append(trial.number)
            self.endings.append("its run was stopped or killed")
            codes = ", ".join(str(run.code) for run in trial.runs if not run.well)
            self.say(f"trial {trial.number}: stopped or killed by somebody else ({codes})")

    def _score(self, trial: Trial) -> None:
        found: list[Outcome] = []
        for run in trial.runs:
            try:
                scored = outcome(run.folder, self.plan.request.objective)
            except (OSError, ValueError) as error:  # BadInput is a ValueError
                reason = f"its records cannot be read: {error}"
                self._fail(trial.number, reason, trial.seconds)
                return
            if scored is None:
                reason = f"{run.folder} holds no held-out evaluation with a score"
                self._fail(trial.number, reason, trial.seconds)
                return
            found.append(scored)
        whole = together(found)
        interval = whole.interval
        self.study.note(
            trial.number,
            step=whole.step,
            low=interval and interval.low,
            high=interval and interval.high,
            by_seed=[each.score for each in found],
            budget=any(run.code == ExitCode.BUDGET for run in trial.runs),
        )
        self.study.complete(trial.number, whole.score)
        self.endings.append(None)
        self.say(f"trial {trial.number}: score {whole.score:.3f} ({trial.seconds:.0f} s)")

    def _fail(self, number: int, reason: str, seconds: float) -> None:
        self.study.note(number, reason=reason[:_MAX_REASON], seconds=seconds)
        self.study.fail(number)
        self.endings.append(reason)
        self.say(f"trial {number}: failed: {reason}")

    # -- how it ends -----------------------------------------------------------------------

    def _hopeless(self) -> str:
        """Why it makes no sense to go on; empty where it does."""
        first = self.endings[:FIRST_FAILURES]
        if len(first) < FIRST_FAILURES or not all(first):
            return ""
        return f"the first {FIRST_FAILURES} trials came to nothing. {self._reasons()}"

    def _reasons(self) -> str:
        reasons = dict.fromkeys(reason for reason in self.endings if reason)
        return "\n".join(reasons) or "The table says why."

    def _stop_all(self) -> None:
        """Stop what runs and wait until its state is saved; what came to its end meanwhile is
        told to the study, the other trials stay unfinished."""
        going = [run for trial in self.trials for run in trial.runs if run.going]
        if not going or self._given_up:
            return
        self.say(f"stopping {len(going)} runs after the step under way; their state is saved")
        try:
            for trial in self.trials:
                trial.ask()
            self._wait(going, None)
        except KeyboardInterrupt:
            self._given_up = True
            for trial in self.trials:
                trial.ask(again=True)
            self._wait(going, time.monotonic() + _LAST_SECONDS)
            raise
        finally:
            for trial in self.trials:
                self.study.note(trial.number, seconds=trial.seconds)
        self._look()

    def _wait(self, going: list[Run], deadline: float | None) -> None:
        while any(run.going for run in going):
            if deadline is not None and time.monotonic() > deadline:
                return
            for trial in self.trials:
                trial.look()
            time.sleep(POLL_SECONDS / 5)

    def _how_to_go_on(self) -> str:
        ended = sum(record.state != "running" for record in self.study.records())
        return (
            f"{ended} of {self.plan.trials} trials have ended, the state of the others is saved "
            f"in {self.plan.folder}. The same command goes on."
        )
