"""What a configuration asks of the GPUs: `physical_gpus`, `protected_pids`, the record of use.

How devices are found, claimed and watched is the room `gpus`'; this module says which, how many
and for whom. It must come before `choose_engine` and everything else that may look for CUDA.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from aflow_tune.config.engine_choice import choose_engine
from aflow_tune.engines.local.models import pick_device
from aflow_tune.errors import BadInput, Fault
from aflow_tune.find_ray import find_ray, uses_ray
from aflow_tune.gpus.choosing import isolated, mapping_lines, obstacles, visible, wanted_faults
from aflow_tune.gpus.devices import Device, NvmlUnavailable, snapshot
from aflow_tune.gpus.freeing import pid_faults
from aflow_tune.gpus.processes import look
from aflow_tune.gpus.use import UseLog
from aflow_tune.report.gpu_use import ROLE
from aflow_tune.report.metrics import FILE_NAME, append_metrics, parse_line
from aflow_tune.report.quantities import is_training
from aflow_tune.report.tail import LineTail

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

_KEY = "physical_gpus"
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def check_devices(config: AflowConfig, engine: str | None = None) -> Iterable[Fault]:
    """What is wrong with both settings, whatever machine they meet.

    Args:
        engine: the one that was chosen, where `config.engine` does not say it yet.
    """
    where = config.positions.where
    yield from wanted_faults(config.physical_gpus, where(_KEY))
    yield from pid_faults(config.protected_pids, where("protected_pids"))
    if config.physical_gpus is None:
        return
    device = config.local.device
    if (engine or config.engine) == "local" and device in ("cpu", "mps"):
        yield Fault(where(_KEY), "local.device: auto or cuda", device, "remove one of the two")
    if not uses_ray(config, engine):
        return
    try:
        found = find_ray(config)
    except BadInput as error:
        yield from error.faults
        return
    if found is not None:
        yield Fault(
            where(_KEY),
            "a Ray that this command starts itself",
            f"the Ray at {found.address} ({found.source}), whose devices were fixed when it was "
            "started",
            "remove it, and start that Ray with CUDA_VISIBLE_DEVICES set to its devices; or "
            "cluster.ray_address: local",
        )


@contextlib.contextmanager
def own_devices(config: AflowConfig, say: Callable[[str], None] = print) -> Iterator[None]:
    """Claim the devices that `physical_gpus` asks for and hide all others, for the block.

    Without the setting nothing is claimed and nothing is hidden.

    Raises:
        BadInput: the settings are wrong, or there are not so many free devices.
    """
    if config.physical_gpus is None:
        yield
        return
    engine = _engine(config)
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
            named = ", ".join(device.label for device in chosen.devices)
            raise BadInput(
                "Trinity's vLLM cannot be given these devices.",
                [
                    Fault(
                        config.positions.where(_KEY),
                        "GPUs of a machine without divided ones (MIG): vLLM takes numbers only",
                        f"GPU {named}, which has to be named by UUID",
                        "engine: local, or leave MIG mode: nvidia-smi -mig 0",
                    )
                ],
            )
        for line in mapping_lines(chosen.devices):
            say(line)
        yield


def missing_devices(config: AflowConfig) -> list[Fault]:
    """What would keep `own_devices` from its devices now. Claims nothing."""
    if config.physical_gpus is None:
        return []
    engine = _engine(config)
    if list(check_devices(config, engine)):
        return []  # what is wrong with the settings is told with them
    where = config.positions.where(_KEY)
    return obstacles(config.physical_gpus, _count(config, engine), where)


def _count(config: AflowConfig, engine: str) -> int | None:
    """How many devices of this machine the run needs; None: all that are free."""
    return 1 if engine == "local" else config.cluster.gpu_per_node or None


def _engine(config: AflowConfig) -> str:
    """The engine that will run, found by asking NVML: CUDA itself must not be used yet."""
    if config.engine != "auto":
        return config.engine
    before = os.environ.get(_NVML_CHECK)
    os.environ[_NVML_CHECK] = "1"
    try:
        return choose_engine(config)[0]
    finally:
        if before is None:
            del os.environ[_NVML_CHECK]
        else:
            os.environ[_NVML_CHECK] = before


@contextlib.contextmanager
def use_recorded(config: AflowConfig, run_dir: Path) -> Iterator[None]:
    """Record in the run's metrics how much its GPUs on this machine are used, for the block."""
    logger = logging.getLogger("trinity")
    tail, last = LineTail(run_dir / FILE_NAME), 0

    def step() -> int:
        nonlocal last
        lines, anew = tail.read()
        last = 0 if anew else last
        for text in lines:
            line = parse_line(text)
            if line is not None and is_training(line):
                last = max(last, line.step)
        return last

    def write(step: int, numbers: dict[str, float]) -> None:
        append_metrics(run_dir, ROLE, step, numbers)

    most = config.cluster.gpu_per_node if config.engine == "trinity" else None
    with UseLog(_watched(config), step, write, logger.warning, most=most or None):
        yield


def _watched(config: AflowConfig) -> list[Device]:
    """The run's devices on this machine: all that it sees, of which the local engine uses one,
    and none where a service computes, or the CPU."""
    if config.model.tinker.enable or config.model.external_model.enable:
        return []
    if config.engine == "local" and pick_device(config.local.device).type != "cuda":
        return []
    found = find_ray(config) if uses_ray(config) else None
    if found is not None and not _is_here(found.address):
        return []
    try:
        now = snapshot()
    except NvmlUnavailable:
        return []
    try:
        seen = visible(now, os.environ)
    except BadInput:
        seen = now.units()
    return seen[:1] if config.engine == "local" else seen


def _is_here(address: str) -> bool:
    """Whether a Ray of this address has its head on this machine."""
    host = address.rpartition("//")[2].partition(":")[0]
    if host in ("localhost", socket.gethostname()):
        return True
    import psutil

    own = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback or host in own
    return False
