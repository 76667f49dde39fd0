"""Executing a sweep: starts trials, follows their runs, scores them, ends.

A trial has one run per seed. A run is a process of its own (or an actor in a Ray cluster) that this
one starts, polls and may ask to stop. A run that succeeds is scored from its folder; one that fails
fails its trial only; one that was killed, or stopped by somebody else, leaves its trial unfinished,
and the same command resumes it first. Table and page are written after every trial and at the end,
also after an error.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from aflow_tune.errors import (
    AlreadyFinished,
    BadInput,
    BudgetReached,
    ExitCode,
    Interrupted,
    RunFailed,
)
from aflow_tune.report.evaluation import load_evaluations, ranked, scores_of
from aflow_tune.report.metrics import FILE_NAME, read_metrics
from aflow_tune.report.quantities import finished_evaluations
from aflow_tune.report.statistics import Interval, mean, mean_interval
from aflow_tune.runs.folder import CHAIN_FILE, RunState, is_locked, locked, read_stages, read_state
from aflow_tune.runs.listing import describe
from aflow_tune.runs.process import RunProcess, last_words, own_program
from aflow_tune.sweeps import Request
from aflow_tune.sweeps.plan import Plan, check_same, make_plan, settings_of
from aflow_tune.sweeps.study import SweepStudy, TrialRecord, opened
from aflow_tune.sweeps.table import JSON_FILE, PAGE_FILE, write

POLL_SECONDS = 0.5
FIRST_FAILURES = 3  # if so many fail first, the settings are not the reason
_MAX_REASON = 600
_WELL = (ExitCode.DONE, ExitCode.ALREADY_FINISHED, ExitCode.BUDGET)
"""Exit codes of runs that are scored; one that reached its `budget` counts with what it has."""


class Process(Protocol):
    """A run that was started."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def stop(self) -> None:
        """Ask it to save and stop; at the second call, to stop at once."""


Start = Callable[[Sequence[str], Path], Process]
"""Starts `aflow-tune` with these arguments, and appends its output to the file."""


@dataclass(frozen=True)
class Ended:
    """A finished sweep: its table as text, and the content of `sweep.json`."""

    text: str
    content: dict[str, Any]


def run_sweep(
    request: Request,
    *,
    ray: str | None = None,
    stop: Callable[[], bool],
    say: Callable[[str], None] = print,
) -> Ended:
    """Start or resume the sweep of a request.

    Args:
        ray: address of the Ray to start runs through, instead of the configuration's; `none`: as
            processes of this machine.
        stop: called twice a second; True: save and stop.

    Raises:
        BadInput: it was refused; nothing was started.
        Interrupted: `stop`, or trials were stopped by others. BudgetReached: `--timeout` is over.
        RunFailed: the first three trials failed, none has a score, or the study is unusable.
        AlreadyFinished: there was nothing left to do.
    """
    from aflow_tune.cluster.sweep_ray import cluster_for, ray_starter

    if ray not in (None, "none"):
        setting = f"cluster.ray_address={ray}"
        request = replace(request, overrides=(*request.overrides, setting))
    plan = make_plan(request, say)
    with locked(plan.folder), contextlib.ExitStack() as stack:
        cluster = None if ray == "none" else cluster_for(plan.config)
        start: Start = lambda words, output: RunProcess([*own_program(), *words], output)  # noqa: E731
        if cluster is not None:
            joined = ray_starter(plan.config, cluster, plan.folder, request.parallel)
            start = stack.enter_context(joined)
        return carry_out(plan, start, stop=stop, say=say)


def carry_out(
    plan: Plan, start: Start, *, stop: Callable[[], bool], say: Callable[[str], None] = print
) -> Ended:
    """Run the trials of a plan whose folder is locked. Before an error is raised, the current table
    is written and printed. Raises as `run_sweep`."""
    check_same(plan)
    say(f"sweep folder: {plan.folder}")
    with opened(plan) as study:
        try:
            Sweep(plan, study, start, stop, say).run()
        except BaseException:
            with contextlib.suppress(Exception):  # the original error matters more
                say(f"\n{write(plan, study.records())[0]}\n")
            raise
        text, content = write(plan, study.records())
        return Ended(f"{text}\n\n{plan.folder / PAGE_FILE} and {JSON_FILE} beside it", content)


@dataclass(eq=False)
class Run:
    """One run of a trial. `code`: its exit code, None until it has ended. `asked`: this command
    asked it to stop. `scores`: by step, read when its metrics file had `size` bytes."""

    folder: Path
    arguments: list[str]
    output: Path
    process: Process | None = None
    code: int | None = None
    asked: bool = False
    started: float = 0.0
    size: int = 0
    scores: dict[int, float] = field(default_factory=dict)

    def ask(self) -> None:
        """Ask it to save and stop."""
        if self.process is not None and self.code is None and not self.asked:
            self.asked = True
            self.process.stop()

    def failure(self) -> str | None:
        """Why it failed; None if it did not, was asked to stop, or was stopped or killed."""
        well = self.code is None or self.code < 0 or self.code in (*_WELL, ExitCode.INTERRUPTED)
        if well or self.asked:
            return None
        state = _state(self.folder)
        said = state.error if state is not None and state.status == "failed" else None
        return f"{said or last_words(self.output) or f'exit code {self.code}'} ({self.output})"


def _state(folder: Path) -> RunState | None:
    try:
        return read_state(folder)
    except BadInput:
        return None


@dataclass(eq=False)
class Trial:
    """A trial in progress. `seconds`: of all its runs, also in earlier commands. `reported`: steps
    that the study knows. Once it is `pruned` or `failed` none of its runs is started."""

    number: int
    runs: list[Run]
    reported: set[int]
    seconds: float
    pruned: bool
    failed: str | None = None

    @property
    def ending(self) -> bool:
        return self.pruned or self.failed is not None

    def ask(self) -> None:
        for run in self.runs:
            run.ask()


class Sweep:
    """One command of a sweep. `trials`: those in progress. `endings`: for each that ended in this
    command why it failed, or None. `left`: numbers of those killed or stopped by others."""

    def __init__(
        self,
        plan: Plan,
        study: SweepStudy,
        start: Start,
        stop: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self.plan, self.study, self.start, self.stop, self.say = plan, study, start, stop, say
        self.trials: list[Trial] = []
        self.endings: list[str | None] = []
        self.left: list[int] = []

    def run(self) -> None:
        """Run until every trial has ended. Raises as `run_sweep`, but for BadInput."""
        records = self.study.records()
        self.trials = [self._trial(record) for record in records if record.state == "running"]
        begun = len(records)
        if not self.trials and begun >= self.plan.trials:
            raise AlreadyFinished(
                f"All {begun} trials of the sweep in {self.plan.folder} have ended. Nothing "
                "was started. For more give a higher --trials."
            )
        for trial in self.trials:
            self.say(f"trial {trial.number}: going on with it")
            # If an earlier command was killed, its run may still be saving.
            for run in trial.runs:
                if is_locked(run.folder):
                    self.say(f"waiting for the run in {run.folder}, which is still going on")
                while is_locked(run.folder) and not self.stop():
                    time.sleep(POLL_SECONDS)
        deadline = time.monotonic() + (self.plan.request.timeout or math.inf)
        try:
            while True:
                self._look()
                late = time.monotonic() > deadline
                if late or self.stop():
                    self._stop_all()
                    if late:
                        raise BudgetReached(f"--timeout is over; {self._how_to_go_on()}")
                    raise Interrupted(f"stopped; {self._how_to_go_on()}")
                begun += self._fill(begun)
                if self._hopeless():
                    title = f"the first {FIRST_FAILURES} trials came to nothing."
                    raise RunFailed(f"{title} {self._reasons()}")
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

    def _fill(self, begun: int) -> int:
        """Start runs up to `parallel`; returns how many trials began."""
        new = 0
        while not self._hopeless() and len(self._going()) < self.plan.request.parallel:
            runs = [run for trial in self.trials if not trial.ending for run in trial.runs]
            waiting = next((r for r in runs if r.process is None and r.code is None), None)
            if waiting is not None:
                waiting.process = self.start(waiting.arguments, waiting.output)
                waiting.started = time.monotonic()
                continue
            record = self.study.next() if begun + new < self.plan.trials else None
            if record is None:
                break
            new += 1
            self.say(f"trial {record.number}: {' '.join(settings_of(record.values))}")
            trial = self._trial(record)
            refused = self.plan.refusal(record.number, record.values)
            if refused is None:
                self.trials.append(trial)
            else:
                self._fail(trial, str(refused))
        return new

    def _trial(self, record: TrialRecord) -> Trial:
        runs = []
        for seed in self.plan.seeds:
            name = self.plan.run_name(record.number, seed)
            settings = self.plan.settings(record.number, seed, record.values)
            output = self.plan.folder / "output" / f"{name}.log"
            run = Run(self.plan.folder / name, [str(self.plan.request.config), *settings], output)
            # It may have reached its target in an earlier command. For a chain of stages only the
            # run's own command can tell.
            state = _state(run.folder)
            if state is not None and state.status == "finished":
                run.code = int(ExitCode.DONE)
            runs.append(run)
        notes = record.notes
        seconds, pruned = float(notes.get("seconds", 0.0)), bool(notes.get("pruned"))
        return Trial(record.number, runs, set(record.reported), seconds, pruned)

    def _going(self) -> list[Run]:
        runs = [run for trial in self.trials for run in trial.runs]
        return [run for run in runs if run.process is not None and run.code is None]

    def _look(self) -> None:
        for trial in list(self.trials):
            for run in trial.runs:
                if run.process is not None and run.code is None:
                    run.code = run.process.poll()
                    trial.seconds += 0.0 if run.code is None else time.monotonic() - run.started
            self._report(trial)
            if not trial.ending:
                trial.failed = next(filter(None, (run.failure() for run in trial.runs)), None)
            if trial.ending:
                trial.ask()
            begun = [run for run in trial.runs if run.process is not None or not trial.ending]
            if all(run.code is not None for run in begun):
                self.trials.remove(trial)
                self._settle(trial)

    def _report(self, trial: Trial) -> None:
        """Report steps that all runs of a trial have scored to the study; prune if it says so."""
        if self.plan.config.stages or trial.ending:
            return
        for run in trial.runs:
            with contextlib.suppress(OSError):
                size = (run.folder / FILE_NAME).stat().st_size
                if size != run.size:
                    run.size, run.scores = size, reports(run.folder)
        common = set.intersection(*(set(run.scores) for run in trial.runs))
        for step in sorted(common - trial.reported):
            score = mean([run.scores[step] for run in trial.runs])
            trial.reported.add(step)
            prune = self.study.report(trial.number, step, score)
            self.say(f"trial {trial.number}: {score:.3f} at step {step}")
            if prune and any(run.code is None for run in trial.runs):
                self.say(f"trial {trial.number}: pruned")
                self.study.note(trial.number, pruned=True)  # kept if this command is killed
                trial.pruned = True
                return

    def _settle(self, trial: Trial) -> None:
        """Tell the study how a trial ended, and write the table. The score is the mean over its
        runs, with Student's t interval over them; of a single run, over its held-out tasks."""
        found, scores = [], []
        try:
            if trial.failed is None and all(run.code in _WELL for run in trial.runs):
                found = [outcome(run.folder, self.plan.request.objective) for run in trial.runs]
                scores = [one[0] for one in found if one is not None]
                if len(scores) < len(found):
                    trial.failed = "it holds no held-out evaluation with a score"
        except (OSError, ValueError) as error:  # BadInput is a ValueError
            trial.failed = f"its records cannot be read: {error}"
        if trial.failed is not None:
            self._fail(trial, trial.failed)
            return
        infos = [describe(run.folder) for run in trial.runs if run.folder.is_dir()]
        known = [info.usd for info in infos if info.usd is not None]
        about = bool(known) and (len(known) < len(infos) or any(info.about for info in infos))
        usd = sum(known) if known else None
        self.study.note(trial.number, seconds=trial.seconds, usd=usd, about=about)
        if scores:
            one = found[0] if len(found) == 1 else None
            interval = mean_interval(scores) if one is None else one[2]
            self.study.note(
                trial.number,
                step=one and one[1],
                low=interval and interval.low,
                high=interval and interval.high,
                by_seed=scores,
                budget=any(run.code == ExitCode.BUDGET for run in trial.runs),
            )
            self.study.end(trial.number, mean(scores))
            self.endings.append(None)
            self.say(f"trial {trial.number}: score {mean(scores):.3f} ({trial.seconds:.0f} s)")
        elif trial.pruned:
            self.study.end(trial.number, pruned=True)
            self.endings.append(None)
        elif not any(run.asked for run in trial.runs):
            self.left.append(trial.number)
            self.endings.append("its run was stopped or killed")
            self.say(f"trial {trial.number}: stopped or killed by somebody else")
        write(self.plan, self.study.records())

    def _fail(self, trial: Trial, reason: str) -> None:
        self.study.note(trial.number, reason=reason[:_MAX_REASON], seconds=trial.seconds)
        self.study.end(trial.number)
        self.endings.append(reason)
        self.say(f"trial {trial.number}: failed: {reason}")
        write(self.plan, self.study.records())

    def _hopeless(self) -> bool:
        first = self.endings[:FIRST_FAILURES]
        return len(first) == FIRST_FAILURES and all(first)

    def _reasons(self) -> str:
        return "\n".join(dict.fromkeys(filter(None, self.endings))) or "The table says why."

    def _stop_all(self) -> None:
        """Ask all runs to stop and wait until they have saved; at a second Ctrl-C, stop them at
        once. Trials that end meanwhile are told to the study; the others stay unfinished."""
        if not (going := self._going()):
            return
        self.say(f"stopping {len(going)} runs after the step under way; their state is saved")
        for run in going:
            run.ask()
        try:
            while self._going():
                time.sleep(POLL_SECONDS / 5)
                self._look()
        finally:
            for run in self._going():  # only at a second Ctrl-C
                if run.process is not None:
                    run.process.stop()
                run.code = -int(signal.SIGKILL)
            for trial in self.trials:
                self.study.note(trial.number, seconds=trial.seconds)

    def _how_to_go_on(self) -> str:
        ended = sum(record.state != "running" for record in self.study.records())
        return (
            f"{ended} of {self.plan.trials} trials have ended, the state of the others is saved "
            f"in {self.plan.folder}. The same command goes on."
        )


def outcome(run: Path, objective: str) -> tuple[float, int, Interval | None] | None:
    """The best or last score of a run that has ended, its step, and its interval if there is only
    one task set; None without a score. Of a chain, the last stage with an evaluation counts.

    Raises:
        ValueError: a record file is damaged; names the file and line.
    """
    folders: Iterator[Path] = iter([run])
    if (run / CHAIN_FILE).is_file():
        folders = (run / stage["name"] for stage in reversed(read_stages(run)))
    for folder in folders:
        if found := _by_step(scores_of(folder)):
            # Ties: the earliest step.
            step = max(found) if objective == "last" else max(found, key=lambda s: (found[s], -s))
            of_sets = load_evaluations(folder).values()
            evaluations = [steps[step] for steps in of_sets if step in steps]
            one = evaluations[0].interval() if len(evaluations) == 1 else None
            return found[step], step, one
    return None


def reports(run: Path) -> dict[int, float]:
    """For a run in progress, the score by step of each finished evaluation after step 0; empty if
    the records cannot be read."""
    try:
        finished: dict[str, set[int]] = defaultdict(set)
        for line in read_metrics(run):
            for name in finished_evaluations(line.metrics):
                finished[name].add(line.step)
        scores = {
            step: {name: score for name, score in of.items() if step in finished[name]}
            for step, of in scores_of(run).items()
        }
    except (OSError, ValueError):
        return {}
    return {step: score for step, score in _by_step(scores).items() if step > 0}


def _by_step(scores: dict[int, dict[str, float]]) -> dict[int, float]:
    """Mean score by step, for the steps that were evaluated on the most task sets. Step 0 counts
    only if there is no other: before training, most trials are the same."""
    there = [step for step, of in scores.items() if of]
    return dict(ranked(scores, [step for step in there if step > 0] or there))
