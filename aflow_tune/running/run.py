"""One run from a loaded configuration to a proven result: a success only if the trainer reached its
target and the last checkpoint loads. `Run` trains on rollouts; what other modes do instead is in
`run_modes.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from trinity.buffer import get_buffer_reader

from aflow_tune.config.accounting import spend_of
from aflow_tune.config.changes import fingerprint_of, render_changes, save_resolved
from aflow_tune.config.engine import choose_engine, give_engine_settings, use_recorded
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.mixes import merge_mix
from aflow_tune.config.prepare import prepare
from aflow_tune.config.quiet import log_to
from aflow_tune.config.settings import Change
from aflow_tune.config.tasksets import materialise_tasksets
from aflow_tune.config.validate import check_data, check_run_prompts, needs_workflow
from aflow_tune.contract.signature import check_functions
from aflow_tune.engines.local.checkpoint import verify_checkpoint
from aflow_tune.engines.trinity.rollout.adapter import adapter_arguments
from aflow_tune.engines.trinity.training.run_state import (
    check_restart,
    newest_sound,
    refuse_chain,
    rewind,
    rewind_trinity,
    trinity_step,
)
from aflow_tune.errors import (
    AflowTuneError,
    BadInput,
    BudgetReached,
    ExitCode,
    Interrupted,
    RunFailed,
    disk_fault,
)
from aflow_tune.find_ray import check_address
from aflow_tune.report.html import summary_text, write_report
from aflow_tune.report.metrics import read_metrics, rewind_metrics
from aflow_tune.report.panel import Panel
from aflow_tune.runs.folder import MAX_ERROR, checkpoints, locked, new_state, write_state
from aflow_tune.runs.listing import summarise
from aflow_tune.types import TuneResult

T = TypeVar("T")
Function = Callable[..., Any]
Phase = Callable[[str], None]
Stop = Callable[[], bool]


async def until_stopped(work: Coroutine[Any, Any, T], stop: Stop, tell: Callable[[], None]) -> T:
    """The result of `work`, which is cancelled once `stop()` is true, after one call of `tell`.
    Raises asyncio.CancelledError: it was, and had not ended by then."""
    task, told = asyncio.ensure_future(work), False
    while not task.done():
        await asyncio.wait([task], timeout=0.2)
        if not told and not task.done() and stop():
            told = True
            tell()
            task.cancel()
    return await task


class Run:
    """One run of one configuration.

    `workflow_func` is None only where the mode calls none (`mode_rules.needs_workflow`).
    """

    def __init__(
        self, config: AflowConfig, workflow_func: Function | None, judge_func: Function | None
    ) -> None:
        self.config = config
        self.workflow_func = workflow_func
        self.judge_func = judge_func
        self.changes: list[Change] = []
        self.built_upon: str | None = None
        """The stage that began from this run's result, which therefore must stay as it is."""

    def prepare(self) -> None:
        """Check the functions, settle the engine and every setting. BadInput: with every fault of
        the functions, of the settings or of the data."""
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
        """Print the engine and why, what is doubtful, and what was changed."""
        print(f"engine: {self.engine[0]} ({self.engine[1]})", flush=True)
        for warning in self.warnings:
            print(f"warning: {warning}", flush=True)
        print(render_changes(self.changes), flush=True)

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the run folder, and take it back to the checkpoint it will resume from.

        Raises:
            BadInput: the folder is in use, or holds a run of another configuration.
            AlreadyFinished: the folder holds this very run, finished.
        """
        with locked(self.run_dir):
            refuse_chain(self.run_dir)
            self.log_file = log_to(self.run_dir / "log")
            materialise_tasksets(self.config)
            fingerprint = fingerprint_of(self.config)
            self.target = self._target()
            self.config.trainer.total_steps = self.target or None
            earlier = check_restart(self.run_dir, fingerprint, self.target)
            if self.built_upon is not None:
                raise BadInput.of(
                    "A finished stage cannot go on once a later one began from its result.",
                    str(self.run_dir),
                    f"the target it was finished with: stage {self.built_upon!r} began from it",
                    f"{self.target} steps",
                    "set the steps back, or give the chain another `name=`",
                )
            find = newest_sound if self.config.engine == "local" else trinity_step
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
                if self.state.status == "running":  # it ended before it was under way
                    stopped = isinstance(error, (Interrupted, KeyboardInterrupt))
                    status = "interrupted" if stopped else "failed"
                    self._write_end(status, str(error) or type(error).__name__)
                raise

    def _rewind(self) -> None:
        """Take the folder back to the checkpoint of `self.start`."""
        rewind(self.run_dir, self.start, self.config.explorer.name)
        if self.config.engine == "trinity":
            rewind_trinity(self.run_dir, self.start)
        rewind_metrics(self.run_dir, self.start)
        print(f"resuming {self.run_dir} from step {self.start} of {self.target}")

    def execute(self, stop: Stop) -> TuneResult:
        """Run to the target on the chosen engine, and report.

        Raises:
            RunFailed: the target was not reached, or the last checkpoint does not load.
            Interrupted: `stop` said so; the state is saved.
            BudgetReached: a limit of the configuration was reached; the state is saved.
        """
        self.books = spend_of(self.config)
        limit = self.config.budget.wall_seconds
        deadline = None if limit is None else time.monotonic() + limit

        def spent() -> bool:
            late = deadline is not None and time.monotonic() > deadline
            return late or self.books.reached() is not None

        try:
            self.books.start()
            self._inject()
            with (
                use_recorded(self.config, self.run_dir),
                Panel(self.run_dir, self.target) as panel,
            ):
                reached = self._engine(panel.phase, lambda: stop() or spent())
            self._prove(reached, stop(), spent())
        except (Interrupted, BudgetReached) as error:
            self._write_end("interrupted", str(error))
            raise
        except KeyboardInterrupt:
            self._write_end("interrupted", "stopped at once, by a second Ctrl-C or SIGTERM")
            raise
        except BaseException as error:
            reason, problem = None, disk_fault(error)
            if problem is not None:
                reason = f"a file of the run could not be written: {problem}. Make room."
            elif isinstance(error, AflowTuneError) and error.exit_code is ExitCode.FAILED:
                reason = str(error)
            self._write_end("failed", reason or f"{type(error).__name__}: {error}")
            if reason is None:  # told otherwise, or a defect
                raise
            raise RunFailed(f"{reason}\n{self._left()}") from error
        self._write_end("finished")
        return TuneResult(
            run_dir=self.run_dir,
            steps_done=reached,
            metrics=last_metrics(self.run_dir),
            checkpoints=tuple(checkpoints(self.run_dir)),
            report=self._report(),
        )

    def _report(self) -> Path | None:
        try:
            report = write_report(self.run_dir, config=self.config.flatten(), changes=self.changes)
        except OSError as error:  # a full disk does not unmake a run that is proven
            print(f"warning: the report could not be written: {error}", flush=True)
            return None
        print(summary_text(self.run_dir, report))
        return report

    def _engine(self, phase: Phase, stop: Stop) -> int:
        """Work until the target or `stop`; returns the step that was reached."""
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
        """Give the adapter the functions and what it needs to know about the run."""
        config = self.config
        if config.engine == "local":
            give_engine_settings(config)
        if self.workflow_func is None:
            return
        arguments = adapter_arguments(
            config,
            self.workflow_func,
            self.judge_func,
            self.books,
            self.run_dir / "evaluations",
            self.run_dir,
        )
        inputs = config.buffer.explorer_input
        for taskset in [*inputs.tasksets, *inputs.eval_tasksets]:
            taskset.workflow_args.update(arguments)
        merge_mix(config, self.run_dir)

    def _rows(self) -> tuple[int, int, str]:
        """Rows to train on, rows a step, and the setting of the latter."""
        tasksets = self.config.buffer.explorer_input.tasksets
        rows = sum(len(get_buffer_reader(taskset)) for taskset in tasksets)
        return rows, self.config.buffer.batch_size, "buffer.batch_size"

    def _target(self) -> int:
        """The step at which the run is done. BadInput: the data is smaller than one batch."""
        buffer, most = self.config.buffer, self.config.trainer.total_steps
        if buffer.total_steps:
            return min(buffer.total_steps, most or buffer.total_steps)
        rows, size, key = self._rows()
        steps = rows * buffer.total_epochs // size
        if steps < 1:
            raise BadInput.of(
                "This run would not train a single step.",
                self.config.positions.where(key),
                "at least one full batch in the data",
                f"{size} rows a batch",
                f"lower {key}, add rows, or raise buffer.total_epochs",
            )
        return min(steps, most or steps)

    def _prove(self, reached: int, stopped: bool, spent: bool) -> None:
        saved = checkpoints(self.run_dir) if self.config.engine == "local" else []
        if saved:
            verify_checkpoint(saved[-1].path)
        if reached >= self.target and (saved or self.config.engine != "local"):
            return
        if stopped or spent:
            last = saved[-1].step if saved else 0
            raise self._ended_early(
                stopped,
                f" at step {reached} of {self.target}; the state of step {last} is saved "
                f"in {self.run_dir}. The same command resumes from there.",
            )
        raise RunFailed(
            f"the trainer ended at step {reached} of {self.target}. Logs: {self.run_dir / 'log'}"
        )

    def _ended_early(self, stopped: bool, rest: str) -> Interrupted | BudgetReached:
        if stopped:
            return Interrupted(f"stopped{rest}")
        return BudgetReached(f"{self.books.reached() or 'budget.wall_seconds reached'}{rest}")

    def _left(self) -> str:
        """What the run folder holds, and what the same command would do with it."""
        saved, kept = checkpoints(self.run_dir), "What was finished is kept"
        if self.target and not saved:
            return f"No step was saved in {self.run_dir}; the same command begins again."
        if self.target:
            kept = f"The state of step {saved[-1].step} of {self.target} is saved"
        return f"{kept} in {self.run_dir}; the same command resumes from there."

    def _write_end(self, status: str, error: str | None = None) -> None:
        """Write down how the run ended. RunFailed: it could not be written, and the run would have
        been called finished."""
        saved = checkpoints(self.run_dir)
        if error is not None and len(error) > MAX_ERROR:  # its first line says what, its last why
            error = f"{error[: MAX_ERROR // 2]}\n...\n{error[-MAX_ERROR // 2 :]}"
        self.state.status = status
        self.state.step = saved[-1].step if saved else 0
        self.state.error = error
        self.state.ended = time.time()
        self.state.summary = summarise(self.run_dir, self.config.algorithm.repeat_times)
        try:
            write_state(self.run_dir, self.state)
        except OSError as problem:
            if status == "finished":
                raise RunFailed(
                    f"the run reached its target, but that could not be written: {problem}. Make "
                    "room; the same command then finishes it."
                ) from problem
            print(f"warning: how the run ended could not be written: {problem}", flush=True)


def last_metrics(run_dir: Path) -> dict[str, float]:
    last: dict[str, float] = {}
    for line in read_metrics(run_dir):
        last.update(line.metrics)
    return last
