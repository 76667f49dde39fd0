"""What `aflow-tune doctor` looks at: the machine alone, or for one configuration.

The machine's checks are those of `aflow_tune/doctor/`. With a configuration come everything that
`validate` finds, sorted under what it is about, and what `validate` leaves out because it would
start or ask something: the hub, the endpoints, the cluster, the disk's room. All checks run side
by side; those that need the settings wait for them. A configuration that cannot be read leaves
only the machine's.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aflow_tune.config.clashes import hollow, installed_versions, known_clashes, missing
from aflow_tune.config.tasksets import total_steps
from aflow_tune.doctor import ray_check
from aflow_tune.doctor.lines import Check, Line, Once, fault, line_of, note, ok
from aflow_tune.doctor.machine import check_folder, check_gpus, check_python, check_sandbox
from aflow_tune.doctor.services import OnHub, check_hub
from aflow_tune.doctor.versions import check_versions
from aflow_tune.engines.local.models import BUNDLED, cache_dir, header_of, is_cached
from aflow_tune.errors import BadInput, Fault

if TYPE_CHECKING:
    from trinity.common.config import ExperienceBufferConfig, TasksetConfig

    from aflow_tune.config.load import AflowConfig
    from aflow_tune.config.validate import ValidationReport

STATE_BYTES = 12
"""Of one trained number in a checkpoint: fp32, and Adam's two moments in fp32."""
_WHOLE_BYTES = 4
_EXPORT_BYTES = 4
"""Of one number of the merged model, at most."""
_OUTSIDE_LORA = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")


@dataclass(frozen=True)
class Shapes:
    """What a model consists of. `linear`: (name, rows, columns) of each two-dimensional weight."""

    parameters: int
    bytes: int
    linear: tuple[tuple[str, int, int], ...] = ()


def shapes_of(folder: Path) -> Shapes | None:
    """The shapes in a folder's safetensors files; None where there are none that can be read."""
    parameters, total = 0, 0
    linear: list[tuple[str, int, int]] = []
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        header = header_of(file)
        if header is None:
            return None
        total += file.stat().st_size
        for name, tensor in header.items():
            shape = tensor.get("shape") if name != "__metadata__" else None
            if shape is None:
                continue
            parameters += math.prod(shape)
            if len(shape) == 2 and name.endswith(".weight"):
                linear.append((name, shape[0], shape[1]))
    return Shapes(parameters, total, tuple(linear)) if files else None


def trained_parameters(config: AflowConfig, shapes: Shapes) -> int:
    """Numbers that are trained: all, or those of the LoRA adapter."""
    if not config.model.lora_configs:
        return shapes.parameters
    lora = config.model.lora_configs[0]
    targets = lora.target_modules
    names = [targets] if isinstance(targets, str) else list(targets)
    found = 0
    for name, rows, columns in shapes.linear:
        module = name.split(".")[-2] if "." in name else name
        every = names == ["all-linear"] and module not in _OUTSIDE_LORA
        if every or module in names:
            found += lora.lora_rank * (rows + columns)
    return found


def will_write(config: AflowConfig, shapes: Shapes) -> float:
    """Bytes that the run folder of a prepared configuration will hold at most."""
    if config.mode in ("bench", "harvest", "explore", "serve"):
        return 0.0
    trained = trained_parameters(config, shapes)
    whole = not config.model.lora_configs
    checkpoint = STATE_BYTES * trained
    if config.engine == "trinity" and not whole:
        checkpoint += _WHOLE_BYTES * shapes.parameters
    export = _EXPORT_BYTES * (shapes.parameters + (0 if whole else trained))
    return float(checkpoint * (checkpoints_kept(config) + 1) + export)


def checkpoints_kept(config: AflowConfig) -> int:
    """Checkpoints that lie there at the end. One more is written before the oldest goes."""
    steps, interval = total_steps(config), config.trainer.save_interval
    saves = math.ceil(steps / interval) if steps and interval else 1
    keep = config.trainer.max_checkpoints_to_keep
    if keep and config.engine == "local" and config.buffer.explorer_input.eval_tasksets:
        best = config.checkpoints.keep_best
        keep += best + (1 if best else 0)  # the newest, the best, and one not yet evaluated
    return min(saves, keep) if keep else saves


CONFIG_SECONDS = 60.0
"""Importing Trinity, the user's own code and the data sets."""
MACHINE_SECONDS = 20.0
"""Far more than any of these takes; only what hangs meets it."""
_BUNDLED_BYTES = 7e8
"""A bundled model in fp32 with the file it is made from, at most."""
_AREAS = (
    ("keys", re.compile(r"\bmodels\.\w+\.(api_key_env|headers_env)")),
    ("model", re.compile(r"\bmodel\.model_path|auxiliary_models\[\d+\]\.model_path")),
    ("ray", re.compile(r"^(RAY_|TMPDIR|/tmp$|ulimit|\S*/pids\.max$)")),
    ("data", re.compile(r"explorer_input|experience_buffer|\.(jsonl?|csv|parquet)(:\d+)?$")),
)
"""What a fault is about, by where it is; anything else is told of the configuration."""


@dataclass(frozen=True)
class Settings:
    """A configuration that was read, with what `validate` says. `parts`: the run, or its stages."""

    report: ValidationReport
    config: AflowConfig
    parts: tuple[AflowConfig, ...]

    @property
    def on_trinity(self) -> bool:
        """Whether it runs on Trinity's engines, or was meant to."""
        chosen = self.report.engine
        return (chosen[0] if chosen is not None else self.config.engine) == "trinity"

    @property
    def remote(self) -> bool:
        """Whether a service samples and trains, so that no GPU of ours is needed."""
        return bool(self.config.model.tinker.enable or self.config.model.external_model.enable)

    @property
    def run_folders(self) -> Path:
        """Where run folders go."""
        return Path(self.config.checkpoint_root_dir or "checkpoints").expanduser().absolute()


class Examination:
    """One command's checks.

    Args:
        path: a configuration; None: the machine alone.
        offline: ask neither the hub nor the endpoints of models.
    """

    def __init__(
        self, path: Path | None = None, overrides: Sequence[str] = (), *, offline: bool = False
    ) -> None:
        self.path = path
        self.overrides = overrides
        self.offline = offline
        self._examined = Once(self._examine)
        self._absent = Once(self._find_absent)
        self._on_hub = Once(self._ask_hub)

    def checks(self) -> list[Check]:
        """The checks, in the order in which they are told."""
        # What needs the settings waits for them.
        later = 0.0 if self.path is None else CONFIG_SECONDS
        checks = [
            Check("python", check_python),
            Check("versions", check_versions),
            Check("gpu", self.gpus, later + MACHINE_SECONDS),
            Check("sandbox", self.sandbox, later + MACHINE_SECONDS),
            Check("ray", self.ray, later + 2 * ray_check.SECONDS),
            Check("disk", self.disk, later + MACHINE_SECONDS),
        ]
        if self.path is not None:
            checks += [
                Check("config", self.configuration, later),
                Check("model", self.models, later + MACHINE_SECONDS),
                Check("data", self.data, later + MACHINE_SECONDS),
                Check("keys", self.keys, later + MACHINE_SECONDS),
            ]
        return checks

    def gpus(self) -> list[Line]:
        """GPUs of this machine, which `engine: trinity` needs unless it joins a Ray."""
        found = self._settings()
        if found is None:
            return check_gpus()
        from aflow_tune.config import on_processors
        from aflow_tune.config.engine import missing_devices

        elsewhere = found.remote or _joins_ray(found.config) or on_processors()
        lines = check_gpus(needed=found.on_trinity and not elsewhere)
        for obstacle in missing_devices(found.config):
            text = f"{obstacle.where}: {obstacle.found} (expected: {obstacle.expected})"
            lines.append(fault("gpu", text, obstacle.cure))
        return lines

    def sandbox(self) -> list[Line]:
        """The wall; a fault only where the configuration itself runs programs of a model."""
        found = self._settings()
        if found is None:
            return check_sandbox()
        graph = bool(found.config.graph.path) and not found.config.graph.trust
        needed = graph or bool(found.config.writer.executor)
        return check_sandbox(found.config.sandbox, needed)

    def ray(self) -> list[Line]:
        """The cluster, as the configuration wants it."""
        found = self._settings()
        if found is None:
            return ray_check.check_ray(ray_check.Wanted())
        if found.config.inline and not found.on_trinity:
            return [ok("ray", "not used: the run is one process (inline)")]
        from aflow_tune.find_ray import find_ray, uses_ray

        engine = "trinity" if found.on_trinity else "local"
        if not any(uses_ray(part, engine) for part in found.parts):
            return [ok("ray", "not used: the run is one process")]
        try:
            joined = find_ray(found.config)
        except BadInput as error:
            return [line_of("ray", problem) for problem in error.faults]
        if joined is None:
            return _faults(found, "ray") or [ok("ray", "not looked at: the run starts its own")]
        cluster = found.config.cluster
        wanted = ray_check.Wanted(
            cluster=True if found.on_trinity else None,  # the local engine needs no GPU there
            address=joined.address,
            folder=found.run_folders,
            nodes=cluster.node_num,
            gpus_per_node=cluster.gpu_per_node,
            trust_users=found.config.runtime_env.trust_users,
        )
        return ray_check.check_ray(wanted)

    def disk(self) -> list[Line]:
        """Room for run folders and for what is fetched."""
        found = self._settings()
        cache = "choose another: export AFLOW_TUNE_CACHE=FOLDER"
        if found is None:
            move = "cd to a folder on another disk"
            return [
                *check_folder("disk", Path.cwd(), None, move),
                *check_folder("disk", cache_dir(), None, cache),
                *_temporary(shared=True),
            ]
        needed = self._written(found)
        move = "choose another: checkpoint_root_dir=FOLDER"
        if needed:
            move += ", or keep fewer: trainer.max_checkpoints_to_keep=2"
        lines = check_folder("disk", found.run_folders, needed, move)
        lines += _temporary(shared=not found.config.inline)
        names = _model_names(found)
        if any(name in BUNDLED and not is_cached(name) for name in names):
            lines += check_folder("disk", cache_dir(), _BUNDLED_BYTES, cache)
        fetched = [on_hub.bytes for _, on_hub in self._on_hub().values() if on_hub is not None]
        if fetched:
            total = sum(fetched) if None not in fetched else None  # type: ignore[arg-type]
            home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
            lines += check_folder("disk", home, total, "choose another: export HF_HOME=FOLDER")
        return lines

    def configuration(self) -> list[Line]:
        """What `validate` says, but for what is told of the model, the data and the keys."""
        found = self._examined()
        if found is None or isinstance(found, list):
            return found or []
        report = found.report
        lines = []
        if report.engine is not None:
            lines.append(ok("config", f"engine: {report.engine[0]} ({report.engine[1]})"))
        lines += _faults(found, "config")
        told = [f"{kind} {name}:" for kind, name in self._absent()]
        told += [f"model {name}:" for name in _model_names(found)]
        lines += [
            note("config", text) for text in report.warnings if not text.startswith(tuple(told))
        ]
        if not report.faults:
            lines.append(ok("config", f"{self.path}: valid"))
        return lines

    def models(self) -> list[Line]:
        """The models that run here: in a folder, in a cache, or to be fetched."""
        found = self._settings()
        if found is None or found.remote:
            return []
        lines = _faults(found, "model")
        for name in _model_names(found):
            if ("model", name) in self._on_hub():
                lines += self._on_hub()[("model", name)][0]
            elif name in BUNDLED and not is_cached(name):
                text = f"{name}: not here yet; fetched once at the start, with pip"
                lines.append(note("model", f"{text}, into {cache_dir()}"))
            elif (folder := folder_of(name)) is not None:
                shapes = _shapes(folder)
                amount = "" if shapes is None else f", {shapes.parameters / 1e6:,.0f} M parameters"
                lines.append(ok("model", f"{name}: {folder}{amount}"))
        return lines

    def data(self) -> list[Line]:
        """The task sets and the data to learn from."""
        from aflow_tune.config.tasksets import read_taskset

        found = self._settings()
        if found is None:
            return []
        lines = _faults(found, "data")
        for part in found.parts:
            for taskset in _data_of(part):
                name = str(taskset.path)
                if ("data set", name) in self._on_hub():
                    lines += self._on_hub()[("data set", name)][0]
                    continue
                table = read_taskset(part, taskset)
                if table is not None and not table.faults:
                    lines.append(ok("data", f"{name}: {table.total} rows"))
        return list(dict.fromkeys(lines))

    def keys(self) -> list[Line]:
        """The variables that the models name, and whether their endpoints take them."""
        from aflow_tune.doctor.services import check_keys, check_variables

        found = self._settings()
        if found is None:
            return []
        lines = check_keys(
            found.config.models, ask=not self.offline, where=found.config.positions.where
        )
        model = found.config.model
        if model.external_model.enable:
            external = model.external_model
            lines += check_variables(
                {"model.external_model": [external.api_key_env, external.base_url_env]}
            )
        if model.tinker.enable:
            lines += check_variables({"model.tinker": ["TINKER_API_KEY"]})
        return lines or [ok("keys", "none needed: no model behind an API")]

    def _settings(self) -> Settings | None:
        """The settings; None where there are none to go by, which `configuration` tells."""
        try:
            found = self._examined()
        except Exception:
            return None
        return found if isinstance(found, Settings) else None

    def _examine(self) -> Settings | list[Line] | None:
        """The configuration; lines instead where it could not be examined."""
        if self.path is None:
            return None
        installed = installed_versions()
        if known_clashes(installed) or missing(installed) or hollow(installed):
            text = f"{self.path}: not examined until the versions are put right"
            return [note("config", text, "the commands under `versions`")]
        from aflow_tune.config.quiet import quiet

        quiet()
        from aflow_tune.config.validate import validate

        report = validate(self.path, self.overrides)
        if report.config is None:
            return [line_of("config", found) for found in report.faults]
        stages = tuple(part.config for _, part in report.stages if part.config is not None)
        return Settings(report, report.config, stages or (report.config,))

    def _find_absent(self) -> list[tuple[str, str]]:
        """('model' or 'data set', name) of what has to come from the hub."""
        found = self._settings()
        if found is None or found.remote:
            return []
        from aflow_tune.config.tasksets import is_file, locate

        # A name that `validate` refused is none that the hub could know.
        refused = [fault.found for fault in _about(found, "model")]
        absent = [
            ("model", name)
            for name in _model_names(found)
            if name not in BUNDLED
            and folder_of(name) is None
            and not any(name in text for text in refused)
        ]
        for part in found.parts:
            for taskset in _data_of(part):
                place = locate(part, taskset)
                missing_here = "not on this machine" in (place.warning or "")
                if is_file(taskset) and place.kind == "hub" and missing_here:
                    absent.append(("data set", str(taskset.path)))
        return list(dict.fromkeys(absent))

    def _ask_hub(self) -> dict[tuple[str, str], tuple[list[Line], OnHub | None]]:
        """What the hub says of each of them."""
        absent = self._absent()
        if not absent:
            return {}

        def ask(item: tuple[str, str]) -> tuple[list[Line], OnHub | None]:
            kind, name = item
            if kind == "model":
                return check_hub("model", name, "model", ask=not self.offline)
            return check_hub("data", name, "dataset", ask=not self.offline)

        with ThreadPoolExecutor(len(absent)) as pool:
            return dict(zip(absent, pool.map(ask, absent), strict=True))

    def _written(self, found: Settings) -> float | None:
        """Bytes that the run will write; None where the model's shapes are not known."""

        total = 0.0
        for part in found.parts:
            name = part.model.model_path
            folder = folder_of(name)
            shapes = None if folder is None else _shapes(folder)
            if shapes is None:
                return None
            total += will_write(part, shapes)
        return total


def folder_of(name: str) -> Path | None:
    """The folder of a model that is on this machine with its weights; None: it has to be fetched.

    A hub model counts only if its weights are in the cache too: a fetch that was cut off leaves
    its configuration there.
    """
    folder = Path(name).expanduser()
    if name in BUNDLED:
        return cache_dir() / name if is_cached(name) else None
    if folder.is_dir():
        return folder
    if not is_cached(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(name, "config.json")
    cached = Path(str(file)).parent
    weights = ("*.safetensors", "*.bin")
    return cached if any(next(cached.glob(pattern), None) for pattern in weights) else None


def _joins_ray(config: AflowConfig) -> bool:
    from aflow_tune.find_ray import find_ray

    try:
        return find_ray(config) is not None
    except BadInput:  # told in the line about Ray
        return False


def _temporary(shared: bool) -> list[Line]:
    """Where Ray, claims and sandboxes put small files, and (`shared`) Ray its objects."""
    move = "choose another: export TMPDIR=FOLDER"
    lines = check_folder("disk", Path(tempfile.gettempdir()), None, move)
    memory = Path("/dev/shm")
    if shared and memory.is_dir():
        lines += check_folder("disk", memory, None, "docker run --shm-size=2g, in a container")
    return lines


def _shapes(folder: Path) -> Shapes | None:

    return shapes_of(folder)


def _model_names(found: Settings) -> list[str]:
    names = [part.model.model_path for part in found.parts]
    names += [model.model_path or "" for model in found.config.explorer.auxiliary_models]
    return [name for name in dict.fromkeys(names) if name]


def _data_of(part: AflowConfig) -> list[TasksetConfig | ExperienceBufferConfig]:
    from aflow_tune.config.tasksets import experience_buffer, user_tasksets

    sets: list[TasksetConfig | ExperienceBufferConfig]
    sets = [taskset for _, taskset, _ in user_tasksets(part)]
    buffer = experience_buffer(part)
    sets += [] if buffer is None else [buffer]
    return [taskset for taskset in sets if taskset.path]


def _area(found: Fault) -> str:
    return next((area for area, mark in _AREAS if mark.search(found.where)), "config")


def _about(found: Settings, area: str) -> list[Fault]:
    return [fault for fault in found.report.faults if _area(fault) == area]


def _faults(found: Settings, area: str) -> list[Line]:
    return [line_of(area, fault) for fault in _about(found, area)]
