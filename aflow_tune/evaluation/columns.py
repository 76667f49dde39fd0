"""What an evaluation compares: one column for each pair of weights and workflow, and settings.

Names of the command line become columns here, and every name that leads nowhere is refused
together with what there is. The base model is always the first column. Loading anything is left
to `evaluating.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aflow_tune.engines.local.saved_weights import kind_of
from aflow_tune.errors import BadInput, Fault
from aflow_tune.report.evaluation import best_step
from aflow_tune.runs.folder import STEP_PREFIX, checkpoints
from aflow_tune.types import Checkpoint

BASE = "base"
WORKFLOW_PREFIX = "workflow:"
GRAPH_FILE = "graph.py"
"""A folder with this file is an operator graph."""
SAMPLING_KEYS = {"temperature": float, "top_p": float, "top_k": int, "max_tokens": int}
"""What `--vary` takes, with the type of its values."""
_RANGES = {
    "temperature": (0.0, 100.0, "0 or more"),
    "top_p": (1e-9, 1.0, "above 0, at most 1"),
    "top_k": (0, 10**9, "0 (off) or more"),
    "max_tokens": (1, 10**9, "1 or more"),
}


@dataclass(frozen=True)
class Side:
    """Weights and workflow. None means the configuration's own.

    `step` is the training step of the weights, for a checkpoint of this run; else 0.
    """

    name: str
    weights: Path | None = None
    step: int = 0
    workflow: str | None = None
    config: Path | None = None
    graph: Path | None = None
    served_model: str | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for two names of the same thing."""
        return self.weights, self.workflow, self.config, self.graph, self.served_model


@dataclass(frozen=True)
class Column:
    """A side with sampling settings and prompts of its own."""

    side: Side
    sampling: tuple[tuple[str, float], ...] = ()
    prompts: Path | None = None

    @property
    def settings(self) -> tuple[object, ...]:
        """What is set beside the side; equal for columns that differ in their side only."""
        return tuple(sorted(self.sampling)), self.prompts

    @property
    def name(self) -> str:
        """What the column is called in every table."""
        told = [self.side.name]
        if self.prompts is not None:
            told.append(self.prompts.name)
        told += [f"{key}={value:g}" for key, value in self.sampling]
        return ", ".join(told)


@dataclass(frozen=True)
class Plan:
    """The columns, the base model's first, and the pairs of them that are compared."""

    columns: tuple[Column, ...]
    pairs: tuple[tuple[Column, Column], ...]


@dataclass(frozen=True)
class Wanted:
    """What the command line asked for, as it was written."""

    checkpoints: Sequence[str] = ()
    compare: tuple[str, str] | None = None
    vary: Sequence[str] = ()
    prompts: Sequence[Path] = ()
    served_models: Sequence[str] = ()
    """Names of models at an endpoint, the base model's first; empty without an endpoint."""


def make_plan(wanted: Wanted, run_dir: Path) -> Plan:
    """The columns and comparisons that were asked for.

    Without `checkpoints` and `compare` the newest checkpoint of the run folder joins the base
    model, where there is one.

    Raises:
        BadInput: with every name and setting that cannot be used.
    """
    faults: list[Fault] = []
    sides = _Sides(run_dir, wanted.served_models, faults)
    base = sides.base()
    chosen = [base]
    if wanted.served_models:
        chosen += [sides.served(name) for name in wanted.served_models[1:]]
    for name in wanted.checkpoints:
        chosen.append(sides.find(name, "--checkpoint"))
    compared = tuple(sides.find(name, "--compare") for name in wanted.compare or ())
    chosen += compared
    if not wanted.checkpoints and not compared and not wanted.served_models:
        chosen += sides.newest()
    grid = _settings(wanted, faults)
    if faults:
        raise BadInput("The evaluation cannot be started.", faults)
    distinct: dict[tuple[object, ...], Side] = {}
    for side in chosen:
        if side.key not in distinct:
            namesakes = sum(other.name.split(" #")[0] == side.name for other in distinct.values())
            name = f"{side.name} #{namesakes + 1}" if namesakes else side.name
            distinct[side.key] = replace(side, name=name)
    columns = tuple(replace(one, side=side) for side in distinct.values() for one in grid)
    pairs = _pairs(columns, [distinct[side.key] for side in compared])
    return Plan(columns, pairs)


def _pairs(
    columns: Sequence[Column], compared: Sequence[Side]
) -> tuple[tuple[Column, Column], ...]:
    """Each column against the base model with the same settings, or, where it is that itself,
    against the first column; and the two sides that were named."""
    first = columns[0]
    at = {(column.side.key, column.settings): column for column in columns}
    pairs = []
    if compared and compared[0].key != first.side.key and compared[0].key != compared[1].key:
        pairs += [
            (column, at[compared[1].key, column.settings])
            for column in columns
            if column.side.key == compared[0].key
        ]
    for column in columns[1:]:
        reference = at[first.side.key, column.settings]
        pairs.append((first if reference is column else reference, column))
    return tuple(pairs)


def _settings(wanted: Wanted, faults: list[Fault]) -> list[Column]:
    """Columns without a side yet: every combination of prompts and varied values."""
    varied: list[list[tuple[str, float]]] = []
    for text in wanted.vary:
        varied.append(_varied(text, faults))
    names = [values[0][0] for values in varied if values]
    if len(set(names)) < len(names):
        where = f"--vary {' '.join(wanted.vary)}"
        faults.append(Fault(where, "each setting once", f"{names}", "list its values in one"))
    for path in wanted.prompts:
        if not path.is_file():
            cure = "name a YAML file of prompts by operator"
            faults.append(Fault(f"--prompts {path}", "a file", "no such file", cure))
    nobody = Side("")
    files: list[Path | None] = [*wanted.prompts] or [None]
    return [
        Column(nobody, values, prompts)
        for prompts in files
        for values in itertools.product(*varied)
    ]


def _varied(text: str, faults: list[Fault]) -> list[tuple[str, float]]:
    where = f"--vary {text}"
    key, equals, listed = text.partition("=")
    if not equals or key not in SAMPLING_KEYS:
        expected = f"KEY=V1,V2,... with KEY one of {', '.join(SAMPLING_KEYS)}"
        faults.append(Fault(where, expected, repr(text), "--vary temperature=0.2,0.7,1.0"))
        return []
    low, high, expected = _RANGES[key]
    values = []
    for part in listed.split(","):
        try:
            value = SAMPLING_KEYS[key](part)
            if not low <= value <= high:
                raise ValueError
        except ValueError:
            faults.append(Fault(where, f"numbers {expected}", repr(part), f"--vary {key}=..."))
            continue
        values.append((key, value))
    return list(dict.fromkeys(values))


class _Sides:
    """Finds the side that a name of the command line means."""

    def __init__(self, run_dir: Path, served: Sequence[str], faults: list[Fault]) -> None:
        self.run_dir = run_dir
        self.served_models = list(served)
        self.faults = faults
        self.saved = checkpoints(run_dir) if run_dir.is_dir() else []

    def base(self) -> Side:
        """The base model, or the first model of the endpoint."""
        return Side(BASE, served_model=self.served_models[0] if self.served_models else None)

    def served(self, name: str) -> Side:
        """Another model of the endpoint."""
        return Side(name, served_model=name)

    def newest(self) -> list[Side]:
        """The newest checkpoint, if there is one."""
        return [_of_run(self.saved[-1], "last")] if self.saved else []

    def find(self, name: str, option: str) -> Side:
        """The side called `name`; what is wrong with it is added to the faults."""
        if name == BASE:
            return self.base()
        served = self.served_models[0] if self.served_models else None
        if name.startswith(WORKFLOW_PREFIX):
            spec = name.removeprefix(WORKFLOW_PREFIX)
            label = spec.rpartition(":")[2] or spec
            return Side(f"{BASE}, {label}", workflow=spec, served_model=served)
        if name.endswith((".yaml", ".yml")):
            if not Path(name).is_file():
                self._miss(option, name, "no such file")
            return Side(Path(name).stem, config=Path(name), served_model=served)
        if (Path(name) / GRAPH_FILE).is_file():
            folder = Path(name).resolve()
            return Side(f"{BASE}, {folder.name}", graph=folder, served_model=served)
        if self.served_models:
            if name in self.served_models:
                return self.base() if name == served else self.served(name)
            cure = "serve the weights there, and name the model: --model BASE TUNED"
            fault = Fault(f"{option} {name}", "a model named by --model", "weights on disk", cure)
            self.faults.append(fault)
            return self.base()
        return self._saved(name, option)

    def _saved(self, name: str, option: str) -> Side:
        """Weights of this run by name or step, or of any folder."""
        by_step = {checkpoint.step: checkpoint for checkpoint in self.saved}
        if name == "last" and self.saved:
            return _of_run(self.saved[-1], "last")
        if name == "best" and self.saved:
            step = best_step(self.run_dir, list(by_step))
            if step is not None:
                return _of_run(by_step[step], "best")
            self._miss(option, name, "no checkpoint of the run was evaluated")
            return self.base()
        if name.isdigit() and int(name) in by_step:
            return _of_run(by_step[int(name)])
        folder = Path(name).expanduser()
        if folder.is_dir():
            return self._folder(folder, option)
        self._miss(option, name, "no such checkpoint")
        return self.base()

    def _folder(self, folder: Path, option: str) -> Side:
        path = folder.resolve()
        if kind_of(path) is None:
            of_run = checkpoints(path)
            if of_run:
                return replace(_of_run(of_run[-1]), name=f"{path.name}, step {of_run[-1].step}")
            self._miss(option, str(folder), "a folder without weights")
            return self.base()
        if path.parent == self.run_dir.resolve() and re.fullmatch(rf"{STEP_PREFIX}\d+", path.name):
            return _of_run(Checkpoint(int(path.name.removeprefix(STEP_PREFIX)), path))
        return Side("/".join(path.parts[-2:]), weights=path)

    def _miss(self, option: str, name: str, found: str) -> None:
        if self.saved:
            steps = ", ".join(str(checkpoint.step) for checkpoint in self.saved)
            there = f"base, last, best, a step ({steps})"
        else:
            there = f"base (no checkpoint is in {self.run_dir})"
        expected = (
            f"{there}, a folder with weights or an operator graph, workflow:FILE.py:FUNCTION, "
            "or a YAML"
        )
        cure = f"{option} last" if self.saved else "train first, or name a folder with weights"
        self.faults.append(Fault(f"{option} {name}", expected, found, cure))


def _of_run(checkpoint: Checkpoint, name: str = "") -> Side:
    label = f"step {checkpoint.step}" + (f" ({name})" if name else "")
    return Side(label, weights=checkpoint.path.resolve(), step=checkpoint.step)
