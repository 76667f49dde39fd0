"""A run as it is sent to a job server: everything that is found and refused before it is.

The client knows its own machine alone. What is written here has to hold on another one: paths of
files that travel are relative to the folder that the command was started in (the job starts in
the copy of that one), all other paths mean the same place on every node or are refused. The job
prepares the run itself, so nothing that depends on the cluster is settled here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.cluster import keys
from aflow_tune.cluster.attached_ray import runtime_env_of
from aflow_tune.cluster.ship import (
    NAME_IT,
    READ_INSIDE,
    refuse_secrets,
    trace_run,
)
from aflow_tune.cluster.submitted import NAMES, PAYLOAD, Payload
from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.stages import parts_of
from aflow_tune.config.tasksets import experience_buffer, locate, user_tasksets
from aflow_tune.config.validate import check_run_prompts, functions_of
from aflow_tune.contract.signature import check_functions
from aflow_tune.engines.local.models import BUNDLED
from aflow_tune.errors import BadInput, Fault
from aflow_tune.models.redaction import masked
from aflow_tune.operators import load_operators
from aflow_tune.shipping.tracing import Trace, too_much
from aflow_tune.shipping.trees import MOST_FILE_BYTES, LeftOut, holds_keys, tree_of

STOP_SECONDS = 240
"""How long a stopped job may take to save its state before Ray kills it."""


@dataclass(frozen=True)
class Submission:
    """A run that is ready to be sent."""

    config: AflowConfig
    environment: dict[str, Any]
    """Ray's `runtime_env` of the job."""
    names: list[str]
    """Variables that the job has to be given, by name."""
    run_dir: str
    """The run folder; the job adds to it where `continue_from_checkpoint` is false."""
    warnings: list[str]


def prepare_submission(config_path: Path, overrides: Sequence[str], folder: Path) -> Submission:
    """Check a configuration as far as this machine can, and write what travels into `folder`.

    Raises:
        BadInput: the configuration, its code or its data were refused.
    """
    config = load_config(config_path, overrides)
    functions = workflow, judge = functions_of(config)
    if workflow is not None:
        check_functions(workflow, judge)
    check_run_prompts(config)
    base = config.positions.base
    operators = load_operators(config.operators, base).values()
    code, _ = trace_run(config, functions, operators)
    warnings = [*code.warnings, *_add_data(config, config_path, code)]
    faults = [*(code.faults or too_much(code.files)), *_not_everywhere(config), *_in_clear(config)]
    if faults:
        raise BadInput("This run cannot be submitted.", faults)
    names, secrets = keys.names_of_keys(config, code), keys.secrets_of(config, code)
    config.positions.file = os.path.relpath(config_path)
    config.positions.base = None if base is None else Path(os.path.relpath(base))
    config.note_command(config_path, overrides)
    payload = Payload(config, functions).to_bytes()
    refuse_secrets(payload, secrets, "the functions and settings", READ_INSIDE)
    waits = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}
    extra = {PAYLOAD: payload, NAMES: "\n".join(names).encode()}
    # The job holds its keys, and says where: they are not asked for in its environment.
    environment = runtime_env_of(config, code, folder, waits, False, extra)
    place = (str(config.checkpoint_root_dir), config.project, config.group, config.name)
    return Submission(config, environment, names, os.path.join(*place), warnings)


def _not_everywhere(config: AflowConfig) -> Iterator[Fault]:
    """Settings that mean another thing on another machine."""
    where = config.positions.where
    root = config.checkpoint_root_dir
    if not root or not os.path.isabs(root):
        yield Fault(
            where("checkpoint_root_dir"),
            "an absolute path that every node of the cluster sees",
            repr(root) if root else "nothing",
            "checkpoint_root_dir: /shared/runs",
        )
    if config.cluster.ray_address == "local":
        yield Fault(
            where("cluster.ray_address"),
            "a run on the cluster that it is submitted to",
            "local: a Ray of its own, inside the job",
            "take it out, or cluster.ray_address=auto",
        )
    seen = set()
    for _, part in parts_of(config)[0]:
        for key, name in _models(part):
            folder = os.path.expanduser(name)
            local = name.startswith((".", "~")) or os.path.isdir(folder)
            if local and name not in BUNDLED and not os.path.isabs(name) and name not in seen:
                seen.add(name)
                yield Fault(
                    part.positions.where(key),
                    "a hub id, or an absolute path that every node of the cluster sees",
                    repr(name),
                    "put the model on a shared disk: model.model_path=/shared/models/NAME",
                )


def _in_clear(config: AflowConfig) -> Iterator[Fault]:
    """Settings that are keys: the YAML travels, and so do the settings."""
    for key, value in config.flatten().items():
        if ".headers_env." in key or masked(key, value) == value:
            continue
        place = config.positions.where(key).partition("=")[0]  # what was typed holds the value
        cure = "take it out and export it: clients read their keys from the environment"
        if key.startswith("runtime_env.env_vars."):
            cure = NAME_IT
        yield Fault(place, "no keys: clusters keep what is sent", "a key in clear", cure)


def _models(config: AflowConfig) -> Iterator[tuple[str, str]]:
    yield "model.model_path", str(config.model.model_path or "")
    for number, model in enumerate(config.explorer.auxiliary_models):
        yield f"explorer.auxiliary_models.{number}.model_path", str(model.model_path or "")


def _add_data(config: AflowConfig, config_path: Path, code: Trace) -> list[str]:
    """Let the YAML, the files of task sets and those of graph and writer travel; returns what
    stays."""
    warnings = []
    code.files[Path(os.path.abspath(config_path))] = config_path.stat().st_size
    data: list[Path] = []
    for _, part in parts_of(config)[0]:
        sets: list[Any] = [taskset for _, taskset, _ in user_tasksets(part)]
        buffer = experience_buffer(part)
        for taskset in sets if buffer is None else [*sets, buffer]:
            found = locate(part, taskset) if taskset.path else None
            if found is not None and found.kind in ("file", "folder"):
                data += found.files
    exclude = LeftOut(patterns=config.runtime_env.exclude)
    for name in _named_paths(config):
        path = Path(os.path.abspath(config.positions.beside(name)))
        data += tree_of(path, exclude).files if path.is_dir() else [path] * path.is_file()
    for file in dict.fromkeys(data):
        size = file.stat().st_size
        if size <= MOST_FILE_BYTES and not holds_keys(file.name):
            code.files[file] = size
        else:
            warnings.append(
                f"{file} does not travel ({size / 2**20:.0f} MiB): the cluster is taken to have it "
                "at the same place"
            )
    return warnings


def _named_paths(config: AflowConfig) -> list[str]:
    """Files and folders that the settings of graph, writer and harvest name."""
    graph, writer, harvest = config.graph, config.writer, config.harvest
    named = (graph.path, graph.test_cases, writer.test_cases, writer.prompt, harvest.templates)
    return [name for name in named if name]
