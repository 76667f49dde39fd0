"""The driver's answers as a `Snapshot`. Reads only; takes a few milliseconds a GPU."""

from __future__ import annotations

import socket
import time
from typing import Any

from aflow_tune.gpus.claims import holder_of
from aflow_tune.gpus.devices import Device, GpuProcess, Snapshot
from aflow_tune.gpus.nvml import Nvml, NvmlUnavailable, opened
from aflow_tune.gpus.processes import look, printable

_NOT_AVAILABLE = 2**63
"""The driver's 'unknown' is the largest number of 64 bits."""
_SENSOR_OF_GPU = 0
"""NVML_TEMPERATURE_GPU."""
_LISTS = (
    (
        "compute",
        ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"),
    ),
    ("compute", ("nvmlDeviceGetMPSComputeRunningProcesses",)),
    (
        "graphics",
        ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
    ),
)
"""The first function of each that answers counts: older drivers have only the second version.
Clients of NVIDIA's MPS stand on a list of their own."""


def snapshot() -> Snapshot:
    """All GPUs, with their processes.

    Raises:
        NvmlUnavailable: there is no driver to ask.
    """
    with opened() as nvml:
        count, why = nvml.ask_or_why("nvmlDeviceGetCount")
        if count is None:  # unknown is not none
            raise NvmlUnavailable(f"the driver does not tell how many ({why})", "`nvidia-smi`")
        return Snapshot(
            time=time.time(),
            host=socket.gethostname(),
            driver=_text(nvml.ask("nvmlSystemGetDriverVersion")),
            cuda=_cuda(nvml.ask("nvmlSystemGetCudaDriverVersion")),
            devices=tuple(_gpu(nvml, index) for index in range(count)),
        )


def use_and_memory(uuids: list[str]) -> dict[str, tuple[float | None, int | None]]:
    """UUID to (share in use, bytes used) of some devices; those that do not answer are left out.

    Instances of a divided GPU have no share of their own: theirs is None.

    Raises:
        NvmlUnavailable: there is no driver to ask.
    """
    found = {}
    with opened() as nvml:
        for uuid in uuids:
            handle = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
            if handle is None:
                handle = _by_index(nvml, uuid)
            if handle is not None:
                memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
                found[uuid] = (_use(nvml, handle), _bytes(getattr(memory, "used", None)))
    return found


def _by_index(nvml: Nvml, uuid: str) -> Any:
    for index in range(nvml.ask("nvmlDeviceGetCount") or 0):
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        if handle is not None and nvml.ask("nvmlDeviceGetUUID", handle) == uuid:
            return handle
    return None


def _gpu(nvml: Nvml, index: int) -> Device:
    handle, why = nvml.ask_or_why("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return Device(index, "unknown", None, problem=why)
    mode = nvml.ask("nvmlDeviceGetMigMode", handle)
    divided = bool(mode) and mode[0] == 1
    instances: list[Device] = []
    if divided:
        most, why = nvml.ask_or_why("nvmlDeviceGetMaxMigDeviceCount", handle)
        for number in range(most or 0):
            question = ("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            part, problem = nvml.ask_or_why(*question)
            if part is not None:
                instances.append(_device(nvml, part, index, number, False, ()))
            elif not nvml.lacks(*question):
                instances.append(
                    Device(index, "unknown", None, number, unknown_why=problem, problem=problem)
                )
    return _device(nvml, handle, index, None, divided, tuple(instances), why if divided else None)


def _device(
    nvml: Nvml,
    handle: Any,
    index: int,
    mig: int | None,
    divided: bool,
    instances: tuple[Device, ...],
    hidden: str | None = None,
) -> Device:
    """`hidden`: why nobody can tell how many instances there are."""
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    processes, why = _processes(nvml, handle)
    if divided and processes is None:  # only root may ask the whole GPU
        known = [part.processes for part in instances if part.processes is not None]
        if len(known) == len(instances) and hidden is None:
            processes = tuple(process for part in known for process in part)
            why = None
    uuid = _text(nvml.ask("nvmlDeviceGetUUID", handle))
    return Device(
        index=index,
        mig=mig,
        name=_text(nvml.ask("nvmlDeviceGetName", handle)) or "unnamed",
        uuid=uuid,
        memory_total=_bytes(getattr(memory, "total", None)),
        memory_used=_bytes(getattr(memory, "used", None)),
        use=_use(nvml, handle),
        temperature=_temperature(nvml, handle),
        power=_watts(nvml.ask("nvmlDeviceGetPowerUsage", handle)),
        power_limit=_watts(nvml.ask("nvmlDeviceGetEnforcedPowerLimit", handle)),
        processes=processes,
        unknown_why=why,
        divided=divided,
        instances=instances,
        claimed=_claimed(uuid),
    )


def _processes(nvml: Nvml, handle: Any) -> tuple[tuple[GpuProcess, ...] | None, str | None]:
    """Processes by number, and why there is no list."""
    kinds: dict[int, list[str]] = {}
    memory: dict[int, int | None] = {}
    for number, (kind, names) in enumerate(_LISTS):
        listed, why = None, None
        for name in names:
            if listed is None:
                listed, problem = nvml.ask_or_why(name, handle)
                why = why or problem
        if listed is None and (number == 0 or not nvml.lacks(names[0], handle)):
            return None, why
        for entry in listed or ():
            pid = int(entry.pid or 0)  # somebody, whoever it is
            if kind not in kinds.setdefault(pid, []):
                kinds[pid].append(kind)
            used = _bytes(getattr(entry, "usedGpuMemory", None))
            memory[pid] = used if memory.get(pid) is None else memory[pid]
    return tuple(GpuProcess(p, tuple(kinds[p]), memory[p], look(p)) for p in sorted(kinds)), None


def _use(nvml: Nvml, handle: Any) -> float | None:
    rates = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
    return None if rates is None else rates.gpu / 100


def _temperature(nvml: Nvml, handle: Any) -> int | None:
    for name in ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"):  # before, from CUDA 14
        degrees = nvml.ask(name, handle, _SENSOR_OF_GPU)
        if degrees is not None:
            return int(degrees)
    return None


def _bytes(value: Any) -> int | None:
    return None if value is None or value >= _NOT_AVAILABLE else int(value)


def _watts(milliwatts: Any) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _text(value: Any) -> str | None:
    return None if value is None else printable(str(value))


def _cuda(version: Any) -> str | None:
    return None if not version else f"{version // 1000}.{version % 1000 // 10}"


def _claimed(uuid: str | None) -> str | None:
    holder = holder_of(uuid) if uuid else None
    return None if holder is None else holder.words()
