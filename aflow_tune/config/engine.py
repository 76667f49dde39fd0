"""Which engine runs a configuration, on which devices, and the settings of its sampler.

The package `gpus` finds, claims and watches GPUs; this module decides which, how many and for
which run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from aflow_tune.config import on_processors, vllm_installed
from aflow_tune.config.settings import AflowConfig
from aflow_tune.engines.local.models import pick_device, pick_dtype
from aflow_tune.errors import BadInput, Fault
from aflow_tune.find_ray import find_ray, uses_ray
from aflow_tune.gpus.choosing import isolated, obstacles, visible, wanted_faults
from aflow_tune.gpus.devices import Device, NvmlUnavailable, snapshot
from aflow_tune.gpus.freeing import pid_faults
from aflow_tune.gpus.processes import look
from aflow_tune.gpus.use import UseLog
from aflow_tune.report.metrics import FILE_NAME, LineTail, append_metrics, parse_line
from aflow_tune.report.quantities import GPU_ROLE as ROLE
from aflow_tune.report.quantities import is_training

_KEY = "physical_gpus"
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def choose_engine(config: AflowConfig) -> tuple[str, str]:
    """The engine ('local' or 'trinity') and the reason; fixed once a configuration is prepared.

    Raises BadInput: `engine: trinity` cannot run here, or `engine: local` with a remote service."""
    if config.prepared.engine is not None:
        return config.prepared.engine
    services = ("tinker", "external_model")
    remote = next((name for name in services if getattr(config.model, name).enable), None)
    if config.engine == "local":
        if remote:
            raise _refused(config, f"`model.{remote}.enable` is enabled", "engine: trinity")
        return "local", "as configured"
    if config.engine == "auto" and config.local.load_in is not None and not remote:
        return "local", "`local.load_in` quantises its base; verl cannot train on one"
    if remote:
        return "trinity", f"`model.{remote}.enable` is enabled, which samples and trains elsewhere"
    import torch

    missing = []
    if not torch.cuda.is_available() and not (config.engine == "trinity" and on_processors()):
        missing.append("no CUDA device")
    if not vllm_installed():
        missing.append("vLLM is not installed")
    if importlib.util.find_spec("verl") is None:
        missing.append("verl is not installed")
    elif config.trainer.use_remove_padding and not removes_padding():
        missing.append("flash_attn is not installed (trainer.use_remove_padding: false needs none)")
    if config.engine == "trinity":
        if missing and find_ray(config) is None:
            fix = "engine: local, or name the cluster with cluster.ray_address"
            fix += " and set inline: false" if config.inline else ""
            raise _refused(config, "; ".join(missing), fix)
        where = " on processors, without a GPU" if on_processors() else ""
        return "trinity", f"as configured{where}"
    if missing:
        return "local", "; ".join(missing)
    return "trinity", "CUDA, vLLM and verl are there"


def removes_padding() -> bool:
    """Whether the padding functions of flash-attn are installed."""
    try:
        return importlib.util.find_spec("flash_attn.bert_padding") is not None
    except ImportError:  # of `flash_attn`, which this imports
        return False


def _refused(config: AflowConfig, found: str, fix: str) -> BadInput:
    title = f"`engine: {config.engine}` cannot run this configuration here."
    return BadInput(title, [config.fault("engine", "what this engine needs", found, fix)])


def give_engine_settings(config: AflowConfig) -> None:
    """Set the `extra_engine_args` that `rollout_model.SamplerHost` reads, for every model."""
    engine: dict[str, Any] = {
        "device": config.local.device,
        "dtype": "float32" if config.deterministic else config.local.dtype,
        "threads": config.local.threads,
        "max_batch": config.local.max_batch,
        "deterministic": config.deterministic,
        "load_in": None,
        "lora": None,
    }
    for auxiliary in config.explorer.auxiliary_models:
        auxiliary.extra_engine_args = {**engine, "frozen": True}
    if config.model.lora_configs:
        lora = config.model.lora_configs[0]
        engine["lora"] = {
            "rank": lora.lora_rank,
            "alpha": lora.lora_alpha,
            "target_modules": lora.target_modules,
        }
    engine["load_in"] = config.local.load_in
    config.explorer.rollout_model.extra_engine_args = {**engine, "frozen": False}


def computes_in_16_bits(config: AflowConfig) -> bool:
    """Whether sampler and trainer of the local engine compute in bf16 or fp16."""
    import torch

    chosen = pick_dtype(config.local.dtype, pick_device(config.local.device))
    return not config.deterministic and chosen != torch.float32


def sampling_speed(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Tokens sampled per second of the sampler's busy time, between two readings of its totals."""
    seconds = after["busy_seconds"] - before["busy_seconds"]
    tokens = after["generated_tokens"] - before["generated_tokens"]
    return {"rollout/tokens_per_second": tokens / seconds} if seconds > 0 else {}


def check_devices(config: AflowConfig, engine: str | None = None) -> Iterable[Fault]:
    """Faults of `physical_gpus` and `protected_pids` that do not depend on this machine's GPUs.
    `engine`: the chosen one, if `config.engine` is still `auto`."""
    where = config.positions.where
    yield from wanted_faults(config.physical_gpus, where(_KEY))
    yield from pid_faults(config.protected_pids, where("protected_pids"))
    if config.physical_gpus is None:
        return
    device = config.local.device
    if (engine or config.engine) == "local" and device in ("cpu", "mps"):
        yield config.fault(_KEY, "local.device: auto or cuda", device, "remove one of the two")
    if not uses_ray(config, engine):
        return
    try:
        found = find_ray(config)
    except BadInput as error:
        yield from error.faults
        return
    if found is not None:
        fix = "remove it and start that Ray with CUDA_VISIBLE_DEVICES, or ray_address: local"
        yield config.fault(_KEY, "a Ray of this command's own", f"the Ray at {found.address}", fix)


@contextlib.contextmanager
def own_devices(config: AflowConfig, say: Callable[[str], None] = print) -> Iterator[None]:
    """For the block, claim the devices that `physical_gpus` asks for and hide all others; without
    the setting do nothing. Enter it before anything initialises CUDA.

    Raises BadInput: the settings are wrong, or too few devices are free."""
    if config.physical_gpus is None:
        yield
        return
    engine = _engine_by_nvml(config)
    faults = list(check_devices(config, engine))
    if faults:
        raise BadInput("These settings cannot be followed.", faults)
    for pid in config.protected_pids:
        if look(pid) is None:
            say(f"warning: protected_pids: there is no process {pid} (any more)")
    with isolated(
        config.physical_gpus,
        _count(config, engine),
        run=f"{config.project}/{config.name}",
        protected=config.protected_pids,
        where=config.positions.where(_KEY),
    ) as chosen:
        if chosen.by_uuid and engine == "trinity":
            expected = "GPUs of a machine without divided ones (MIG): vLLM takes numbers only"
            named = ", ".join(device.label for device in chosen.devices)
            fault = config.fault(_KEY, expected, f"GPU {named}", "engine: local, or leave MIG mode")
            raise BadInput("Trinity's vLLM cannot be given these devices.", [fault])
        for number, it in enumerate(chosen.devices):
            say(f"GPU {it.label} ({it.name}, {it.uuid}) is cuda:{number} of this run")
        yield


def missing_devices(config: AflowConfig) -> list[Fault]:
    """What would prevent `own_devices` from claiming its devices now. Claims nothing."""
    if config.physical_gpus is None:
        return []
    engine = _engine_by_nvml(config)
    if list(check_devices(config, engine)):
        return []  # `check_devices` reports these
    where = config.positions.where(_KEY)
    return obstacles(config.physical_gpus, _count(config, engine), where)


def _count(config: AflowConfig, engine: str) -> int | None:
    """How many devices of this machine the run needs; None: all free ones."""
    return 1 if engine == "local" else config.cluster.gpu_per_node or None


def _engine_by_nvml(config: AflowConfig) -> str:
    """The engine that will run, found through NVML: CUDA must not be initialised yet."""
    if config.engine != "auto":
        return config.engine
    before = dict(os.environ)
    os.environ[_NVML_CHECK] = "1"
    try:
        return choose_engine(config)[0]
    finally:
        os.environ.pop(_NVML_CHECK)
        os.environ.update(before)


@contextlib.contextmanager
def use_recorded(config: AflowConfig, run_dir: Path) -> Iterator[None]:
    """For the block, record the use of the run's GPUs on this machine in its metrics."""
    tail, last = LineTail(run_dir / FILE_NAME), 0

    def step() -> int:
        nonlocal last
        lines, anew = tail.read()
        last = 0 if anew else last
        parsed = [line for text in lines if (line := parse_line(text)) is not None]
        last = max([last, *(line.step for line in parsed if is_training(line))])
        return last

    def write(step: int, numbers: dict[str, float]) -> None:
        append_metrics(run_dir, ROLE, step, numbers)

    most = config.cluster.gpu_per_node if config.engine == "trinity" else None
    warn = logging.getLogger("trinity").warning
    with UseLog(_watched(config), step, write, warn, most=most or None):
        yield


def _watched(config: AflowConfig) -> list[Device]:
    """The run's GPUs on this machine; none if a service, another machine or the CPU computes."""
    found = find_ray(config) if uses_ray(config) else None
    if (
        config.model.tinker.enable
        or config.model.external_model.enable
        or (config.engine == "local" and pick_device(config.local.device).type != "cuda")
        or (found is not None and not _is_here(found.address))
    ):
        return []
    with contextlib.suppress(NvmlUnavailable):
        now = snapshot()
        try:
            seen = visible(now, os.environ)
        except BadInput:
            seen = now.units()
        return seen[:1] if config.engine == "local" else seen
    return []


def _is_here(address: str) -> bool:
    """Whether the head of a Ray is on this machine: then a socket can bind to its host."""
    try:
        with socket.create_server((address.rpartition("//")[2].partition(":")[0], 0)):
            return True
    except OSError:
        return False
