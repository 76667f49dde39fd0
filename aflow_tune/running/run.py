"""Executes one run and verifies the result: training succeeds only if it reached its target and the
last checkpoint is intact. `Run` trains on rollouts; `MODES` has the classes of the other modes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trinity.buffer import get_buffer_reader

from aflow_tune.config.accounting import spend_of
from aflow_tune.config.changes import fingerprint_of, render_changes, save_resolved
from aflow_tune.config.engine import choose_engine, give_engine_settings, use_recorded
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.prepare import prepare
from aflow_tune.config.quiet import log_to
from aflow_tune.config.settings import Change
from aflow_tune.config.tasksets import materialise_tasksets, merge_mix
from aflow_tune.config.validate import check_data, check_run_prompts, needs_workflow
from aflow_tune.contract.signature import check_functions
from aflow_tune.data.coreset import count_of
from aflow_tune.engines.local.checkpoint import verify_checkpoint
from aflow_tune.engines.trinity.memory import (
    Rehearsal,
    choose_coreset,
    join_buffer,
    open_rehearsal,
)
from aflow_tune.engines.trinity.readers import (
    Experiences,
    hand_over,
    left_out_warning,
    materialise_experiences,
    open_experiences,
)
from aflow_tune.engines.trinity.rollout.adapter import adapter_arguments
from aflow_tune.engines.trinity.training import run_state
from aflow_tune.engines.trinity.training.off_policy import BatchFiles
from aflow_tune.errors import (
    AflowTuneError,
    AlreadyFinished,
    BadInput,
    BudgetReached,
    ExitCode,
    Interrupted,
    RunFailed,
    disk_fault,
)
from aflow_tune.evaluation.evaluating import Batch, LocalModels, TaskSets, read_tasks
from aflow_tune.find_ray import check_address
from aflow_tune.report.evaluation import FOLDER, load_evaluations
from aflow_tune.report.html import summary_text, write_report
from aflow_tune.report.metrics import read_metrics, rewind_metrics
from aflow_tune.report.panel import Panel
from aflow_tune.running.pairing import write_pairs
from aflow_tune.running.stopping import until_stopped
from aflow_tune.runs.folder import (
    MAX_ERROR,
    checkpoints,
    locked,
    new_state,
    read_state,
    write_state,
)
from aflow_tune.runs.listing import summarise
from aflow_tune.types import TuneResult

Function = Callable[..., Any]
Phase = Callable[[str], None]
Stop = Callable[[], bool]


class Run:
    """One run: call `prepare`, `claimed`, `execute`. `workflow_func` None: the mode calls none."""

    def __init__(
        self, config: AflowConfig, workflow_func: Function | None, judge_func: Function | None
    ) -> None:
        self.config, self.workflow_func, self.judge_func = config, workflow_func, judge_func
        self.changes: list[Change] = []
        self.built_upon: str | None = None
        """The later stage that started from this run's result, which must not change any more."""

    def prepare(self) -> None:
        """Check the functions and data; decide the engine and all settings. Raises BadInput."""
        if self.workflow_func is not None and needs_workflow(self.config):
            check_functions(self.workflow_func, self.judge_func)
        check_run_prompts(self.config)
        self.engine = choose_engine(self.config)
        if unreachable := list(check_address(self.config, self.engine[0])):
            raise BadInput("There is no Ray for this run.", unreachable)
        self.changes = prepare(self.config, workflow=self.workflow_func)
        self.run_dir = Path(self.config.checkpoint_job_dir)
        data = check_data(self.config, self.workflow_func, self.judge_func)
        self.warnings = [*self.config.warnings, *data.warnings]
        if data.faults:
            raise BadInput("The data sets do not fit.", data.faults)

    def announce(self) -> None:
        """Print the engine and why it was chosen, the warnings, and the changed settings."""
        warnings = [f"warning: {warning}" for warning in self.warnings]
        told = [f"engine: {self.engine[0]} ({self.engine[1]})", *warnings]
        print("\n".join([*told, render_changes(self.changes)]), flush=True)

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the run folder and rewind it to the checkpoint to resume from. Raises BadInput: it
        is in use or of another configuration, or no checkpoint is sound; AlreadyFinished."""
        with locked(self.run_dir):
            run_state.refuse_chain(self.run_dir)
            log_to(self.run_dir / "log")
            materialise_tasksets(self.config)
            fingerprint = fingerprint_of(self.config)
            self.target = self._target()
            self.config.trainer.total_steps = self.target or None
            earlier = run_state.check_restart(self.run_dir, fingerprint, self.target)
            if self.built_upon is not None:
                title = "A finished stage cannot go on once a later one began from its result."
                where, fix = str(self.run_dir), "set the steps back, or give another `name=`"
                expected = f"its old target: stage {self.built_upon!r} began from it"
                raise BadInput.of(title, where, expected, f"{self.target} steps", fix)
            find = (
                run_state.newest_sound if self.config.engine == "local" else run_state.trinity_step
            )
            self.start = find(self.run_dir)
            if earlier is not None:
                self._rewind()
            else:
                print(f"run folder: {self.run_dir}")
            self.state = new_state(self.target, self.start, fingerprint, self.config.command)
            write_state(self.run_dir, self.state)
            try:
                save_resolved(self.config, self.changes, self.run_dir / "resolved.yaml")
                yield
            except BaseException as error:
                if self.state.status == "running":  # it ended before `execute` recorded an end
                    stopped = isinstance(error, (Interrupted, KeyboardInterrupt))
                    status = "interrupted" if stopped else "failed"
                    self._write_end(status, str(error) or type(error).__name__)
                raise

    def _rewind(self) -> None:
        """Rewind the folder to the checkpoint of step `self.start`."""
        run_state.rewind(self.run_dir, self.start, self.config.explorer.name)
        if self.config.engine == "trinity":
            run_state.rewind_trinity(self.run_dir, self.start)
        rewind_metrics(self.run_dir, self.start)
        print(f"resuming {self.run_dir} from step {self.start} of {self.target}")

    def execute(self, stop: Stop) -> TuneResult:
        """Run to the target on the chosen engine, verify the result and write the report. Raises
        RunFailed: the target was not reached, the last checkpoint is damaged, or a file could not
        be written; Interrupted, BudgetReached: the state is saved."""
        self.spend = spend_of(self.config)
        limit = self.config.budget.wall_seconds
        deadline = None if limit is None else time.monotonic() + limit

        def spent() -> bool:
            late = deadline is not None and time.monotonic() > deadline
            return late or self.spend.reached() is not None

        try:
            self.spend.start()
            self._inject()
            with (
                use_recorded(self.config, self.run_dir),
                Panel(self.run_dir, self.target) as panel,
            ):
                reached = self._engine(panel.phase, lambda: stop() or spent())
            self._prove(reached, stop(), spent())
        except (Interrupted, BudgetReached, KeyboardInterrupt) as error:
            self._write_end("interrupted", str(error) or "stopped at once, by a second Ctrl-C")
            raise
        except BaseException as error:
            reason, problem = None, disk_fault(error)
            if problem is not None:
                reason = f"a file of the run could not be written: {problem}. Make room."
            elif isinstance(error, AflowTuneError) and error.exit_code is ExitCode.FAILED:
                reason = str(error)
            self._write_end("failed", reason or f"{type(error).__name__}: {error}")
            if reason is None:  # an error with its own report, or a bug
                raise
            raise RunFailed(f"{reason}\n{self._left()}") from error
        self._write_end("finished")
        report, saved = self._report(), tuple(checkpoints(self.run_dir))
        return TuneResult(self.run_dir, reached, last_metrics(self.run_dir), saved, report)

    def _report(self) -> Path | None:
        """Write the report and print its summary."""
        try:
            report = write_report(self.run_dir, config=self.config.flatten(), changes=self.changes)
            print(summary_text(self.run_dir, report))
            return report
        except OSError as error:  # a full disk must not fail a run that is verified
            print(f"warning: the report could not be written: {error}", flush=True)
            return None

    def _engine(self, phase: Phase, stop: Stop) -> int:
        """Train until the target or `stop`; returns the step reached."""
        functions = self.workflow_func, self.judge_func
        if self.config.engine == "trinity":
            from aflow_tune.engines.trinity.launcher import run_cluster

            return run_cluster(self.config, functions, self.target, phase)
        if self.config.inline:
            from aflow_tune.engines.trinity.inline import InlineRun

            return asyncio.run(InlineRun(self.config, self.target, phase, stop).run())
        from aflow_tune.engines.trinity.launcher import run_split

        return run_split(self.config, functions, self.target, phase, stop)

    def _inject(self) -> None:
        """Pass the functions and the run's settings to the adapter."""
        config = self.config
        if config.engine == "local":
            give_engine_settings(config)
        if self.workflow_func is None:
            return
        arguments = self._arguments(self.run_dir)
        inputs = config.buffer.explorer_input
        for taskset in [*inputs.tasksets, *inputs.eval_tasksets]:
            taskset.workflow_args.update(arguments)
        merge_mix(config, self.run_dir)

    def _arguments(self, run_dir: Path | None = None) -> dict[str, Any]:
        """The adapter's settings; `run_dir`: where what training rollouts keep is recorded."""
        assert self.workflow_func is not None
        functions, folder = (self.workflow_func, self.judge_func), self.run_dir / FOLDER
        return adapter_arguments(self.config, *functions, self.spend, folder, run_dir)

    def _rows(self) -> tuple[int, int, str]:
        """Rows to train on, rows per step, and the key that sets the latter."""
        rows = sum(map(len, map(get_buffer_reader, self.config.buffer.explorer_input.tasksets)))
        return rows, self.config.buffer.batch_size, "buffer.batch_size"

    def _target(self) -> int:
        """The last step of the run. Raises BadInput: the data has less than one batch."""
        buffer, most = self.config.buffer, self.config.trainer.total_steps
        if buffer.total_steps:
            return min(buffer.total_steps, most or buffer.total_steps)
        rows, size, key = self._rows()
        steps = rows * buffer.total_epochs // size
        if steps < 1:
            title, expected = "This run would not train a single step.", "at least one full batch"
            fix = f"lower {key}, add rows, or raise buffer.total_epochs"
            where, found = self.config.positions.where(key), f"{size} rows a batch"
            raise BadInput.of(title, where, expected, found, fix)
        return min(steps, most or steps)

    def _prove(self, reached: int, stopped: bool, spent: bool) -> None:
        saved = checkpoints(self.run_dir) if self.config.engine == "local" else []
        if saved:
            verify_checkpoint(saved[-1].path)
        if reached >= self.target and (saved or self.config.engine != "local"):
            return
        at = f"at step {reached} of {self.target}"
        if stopped or spent:
            raise self._ended_early(stopped, f" {at}. {self._left()}")
        raise RunFailed(f"the trainer ended {at}. Logs: {self.run_dir / 'log'}")

    def _ended_early(self, stopped: bool, rest: str) -> Interrupted | BudgetReached:
        if stopped:
            return Interrupted(f"stopped{rest}")
        return BudgetReached(f"{self.spend.reached() or 'budget.wall_seconds reached'}{rest}")

    def _left(self) -> str:
        """A sentence for the user: what is saved, and that the same command resumes."""
        kept = "What was finished is kept"
        if self.target:
            step = max((point.step for point in checkpoints(self.run_dir)), default=0)
            kept = f"The state of step {step} of {self.target} is saved"
        return f"{kept} in {self.run_dir}; the same command resumes from there."

    def _write_end(self, status: str, error: str | None = None) -> None:
        """Record the end in `run.json`. RunFailed if that fails for `finished`, else a warning."""
        saved = checkpoints(self.run_dir)
        if error is not None and len(error) > MAX_ERROR:  # the first line and the last say most
            error = f"{error[: MAX_ERROR // 2]}\n...\n{error[-MAX_ERROR // 2 :]}"
        self.state.status, self.state.error, self.state.ended = status, error, time.time()
        self.state.step = saved[-1].step if saved else 0
        self.state.summary = summarise(self.run_dir)
        try:
            write_state(self.run_dir, self.state)
        except OSError as problem:
            told = f"how the run ended ({status}) could not be written: {problem}"
            if status == "finished":
                raise RunFailed(f"{told}. Make room; the same command then ends it.") from problem
            print(f"warning: {told}", flush=True)


class DataRun(Run):
    """`mode: train`: trains on a data set; on the local engine always in this process."""

    def _target(self) -> int:
        materialise_experiences(self.config)
        self.reader = open_experiences(self.config)
        if warning := left_out_warning(self.reader, self.config):
            print(f"warning: {warning}", flush=True)
        rows, size, key = self._rows()
        if size > rows:
            title, where = "This run would not train a single step.", self.config.positions.where
            expected = f"at most {rows}, the rows that can be learned from"
            raise BadInput.of(title, where(key), expected, str(size), f"{key}: {rows}")
        return super()._target()

    def _rows(self) -> tuple[int, int, str]:
        of_files, there = isinstance(self.reader, BatchFiles), len(self.reader)
        size = 1 if of_files else self.config.buffer.train_batch_size
        part = self.config.coreset.size
        rows = there if part is None else count_of(part, there)
        if rows > there:
            title, where = "The data set is smaller.", self.config.positions.where("coreset.size")
            expected = f"at most {there}, the rows that can be learned from"
            raise BadInput.of(title, where, expected, str(rows), f"size: {there}")
        return rows, size, "buffer.train_batch_size"

    def _rewind(self) -> None:
        """On Trinity's engines the trainer itself keeps the position in the data."""
        if self.config.engine == "trinity":
            run_state.save_taskset_state(self.run_dir, self.start, [])
        super()._rewind()

    def _engine(self, phase: Phase, stop: Stop) -> int:
        if self.config.engine == "trinity":
            if isinstance(self.reader, Experiences):
                hand_over(self.reader, self.config, self.target)
            return super()._engine(phase, stop)
        from aflow_tune.engines.trinity.inline import InlineRun

        config, choose = self.config, None
        reader: Experiences | BatchFiles | Rehearsal = self.reader
        if isinstance(reader, Experiences):  # without them `config.rules` refuses these sections
            if config.coreset.size is not None:
                choose = functools.partial(choose_coreset, config, reader)
            if config.replay.buffer is not None:
                reader = open_rehearsal(config, reader)
        return asyncio.run(InlineRun(config, self.target, phase, stop, reader, choose).run())

    def _prove(self, reached: int, stopped: bool, spent: bool) -> None:
        super()._prove(reached, stopped, spent)
        if self.config.replay.buffer is not None and isinstance(self.reader, Experiences):
            join_buffer(self.config, self.reader)


class _Stepless(Run):
    """A run without training steps; `_engine` itself raises if the result is incomplete."""

    def _target(self) -> int:
        return 0

    def _rewind(self) -> None:
        print(f"resuming {self.run_dir}")

    def _prove(self, reached: int, stopped: bool, spent: bool) -> None: ...


class HarvestRun(_Stepless):
    """`mode: harvest`: writes a data set for a later stage, see `harvesting.py`."""

    def _inject(self) -> None:
        """The harvest does not use the adapter; only the local samplers need settings."""
        give_engine_settings(self.config)

    def _engine(self, phase: Phase, stop: Stop) -> int:
        from aflow_tune.running.harvesting import run_harvest
        from aflow_tune.writer.workflow import WriterWorkflow

        if not isinstance(self.workflow_func, WriterWorkflow):
            where = self.config.positions.where("writer.executor")
            found = "another workflow function", "writer: {executor: NAME}, and no `workflow`"
            title, expected = "Only written workflows are harvested.", "the writer as the workflow"
            raise BadInput.of(title, where, expected, *found)
        run_harvest(self.config, self.run_dir, stop, phase, self.workflow_func)
        return 0


class ServeRun(_Stepless):
    """`mode: serve` of Trinity: serves the models at one address until stopped."""

    _rewind = Run._rewind


_MEASURED_BY = (
    *("buffer.explorer_input.eval_tasksets.", "explorer.auxiliary_models.", "graph.", "judge"),
    *("model.", "operators.", "prompts.", "rewards.", "rollout.system_prompt", "seed", "workflow"),
    "writer.",
)
"""Prefixes of settings that decide scores: a guest must share them with the folder's run."""


class BenchRun(_Stepless):
    """`mode: bench`: evaluates weights on held-out tasks without training.

    Trinity's rule decides which weights: the model of `model.model_path` (unless
    `explorer.eval_on_startup: false`) and every checkpoint of the run folder, or with
    `explorer.bench_on_latest_checkpoint: true` only the newest one. In the folder of another run
    the bench is a guest: it adds missing evaluations and does not touch `run.json`.
    """

    guest = False

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """As `Run.claimed`. A guest rewinds nothing; BadInput if `_MEASURED_BY` settings differ."""
        self._done: set[tuple[str, int]] = set()
        """(task set, step) of complete evaluations."""
        earlier = read_state(self.run_dir)
        if earlier is None or earlier.fingerprint.get("mode") == "bench":
            with super().claimed():
                yield
            return
        with locked(self.run_dir):
            run_state.refuse_chain(self.run_dir)
            self.guest, self.target, self.state = True, 0, earlier
            log_to(self.run_dir / "log")
            materialise_tasksets(self.config)
            changed = run_state.changed_keys(self.run_dir, earlier, fingerprint_of(self.config))
            if faults := [fault for fault in changed if fault.where.startswith(_MEASURED_BY)]:
                title = "This run folder's evaluations were made with other settings."
                raise BadInput(title, faults)
            print(f"evaluating in the run folder {self.run_dir}")
            yield

    def execute(self, stop: Stop) -> TuneResult:
        """Evaluate what has no record yet, and report. Raises, besides those of `Run.execute`,
        BadInput: no weights to evaluate; AlreadyFinished: a guest found all evaluated."""
        if not self._weights():
            title, fix = "There is nothing to evaluate.", "explorer.bench_on_latest_checkpoint"
            found = f"none in {self.run_dir}", f"train first, or remove {fix}"
            raise BadInput.of(title, "explorer", "a checkpoint", *found)
        return super().execute(stop)

    def _weights(self) -> dict[int, Path | None]:
        """Steps to evaluate with their checkpoints; None is the model of `model.model_path`."""
        explorer, saved = self.config.explorer, checkpoints(self.run_dir)
        trained: dict[int, Path | None] = {point.step: point.path for point in saved}
        if explorer.bench_on_latest_checkpoint:
            return {step: trained[step] for step in sorted(trained)[-1:]}
        return ({0: None} if explorer.eval_on_startup else {}) | trained

    def _engine(self, phase: Phase, stop: Stop) -> int:
        if self.config.engine == "trinity":
            return super()._engine(phase, stop)
        with contextlib.suppress(asyncio.CancelledError, BudgetReached):
            told = functools.partial(phase, "stopping: the finished rollouts are kept")
            asyncio.run(until_stopped(self._all(phase), stop, told))
        return 0

    async def _all(self, phase: Phase) -> None:
        tasks = await read_tasks(self.config)
        made = 0
        async with LocalModels() as models:
            for step, weights in self._weights().items():
                made += await self._measure(step, weights, tasks, models, phase)
        if self.guest and not made:
            raise AlreadyFinished(f"Everything in {self.run_dir} is evaluated already.")

    async def _measure(
        self, step: int, weights: Path | None, tasks: TaskSets, models: LocalModels, phase: Phase
    ) -> int:
        """Evaluate the weights of one step; returns the number of new rollouts."""
        config, made, folder = self.config, 0, self.run_dir / FOLDER
        arguments = self._arguments()
        for taskset in config.buffer.explorer_input.eval_tasksets:
            of_set, samples = {taskset.name: tasks[taskset.name]}, taskset.repeat_times
            batch = Batch(None, [], arguments, folder, step)
            left = batch.rollouts_left(of_set, samples, again=False)
            if left:
                phase("loading the model")
                batch.model = await models.take(config, weights)
                batch.auxiliary = await models.auxiliary(config)
                phase(f"evaluating on {taskset.name}")
                await batch.run(of_set, left, samples, config.local.max_batch, lambda: None)
                made += len(left)
            if not batch.rollouts_left(of_set, samples, again=False):
                self._done.add((taskset.name, step))
        if made:
            self._log(step)
        return made

    def _log(self, step: int) -> None:
        """Log the metrics that mark the evaluation of a step as complete for panel and report."""
        from aflow_tune.engines.trinity.inline import make_monitor

        metrics: dict[str, float] = {}
        for name, steps in load_evaluations(self.run_dir).items():
            if (found := steps.get(step)) is not None:
                metrics[f"eval/{name}/finished_task_count"] = float(found.items)
                means = {metric: found.metric_interval(metric) for metric in found.metric_names()}
                for metric, mean in ({"score": found.interval()} | means).items():
                    if mean is not None:
                        metrics[f"eval/{name}/{metric}/mean"] = mean.mean
        monitor = make_monitor(self.config, self.config.explorer.name)
        monitor.log(metrics, step)
        monitor.close()

    def _prove(self, reached: int, stopped: bool, spent: bool) -> None:
        """Every task set is evaluated completely at every step, and not all rollouts failed."""
        found = load_evaluations(self.run_dir)
        names = [taskset.name for taskset in self.config.buffer.explorer_input.eval_tasksets]
        if self.config.engine == "trinity":  # its benchmark either completes a task set or fails
            self._done = {(name, step) for name, steps in found.items() for step in steps}
        wanted = [(name, step) for name in names for step in self._weights()]
        missing = [f"{one[0]} at step {one[1]}" for one in wanted if one not in self._done]
        if missing and (stopped or spent):
            raise self._ended_early(stopped, f". {self._left()}")
        if missing:
            raise RunFailed(f"not evaluated to the end: {', '.join(missing)}")
        for name, step in wanted:
            evaluation = found[name][step]
            if evaluation.failed_rollouts == len(evaluation.records):
                reason = evaluation.records[0].reason or "no reason was given"
                raise RunFailed(f"every rollout of {name} at step {step} failed: {reason}")

    def _write_end(self, status: str, error: str | None = None) -> None:
        if not self.guest:
            super()._write_end(status, error)


class PairsRun(BenchRun):
    """`mode: pairs`: samples `algorithm.repeat_times` answers to each training task, which
    `prepare` has made the evaluated ones, and writes preference pairs, see `pairing.py`."""

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """As `Run.claimed`: never a guest in another run's folder."""
        self._done = set()
        with Run.claimed(self):
            yield

    def _weights(self) -> dict[int, Path | None]:
        return {0: None}

    def _arguments(self, run_dir: Path | None = None) -> dict[str, Any]:
        """With the calls of all tasks in their records."""
        return {**super()._arguments(run_dir), "transcripts": sys.maxsize}

    def _engine(self, phase: Phase, stop: Stop) -> int:
        if self.config.engine == "local":
            return super()._engine(phase, stop)
        self.config.mode = "bench"  # for Trinity, which knows no `pairs`
        try:
            return super()._engine(phase, stop)
        finally:
            self.config.mode = "pairs"

    def _prove(self, reached: int, stopped: bool, spent: bool) -> None:
        super()._prove(reached, stopped, spent)
        found = load_evaluations(self.run_dir)
        names = [taskset.name for taskset in self.config.buffer.explorer_input.eval_tasksets]
        records = [record for name in names for record in found[name][0].records]
        print(write_pairs(self.run_dir, records), flush=True)


MODES = {
    "train": DataRun,
    "bench": BenchRun,
    "harvest": HarvestRun,
    "pairs": PairsRun,
    "serve": ServeRun,
}


def make_run(
    config: AflowConfig, workflow_func: Function | None, judge_func: Function | None
) -> Run:
    """The run for `config.mode`; `Run.prepare` refuses an unknown mode."""
    return MODES.get(config.mode, Run)(config, workflow_func, judge_func)


def last_metrics(run_dir: Path) -> dict[str, float]:
    last: dict[str, float] = {}
    for line in read_metrics(run_dir):
        last.update(line.metrics)
    return last
