"""A configuration made ready for evaluation: held-out task sets, a model, sampling; no training.

What `validators.prepare` does for a run, without anything that only training needs, so that a
configuration can be evaluated on a machine that could not train it. What an evaluation has in
common with those of a run comes from the same code, so that both give the same numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.config.accounting import check_spend
from aflow_tune.config.rules.model_checks import check_model
from aflow_tune.config.rules.refusals_writer import check_writer_rows
from aflow_tune.config.tasksets import (
    fill_held_out,
    materialise_tasksets,
    readable_tables,
    user_tasksets,
)
from aflow_tune.config.validators import settle_models
from aflow_tune.data.checks import Findings, check_fields, check_rows
from aflow_tune.data.fields import task_reads
from aflow_tune.errors import BadInput, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from aflow_tune.config.load import AflowConfig


def prepare_evaluation(
    config: AflowConfig, functions: list[Callable[..., Any]], *, local_model: bool
) -> Path:
    """Fill in what an evaluation needs, in place; returns the run folder, which is not made.

    Args:
        functions: workflows and judges, for the fields that they read of a row.
        local_model: whether the configured model is going to be loaded.

    Raises:
        BadInput: with every fault of the held-out task sets, the models and the budget.
    """
    inputs = config.buffer.explorer_input
    inputs.taskset, inputs.tasksets = None, []
    config.mode = "bench"
    faults = [*_data_faults(config, functions), *check_spend(config, tuned=local_model)]
    if local_model:
        found = check_model(config)
        faults += found.faults
        config.warnings.extend(found.warnings)
    if faults:
        raise BadInput("This configuration cannot be evaluated.", faults)
    settle_models(config)
    for taskset in inputs.eval_tasksets:
        fill_held_out(config, taskset)
    return Path(config.get_checkpoint_job_dir())


def lay_out_tasksets(config: AflowConfig, folder: Path) -> None:
    """Put plain files where Trinity's reader finds them, below `folder`."""
    config.checkpoint_job_dir = str(folder)
    materialise_tasksets(config)


def _data_faults(config: AflowConfig, functions: list[Callable[..., Any]]) -> list[Fault]:
    if not user_tasksets(config):
        cure = "buffer: {explorer_input: {eval_tasksets: [{name: held_out, path: test.jsonl}]}}"
        where = config.positions.where("buffer.explorer_input.eval_tasksets")
        return [Fault(where, "at least one held-out task set", "none", cure)]
    found = Findings()
    reads = [read for function in functions for read in task_reads(function)]
    for _, table in readable_tables(config, found):
        rows = check_rows(table)
        for function in functions:
            rows.faults += check_writer_rows(function, table)
        found.add(rows)
        if not rows.faults:
            found.add(check_fields(reads, table))
    config.warnings.extend(found.warnings)
    return list({fault.where: fault for fault in found.faults}.values())
