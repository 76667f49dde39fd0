"""`tune()` and the other entry points: from a function and a YAML to a trained, evaluated model.

This module only connects the steps; each is implemented in its own package. The first Ctrl-C or
SIGTERM asks everything here to save and stop; it raises Interrupted if there is a state to resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aflow_tune.types import TuneResult

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig
    from aflow_tune.config.validate import ValidationReport
    from aflow_tune.running.ablating import AblationSummary
    from aflow_tune.running.harvesting import HarvestSummary
    from aflow_tune.running.searching import SearchSummary

T = TypeVar("T")
Function = Callable[..., Any]
Stop = Callable[[], bool]
Phase = Callable[[str], None]


def tune(
    workflow_func: Function,
    config_path: str | Path | None = None,
    *,
    judge_func: Function | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    model: Any = None,
    auxiliary_models: dict[str, Any] | None = None,
    algorithm: Any = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    monitor_type: str | None = None,
    overrides: Sequence[str] = (),
    inline: bool | None = None,
) -> TuneResult:
    """Tune the model behind a workflow function. Takes the arguments of AgentScope's `tuner.tune`,
    which win over the YAML. Works inside a notebook's running event loop.

    Args:
        workflow_func: `async def f(task: Dict, model: TrinityChatModel) -> float`, or
            AgentScope's newer form that returns a `WorkflowOutput`.
        config_path: a YAML in Trinity's schema with our sections; None for defaults.
        judge_func: scores the response of a `WorkflowOutput`.
        overrides: `key=value` settings that win over everything else.
        inline: one process without Ray; None leaves it to the configuration.

    Raises:
        BadInput: function, configuration or data were refused; nothing was started.
        AlreadyFinished: the run folder holds a finished run of this configuration.
        RunFailed: training stopped before its target.
        Interrupted, BudgetReached: the state is saved and the same call resumes.
    """

    def work(stop: Stop) -> TuneResult:
        from aflow_tune.config.load import apply_agentscope_args, load_config

        config = load_config(config_path, overrides)
        apply_agentscope_args(
            config,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            model=model,
            auxiliary_models=auxiliary_models,
            algorithm=algorithm,
            project_name=project_name,
            experiment_name=experiment_name,
            monitor_type=monitor_type,
        )
        return _execute(config, workflow_func, judge_func, inline, stop)

    return with_stop(work)


def run_config(
    config_path: Path, overrides: Sequence[str] = (), inline: bool | None = None
) -> TuneResult:
    """Tune the workflow that a YAML names with its `workflow:` key. Raises as `tune()`."""

    def work(stop: Stop) -> TuneResult:
        from aflow_tune.config.load import load_config
        from aflow_tune.config.validate import functions_of

        config = load_config(config_path, overrides)
        config.note_command(config_path, overrides, inline)
        return _execute(config, *functions_of(config), inline, stop)

    return with_stop(work)


def resume_run(folder: Path, overrides: Sequence[str] = ()) -> TuneResult:
    """Repeat the command that started the run in `folder` (for a stage: its whole chain), with
    `overrides` added. Raises as `tune()`; BadInput also if no command started a run there."""
    from aflow_tune.runs.folder import command_of

    config, began, inline, cwd = command_of(folder, overrides)
    os.chdir(cwd)
    return run_config(config, [*began, *overrides], inline)


def run_loaded(
    config: AflowConfig, workflow_func: Function | None, judge_func: Function | None
) -> TuneResult:
    """Tune with a configuration that is already loaded. Raises as `tune()`."""
    return with_stop(lambda stop: _execute(config, workflow_func, judge_func, None, stop))


def validate_config(config_path: Path, overrides: Sequence[str] = ()) -> ValidationReport:
    """Check whatever can be checked without starting or fetching anything."""
    from aflow_tune.config.quiet import quiet

    quiet()
    from aflow_tune.config.validate import validate

    return validate(config_path, overrides)


def ablate_config(
    path: Path,
    config_path: Path,
    overrides: Sequence[str] = (),
    *,
    prompts: bool = False,
    limit: int | None = None,
    executor: str | None = None,
    phase: Phase = print,
) -> AblationSummary:
    """Measure the graph at `path` without each of its operators on the held-out task sets of a YAML
    and with its `graph` settings. Raises as `prepare_ablation` and `run_ablation`.

    Args:
        prompts: take out its instructions and prompts instead.
        limit: only the first so many problems of each task set.
        executor: the auxiliary model or the role of `models` that answers as the graph's model;
            None: the model under `model`, untrained.
    """

    def work(stop: Stop) -> AblationSummary:
        from aflow_tune.config.engine import own_devices
        from aflow_tune.config.quiet import log_to
        from aflow_tune.config.tasksets import materialise_tasksets
        from aflow_tune.evaluation.trained import load_trained
        from aflow_tune.running.ablating import prepare_ablation, run_ablation
        from aflow_tune.runs.folder import locked

        config = load_trained(config_path, overrides)
        with own_devices(config, phase):
            ablation = prepare_ablation(config, path, prompts=prompts, executor=executor)
            for warning in config.warnings:
                phase(f"warning: {warning}")
            with locked(ablation.folder):
                log_to(ablation.folder / "log")
                materialise_tasksets(config, ablation.folder)
                return run_ablation(ablation, stop, phase, limit=limit)

    return with_stop(work)


def harvest_config(
    config_path: Path,
    overrides: Sequence[str] = (),
    *,
    sources: Sequence[str] | None = None,
    runs: Sequence[Path] = (),
    limit: int | None = None,
    out: Path | None = None,
    phase: Phase = print,
) -> HarvestSummary:
    """Collect pairs of a problem and a graph that solves it, with the writer of a YAML. Raises as
    `prepare_harvest` and `run_harvest`.

    Args:
        sources, runs, limit: override the section `harvest`; None or empty: as there. `runs`
            also adds the source "runs".
        out: where the pairs go; None: `harvested/sft.jsonl` in the run folder.
    """

    def work(stop: Stop) -> HarvestSummary:
        from aflow_tune.config.engine import own_devices
        from aflow_tune.config.load import load_config
        from aflow_tune.config.quiet import log_to
        from aflow_tune.config.tasksets import materialise_tasksets
        from aflow_tune.config.validate import prepare_harvest
        from aflow_tune.running.harvesting import run_harvest
        from aflow_tune.runs.folder import locked

        config = load_config(config_path, overrides)
        section = config.harvest
        section.sources = list(sources or section.sources)
        if runs:
            section.runs = [str(path) for path in runs]
            section.sources += [] if "runs" in section.sources else ["runs"]
        section.limit = section.limit if limit is None else limit
        with own_devices(config, phase):
            workflow, folder = prepare_harvest(config)
            for warning in config.warnings:
                phase(f"warning: {warning}")
            with locked(folder):
                log_to(folder / "log")
                materialise_tasksets(config, folder)
                return run_harvest(config, folder, stop, phase, workflow, out=out)

    return with_stop(work)


def search(
    config_path: str | Path,
    *,
    overrides: Sequence[str] = (),
    inline: bool | None = None,
    phase: Phase = print,
) -> SearchSummary:
    """Search for a workflow better than the one under `graph` of a YAML.

    Args:
        overrides: `key=value` settings that win over the file.
        inline: one process without Ray; None leaves it to the configuration.
        phase: gets a line of progress.

    Raises:
        BadInput: the configuration, its graphs or its data were refused; nothing was started.
        RunFailed: the seed workflow could not be scored, the limits do not buy three proposals, or
            a model that proposes is down.
        Interrupted, BudgetReached: finished trials are kept and the same call resumes.
    """

    def work(stop: Stop) -> SearchSummary:
        from aflow_tune.config.engine import own_devices
        from aflow_tune.config.load import load_config
        from aflow_tune.config.quiet import log_to
        from aflow_tune.config.tasksets import materialise_tasksets
        from aflow_tune.config.validate import prepare_search
        from aflow_tune.running.searching import run_search
        from aflow_tune.runs.folder import locked

        config = load_config(Path(config_path), overrides)
        config.inline = config.inline if inline is None else inline
        with own_devices(config, phase):
            workflows, folder = prepare_search(config)
            for warning in config.warnings:
                phase(f"warning: {warning}")
            with locked(folder):
                log_to(folder / "log")
                materialise_tasksets(config, folder)
                return run_search(config, folder, stop, phase, workflows)

    return with_stop(work)


def _execute(
    config: AflowConfig,
    workflow_func: Function | None,
    judge_func: Function | None,
    inline: bool | None,
    stop: Stop,
) -> TuneResult:
    from aflow_tune.config.engine import own_devices
    from aflow_tune.running.run import make_run
    from aflow_tune.running.stage_chain import run_chain

    if inline is not None:
        config.inline = inline
    with own_devices(config):
        if config.stages:
            return run_chain(config, workflow_func, judge_func, stop)
        run = make_run(config, workflow_func, judge_func)
        run.prepare()
        run.announce()
        with run.claimed():
            return run.execute(stop)


def with_stop(work: Callable[[Stop], T]) -> T:
    """Run `work` so that Ctrl-C or SIGTERM asks it to stop; a second one raises KeyboardInterrupt.
    Inside a running event loop (a notebook) `work` runs in a thread of its own, and Ctrl-C, however
    often, only asks it to stop."""
    from aflow_tune.config.quiet import quiet

    quiet()
    asked = threading.Event()
    if asyncio._get_running_loop() is None:
        with _signals(asked):
            return work(asked.is_set)
    with ThreadPoolExecutor(1, "aflow-tune") as pool:
        future = pool.submit(work, asked.is_set)
        while not future.done():
            try:
                wait([future], timeout=0.5)
            except KeyboardInterrupt:
                asked.set()
        return future.result()


@contextlib.contextmanager
def _signals(asked: threading.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        text = "\nstopping after the step under way; once more to stop at once"
        try:
            print(text, flush=True)
        except RuntimeError:  # the signal interrupted a print, which holds the buffer
            os.write(sys.stdout.fileno(), f"{text}\n".encode())

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
