"""What a column is measured from: configuration, functions, tasks; and what decides its records.

A column's identity is everything that its records depend on and that can be seen from here. Its
folder is named after it, so that records are taken up again exactly where they still hold. What a
function does beyond its own files, such as a server that it asks, is not seen.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aflow_tune.cluster.sent_function import user_modules
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.config.validate import resolve_functions
from aflow_tune.contract.plugins import resolve
from aflow_tune.contract.signature import check_functions
from aflow_tune.engines.local.saved_weights import fingerprint
from aflow_tune.engines.trinity.rollout.endpoint import base_url
from aflow_tune.evaluation.columns import Column, Plan, Side, Wanted
from aflow_tune.evaluation.prompts import as_graph
from aflow_tune.evaluation.trained import load_trained
from aflow_tune.files import write_json

Function = Callable[..., Any]
_OURS = "aflow_tune."
_BY_CONTENT = ("graph", "score", "operators", "clients")
"""Fields of functions that are objects: what is in them counts, not how it is written."""
_AUXILIARY = ("name", "temperature", "top_p", "max_response_tokens", "chat_template")
"""What decides the answers of an auxiliary model beside its weights."""


@dataclass(frozen=True)
class Request:
    """What the command line asked for. `out` None is `eval` in the run folder."""

    config: Path
    overrides: Sequence[str] = ()
    wanted: Wanted = field(default_factory=Wanted)
    samples: int = 1
    limit: int | None = None
    endpoint: str | None = None
    key_variable: str | None = None
    out: Path | None = None
    solved_at: float = 1.0
    again: bool = False
    """Whether runs that failed in an earlier command are made again."""
    cache: Path | None = None
    """Where answers of executors and judges are kept for the next evaluation; None: nowhere."""


@dataclass
class Source:
    """A configuration with its functions and tasks. Several columns may share one."""

    config: AflowConfig
    workflow: Function
    judge: Function | None
    tasks: dict[str, Sequence[Any]] = field(default_factory=dict)

    @functools.cached_property
    def functions(self) -> dict[str, Any]:
        """Digests of the user's code, as it is now."""
        return {
            "workflow": _sources_of(self.workflow),
            "judge": _sources_of(self.judge) if self.judge else None,
        }


def make_sources(
    plan: Plan, untouched: AflowConfig, first: Source, request: Request
) -> dict[Column, Source]:
    """What every column is measured from; each configuration and function is loaded once.

    Raises:
        BadInput: a workflow or configuration that a column names cannot be used.
    """
    made: dict[tuple[Any, ...], Source] = {(None, None, None): first}
    found = {}
    for column in plan.columns:
        side = column.side
        key = (side.workflow, side.config, side.graph)
        if key not in made:
            if side.config is not None:
                made[key] = _other_config(side.config, untouched, request)
            else:
                workflow = _other_workflow(side, untouched, request)
                check_functions(workflow, first.judge)
                made[key] = replace(first, workflow=workflow)
        found[column] = made[key]
    return found


def _other_workflow(side: Side, untouched: AflowConfig, request: Request) -> Function:
    """A function, or an operator graph with the settings of the configuration's own graph."""
    if side.graph is None:
        workflow: Function = resolve(side.workflow or "", request.config.parent)
        return workflow
    config = copy.deepcopy(untouched)
    config.workflow, config.graph.path, config.writer.executor = None, str(side.graph), None
    return resolve_functions(config)[0]


def _other_config(path: Path, untouched: AflowConfig, request: Request) -> Source:
    """Another configuration on the held-out tasks of the first one."""
    config = load_trained(path)
    workflow, judge = resolve_functions(config)
    check_functions(workflow, judge)
    config.buffer.explorer_input.eval_tasksets = copy.deepcopy(
        untouched.buffer.explorer_input.eval_tasksets
    )
    for taskset in config.buffer.explorer_input.eval_tasksets:
        own = request.config.parent / str(taskset.path)
        if not Path(str(taskset.path)).exists() and own.exists():
            taskset.path = str(own)
    config.report.score = untouched.report.score
    local_model = request.endpoint is None
    prepare(config, Purpose.EVALUATE, workflow=workflow, judge=judge, local_model=local_model)
    return Source(config, workflow, judge)


def column_folder(out: Path, column: Column, source: Source, request: Request) -> Path:
    """Where the column's records are: named after all that decides them, which it also holds."""
    identity = _identity(column, source, request)
    text = json.dumps(identity, sort_keys=True, default=str)
    slug = re.sub(r"[^A-Za-z0-9.=_-]+", "-", column.name).strip("-")[:60] or "column"
    folder = out / "columns" / f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    if not (folder / "column.json").exists():
        write_json(folder / "column.json", json.loads(text))
    return folder


def _identity(column: Column, source: Source, request: Request) -> dict[str, Any]:
    config, side = source.config, column.side
    model = config.explorer.rollout_model
    sizes = ("max_model_len", "max_prompt_tokens", "max_response_tokens", "enable_thinking")
    local = {"dtype": config.local.dtype, "deterministic": config.deterministic}
    return {
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
            [getattr(auxiliary, name) for name in ("model_path", *_AUXILIARY)]
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


def _sources_of(function: Function) -> dict[str, str]:
    """Digests of the files that a function of the user's consists of, by module; an operator
    graph is its own text, a writer its settings."""
    if dataclasses.is_dataclass(function) and type(function).__module__.startswith(_OURS):
        settings = [
            (item.name, repr(getattr(function, item.name)))
            for item in dataclasses.fields(function)
            if item.name not in _BY_CONTENT
        ]
        named = sorted(getattr(function, "operators", ()))
        own = {"graph": _digest(repr([_texts_of(function), named, settings]).encode())}
        carried = getattr(function, "carries", ())
        inside = {str(number): _sources_of(part) for number, part in enumerate(carried)}
        return {**own, **{f"{key}/{name}": v for key, d in inside.items() for name, v in d.items()}}
    plain = inspect.unwrap(getattr(function, "func", function))
    names = {*user_modules([function]), getattr(plain, "__module__", "")}
    found = {"": getattr(plain, "__qualname__", type(plain).__name__)}
    for name in sorted(names):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and Path(file).is_file():
            found[name] = _digest(Path(file).read_bytes())
    return found


def _texts_of(function: Function) -> list[Any]:
    flow = as_graph(function)
    if flow is None:
        return []
    graph = flow.graph
    return [sorted(texts.items()) for texts in (graph.sources, graph.prompts, graph.instructions)]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
