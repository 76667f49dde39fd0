"""One evaluation, from the command line to its result.

Each column keeps its records in its own folder, named by a hash of all that they depend on
(`columns.py`), so the same command continues where it was stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import signal
import time
from collections.abc import Callable, Iterator, Mapping
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
from aflow_tune.evaluation.columns import (
    Column,
    Plan,
    Request,
    Source,
    column_folder,
    make_plan,
    make_sources,
    with_prompts,
)
from aflow_tune.evaluation.evaluating import (
    Batch,
    LocalModels,
    endpoint_model,
    read_tasks,
    rows_by_item,
)
from aflow_tune.evaluation.results import PAGE_NAME, Cell, Result, write_eval_page
from aflow_tune.evaluation.trained import load_trained
from aflow_tune.files import write_json
from aflow_tune.models.prices import price_of
from aflow_tune.models.types import Usage
from aflow_tune.report.evaluation import FOLDER, Evaluation, Price, load_evaluations
from aflow_tune.runs.folder import locked
from aflow_tune.sections import ModelSettings
from aflow_tune.trace import POLICY

JSON_NAME = "eval.json"
OUT_NAME = "eval"
"""The default folder of an evaluation, inside the run folder."""
_LINE_SECONDS = 5.0
"""Interval of progress lines."""


class EvalProgress:
    """Prints the progress of an evaluation on `console`, a `rich` console."""

    def __init__(self, console: Any) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def column(self, name: str, total: int, done: int) -> Iterator[Callable[[], None]]:
        """Context of one column; yields a function to call after each rollout. `done` of the
        `total` rollouts have a record from an earlier command."""
        if done:
            self.say(f"{name}: {done} of {total} rollouts are there from an earlier command")
        started = said = time.monotonic()
        count = done

        def advance() -> None:
            nonlocal count, said
            count += 1
            if count < total and time.monotonic() - said > _LINE_SECONDS:
                said = time.monotonic()
                left = (said - started) / (count - done) * (total - count)
                self.say(f"{name}: {count} of {total} rollouts, about {left:.0f} s left")

        yield advance
        if done < total:
            self.say(f"{name}: {total - done} rollouts in {time.monotonic() - started:.1f} s")


def evaluate(request: Request, progress: EvalProgress) -> tuple[Result, Path]:
    """Run the evaluation; returns the result and the folder that holds it.

    Raises:
        BadInput: the configuration, functions, data, columns or endpoint cannot be used.
        Interrupted: stopped by a signal; the same command continues from there.
        BudgetReached: a limit of `budget` was reached; likewise.
        RunFailed: something outside the user's functions failed.
    """
    config = load_trained(request.config, request.overrides)
    untouched = copy.deepcopy(config)
    workflow, judge = resolve_functions(config)
    check_functions(workflow, judge)
    local_model = request.endpoint is None
    prepare(config, Purpose.EVALUATE, workflow=workflow, judge=judge, local_model=local_model)
    run_dir = Path(config.get_checkpoint_job_dir())
    plan = make_plan(request, run_dir, config.model.model_path)
    if request.endpoint is not None:
        names = [column.side.served_model for column in plan.columns]
        served = list(dict.fromkeys(name for name in names if name))
        check_endpoint(request.endpoint, served, request.key_variable)
        check_served(config, [_served(name, request.endpoint, config) for name in served])
    sources = make_sources(plan, untouched, Source(config, workflow, judge), request)
    for column in plan.columns:
        source = sources[column]
        check_run_prompts(source.config)
        with_prompts(source.workflow, column.prompts, source.config)  # raise before anything runs
    out = (request.out or run_dir / OUT_NAME).absolute()
    transformers.utils.logging.disable_progress_bar()
    with locked(out):
        log_to(out / "log")
        for warning in config.warnings:
            progress.say(f"warning: {warning}")
        asyncio.run(_measure_all(request, plan, sources, out, progress))
        result = _result(request, plan, sources, out)
        write_json(out / JSON_NAME, result.to_json())
        write_eval_page(out / PAGE_NAME, result)
    return result, out


async def _measure_all(
    request: Request,
    plan: Plan,
    sources: Mapping[Column, Source],
    out: Path,
    progress: EvalProgress,
) -> None:
    """Make every rollout without a record, columns with the same model after each other."""
    kept = f"; finished rollouts are kept in {out}: the same command goes on from there"
    limit = sources[plan.columns[0]].config.budget.wall_seconds
    models = [(column.side.weights, column.side.config) for column in plan.columns]
    ordered = sorted(plan.columns, key=lambda c: models.index((c.side.weights, c.side.config)))
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGTERM)  # a second one ends the process at once
        task.cancel()

    with contextlib.suppress(ValueError, RuntimeError):  # only the main thread has signals
        loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        async with asyncio.timeout(limit), LocalModels() as local:
            for source in {id(source.config): source for source in sources.values()}.values():
                materialise_tasksets(source.config, out)
                spend_of(source.config).start()
                tasks = await read_tasks(source.config)
                for other in sources.values():
                    if other.config is source.config:
                        other.tasks = dict(tasks)
            for column in ordered:
                await _measure(column, sources[column], request, out, progress, local)
    except BudgetReached as error:
        raise BudgetReached(f"{error}{kept}") from None
    except TimeoutError:
        raise BudgetReached(f"budget.wall_seconds ({limit:g}) reached{kept}") from None
    except asyncio.CancelledError:  # SIGTERM, or Ctrl-C by way of asyncio.run
        raise Interrupted(f"stopped{kept}") from None


async def _measure(
    column: Column,
    source: Source,
    request: Request,
    out: Path,
    progress: EvalProgress,
    local: LocalModels,
) -> None:
    config, samples, endpoint = source.config, request.samples, request.endpoint
    tasks = {name: of_set[: request.limit] for name, of_set in source.tasks.items()}
    folder = column_folder(out, column, source, request)
    workflow, prompts = with_prompts(source.workflow, column.prompts, config)
    spend, served = spend_of(config), column.side.served_model or ""
    if endpoint is not None:
        policy = _served(served, endpoint, config)
        spend = replace(spend, models={**spend.models, POLICY: policy})
    batch = Batch(
        model=None,
        auxiliary=[],
        arguments={
            **adapter_arguments(config, workflow, source.judge, spend, folder / FOLDER),
            "prompts": prompts,
            "cache": None if request.cache is None else str(request.cache),
        },
        folder=folder / FOLDER,
        step=column.side.step,
        sampling=dict(column.sampling),
    )
    total = samples * sum(map(len, tasks.values()))
    left = batch.rollouts_left(tasks, samples, again=request.again)
    with progress.column(column.name, total, total - len(left)) as advance:
        if not left:
            return
        if endpoint is None:
            batch.model = await local.take(config, column.side.weights)
        else:
            batch.model = endpoint_model(config, endpoint, served, request.key_variable)
        batch.auxiliary = await local.auxiliary(config)
        await batch.run(tasks, left, samples, config.local.max_batch, advance)
    missing = len(batch.rollouts_left(tasks, samples, again=False))
    if missing:
        told = f"{missing} rollouts of {column.name} left no record in {folder}"
        raise RunFailed(f"{told}: is the disk full?")


def _result(request: Request, plan: Plan, sources: Mapping[Column, Source], out: Path) -> Result:
    """The result, from the records of the plan's columns."""
    first = sources[plan.columns[0]]
    config, samples, solved_at = first.config, request.samples, request.solved_at
    rows = {name: rows_by_item(of_set[: request.limit]) for name, of_set in first.tasks.items()}
    cells: dict[str, list[Cell]] = {name: [] for name in rows}
    for column in plan.columns:
        found = load_evaluations(column_folder(out, column, sources[column], request))
        price = _price(column, request, config)
        for name, of_set in rows.items():
            measured: Evaluation = found[name][column.side.step]
            # Earlier commands may have recorded more items and samples.
            records = [r for r in measured.records if r.item in of_set and r.run < samples]
            evaluation = replace(measured, records=tuple(records))
            cells[name].append(Cell(column, evaluation, of_set, price, samples, solved_at))
    executor = config.writer.executor
    written = f"written by the policy, run by {executor}" if executor else None
    facts = {
        "config": str(request.config),
        "workflow": config.workflow or config.graph.path or written,
        "model": plan.columns[0].side.served_model or config.model.model_path,
        "endpoint": request.endpoint,
        "score": config.report.score,
        "seed": config.seed,
        "tasks": {name: len(of_set) for name, of_set in rows.items()},
        "written": time.strftime("%Y-%m-%d %H:%M"),
    }
    return Result(facts, samples, solved_at, plan, cells, config.warnings)


def _price(column: Column, request: Request, config: AflowConfig) -> Price | None:
    """The price of an endpoint's model: as configured for `policy`, else the listed one."""
    if request.endpoint is None or column.side.served_model is None:
        return None
    served = _served(column.side.served_model, request.endpoint, config)
    price = price_of(served.provider, served.base_url, served.model or "", served.prices)
    if price is None:
        return None
    return lambda prompt, drawn: price.cost(Usage(prompt, drawn))


def _served(name: str, endpoint: str, config: AflowConfig) -> ModelSettings:
    """An endpoint's model for the budget, with the prices of `policy`."""
    policy = config.models.get(POLICY)
    prices = policy.prices if policy else None
    return ModelSettings(model=name, base_url=base_url(endpoint), prices=prices)
