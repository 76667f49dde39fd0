"""One evaluation from a command line to its result: what follows what.

Every column keeps its records in a folder of its own, named after everything that decides them
(`sources.py`). The same command therefore goes on where it was stopped, and another one that
shares a column measures only what is new.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers.utils.logging

from aflow_tune.config.accounting import check_served, spend_of
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.config.quiet import log_to
from aflow_tune.config.tasksets import materialise_tasksets
from aflow_tune.config.validate import check_run_prompts, resolve_functions
from aflow_tune.contract.signature import check_functions
from aflow_tune.engines.trinity.rollout.adapter import adapter_arguments
from aflow_tune.engines.trinity.rollout.endpoint import base_url, check_endpoint
from aflow_tune.errors import BudgetReached, Interrupted, RunFailed
from aflow_tune.evaluation.columns import Column, Plan, make_plan
from aflow_tune.evaluation.evaluating import (
    Batch,
    LocalModels,
    TaskSets,
    endpoint_model,
    read_tasks,
    rows_by_item,
)
from aflow_tune.evaluation.page import PAGE_NAME, write_eval_page
from aflow_tune.evaluation.progress import EvalProgress
from aflow_tune.evaluation.prompts import with_prompts
from aflow_tune.evaluation.results import Result, build
from aflow_tune.evaluation.sources import Request, Source, column_folder, make_sources
from aflow_tune.evaluation.trained import load_trained
from aflow_tune.files import write_json
from aflow_tune.models.prices import price_of
from aflow_tune.models.types import Usage
from aflow_tune.report.evaluation import FOLDER, Evaluation, load_evaluations
from aflow_tune.report.usage import Price
from aflow_tune.runs.folder import locked
from aflow_tune.sections import ModelSettings
from aflow_tune.trace import POLICY

JSON_NAME = "eval.json"
OUT_NAME = "eval"
"""The folder below the run folder that an evaluation is kept in if none is named."""


def evaluate(request: Request, progress: EvalProgress) -> tuple[Result, Path]:
    """Measure what is asked for; returns the result and the folder that holds it.

    Raises:
        BadInput: configuration, functions, data, columns or endpoint were refused.
        Interrupted: stopped by a signal; the same command goes on from there.
        BudgetReached: a limit of `budget` was reached; as above.
        RunFailed: something outside of the user's functions failed.
    """
    config = load_trained(request.config, request.overrides)
    untouched = copy.deepcopy(config)
    workflow, judge = resolve_functions(config)
    check_functions(workflow, judge)
    local_model = request.endpoint is None
    prepare(config, Purpose.EVALUATE, workflow=workflow, judge=judge, local_model=local_model)
    run_dir = Path(config.get_checkpoint_job_dir())
    plan = make_plan(request.wanted, run_dir)
    if request.endpoint is not None:
        names = [column.side.served_model for column in plan.columns]
        served = list(dict.fromkeys(name for name in names if name))
        check_endpoint(request.endpoint, served, request.key_variable)
        check_served(config, [_served(name, request.endpoint, config.models) for name in served])
    sources = make_sources(plan, untouched, Source(config, workflow, judge), request)
    for column in plan.columns:
        source = sources[column]
        check_run_prompts(source.config)
        with_prompts(source.workflow, column.prompts, source.config)  # faults before anything runs
    out = (request.out or run_dir / OUT_NAME).absolute()
    transformers.utils.logging.disable_progress_bar()
    with locked(out):
        log_to(out / "log")
        for warning in config.warnings:
            progress.say(f"warning: {warning}")
        asyncio.run(_Evaluation(request, plan, sources, out, progress).run())
        result = _result(request, plan, sources, out, config)
        write_json(out / JSON_NAME, result.to_json())
        write_eval_page(out / PAGE_NAME, result)
    return result, out


class _Evaluation:
    """The measuring of a plan's columns, those with the same model after each other."""

    def __init__(
        self,
        request: Request,
        plan: Plan,
        sources: Mapping[Column, Source],
        out: Path,
        progress: EvalProgress,
    ) -> None:
        self.request = request
        self.plan = plan
        self.sources = sources
        self.out = out
        self.progress = progress

    async def run(self) -> None:
        """Make every run that has no record yet."""
        limit = self.sources[self.plan.columns[0]].config.budget.wall_seconds
        try:
            async with asyncio.timeout(limit):
                with _signals_cancel():
                    await self._all()
        except BudgetReached as error:
            raise BudgetReached(self._kept(str(error))) from None
        except TimeoutError:
            raise BudgetReached(self._kept(f"budget.wall_seconds ({limit:g}) reached")) from None
        except asyncio.CancelledError:
            raise Interrupted(self._kept("stopped")) from None

    async def _all(self) -> None:
        for source in {id(source.config): source for source in self.sources.values()}.values():
            materialise_tasksets(source.config, self.out)
            spend_of(source.config).start()
            tasks = await read_tasks(source.config)
            for other in self.sources.values():
                if other.config is source.config:
                    other.tasks = dict(tasks)
        async with LocalModels() as local:
            for column in sorted(self.plan.columns, key=self._model_order):
                await self._measure(column, local)

    def _model_order(self, column: Column) -> tuple[int, int]:
        """Columns that need the same weights stand together; the base model comes first."""
        keys = [(other.side.weights, other.side.config) for other in self.plan.columns]
        return keys.index((column.side.weights, column.side.config)), self.plan.columns.index(
            column
        )

    async def _measure(self, column: Column, local: LocalModels) -> None:
        source = self.sources[column]
        tasks = limited(source.tasks, self.request.limit)
        config, samples = source.config, self.request.samples
        folder = column_folder(self.out, column, source, self.request)
        workflow, prompts = with_prompts(source.workflow, column.prompts, config)
        books, served = spend_of(config), column.side.served_model
        if self.request.endpoint is not None and served is not None:
            policy = _served(served, self.request.endpoint, config.models)
            books = replace(books, models={**books.models, POLICY: policy})
        batch = Batch(
            model=None,
            auxiliary=[],
            arguments={
                **adapter_arguments(config, workflow, source.judge, books, folder / FOLDER),
                "prompts": prompts,
                "cache": None if self.request.cache is None else str(self.request.cache),
            },
            folder=folder / FOLDER,
            step=column.side.step,
            sampling=dict(column.sampling),
        )
        total = samples * sum(map(len, tasks.values()))
        left = batch.runs_left(tasks, samples, again=self.request.again)
        with self.progress.column(column.name, total, total - len(left)) as advance:
            if not left:
                return
            if self.request.endpoint is None:
                batch.model = await local.take(config, column.side.weights)
            else:
                batch.model = endpoint_model(
                    config,
                    self.request.endpoint,
                    column.side.served_model or "",
                    self.request.key_variable,
                )
            batch.auxiliary = await local.auxiliary(config)
            await batch.run(tasks, left, samples, config.local.max_batch, advance)
        missing = batch.runs_left(tasks, samples, again=False)
        if missing:
            raise RunFailed(
                f"{len(missing)} runs of {column.name} left no record in {folder}: "
                "is the disk full?"
            )

    def _kept(self, reason: str) -> str:
        return (
            f"{reason}; every run that was finished is kept in {self.out}. The same command goes "
            "on from there."
        )


def limited(tasks: TaskSets, limit: int | None) -> dict[str, Sequence[Any]]:
    """The first `limit` tasks of every task set."""
    return {name: of_set[:limit] for name, of_set in tasks.items()}


def _result(
    request: Request,
    plan: Plan,
    sources: Mapping[Column, Source],
    out: Path,
    config: AflowConfig,
) -> Result:
    first = sources[plan.columns[0]]
    tasks = limited(first.tasks, request.limit)
    rows = {name: rows_by_item(of_set) for name, of_set in tasks.items()}
    evaluations = {
        column: _evaluations(
            column_folder(out, column, sources[column], request), column, rows, request.samples
        )
        for column in plan.columns
    }
    facts = {
        "config": str(request.config),
        "workflow": config.workflow or config.graph.path or _writer_name(config),
        "model": plan.columns[0].side.served_model or config.model.model_path,
        "endpoint": request.endpoint,
        "score": config.report.score,
        "seed": config.seed,
        "tasks": {name: len(of_set) for name, of_set in rows.items()},
        "written": time.strftime("%Y-%m-%d %H:%M"),
    }
    return build(
        plan,
        evaluations,
        rows,
        {column: _price(column, request, config.models) for column in plan.columns},
        facts=facts,
        samples=request.samples,
        solved_at=request.solved_at,
        warnings=config.warnings,
    )


def _writer_name(config: AflowConfig) -> str | None:
    executor = config.writer.executor
    return f"written by the policy, run by {executor}" if executor else None


def _evaluations(
    folder: Path, column: Column, rows: Mapping[str, Mapping[int, Any]], samples: int
) -> dict[str, Evaluation]:
    """The column's records on these rows; earlier commands may have measured more."""
    found = load_evaluations(folder)
    evaluations = {}
    for name, items in rows.items():
        evaluation = found[name][column.side.step]
        records = tuple(r for r in evaluation.records if r.item in items and r.run < samples)
        evaluations[name] = replace(evaluation, records=records)
    return evaluations


def _price(column: Column, request: Request, models: Mapping[str, ModelSettings]) -> Price | None:
    """What a call of an endpoint's model costs: as configured for `policy`, else as listed."""
    if request.endpoint is None or column.side.served_model is None:
        return None
    served = _served(column.side.served_model, request.endpoint, models)
    price = price_of(served.provider, served.base_url, served.model or "", served.prices)
    if price is None:
        return None
    return lambda prompt, drawn: price.cost(Usage(prompt, drawn))


def _served(name: str, endpoint: str, models: Mapping[str, ModelSettings]) -> ModelSettings:
    """An endpoint's model as the books know it: with the prices that `policy` is given."""
    policy = models.get(POLICY)
    prices = policy.prices if policy else None
    return ModelSettings(model=name, base_url=base_url(endpoint), prices=prices)


@contextlib.contextmanager
def _signals_cancel() -> Iterator[None]:
    """Ctrl-C and SIGTERM cancel the current task; a second one ends the process at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
        if task is not None:
            task.cancel()

    added = []
    for number in numbers:
        # Only the main thread has signals; in a notebook's thread the interpreter handles them.
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(number, stop)
            added.append(number)
    try:
        yield
    finally:
        for number in added:
            loop.remove_signal_handler(number)
