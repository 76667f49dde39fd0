"""`mode: bench`: evaluate a model on held-out tasks, train nothing.

Which weights, is Trinity's rule: the model of `model.model_path`, and every checkpoint of the
run folder; with `explorer.eval_on_startup: false` the checkpoints only, with
`explorer.bench_on_latest_checkpoint: true` the newest one only. A stage of a chain has no
checkpoints of its own: its model is what the stages before it trained.

Records lie where a training run's do, so the report is the same; an evaluation that was broken
off goes on from its last record. In the folder of a training run the bench is a guest: it adds
what that run did not evaluate and leaves the run's own state alone. On `engine: trinity`
Trinity's own benchmark runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aflow_tune.config.fingerprint import fingerprint_of
from aflow_tune.config.quiet import log_to
from aflow_tune.config.tasksets import materialise_tasksets
from aflow_tune.engines.trinity.rollout.arguments import adapter_arguments
from aflow_tune.engines.trinity.rollout.inline_rollouts import make_monitor
from aflow_tune.engines.trinity.training.run_state import changed_keys, refuse_chain
from aflow_tune.errors import (
    AlreadyFinished,
    BadInput,
    BudgetReached,
    Fault,
    RunFailed,
)
from aflow_tune.evaluation.evaluating import Batch, LocalModels, TaskSets, read_tasks
from aflow_tune.report.evaluation import FOLDER, Evaluation, load_evaluations
from aflow_tune.running.run import Run
from aflow_tune.running.stopping import until_stopped
from aflow_tune.runs.folder import RunState, checkpoints, locked, read_state
from aflow_tune.types import TuneResult

_MEASURED_BY = (
    "buffer.explorer_input.eval_tasksets.",
    "explorer.auxiliary_models.",
    "graph.",
    "judge",
    "model.",
    "operators.",
    "prompts.",
    "rewards.",
    "rollout.system_prompt",
    "seed",
    "workflow",
    "writer.",
)
"""Settings that a guest has in common with the run whose folder it is: they decide scores."""


class BenchRun(Run):
    """Evaluates; it has no steps."""

    guest = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._done: set[tuple[str, int]] = set()
        """Task sets and steps that are evaluated to the last run."""

    def _target(self) -> int:
        return 0

    def _rewind(self) -> None:
        print(f"resuming {self.run_dir}")

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
            self._check_guest(earlier)
            print(f"evaluating in the run folder {self.run_dir}")
            yield

    def _check_guest(self, earlier: RunState) -> None:
        faults = [
            fault
            for fault in changed_keys(self.run_dir, earlier, fingerprint_of(self.config))
            if fault.where.startswith(_MEASURED_BY)
        ]
        if faults:
            raise BadInput("This run folder's evaluations were made with other settings.", faults)

    def execute(self, stop: Callable[[], bool]) -> TuneResult:
        """Evaluate what has no record yet, and report.

        Raises:
            AlreadyFinished: a guest found everything evaluated.
        """
        if not self._weights():
            cure = "train first, or remove explorer.bench_on_latest_checkpoint"
            found = f"none in {self.run_dir}"
            raise BadInput(
                "There is nothing to evaluate.", [Fault("explorer", "a checkpoint", found, cure)]
            )
        return super().execute(stop)

    def _weights(self) -> dict[int, Path | None]:
        """What is evaluated: steps with their checkpoints; None stands for the model itself."""
        explorer, saved = self.config.explorer, checkpoints(self.run_dir)
        trained: dict[int, Path | None] = {point.step: point.path for point in saved}
        if explorer.bench_on_latest_checkpoint:
            return {step: trained[step] for step in sorted(trained)[-1:]}
        return ({0: None} if explorer.eval_on_startup else {}) | trained

    def _local(self, phase: Callable[[str], None], stop: Callable[[], bool]) -> int:
        return asyncio.run(self._evaluate(phase, stop))

    async def _evaluate(self, phase: Callable[[str], None], stop: Callable[[], bool]) -> int:
        with contextlib.suppress(asyncio.CancelledError, BudgetReached):
            await until_stopped(
                self._all(phase), stop, lambda: phase("stopping: the finished runs are kept")
            )
        return 0

    async def _all(self, phase: Callable[[str], None]) -> None:
        tasks = await read_tasks(self.config)
        made = 0
        async with LocalModels() as models:
            for step, weights in self._weights().items():
                made += await self._measure(step, weights, tasks, models, phase)
        if self.guest and not made:
            raise AlreadyFinished(f"Everything in {self.run_dir} is evaluated already.")

    async def _measure(
        self,
        step: int,
        weights: Path | None,
        tasks: TaskSets,
        models: LocalModels,
        phase: Callable[[str], None],
    ) -> int:
        """Evaluate the weights of one step; returns how many runs that took."""
        config, made = self.config, 0
        assert self.workflow_func is not None
        arguments = adapter_arguments(
            config, self.workflow_func, self.judge_func, self.books, self.run_dir / FOLDER
        )
        for taskset in config.buffer.explorer_input.eval_tasksets:
            of_set, samples = {taskset.name: tasks[taskset.name]}, taskset.repeat_times
            batch = Batch(None, [], arguments, self.run_dir / FOLDER, step)
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
        """Close the evaluation in the metrics: panel and report know by this that it is whole."""
        metrics: dict[str, float] = {}
        for name, steps in load_evaluations(self.run_dir).items():
            if step in steps:
                metrics |= _means(name, steps[step])
        monitor = make_monitor(self.config, self.config.explorer.name)
        monitor.log(metrics, step)
        monitor.close()

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
            raise self._ended_early(
                stopped,
                f"; every finished run is kept in {self.run_dir}. The same command goes on from "
                "there.",
            )
        if missing:
            raise RunFailed(f"not evaluated to the end: {', '.join(missing)}")
        for name, step in wanted:
            evaluation = found[name][step]
            if evaluation.failed_rollouts == len(evaluation.records):
                reason = evaluation.records[0].reason or "no reason was given"
                raise RunFailed(f"every run of {name} at step {step} failed: {reason}")

    def _settle(self, status: str, error: str | None = None) -> None:
        if not self.guest:
            super()._settle(status, error)


def _means(name: str, evaluation: Evaluation) -> dict[str, float]:
    """What a training run logs about an evaluation, from its records."""
    metrics = {f"eval/{name}/finished_task_count": float(evaluation.items)}
    score = evaluation.interval()
    if score is not None:
        metrics[f"eval/{name}/score/mean"] = score.mean
    for metric in evaluation.metric_names():
        found = evaluation.metric_interval(metric)
        if found is not None:
            metrics[f"eval/{name}/{metric}/mean"] = found.mean
    return metrics
