"""What an evaluation compares: one column for each combination of weights, workflow and settings,
and the configuration, functions and tasks of each column.

The base model is always the first column. The name of a column's folder contains a hash of all that
its records depend on, as far as it is visible here, so that records are reused exactly while they
are valid. What a function uses besides its own files, such as a server, is not visible.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from aflow_tune.cluster.sent_function import user_modules
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.config.validate import resolve_functions
from aflow_tune.contract.plugins import resolve
from aflow_tune.contract.signature import check_functions
from aflow_tune.engines.local.checkpoint import fingerprint, kind_of
from aflow_tune.engines.trinity.rollout.endpoint import base_url
from aflow_tune.errors import BadInput, Fault
from aflow_tune.evaluation.trained import RESOLVED, load_trained, stage_folders, trained_run
from aflow_tune.files import write_json
from aflow_tune.report.evaluation import best_step
from aflow_tune.runs.folder import STEP_PREFIX, checkpoints
from aflow_tune.types import Checkpoint

BASE = "base"
WORKFLOW_PREFIX = "workflow:"
GRAPH_FILE = "graph.py"
"""A folder with this file holds an operator graph."""
_VARIED: Mapping[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, 1e-9, 1.0),
    "top_k": (int, 0, 10**9),
    "max_tokens": (int, 1, 10**9),
}
"""The settings that `--vary` takes: type, lowest, highest value."""
_BY_CONTENT = ("graph", "score", "operators", "clients")
"""Fields of graph and writer functions that are hashed by content, not by `repr`."""
_AUXILIARY = ("model_path", "name", "temperature", "top_p", "max_response_tokens", "chat_template")
"""The settings of an auxiliary model that its answers depend on."""

Function = Callable[..., Any]


@dataclass(frozen=True)
class Side:
    """Weights and workflow; None: those of the configuration. `step` is the training step if the
    weights are a checkpoint of a run, else 0."""

    name: str
    weights: Path | None = None
    step: int = 0
    workflow: str | None = None
    config: Path | None = None
    graph: Path | None = None
    served_model: str | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for two names of the same weights and workflow."""
        return self.weights, self.workflow, self.config, self.graph, self.served_model


@dataclass(frozen=True)
class Column:
    """A side with its own sampling settings and prompts."""

    side: Side
    sampling: tuple[tuple[str, float], ...] = ()
    prompts: Path | None = None

    @property
    def settings(self) -> tuple[object, ...]:
        """Equal for columns that differ only in their side."""
        return tuple(sorted(self.sampling)), self.prompts

    @property
    def name(self) -> str:
        """The title of the column in every table."""
        prompts = [] if self.prompts is None else [self.prompts.name]
        varied = [f"{key}={value:g}" for key, value in self.sampling]
        return ", ".join([self.side.name, *prompts, *varied])


class Plan(NamedTuple):
    """The columns, the base model first, and the pairs (before, after) to compare."""

    columns: tuple[Column, ...]
    pairs: tuple[tuple[Column, Column], ...]


@dataclass(frozen=True)
class Request:
    """The arguments of the command line.

    `served_models`: names at the endpoint, the base model's first. `out`: None: `eval` in the run
    folder. `again`: repeat failed rollouts of an earlier command. `cache`: where answers of
    executors and judges are kept for the next evaluation.
    """

    config: Path
    overrides: Sequence[str] = ()
    checkpoints: Sequence[str] = ()
    compare: Sequence[str] = ()
    vary: Sequence[str] = ()
    prompts: Sequence[Path] = ()
    samples: int = 1
    limit: int | None = None
    endpoint: str | None = None
    served_models: Sequence[str] = ()
    key_variable: str | None = None
    out: Path | None = None
    solved_at: float = 1.0
    again: bool = False
    cache: Path | None = None


def make_plan(request: Request, run_dir: Path, model: str | None = None) -> Plan:
    """The columns and comparisons of a request; `model` is the configured one.

    Without `checkpoints`, `compare` and `served_models`, the newest checkpoint of the run folder is
    added to the base model, if there is one. The two sides of `compare` are compared first; then
    each column with the base model under the same settings, or, if it is the base model itself,
    with the first column.

    Raises:
        BadInput: with every unusable name and setting.
    """
    faults: list[Fault] = []
    served = request.served_models
    base = Side(BASE, served_model=served[0] if served else None)
    saved = checkpoints(run_dir) if run_dir.is_dir() else []

    def find(name: str, option: str) -> Side:
        found = _find_side(base, served, run_dir, saved, name, model)
        if isinstance(found, Side):
            return found
        steps = ", ".join(str(checkpoint.step) for checkpoint in saved) or f"none in {run_dir}"
        expected = (
            f"base, last, best, a step ({steps}), a stage, a folder with weights or an operator "
            "graph, workflow:FILE.py:FUNCTION, a YAML, or a model named by --model"
        )
        faults.append(Fault(f"{option} {name}", expected, found, "name one of these"))
        return base

    compared = [find(name, "--compare") for name in request.compare]
    chosen = [
        base,
        *(Side(name, served_model=name) for name in served[1:]),
        *(find(name, "--checkpoint") for name in request.checkpoints),
        *compared,
    ]
    if not (request.checkpoints or compared or served) and saved:
        chosen.append(_of_run(saved[-1], "last"))
    grid = _settings(request, faults)
    if faults:
        raise BadInput("The evaluation cannot be started.", faults)
    distinct: dict[tuple[object, ...], Side] = {}
    for side in chosen:
        distinct.setdefault(side.key, side)
    columns = tuple(replace(one, side=side) for side in distinct.values() for one in grid)
    at = {(column.side.key, column.settings): column for column in columns}
    pairs = []
    if compared and compared[0].key not in (base.key, compared[1].key):
        before, after = (side.key for side in compared)
        pairs += [(c, at[after, c.settings]) for c in columns if c.side.key == before]
    for column in columns[1:]:
        reference = at[base.key, column.settings]
        pairs.append((columns[0] if reference is column else reference, column))
    return Plan(columns, tuple(pairs))


def _settings(request: Request, faults: list[Fault]) -> list[Column]:
    """Columns still without a side: every combination of prompts and varied values."""
    varied: dict[str, list[tuple[str, float]]] = {}
    for text in request.vary:
        where = f"--vary {text}"
        key, equals, listed = text.partition("=")
        if not equals or key not in _VARIED or key in varied:
            expected = f"KEY=V1,V2,... with KEY one of {', '.join(_VARIED)}, each once"
            faults.append(Fault(where, expected, repr(text), "--vary temperature=0.2,0.7,1.0"))
            continue
        kind, low, high = _VARIED[key]
        values: dict[tuple[str, float], None] = {}
        for part in listed.split(","):
            try:
                value = kind(part)
                if not low <= value <= high:
                    raise ValueError
                values[key, value] = None
            except ValueError:
                expected = f"{kind.__name__} from {low:g} to {high:g}"
                faults.append(Fault(where, expected, repr(part), f"--vary {key}=..."))
        varied[key] = list(values)
    for path in request.prompts:
        if not path.is_file():
            cure = "name a YAML file of prompts by operator"
            faults.append(Fault(f"--prompts {path}", "a file", "no such file", cure))
    files: list[Path | None] = [*request.prompts] or [None]
    combined = [*itertools.product(*varied.values())]
    return [Column(Side(""), values, prompts) for prompts in files for values in combined]


def _find_side(
    base: Side,
    served: Sequence[str],
    run_dir: Path,
    saved: Sequence[Checkpoint],
    name: str,
    model: str | None,
) -> Side | str:
    """The side for a name on the command line, or a text that says what was found instead."""
    path = Path(name).expanduser()
    by_step = {checkpoint.step: checkpoint for checkpoint in saved}
    if name in (BASE, base.served_model):
        return base
    if name.startswith(WORKFLOW_PREFIX):
        spec = name.removeprefix(WORKFLOW_PREFIX)
        label = spec.rpartition(":")[2] or spec
        return replace(base, name=f"{BASE}, {label}", workflow=spec)
    if name.endswith((".yaml", ".yml")):
        return replace(base, name=path.stem, config=path) if path.is_file() else "no such file"
    if (path / GRAPH_FILE).is_file():
        folder = path.resolve()
        return replace(base, name=f"{BASE}, {folder.name}", graph=folder)
    if served:
        known = Side(name, served_model=name)
        on_disk = name in ("last", "best") or name.isdigit() or path.is_dir()
        found = "weights on disk, which" if on_disk else "a name that"
        return known if name in served else f"{found} --endpoint does not serve"
    if name == "last" and saved:
        return _of_run(saved[-1], "last")
    if name == "best" and saved:
        step = best_step(run_dir, list(by_step))
        return _of_run(by_step[step], "best") if step else "no checkpoint was evaluated"
    if name.isdigit() and int(name) in by_step:
        return _of_run(by_step[int(name)])
    of_chain = {stage.name: stage for stage in stage_folders(run_dir.parent)}
    path = of_chain.get(name, path)
    if not path.is_dir():
        return "no such checkpoint"
    path = path.resolve()
    if kind_of(path) is None:
        other, of_run = trained_run(path)
        if other is None:
            return "a folder without weights"
        merged = other / "export" / "merged"
        if kind_of(merged) is not None and _model_of(other) not in (None, model):
            # Its adapters belong to another base model, as those of another stage do.
            return base if str(merged) == model else Side(other.name, weights=merged)
        return replace(_of_run(of_run[-1]), name=f"{path.name}, step {of_run[-1].step}")
    if path.parent == run_dir.resolve() and re.fullmatch(rf"{STEP_PREFIX}\d+", path.name):
        return _of_run(Checkpoint(int(path.name.removeprefix(STEP_PREFIX)), path))
    return Side("/".join(path.parts[-2:]), weights=path)


def _model_of(run_dir: Path) -> str | None:
    """The model that a run began with; None if its `resolved.yaml` does not tell."""
    try:
        text = (run_dir / RESOLVED).read_text(encoding="utf-8")
        return str(yaml.safe_load(text)["model"]["model_path"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None


def _of_run(checkpoint: Checkpoint, name: str = "") -> Side:
    label = f"step {checkpoint.step}" + (f" ({name})" if name else "")
    return Side(label, weights=checkpoint.path.resolve(), step=checkpoint.step)


@dataclass
class Source:
    """A configuration with its functions and tasks. Several columns may share one."""

    config: AflowConfig
    workflow: Function
    judge: Function | None
    tasks: dict[str, Sequence[Any]] = field(default_factory=dict)

    @functools.cached_property
    def functions(self) -> dict[str, Any]:
        """Hashes of the user's code, computed on first use."""
        judge = _sources_of(self.judge) if self.judge else None
        return {"workflow": _sources_of(self.workflow), "judge": judge}


def make_sources(
    plan: Plan, untouched: AflowConfig, first: Source, request: Request
) -> dict[Column, Source]:
    """The source of every column; each configuration and function is loaded once. Raises `BadInput`
    if one cannot be used."""
    made: dict[tuple[Any, ...], Source] = {(None, None, None): first}
    found = {}
    for column in plan.columns:
        side = column.side
        key = (side.workflow, side.config, side.graph)
        if key not in made and side.config is not None:
            made[key] = _other_config(side.config, untouched, request)
        elif key not in made:
            if side.graph is None:
                workflow: Function = resolve(side.workflow or "", request.config.parent)
            else:  # with the settings of the configuration's `graph:`
                config = copy.deepcopy(untouched)
                config.workflow, config.writer.executor = None, None
                config.graph.path = str(side.graph)
                workflow = resolve_functions(config)[0]
            check_functions(workflow, first.judge)
            made[key] = replace(first, workflow=workflow)
        found[column] = made[key]
    return found


def _other_config(path: Path, untouched: AflowConfig, request: Request) -> Source:
    """Another configuration, on the held-out tasks of the first one."""
    config = load_trained(path)
    workflow, judge = resolve_functions(config)
    check_functions(workflow, judge)
    tasksets = copy.deepcopy(untouched.buffer.explorer_input.eval_tasksets)
    for taskset in tasksets:
        own = request.config.parent / str(taskset.path)
        if not Path(str(taskset.path)).exists() and own.exists():
            taskset.path = str(own)
    config.buffer.explorer_input.eval_tasksets = tasksets
    config.report.score = untouched.report.score
    local_model = request.endpoint is None
    prepare(config, Purpose.EVALUATE, workflow=workflow, judge=judge, local_model=local_model)
    return Source(config, workflow, judge)


def column_folder(out: Path, column: Column, source: Source, request: Request) -> Path:
    """The folder of a column's records, named by a hash of `column.json`, written if missing."""
    config, side = source.config, column.side
    model = config.explorer.rollout_model
    sizes = ("max_model_len", "max_prompt_tokens", "max_response_tokens", "enable_thinking")
    local = {"dtype": config.local.dtype, "deterministic": config.deterministic}
    if config.local.load_in is not None:
        local["load_in"] = config.local.load_in
    identity = {
        "model": side.served_model or config.model.model_path,
        "endpoint": base_url(request.endpoint) if request.endpoint else None,
        "local": None if request.endpoint else local,
        "weights": [str(side.weights), fingerprint(side.weights)] if side.weights else None,
        "model_settings": {name: getattr(model, name) for name in sizes},
        "chat_template": model.chat_template,
        "sampling": dict(column.sampling),
        **source.functions,
        "prompts": _digest(column.prompts.read_bytes()) if column.prompts else None,
        "run_prompts": config.prompts,
        "system_prompt": config.rollout.system_prompt,
        "run_timeout": config.rollout.run_timeout,
        "rewards": repr(config.rewards),
        "sandbox": config.sandbox,
        "models": repr(sorted(config.models.items())),
        "score": config.report.score,
        "seed": config.seed,
        "auxiliary": [
            [getattr(auxiliary, name) for name in _AUXILIARY]
            for auxiliary in config.explorer.auxiliary_models
        ],
        "tasks": {
            name: [
                _digest(json.dumps([t.raw_task for t in tasks], default=str).encode()),
                repr(tasks[0].rollout_args) if tasks else "",
            ]
            for name, tasks in source.tasks.items()
        },
    }
    text = json.dumps(identity, sort_keys=True, default=str)
    slug = re.sub(r"[^A-Za-z0-9.=_-]+", "-", column.name).strip("-")[:60] or "column"
    folder = out / "columns" / f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    if not (folder / "column.json").exists():
        write_json(folder / "column.json", json.loads(text))
    return folder


def _sources_of(function: Function) -> dict[str, str]:
    """Hashes of the files of a user's function, by module; of an operator graph or a writer, the
    hash of its texts and settings, and those of the user's code in it."""
    if dataclasses.is_dataclass(function) and type(function).__module__.startswith("aflow_tune."):
        settings = [
            (item.name, repr(getattr(function, item.name)))
            for item in dataclasses.fields(function)
            if item.name not in _BY_CONTENT
        ]
        flow = _as_graph(function)
        texts = () if flow is None else ("sources", "prompts", "instructions")
        content = [sorted(getattr(flow.graph, name).items()) for name in texts]
        named = sorted(getattr(function, "operators", ()))
        found = {"graph": _digest(repr([content, named, settings]).encode())}
        for number, part in enumerate(getattr(function, "carries", ())):
            found |= {f"{number}/{name}": digest for name, digest in _sources_of(part).items()}
        return found
    plain = inspect.unwrap(getattr(function, "func", function))
    names = {*user_modules([function]), getattr(plain, "__module__", "")}
    found = {"": getattr(plain, "__qualname__", type(plain).__name__)}
    for name in sorted(names):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and Path(file).is_file():
            found[name] = _digest(Path(file).read_bytes())
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def with_prompts(
    workflow: Function, path: Path | None, config: AflowConfig
) -> tuple[Function, Mapping[str, Any]]:
    """The workflow and the configuration's prompts, overridden by those of a YAML file.

    The file has the form of the configuration's prompts, optionally under a key `prompts:`.

    Raises:
        BadInput: the file is no YAML mapping, or a prompt does not fit the operators or graph.
    """
    if path is None:
        return workflow, config.prompts
    try:
        prompts = yaml.safe_load(path.read_text(encoding="utf-8"))
        found = f"a {type(prompts).__name__}"
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        prompts, found = None, " ".join(str(error).split())
    if isinstance(prompts, dict) and set(prompts) == {"prompts"}:
        prompts = prompts["prompts"]
    if not isinstance(prompts, dict) or not prompts:
        raise BadInput.of(
            "The prompts cannot be used.",
            f"--prompts {path}",
            "a YAML mapping of operators to texts, such as `Review: {main: ...}`",
            found,
            "write the prompts by operator or by Operator.instance",
        )
    graph = _as_graph(workflow)
    if graph is not None:
        changed = dataclasses.replace(graph, graph=graph.graph.with_prompts(prompts))
        return changed, config.prompts
    from aflow_tune.operators import OPERATORS, check_prompts, load_operators

    known = {**OPERATORS, **load_operators(config.operators, config.positions.base)}
    check_prompts(prompts, str(path), known)
    merged = dict(config.prompts)
    for key, texts in prompts.items():
        both = isinstance(texts, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = {**merged[key], **texts} if both else texts
    return workflow, merged


def _as_graph(workflow: Function) -> Any:
    """`workflow` if it is an operator graph, else None; avoids importing `aflow_tune.graph`."""
    return workflow if type(workflow).__module__ == "aflow_tune.graph.workflow" else None
