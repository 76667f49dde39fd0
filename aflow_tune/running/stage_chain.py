"""Runs the stages of one YAML one after the other: `run_chain`.

    <root>/<project>/<name>/         the chain folder
      chain.json                     the stages and the state of each
      report.html                    all stages side by side
      account.sqlite                 spend of all stages together
      <stage_name>/                  an ordinary run folder (`runs/folder.py`)

Each stage is a run (`run.make_run`) that starts from the model of the last training stage before
it, unless it names one. All stages are checked before the first one starts. The same command
resumes in the stage that was interrupted. On `engine: trinity` the order, the folders and the
checkpoint handed on are those of Trinity's own stage loop.
"""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from aflow_tune.config.load import AflowConfig
from aflow_tune.config.stages import TRAINING, chain_folder, parts_of
from aflow_tune.config.validate import check_part
from aflow_tune.errors import AlreadyFinished, BadInput, BudgetReached, Interrupted, RunFailed
from aflow_tune.files import write_json
from aflow_tune.report.html import chain_summary, write_chain_report
from aflow_tune.running.run import Function, last_metrics, make_run
from aflow_tune.runs.folder import CHAIN_FILE, RUN_FILE, checkpoints, locked, read_state
from aflow_tune.types import TuneResult


@dataclass
class StageState:
    """One stage in `chain.json`. `status`: waiting, running, interrupted, failed, finished.
    `seconds`: over all commands. `model`: the one that it starts from."""

    name: str
    mode: str
    status: str = "waiting"
    target: int = 0
    seconds: float = 0.0
    model: str = ""


def run_chain(
    config: AflowConfig,
    workflow_func: Function | None,
    judge_func: Function | None,
    stop: Callable[[], bool],
) -> TuneResult:
    """Run every stage that is not finished; returns the result of the last training stage. Raises
    BadInput: a stage was refused, or the folder belongs to another chain; else as `Run.execute`."""
    folder = chain_folder(config)
    if not config.continue_from_checkpoint and folder.is_dir() and any(folder.iterdir()):
        config.name = f"{config.name}_{time.strftime('%Y%m%d%H%M%S')}"
        print(f"the folder {folder} is in use: this chain is named {config.name}", flush=True)
    config.continue_from_checkpoint = True  # one name for the whole chain
    parts, found = parts_of(config)
    faults = list(found)
    for name, part in parts:  # with the configured models: the stages' own do not exist yet
        report = check_part(part, workflow_func, judge_func)
        known = {fault.where for fault in faults}
        faults += [fault for fault in report.faults if fault.where not in known]
        if not report.faults:
            print(f"stage {name}: {part.mode}, checked", flush=True)
    if faults:
        raise BadInput("These stages cannot run.", faults)
    with locked(chain_folder(config)):
        return _Chain(config, workflow_func, judge_func).run(stop)


class _Chain:
    def __init__(self, config: AflowConfig, *functions: Function | None) -> None:
        self.config, self.functions = config, functions
        self.folder, self.started = chain_folder(config), time.monotonic()
        self.parts, _ = parts_of(config)
        self.states = self._read_states()

    def run(self, stop: Callable[[], bool]) -> TuneResult:
        model, done, result = None, 0, None
        for number, (name, part) in enumerate(self.parts):
            if stop():
                raise Interrupted(f"stopped before stage {name!r}; the same command goes on there")
            part.prepared.account_folder = str(self.folder)
            if model is not None and "model.model_path" not in part.positions.shown:
                part.model.model_path = model
            try:
                with self._watched(number, part):
                    found = self._stage(number, part, stop)
            except AlreadyFinished:
                done += 1
                found = None
            folder = self.folder / name
            if part.mode in TRAINING:
                model = trained_model(part, folder)
                if found is None and (state := read_state(folder)) is not None:
                    saved = tuple(checkpoints(folder))
                    found = TuneResult(folder, state.step, last_metrics(folder), saved)
                result = found
            gc.collect()
        if done == len(self.parts):
            told = f"All {done} stages in {self.folder} are finished. Nothing was started."
            raise AlreadyFinished(f"{told} For a new run give another `name=`.")
        report = self._report()
        if report is not None:
            print(chain_summary(self.folder, report), flush=True)
        result = result or TuneResult(self.folder, 0)
        return replace(result, run_dir=self.folder, report=report)

    def _stage(self, number: int, part: AflowConfig, stop: Callable[[], bool]) -> TuneResult:
        state = self.states[number]
        over, later = state.status == "finished", self.states[number + 1 :]
        place = f"stage {number + 1} of {len(self.states)}: {state.name} ({part.mode})"
        print(place if over else f"\n{place}", flush=True)
        limit = part.budget.wall_seconds
        if limit is not None:
            part.budget.wall_seconds = max(0.0, limit - (time.monotonic() - self.started))
        workflow, judge = self.functions
        run = make_run(part, workflow, judge)
        run.prepare()
        if not over:
            run.announce()
        state.model = part.model.model_path
        if over and state.mode in TRAINING:
            started = (s.name for s in later if (self.folder / s.name / RUN_FILE).exists())
            run.built_upon = next(started, None)
        with run.claimed():
            state.status, state.target = "running", run.target
            self._write_states(must=True)
            return run.execute(stop)

    @contextlib.contextmanager
    def _watched(self, number: int, part: AflowConfig) -> Iterator[None]:
        """Record how a stage ended, and add its name to what it raises."""
        state, began, status = self.states[number], time.monotonic(), "failed"
        try:
            yield
            status = "finished"
        except AlreadyFinished:
            status = "finished"
            print(f"stage {state.name}: finished", flush=True)
            raise
        except BadInput as error:
            status = state.status
            # `changed_keys` gives the bare key; in a chain, show its stage and position instead.
            keys, where = part.flatten(), part.positions.where
            faults = [
                replace(fault, where=where(fault.where) if fault.where in keys else fault.where)
                for fault in error.faults
            ]
            raise BadInput(f"Stage {state.name!r}: {error.title}", faults) from error
        except (Interrupted, BudgetReached, RunFailed) as error:
            status = "failed" if isinstance(error, RunFailed) else "interrupted"
            raise type(error)(f"stage {state.name!r}: {error}") from error
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            state.status = status
            state.seconds += time.monotonic() - began
            self._write_states(must=status == "finished")
            self._report()

    def _report(self) -> Path | None:
        """Write the chain's report; a full disk is only a warning."""
        try:
            return write_chain_report(self.folder)
        except OSError as error:
            print(f"warning: the report could not be written: {error}", flush=True)
            return None

    def _read_states(self) -> list[StageState]:
        """The states from `chain.json`, new ones added. Raises BadInput: the folder is of a single
        run, or of a chain whose started stages are not the first ones of this configuration."""
        if (self.folder / RUN_FILE).exists():
            title, fix = "This folder holds a run without `stages`.", "give another `name=`"
            expected = "the folder of a chain, or a new one"
            raise BadInput.of(title, str(self.folder), expected, "a single run", fix)
        path, names = self.folder / CHAIN_FILE, [name for name, _ in self.parts]
        known: dict[str, StageState] = {}
        if path.exists():
            for entry in json.loads(path.read_text(encoding="utf-8"))["stages"]:
                known[entry["name"]] = StageState(**entry)
        started = [name for name in known if (self.folder / name / RUN_FILE).exists()]
        if started != names[: len(started)]:
            title, where = "This folder belongs to a chain of other stages.", "stages"
            expected = f"the stages that were started, in this order: {', '.join(started)}"
            fix = "name them as before, or give the chain another `name=`"
            where = self.config.positions.where(where)
            raise BadInput.of(title, where, expected, ", ".join(names), fix)
        return [
            replace(known.get(name, StageState(name, part.mode)), mode=part.mode)
            for name, part in self.parts
        ]

    def _write_states(self, *, must: bool) -> None:
        """Unless it `must`, a failure is a warning, so that the stage's own error is reported."""
        stages = [asdict(state) for state in self.states]
        content = {"stages": stages, "command": self.config.command, "host": socket.gethostname()}
        try:
            write_json(self.folder / CHAIN_FILE, content)
        except OSError as problem:
            if must:
                raise RunFailed(f"{self.folder / CHAIN_FILE}: {problem.strerror}") from problem
            print(f"warning: how the stage ended could not be written: {problem}", flush=True)


def trained_model(config: AflowConfig, folder: Path) -> str:
    """The path of the model that a finished training stage exported. RunFailed: it is missing."""
    if config.engine == "trinity":
        from trinity.trainer.trainer import get_latest_hf_checkpoint_path

        config.checkpoint_job_dir = config.checkpoint_job_dir or str(folder)
        path = get_latest_hf_checkpoint_path(config)
        if path is None:
            raise RunFailed(f"stage {folder.name!r} left no Hugging Face checkpoint in {folder}")
        return str(path)
    merged = folder / "export" / "merged"
    if not (merged / "config.json").is_file():
        raise RunFailed(f"stage {folder.name!r} is finished, but its model is gone: {merged}")
    return str(merged)
