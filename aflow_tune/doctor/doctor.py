"""The checks of `aflow-tune doctor`: of the machine alone, or for one configuration.

A configuration adds everything that `validate` finds, sorted by subject, and what `validate` leaves
out because it would start or contact something: the hub, the endpoints, the cluster. All checks run
concurrently; those that need the settings wait for them. Where the settings cannot be read, the
machine is checked without them, and `model`, `data` and `keys` have no lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.config.clashes import installed_versions, known_clashes, missing
from aflow_tune.contract.import_faults import package_cure
from aflow_tune.doctor.lines import Check, Line, begun, fault, line_of, note, ok
from aflow_tune.doctor.machine import (
    check_folder,
    check_gpus,
    check_python,
    check_sandbox,
    check_versions,
)
from aflow_tune.doctor.services import check_hub, check_keys
from aflow_tune.engines.local.models import BUNDLED, cache_dir, is_cached
from aflow_tune.errors import BadInput
from aflow_tune.find_ray import FoundRay, answers, find_ray, look_for, make_ray_base, uses_ray

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig
    from aflow_tune.config.validate import ValidationReport

CONFIG_SECONDS = 60.0
"""For importing Trinity and the user's code, and reading the data sets."""
MACHINE_SECONDS = 20.0
RAY_SECONDS = 30.0
"""After this the process that asks a Ray is killed."""
_AREAS = (
    ("keys", re.compile(r"\bmodels\.\w+\.(api_key_env|headers_env)")),
    ("model", re.compile(r"\bmodel\.model_path|auxiliary_models\[\d+\]\.model_path")),
    ("ray", re.compile(r"^(RAY_|TMPDIR|/tmp$)")),
    ("data", re.compile(r"explorer_input|experience_buffer|\.(jsonl?|csv|parquet)(:\d+)?$")),
)
"""Which check shows a fault, by its place; all others are shown under `config`."""


@dataclass(frozen=True)
class Settings:
    """A configuration with the report of `validate` on it. `parts`: the run, or its stages."""

    report: ValidationReport
    config: AflowConfig
    parts: tuple[AflowConfig, ...]

    @property
    def engine(self) -> str:
        """The engine that was chosen, else the configured one."""
        return self.report.engine[0] if self.report.engine is not None else self.config.engine

    @property
    def remote(self) -> bool:
        """Whether a service runs the model, so that the run needs no GPU of its own."""
        return bool(self.config.model.tinker.enable or self.config.model.external_model.enable)

    @property
    def run_folders(self) -> Path:
        """Where run folders go."""
        return Path(self.config.checkpoint_root_dir or "checkpoints").expanduser().absolute()

    def lines(self, area: str) -> list[Line]:
        """The faults that `validate` found in this area."""

        def about(where: str) -> str:
            return next((name for name, mark in _AREAS if mark.search(where)), "config")

        return [line_of(area, found) for found in self.report.faults if about(found.where) == area]


def examination(
    path: Path | None = None, overrides: Sequence[str] = (), *, offline: bool = False
) -> list[Check]:
    """The checks of one command, in the order in which they are shown. `path`: a configuration;
    None: the machine alone. `offline`: contact neither the hub nor the endpoints of models."""
    examined = begun(lambda: _examine(path, overrides))

    def settings() -> Settings | None:
        found = None if examined.exception() is not None else examined.result()
        return found if isinstance(found, Settings) else None  # else `config` reports it

    def of(look: Callable[[Settings], list[Line]]) -> Callable[[], list[Line]]:
        return lambda: [] if (found := settings()) is None else look(found)

    def configuration() -> list[Line]:
        found = examined.result()
        if isinstance(found, list):
            return found
        report, lines = found.report, found.lines("config")
        if report.engine is not None:
            lines.insert(0, ok("config", f"engine: {report.engine[0]} ({report.engine[1]})"))
        # What will be fetched is shown under `model` and `data`, which ask the hub.
        lines += [note("config", told) for told in report.warnings if "fetched" not in told]
        return lines if report.faults else [*lines, ok("config", f"{path}: valid")]

    # Checks that need the settings wait for them.
    seconds = MACHINE_SECONDS + (0.0 if path is None else CONFIG_SECONDS)
    checks = [
        Check("python", check_python),
        Check("versions", check_versions),
        Check("gpu", lambda: _gpus(settings()), seconds),
        Check("sandbox", lambda: _sandbox(settings()), seconds),
        Check("ray", lambda: _ray(settings()), seconds + RAY_SECONDS),
        Check("disk", lambda: _disk(settings()), seconds),
    ]
    if path is None:
        return checks
    return [
        *checks,
        Check("config", configuration, seconds),
        Check("model", of(lambda found: _models(found, ask=not offline)), seconds),
        Check("data", of(lambda found: _data(found, ask=not offline)), seconds),
        Check("keys", of(lambda found: check_keys(found.config, ask=not offline)), seconds),
    ]


def _examine(path: Path | None, overrides: Sequence[str]) -> Settings | list[Line]:
    """The configuration, or lines that say why it could not be examined; [] without one."""
    if path is None:
        return []
    installed = installed_versions()
    if known_clashes(installed) or missing(installed):
        text = f"{path}: not examined until the versions are put right"
        return [note("config", text, "the commands under `versions`")]
    from aflow_tune.config.quiet import quiet

    quiet()
    from aflow_tune.config.validate import validate

    report = validate(path, overrides)
    if report.config is None:
        return [line_of("config", found) for found in report.faults]
    stages = tuple(part.config for _, part in report.stages if part.config is not None)
    return Settings(report, report.config, stages or (report.config,))


def _gpus(found: Settings | None) -> list[Line]:
    """This machine's GPUs; `engine: trinity` needs one unless on a Ray, a service or processors."""
    if found is None:
        return check_gpus()
    from aflow_tune.config import on_processors
    from aflow_tune.config.engine import missing_devices

    elsewhere = found.remote or on_processors()
    with contextlib.suppress(BadInput):  # reported by the check of Ray
        elsewhere = elsewhere or find_ray(found.config) is not None
    lines = check_gpus(needed=found.engine == "trinity" and not elsewhere)
    return lines + [line_of("gpu", it, given=False) for it in missing_devices(found.config)]


def _sandbox(found: Settings | None) -> list[Line]:
    """A missing sandbox is a fault only if the configuration runs programs of a model."""
    if found is None:
        return check_sandbox()
    graph = bool(found.config.graph.path) and not found.config.graph.trust
    return check_sandbox(found.config.sandbox, graph or bool(found.config.writer.executor))


def _ray(found: Settings | None) -> list[Line]:
    """The Ray that a run would join, with the checks that the run would make of it."""
    if not installed_versions(("ray",)):
        return [fault("ray", "Ray is not installed", package_cure("ray"))]
    if found is not None:
        engine = "trinity" if found.engine == "trinity" else "local"
        inline = found.config.inline and engine == "local"
        if inline or not any(uses_ray(part, engine) for part in found.parts):
            why = " (inline)" if inline else ""
            return [ok("ray", f"not used: the run is one process{why}")]
    joined = look_for() if found is None else find_ray(found.config)
    if joined is not None:
        return ask_ray(joined, found)
    if found is None:
        make_ray_base()
    faults = [] if found is None else found.lines("ray")
    return faults or [ok("ray", "no cluster is running here; a run starts its own")]


def ask_ray(joined: FoundRay, found: Settings | None = None) -> list[Line]:
    """Lines about a Ray. A child process (`_ray_probe.py`) asks it, because connecting can hang,
    cannot be interrupted, and changes the process that connects."""
    address = joined.address
    if not answers(address):
        cure = "start it (`aflow-tune cluster up`), or correct cluster.ray_address or RAY_ADDRESS"
        return [fault("ray", f"nothing answers at {address} ({joined.source})", cure)]
    question: dict[str, Any] = {"address": address, "source": joined.source, "needs": {}}
    question |= {"folder": None, "where": "", "trust_users": False, "seconds": RAY_SECONDS - 5}
    lines: list[Line] = []
    if found is not None:
        runs, config = found.run_folders, found.config
        folder = next(path for path in (runs, *runs.parents) if path.exists())
        if folder.is_dir() and os.access(folder, os.W_OK):  # `disk` reports other folders
            question["folder"] = str(folder)
        question["where"] = config.positions.where("checkpoint_root_dir")
        question["trust_users"] = config.runtime_env.trust_users
        if not found.report.faults:
            from aflow_tune.cluster.ray_for_run import code_of
            from aflow_tune.config.validate import functions_of

            question["needs"] = code_of(config, functions_of(config))[0].needs
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "aflow_tune.cluster._ray_probe"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=RAY_SECONDS,
            check=False,
        )
        answer = json.loads(asked.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return [fault("ray", f"{address}: no answer within {RAY_SECONDS:g} s", "ray status")]
    except (IndexError, ValueError):
        last = " ".join(asked.stderr.strip().splitlines()[-2:])[-400:]
        return [fault("ray", f"{address}: asking it failed: {last}", "ray status")]
    if nodes := answer.get("nodes"):
        total, free = answer["total"], answer["available"]
        parts = [f"{len(nodes)} nodes"]
        for kind in sorted(total.keys() & {"CPU", "GPU"}):
            parts.append(f"{free.get(kind, 0):g} of {total[kind]:g} {kind}s free")
        lines.append(ok("ray", f"{address}: {', '.join(parts)}"))
        if found is not None and found.engine == "trinity":
            cluster = found.config.cluster
            wanted, least = max(cluster.node_num, 1), max(cluster.gpu_per_node, 1)
            fitting = sum(node.get("GPU", 0) >= least for node in nodes)
            if fitting < wanted:
                text = f"{fitting} nodes with {least} GPUs or more, the run wants {wanted}"
                cure = f"ray start --address={address} on others, or cluster.node_num=0"
                lines.append(fault("ray", text, cure))
    return lines + [
        fault("ray", f"{where}: {told} (expected: {expected})", cure)
        for where, expected, told, cure in answer["faults"]
    ]


def _disk(found: Settings | None) -> list[Line]:
    """The folders for runs and for temporary files."""
    runs, move = Path.cwd(), "cd to a folder on another disk"
    if found is not None:
        runs, move = found.run_folders, "choose another: checkpoint_root_dir=FOLDER"
    temporary = Path(tempfile.gettempdir())
    return check_folder(runs, move) + check_folder(
        temporary, "choose another: export TMPDIR=FOLDER"
    )


def _models(found: Settings, *, ask: bool) -> list[Line]:
    """The models of the run: in a folder, in a cache, or to be fetched."""
    lines = found.lines("model")
    refused = " ".join(line.found for line in lines)  # by `validate`: not a hub id
    names = [part.model.model_path for part in found.parts]
    names += [model.model_path or "" for model in found.config.explorer.auxiliary_models]
    for name in () if found.remote else dict.fromkeys(filter(None, names)):
        if (folder := folder_of(name)) is not None:
            lines.append(ok("model", f"{name}: {folder}"))
        elif name in BUNDLED:
            text = f"{name}: fetched once at the start, with pip, into {cache_dir()}"
            lines.append(note("model", text))
        elif name not in refused:
            lines += check_hub("model", name, "model", ask=ask)
    return lines


def _data(found: Settings, *, ask: bool) -> list[Line]:
    """The task sets and the experience buffer."""
    from aflow_tune.config.tasksets import (
        experience_buffer,
        is_file,
        locate,
        read_taskset,
        user_tasksets,
    )

    lines = found.lines("data")
    for part in found.parts:
        sets: list[Any] = [taskset for _, taskset, _ in user_tasksets(part)]
        for taskset in [*sets, experience_buffer(part)]:
            if taskset is None or not taskset.path:
                continue
            place, name = locate(part, taskset), str(taskset.path)
            if is_file(taskset) and place.kind == "hub" and place.warning:
                lines += check_hub("data", name, "dataset", ask=ask)
                continue
            table = read_taskset(part, taskset)
            if table is not None and not table.faults:
                lines.append(ok("data", f"{name}: {table.total} rows"))
    return list(dict.fromkeys(lines))


def folder_of(name: str) -> Path | None:
    """The folder of a model that is on this machine; None: it has to be fetched.

    A hub model counts only if its weights are in the cache too: an interrupted download leaves the
    configuration there without them.
    """
    folder = Path(name).expanduser()
    if name in BUNDLED:
        return cache_dir() / name if is_cached(name) else None
    if folder.is_dir():
        return folder
    if not is_cached(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = Path(str(try_to_load_from_cache(name, "config.json"))).parent
    weights = ("*.safetensors", "*.bin")
    return cached if any(next(cached.glob(pattern), None) for pattern in weights) else None
