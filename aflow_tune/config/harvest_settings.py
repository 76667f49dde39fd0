"""A configuration made ready to be harvested with outside of a run: no training, no policy.

What `validators.prepare` does for a run, without anything that only training needs: the model
that will be tuned is not loaded, and need not be on this machine. As a stage of a run,
`mode: harvest` is prepared like the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.config.accounting import check_spend
from aflow_tune.config.mixes import check_mix, fields_of_mix
from aflow_tune.config.rules.harvest_rules import check_harvest
from aflow_tune.config.rules.model_checks import check_model
from aflow_tune.config.tasksets import (
    fill_held_out,
    materialise_tasksets,
    readable_tables,
)
from aflow_tune.config.validate import check_run_prompts, resolve_functions
from aflow_tune.config.validators import settle_models
from aflow_tune.data.checks import Findings, check_fields, check_rows
from aflow_tune.errors import BadInput, Fault
from aflow_tune.writer.workflow import WriterWorkflow

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

FOLDER = "harvested"
"""Below the run folder: where a harvest is kept if no other place is named."""


def prepare_harvest(config: AflowConfig) -> tuple[WriterWorkflow, Path]:
    """Fill in what a harvest needs, in place.

    Returns:
        The writer that the configuration describes, and the folder, which is not made.

    Raises:
        BadInput: with every fault of the sections, the task sets and the models.
    """
    faults = [*check_harvest(config), *check_mix(config), *check_spend(config)]
    workflow = None
    if config.writer.executor:
        try:
            check_run_prompts(config)
            workflow = resolve_functions(config)[0]
        except BadInput as error:
            faults += error.faults
    faults += _data_faults(config, workflow)
    faults += _executor_faults(config)
    if faults or not isinstance(workflow, WriterWorkflow):
        faults = list({fault.where: fault for fault in reversed(faults)}.values())[::-1]
        raise BadInput("This configuration cannot be harvested with.", faults)
    config.mode = "harvest"
    settle_models(config)
    inputs = config.buffer.explorer_input
    for taskset in [*([inputs.taskset] if inputs.taskset else []), *inputs.tasksets]:
        fill_held_out(config, taskset)
    for taskset in inputs.eval_tasksets:
        fill_held_out(config, taskset)
    return workflow, Path(config.get_checkpoint_job_dir()) / FOLDER


def lay_out(config: AflowConfig, folder: Path) -> None:
    """Put task sets and books below `folder`, which the caller holds."""
    config.checkpoint_job_dir = str(folder)
    materialise_tasksets(config)


def _data_faults(config: AflowConfig, workflow: Any) -> list[Fault]:
    found = Findings()
    reads = getattr(workflow, "reads", ())
    given = fields_of_mix(config)
    for held_out, table in readable_tables(config, found):
        rows = check_rows(table)
        found.add(rows)
        if not rows.faults and not held_out:
            found.add(check_fields([read for read in reads if read.name not in given], table))
    config.warnings.extend(found.warnings)
    return found.faults


def _executor_faults(config: AflowConfig) -> list[Fault]:
    """What is wrong with the auxiliary models, if one of them is going to be loaded."""
    used = {config.writer.executor, *config.writer.models.values()}
    if not used & {model.name for model in config.explorer.auxiliary_models}:
        return []
    found = check_model(config)
    config.warnings.extend(found.warnings)
    policy = config.positions.where("model.model_path")
    return [fault for fault in found.faults if fault.where != policy]
