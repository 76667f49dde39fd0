"""What a run does by its `mode`, in one table: `MODES`. Each kind is a `Run` (`run.py`): it is
prepared, takes its folder, works, is proven and reported."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aflow_tune.config.changes import fingerprint_of
from aflow_tune.config.engine import give_engine_settings
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.quiet import log_to
from aflow_tune.config.tasksets import materialise_tasksets
from aflow_tune.engines.trinity.readers import (
    left_out_warning,
    materialise_experiences,
    open_experiences,
)
from aflow_tune.engines.trinity.rollout.adapter import adapter_arguments
from aflow_tune.engines.trinity.training.run_state import changed_keys, refuse_chain
from aflow_tune.errors import AlreadyFinished, BadInput, BudgetReached, RunFailed
from aflow_tune.evaluation.evaluating import Batch, LocalModels, TaskSets, read_tasks
from aflow_tune.report.evaluation import FOLDER, Evaluation, load_evaluations
from aflow_tune.running.run import Function, Phase, Run, Stop, until_stopped
from aflow_tune.runs.folder import checkpoints, locked, read_state
from aflow_tune.types import TuneResult


class DataRun(Run):
    """`mode: train`: learns from a data set. One trainer needs no Ray: on the local engine it runs
    in this process, with or without `--inline`."""

    def _target(self) -> int:
        materialise_experiences(self.config)
        self.reader = open_experiences(self.config)
        if warning := left_out_warning(self.reader, self.config):
            print(f"warning: {warning}", flush=True)
        rows, size, key = self._rows()
        if size > rows:
            raise BadInput.of(
                "This run would not train a single step.",
                self.config.positions.where(key),
                f"at most {rows}, the rows that can be learned from",
                str(size),
                f"{key}: {rows}",
            )
        return super()._target()

    def _rows(self) -> tuple[int, int, str]:
        return len(self.reader), self.config.buffer.train_batch_size, "buffer.train_batch_size"

    def _engine(self, phase: Phase, stop: Stop) -> int:
        if self.config.engine == "trinity":
            return super()._engine(phase, stop)
        from aflow_tune.engines.trinity.inline import InlineRun

        return asyncio.run(InlineRun(self.config, self.target, phase, stop, self.reader).run())


class _Stepless(Run):
    """A run without steps: there is none to reach, and nothing to take back."""

    def _target(self) -> int:
        return 0

    def _rewind(self) -> None:
        print(f"resuming {self.run_dir}")

    def _prove(self, reached: int, stopped: bool, spent: bool) -> None:
        """Whatever works raises where its result is not whole."""


class HarvestRun(_Stepless):
    """`mode: harvest`: writes a data set for a later stage; `harvesting.py` says how."""

    def _inject(self) -> None:
        """The harvest runs graphs itself; only the auxiliary models' samplers need settings."""
        give_engine_settings(self.config)

    def _engine(self, phase: Phase, stop: Stop) -> int:
        from aflow_tune.running.harvesting import run_harvest
        from aflow_tune.writer.workflow import WriterWorkflow

        if not isinstance(self.workflow_func, WriterWorkflow):
            raise BadInput.of(
                "Only written workflows are harvested.",
                self.config.positions.where("writer.executor"),
                "the writer as the workflow",
                "another workflow function",
                "writer: {executor: NAME}, and no `workflow`",
            )
        run_harvest(self.config, self.run_dir, stop, phase, self.workflow_func)
        return 0


class ServeRun(_Stepless):
    """`mode: serve` of Trinity: its engines answer at one address until they are stopped."""

    _rewind = Run._rewind


_MEASURED_BY: tuple[str, ...] = (
    "buffer.explorer_input.eval_tasksets.",
    "explorer.auxiliary_models.",
    "graph.",
)
_MEASURED_BY += ("judge", "model.", "operators.", "prompts.", "rewards.", "rollout.system_prompt")
_MEASURED_BY += ("seed", "workflow", "writer.")
"""Settings that a guest has in common with the run whose folder it is: they decide scores."""


class BenchRun(_Stepless):
    """`mode: bench`: evaluates a model on held-out tasks, trains nothing.

    Which weights is Trinity's rule: the model of `model.model_path`, and every checkpoint of the
    run folder; with `explorer.eval_on_startup: false` the checkpoints only, with
    `explorer.bench_on_latest_checkpoint: true` the newest one only. On `engine: trinity` Trinity's
    own benchmark runs.

    An evaluation that was broken off goes on from its last record. In the folder of a training run
    the bench is a guest: it adds what that run did not evaluate and leaves its state alone.
    """

    guest = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._done: set[tuple[str, int]] = set()
        """Task sets and steps that are evaluated to the last rollout."""

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """As `Run.claimed`, or as a guest in a training run's folder."""
        earlier = read_state(self.run_dir)
        if earlier is None or earlier.fingerprint.get("mode") == "bench":
            with super().claimed():
                yield
            return
        with locked(self.run_dir):
            refuse_chain(self.run_dir)
            self.guest, self.target, self.state = True, 0, earlier
            self.log_file = log_to(self.run_dir / "log")
            materialise_tasksets(self.config)
            changed = changed_keys(self.run_dir, earlier, fingerprint_of(self.config))
            faults = [fault for fault in changed if fault.where.startswith(_MEASURED_BY)]
            if faults:
                title = "This run folder's evaluations were made with other settings."
                raise BadInput(title, faults)
            print(f"evaluating in the run folder {self.run_dir}")
            yield

    def execute(self, stop: Stop) -> TuneResult:
        """Evaluate what has no record yet, and report. AlreadyFinished: a guest found everything
        evaluated."""
        if not self._weights():
            raise BadInput.of(
                "There is nothing to evaluate.",
                "explorer",
                "a checkpoint",
                f"none in {self.run_dir}",
                "train first, or remove explorer.bench_on_latest_checkpoint",
            )
        return super().execute(stop)

    def _weights(self) -> dict[int, Path | None]:
        """What is evaluated: steps with their checkpoints; None stands for the model itself."""
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
        """Evaluate the weights of one step; returns how many rollouts that took."""
        config, made, folder = self.config, 0, self.run_dir / FOLDER
        assert self.workflow_func is not None
        functions = self.workflow_func, self.judge_func
        arguments = adapter_arguments(config, *functions, self.books, folder)
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
        if made:  # panel and report know by these metrics that the evaluation is whole
            from aflow_tune.engines.trinity.inline import make_monitor

            metrics: dict[str, float] = {}
            for name, steps in load_evaluations(self.run_dir).items():
                if step in steps:
                    metrics |= _means(name, steps[step])
            monitor = make_monitor(config, config.explorer.name)
            monitor.log(metrics, step)
            monitor.close()
        return made

    def _prove(self, reached: int, stopped: bool, spent: bool) -> None:
        """Every held-out task of every task set has its records, and not all of them failed."""
        found = load_evaluations(self.run_dir)
        names = [taskset.name for taskset in self.config.buffer.explorer_input.eval_tasksets]
        if self.config.engine == "trinity":  # whose benchmark ends with all of a task set or fails
            self._done = {(name, step) for name, steps in found.items() for step in steps}
        wanted = [(name, step) for name in names for step in self._weights()]
        missing = [
            f"{name} at step {step}" for name, step in wanted if (name, step) not in self._done
        ]
        if missing and (stopped or spent):
            rest = f"; every finished rollout is kept in {self.run_dir}. The same command goes on."
            raise self._ended_early(stopped, rest)
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


def _means(name: str, evaluation: Evaluation) -> dict[str, float]:
    metrics = {f"eval/{name}/finished_task_count": float(evaluation.items)}
    score = evaluation.interval()
    if score is not None:
        metrics[f"eval/{name}/score/mean"] = score.mean
    for metric in evaluation.metric_names():
        found = evaluation.metric_interval(metric)
        if found is not None:
            metrics[f"eval/{name}/{metric}/mean"] = found.mean
    return metrics


MODES: Mapping[str, type[Run]] = {
    "both": Run,
    "train": DataRun,
    "bench": BenchRun,
    "harvest": HarvestRun,
    # Trinity's own, on its engines only.
    "colocate": Run,
    "explore": Run,
    "serve": ServeRun,
}


def make_run(
    config: AflowConfig, workflow_func: Function | None, judge_func: Function | None
) -> Run:
    """The run that `config.mode` asks for; an unknown mode is refused when it is prepared."""
    return MODES.get(config.mode, Run)(config, workflow_func, judge_func)
