"""Everything that `aflow-tune validate CONFIG` does: check, start nothing, fetch nothing.

Settings, functions and data are checked one after the other, and what one finds does not keep
the others from being looked at; only settings that could not be read stop the questions that
need them. The report holds faults (the command would refuse to run), warnings, and what would
be changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aflow_tune.config.changes import Change, render_changes
from aflow_tune.config.engine_choice import choose_engine
from aflow_tune.config.load import AflowConfig, read_config
from aflow_tune.config.mixes import fields_of_mix
from aflow_tune.config.mode_rules import needs_workflow
from aflow_tune.config.rules.experience_checks import check_experience_rows
from aflow_tune.config.rules.refusals_writer import auxiliary_models, check_writer_rows
from aflow_tune.config.stages import parts_of
from aflow_tune.config.tasksets import locate, read_taskset, user_tasksets
from aflow_tune.config.validators import prepare
from aflow_tune.data.checks import Findings, check_fields, check_overlap, check_rows
from aflow_tune.data.fields import task_reads
from aflow_tune.data.rows import Table
from aflow_tune.errors import BadInput, Fault
from aflow_tune.find_ray import check_address
from aflow_tune.shipping.arrival import travelled

Function = Callable[..., Any]


@dataclass
class ValidationReport:
    """What was found. `config` is None where the file could not be read at all."""

    path: str
    config: AflowConfig | None = None
    engine: tuple[str, str] | None = None
    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    stages: list[tuple[str, ValidationReport]] = field(default_factory=list)
    """What was found of each stage; faults and warnings stand above as well."""

    def add(self, error: BadInput) -> None:
        """Take over the faults of a refusal."""
        self.faults += error.faults or [Fault(self.path, "valid input", error.title, "see above")]

    def render(self) -> str:
        """The report as text, for a terminal or a log."""
        parts = []
        if self.engine is not None:
            parts.append(f"engine: {self.engine[0]} ({self.engine[1]})")
        if self.changes:
            parts.append(render_changes(self.changes))
        for name, stage in self.stages:
            if stage.changes:
                parts.append(f"stage {name}: {render_changes(stage.changes)}")
        if self.warnings:
            parts.append("\n".join(["warnings:", *(f"  - {text}" for text in self.warnings)]))
        if self.faults:
            listed = "\n".join(f"{number}. {fault}" for number, fault in enumerate(self.faults, 1))
            count = "one fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
            parts.append(f"{listed}\n\n{self.path}: {count}; nothing was started")
        else:
            parts.append(f"{self.path}: valid; nothing was started")
        return "\n\n".join(parts)


def validate(path: str | Path, overrides: Sequence[str] = ()) -> ValidationReport:
    """Check a configuration, its functions and its data sets.

    Never raises for a bad input: what is wrong is in the report's faults.
    """
    report = ValidationReport(str(path))
    try:
        config, faults = read_config(path, overrides)
    except BadInput as error:
        report.add(error)
        return report
    report.config, report.faults = config, list(faults)
    parts, misplaced = parts_of(config)
    report.faults += misplaced
    workflow: Function | None = None
    judge: Function | None = None
    if any(needs_workflow(part) for _, part in parts):
        workflow, judge = _functions(config, report)
    try:
        check_run_prompts(config)
    except BadInput as error:
        report.faults += [fault for fault in error.faults if fault not in report.faults]
    for name, part in parts:
        found = check_part(part, workflow, judge, path, settings=not faults)
        report.engine = report.engine or found.engine
        if name:
            report.stages.append((name, found))
        else:
            report.changes = found.changes
        known = {fault.where for fault in report.faults}
        report.faults += [fault for fault in found.faults if fault.where not in known]
        report.warnings += [text for text in found.warnings if text not in report.warnings]
    return report


def check_part(
    config: AflowConfig,
    workflow: Function | None,
    judge: Function | None,
    path: str | Path = "",
    *,
    settings: bool = True,
) -> ValidationReport:
    """Check a single run or one stage of a chain, without its functions. Starts nothing.

    Args:
        settings: whether the settings were read without a fault and can be looked at.
    """
    report = ValidationReport(str(path), config)
    if settings:
        _settings(config, workflow, report)
        engine = report.engine[0] if report.engine is not None else None
        address = check_address(config, engine)
        report.faults += [fault for fault in address if fault not in report.faults]
    report.warnings += config.warnings
    found = check_data(config, workflow, judge)
    known = {fault.where for fault in report.faults}
    report.faults += [fault for fault in found.faults if fault.where not in known]
    report.warnings += found.warnings
    return report


def functions_of(config: AflowConfig) -> tuple[Function | None, Function | None]:
    """As `resolve_functions`; (None, None) where no run or stage calls a function."""
    if not any(needs_workflow(part) for _, part in parts_of(config)[0]):
        return None, None
    return resolve_functions(config)


def resolve_functions(config: AflowConfig) -> tuple[Function, Function | None]:
    """The functions that `workflow:` (or `graph:`, or `writer:`) and `judge:` name.

    A path is relative to here or `config.positions.base`.

    Raises:
        BadInput: no workflow is named, or a name leads to no function, or a graph is faulty.
    """
    ways = {
        "workflow": config.workflow,
        "graph.path": config.graph.path,
        "writer.executor": config.writer.executor,
    }
    named = [key for key, value in ways.items() if value]
    if len(named) != 1:
        expected = (
            "`workflow: path/file.py:function`, `workflow: module:function`, "
            "`graph: {path: FOLDER}`, or `writer: {executor: ROLE}`"
        )
        found, cure = "none of them", "add one of these lines, or pass the function to tune()"
        title = "The configuration names no workflow function."
        if named:
            found, cure = " and ".join(named), "keep one of them"
            title = "The configuration names more than one workflow function."
        raise BadInput(
            title,
            [
                Fault(
                    config.positions.where(named[0] if named else "workflow"), expected, found, cure
                )
            ],
        )
    judge = None
    if config.graph.path:
        workflow: Function = _graph_workflow(config)
    elif config.writer.executor:
        workflow = _writer_workflow(config)
    else:
        workflow = _resolve(config, "workflow", str(config.workflow))
    if config.judge:
        judge = _resolve(config, "judge", config.judge)
    return workflow, judge


def check_run_prompts(config: AflowConfig) -> None:
    """Load the run's `operators:`, and hold its `prompts:` against them.

    Raises:
        BadInput: with every operator that is none, or every prompt that does not fit.
    """
    if not config.prompts and not config.operators:
        return
    from aflow_tune.operators import OPERATORS, check_prompts, load_operators

    named = {name: travelled(spec) for name, spec in config.operators.items()}
    keys = {spec: f"operators.{name}" for name, spec in named.items()}
    try:
        own = load_operators(named, config.positions.base)
        check_prompts(config.prompts, operators={**OPERATORS, **own})
    except BadInput as error:
        where = config.positions.where
        faults = [
            replace(fault, where=where(keys.get(fault.where, fault.where)))
            for fault in error.faults
        ]
        raise BadInput(error.title, faults) from None


def check_data(
    config: AflowConfig, workflow: Function | None = None, judge: Function | None = None
) -> Findings:
    """Check the rows of every task set: readable, with the fields read, no leaks.

    Paths under which nothing can be read are left to `validators.prepare`.
    """
    found = Findings()
    functions = [function for function in (workflow, judge) if function]
    reads = [read for function in functions for read in task_reads(function)]
    reads += [read for function in functions for read in getattr(function, "reads", ())]
    training: list[Table] = []
    held_out: list[Table] = []
    for _, taskset, is_held_out in user_tasksets(config):
        if not taskset.path:
            continue
        warning = locate(config, taskset).warning
        if warning:
            found.warnings.append(warning)
        table = read_taskset(config, taskset)
        if table is None:
            continue
        rows = check_rows(table)
        given = () if is_held_out else fields_of_mix(config)
        rows.faults += check_writer_rows(workflow, table, given)
        found.add(rows)
        if not rows.faults:
            (held_out if is_held_out else training).append(table)
    given = fields_of_mix(config)
    ungiven = [read for read in reads if read.name not in given]
    together = [training] if config.mix else [[table] for table in training]
    checks = [(ungiven, tables) for tables in together]
    checks += [(reads, [table]) for table in held_out]
    for asked, tables in checks:
        fields = check_fields(asked, *tables)
        reported = {fault.where for fault in found.faults}
        found.faults += [fault for fault in fields.faults if fault.where not in reported]
        found.warnings += [text for text in fields.warnings if text not in found.warnings]
    found.add(check_overlap(training, held_out))
    found.add(check_experience_rows(config))
    return found


def _functions(
    config: AflowConfig, report: ValidationReport
) -> tuple[Function | None, Function | None]:
    from aflow_tune.contract.signature import check_functions

    try:
        workflow, judge = resolve_functions(config)
    except BadInput as error:
        report.add(error)
        return None, None
    try:
        check_functions(workflow, judge)
    except BadInput as error:
        report.add(error)
    return workflow, judge


def _resolve(config: AflowConfig, key: str, reference: str) -> Function:
    from aflow_tune.contract.plugins import resolve

    try:
        function: Function = resolve(reference, config.positions.base)
    except BadInput as error:
        where = config.positions.where(key)
        faults = [
            Fault(
                where if fault.where == reference else f"{where}: {fault.where}",
                fault.expected,
                fault.found,
                fault.cure,
            )
            for fault in error.faults
        ]
        raise BadInput(error.title, faults) from error
    return function


def _graph_workflow(config: AflowConfig) -> Function:
    from aflow_tune.graph.workflow import workflow_from_config
    from aflow_tune.operators import load_operators

    section, beside = config.graph, config.positions.beside
    score = None
    if section.score:
        score = _resolve(config, "graph.score", section.score)
    path = beside(str(section.path))
    try:
        return workflow_from_config(
            section,
            config.models,
            path=path,
            test_cases=beside(section.test_cases) if section.test_cases else None,
            operators=load_operators(config.operators, config.positions.base),
            score=score,
            judged=bool(config.judge),
            where=config.positions.where,
        )
    except BadInput as error:
        key = config.positions.where("graph.path")
        faults = [
            replace(fault, where=f"{key}: {fault.where}") if fault.where == str(path) else fault
            for fault in error.faults
        ]
        raise BadInput(error.title, faults) from error


def _writer_workflow(config: AflowConfig) -> Function:
    from aflow_tune.operators import load_operators
    from aflow_tune.writer.workflow import writer_from_config

    section, beside = config.writer, config.positions.beside
    score = None
    if section.score:
        score = _resolve(config, "writer.score", section.score)
    return writer_from_config(
        section,
        config.models,
        auxiliary=auxiliary_models(config),
        operators=load_operators(config.operators, config.positions.base),
        score=score,
        test_cases=beside(section.test_cases) if section.test_cases else None,
        prompt=beside(section.prompt) if section.prompt else None,
        sandbox=config.sandbox,
        where=config.positions.where,
    )


def _settings(config: AflowConfig, workflow: Function | None, report: ValidationReport) -> None:
    try:
        report.engine = choose_engine(config)
        with leaving_no_folders(config):
            report.changes = prepare(config, workflow_func=workflow, dry=True)
    except BadInput as error:
        report.add(error)


class leaving_no_folders:
    """Trinity's validators make the run's folders; checking must not leave them behind."""

    def __init__(self, config: AflowConfig) -> None:
        self.config = config

    def __enter__(self) -> None:
        root = Path(self.config.checkpoint_root_dir or "checkpoints").expanduser().absolute()
        folder = root / self.config.project / self.config.group / self.config.name
        self.missing = [path for path in (folder, *folder.parents) if not path.exists()]
        self.there = {path for path in _run_folders(folder) if path.exists()}

    def __exit__(self, *_: object) -> None:
        # The folder may have got another name meanwhile.
        made = self.config.checkpoint_job_dir
        for path in [*(_run_folders(Path(made)) if made else []), *self.missing]:
            if path in self.there:
                continue
            try:
                path.rmdir()
            except OSError:
                continue  # never made, or somebody has put something into it


def _run_folders(run: Path) -> list[Path]:
    return [run / "monitor", run / "buffer", run]
