"""Everything that `aflow-tune validate CONFIG` does: check, start nothing, fetch nothing.

Settings, functions and data are all checked, whatever the others yield; faults in reading the
settings skip only the checks that need sound settings. This module also resolves the functions that
a configuration names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.config.changes import render_changes
from aflow_tune.config.engine import choose_engine
from aflow_tune.config.file_rules import check_data
from aflow_tune.config.load import AflowConfig, read_config
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.config.settings import Change, value_of
from aflow_tune.config.stages import parts_of
from aflow_tune.config.tasksets import reads_dialogues
from aflow_tune.contract.plugins import resolve
from aflow_tune.contract.signature import check_functions
from aflow_tune.errors import BadInput, Fault
from aflow_tune.find_ray import check_address
from aflow_tune.sections import GraphSection
from aflow_tune.shipping import travelled

if TYPE_CHECKING:
    from aflow_tune.graph.workflow import GraphWorkflow

Function = Callable[..., Any]


@dataclass
class ValidationReport:
    """The result of a check. `config` is None if the file could not be read at all."""

    path: str
    config: AflowConfig | None = None
    engine: tuple[str, str] | None = None
    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    stages: list[tuple[str, ValidationReport]] = field(default_factory=list)
    """The report of each stage; its faults and warnings are also in those above."""

    def add(self, faults: Sequence[Fault], warnings: Sequence[str] = ()) -> None:
        """Add faults of places that have none yet, and new warnings."""
        known = {fault.where for fault in self.faults}
        self.faults += [fault for fault in faults if fault.where not in known]
        self.warnings += [text for text in warnings if text not in self.warnings]

    def render(self) -> str:
        """The report as text, for a terminal or a log."""
        changed = [("", self.changes)]
        changed += [(f"stage {name}: ", stage.changes) for name, stage in self.stages]
        parts = [f"engine: {self.engine[0]} ({self.engine[1]})"] if self.engine else []
        parts += [name + render_changes(changes) for name, changes in changed if changes]
        if self.warnings:
            parts.append("\n".join(["warnings:", *(f"  - {text}" for text in self.warnings)]))
        if self.faults:
            parts.append("\n".join(f"{n}. {fault}" for n, fault in enumerate(self.faults, 1)))
        verdict = f"{len(self.faults)} fault(s)" if self.faults else "valid"
        return "\n\n".join([*parts, f"{self.path}: {verdict}; nothing was started"])


def validate(path: str | Path, overrides: Sequence[str] = ()) -> ValidationReport:
    """Check a configuration, its functions and its data sets; faults are in the report."""
    report = ValidationReport(str(path))
    with _collected(report.faults):
        report.config, faults = read_config(path, overrides)
    if report.config is None:
        return report
    config = report.config
    parts, misplaced = parts_of(config)
    report.faults += [*faults, *misplaced]
    workflow = judge = None
    with _collected(report.faults):
        if _named(config) or not config.search.tasksets:  # each of those names its own
            workflow, judge = functions_of(config)
        if workflow is not None:
            check_functions(workflow, judge)
    with _collected(report.faults):
        check_run_prompts(config)
    for name, part in parts:
        found = check_part(part, workflow, judge, path, settings=not faults)
        report.engine = report.engine or found.engine
        report.stages.append((name, found))
        report.add(found.faults, found.warnings)
    if not config.stages:
        report.changes, report.stages = report.stages[0][1].changes, []
    return report


@contextlib.contextmanager
def _collected(faults: list[Fault]) -> Iterator[None]:
    """Add the faults of a BadInput raised in the block to `faults`, and go on after it."""
    try:
        yield
    except BadInput as error:
        told = error.faults or [Fault("configuration", "valid input", error.title, "correct it")]
        faults += [fault for fault in told if fault not in faults]


def check_part(
    config: AflowConfig,
    workflow: Function | None,
    judge: Function | None,
    path: str | Path = "",
    *,
    settings: bool = True,
) -> ValidationReport:
    """Check a single run or one stage, but not its functions. `settings`: whether the settings were
    read without a fault; if not, only data is checked."""
    report = ValidationReport(str(path), config)
    if settings:
        with _collected(report.faults):
            report.engine = choose_engine(config)
            report.changes = prepare(config, Purpose.CHECK, workflow=workflow)
        engine = report.engine[0] if report.engine is not None else None
        address = check_address(config, engine)
        report.faults += [fault for fault in address if fault not in report.faults]
    found = check_data(config, workflow, judge)
    report.add(found.faults, [*config.warnings, *found.warnings])
    return report


def needs_workflow(config: AflowConfig) -> bool:
    """Whether a run of this configuration calls the workflow function."""
    if config.mode == "serve":
        return False
    return config.mode != "train" or bool(config.buffer.explorer_input.eval_tasksets)


def functions_of(config: AflowConfig) -> tuple[Function | None, Function | None]:
    """As `resolve_functions`, but (None, None) if no run or stage calls a function."""
    if not any(needs_workflow(part) for _, part in parts_of(config)[0]):
        return None, None
    return resolve_functions(config)


def _named(config: AflowConfig) -> list[str]:
    keys = ("workflow", "graph.path", "writer.executor")
    return [key for key in keys if value_of(config, key)]


def resolve_functions(config: AflowConfig) -> tuple[Function, Function | None]:
    """The functions that `workflow:` (or `graph:`, or `writer:`) and `judge:` name; `use_tools`
    with `dialogues.as_tasks` and none of them.

    Raises BadInput: none or several workflows are named, a name resolves to no function, or a graph
    is faulty."""
    named = _named(config)
    if not named and reads_dialogues(config):
        from aflow_tune.scoring.use_tools import use_tools

        return use_tools, None
    if len(named) != 1:
        expected = (
            "one of `workflow: path/file.py:function` (or module:function), "
            "`graph: {path: FOLDER}`, and `writer: {executor: ROLE}`"
        )
        found = " and ".join(named) or "none of them"
        fix = "keep one of them" if named else "add one, or pass the function to tune()"
        fault = config.fault(named[0] if named else "workflow", expected, found, fix)
        raise BadInput("The configuration does not name one workflow function.", [fault])
    spec = config.workflow
    workflow = _resolve(config, "workflow", spec) if spec else _operator_workflow(config)
    return workflow, _resolve(config, "judge", config.judge) if config.judge else None


def check_run_prompts(config: AflowConfig) -> None:
    """Load the run's `operators:`, and check its `prompts:` against them.

    Raises BadInput: with every invalid operator, or every prompt that does not fit."""
    if not config.prompts and not config.operators:
        return
    from aflow_tune.operators import OPERATORS, check_prompts, load_operators

    named = {name: travelled(spec) for name, spec in config.operators.items()}
    keys = {spec: f"operators.{name}" for name, spec in named.items()}
    with _placed(lambda where: config.positions.where(keys.get(where, where))):
        own = load_operators(named, config.positions.base)
        check_prompts(config.prompts, operators={**OPERATORS, **own})


def prepare_harvest(config: AflowConfig) -> tuple[Any, Path]:
    """Prepare a configuration for a harvest outside of a run.

    Returns its `WriterWorkflow`, and the folder of the harvest, which is not made yet. Raises
    BadInput: with every fault of the sections, the task sets and the models."""
    workflow, faults = None, list[Fault]()
    with _collected(faults):
        if config.writer.executor:
            check_run_prompts(config)
            workflow = resolve_functions(config)[0]
    prepare(config, Purpose.HARVEST, workflow=workflow, faults=faults)
    assert workflow is not None  # without an executor `check_harvest` refuses
    return workflow, Path(config.get_checkpoint_job_dir()) / "harvested"


def prepare_search(config: AflowConfig) -> tuple[dict[str, GraphWorkflow], Path]:
    """Prepare a configuration for a search over workflows.

    Returns the seed workflow by name of a task set (without `search.tasksets` one, named as the
    only training task set, else `train`) with the settings that all of its trials have; and the
    folder of the search, which is not made yet. Raises BadInput: with every fault of the sections,
    the task sets and the models."""
    faults: list[Fault] = []
    workflows: dict[str, Any] = {}
    inputs = config.buffer.explorer_input
    training = [*([inputs.taskset] if inputs.taskset else []), *inputs.tasksets]
    only = str(training[0].name or "") if len(training) == 1 else ""
    sections = {name: replace(config.graph) for name in config.search.tasksets or [only or "train"]}
    for name, own in config.search.tasksets.items():
        given = {key: value for key, value in vars(own).items() if value and key != "held_out"}
        given |= {"benchmark": None} if own.score else {"score": None} if own.benchmark else {}
        sections[name] = replace(config.graph, **given)
    with _collected(faults):
        check_run_prompts(config)
    for name, section in sections.items():
        if not section.path:
            several = bool(config.search.tasksets)
            key = f"search.tasksets.{name}.path" if several else "graph.path"
            fix = "graph: {path: FOLDER, benchmark: NAME}"
            faults.append(
                config.fault(key, "the workflow that the search starts from", "none", fix)
            )
            continue
        with _collected(faults):
            workflows[name] = _operator_workflow(config, section)
    workflow = next(iter(workflows.values()), None)
    prepare(config, Purpose.SEARCH, workflow=workflow, faults=faults)
    return workflows, Path(config.get_checkpoint_job_dir()) / "search"


@contextlib.contextmanager
def _placed(where: Callable[[str], str]) -> Iterator[None]:
    """Map the places of the faults of a BadInput raised in the block."""
    try:
        yield
    except BadInput as error:
        faults = [replace(fault, where=where(fault.where)) for fault in error.faults]
        raise BadInput(error.title, faults) from error


def _resolve(config: AflowConfig, key: str, reference: str) -> Function:
    place = config.positions.where(key)
    with _placed(lambda where: place if where == reference else f"{place}: {where}"):
        function: Function = resolve(reference, config.positions.base)
    return function


def _operator_workflow(config: AflowConfig, graph: GraphSection | None = None) -> Function:
    """The workflow that `graph:` (or `graph`) or `writer:` describes."""
    from aflow_tune.graph.workflow import workflow_from_config
    from aflow_tune.operators import load_operators
    from aflow_tune.writer.workflow import AuxiliaryModel, writer_from_config

    graph = graph or config.graph
    of_graph = bool(graph.path)
    name, section = ("graph", graph) if of_graph else ("writer", config.writer)
    beside, model = config.positions.beside, config.model
    common: dict[str, Any] = {
        "operators": load_operators(config.operators, config.positions.base),
        "score": _resolve(config, f"{name}.score", section.score) if section.score else None,
        "test_cases": beside(section.test_cases) if section.test_cases else None,
        "where": config.positions.where,
    }
    if of_graph:
        path, place = beside(str(graph.path)), config.positions.where("graph.path")
        common |= {"path": path, "judged": bool(config.judge)}
        with _placed(lambda where: f"{place}: {where}" if where == str(path) else where):
            return workflow_from_config(graph, config.models, **common)
    auxiliary = {}
    for other in config.explorer.auxiliary_models:  # unset limits are the tuned model's
        answer = other.max_response_tokens or model.max_response_tokens
        prompt = other.max_prompt_tokens or model.max_prompt_tokens
        whole = other.max_model_len or model.max_model_len
        if prompt is None and whole is not None:
            prompt = max(1, whole - (answer or whole // 2))
        if other.name:
            auxiliary[other.name] = AuxiliaryModel(answer_tokens=answer, prompt_tokens=prompt)
    text = beside(config.writer.prompt) if config.writer.prompt else None
    common |= {"auxiliary": auxiliary, "prompt": text, "sandbox": config.sandbox}
    return writer_from_config(config.writer, config.models, **common)
