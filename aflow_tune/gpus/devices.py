"""A snapshot of the GPUs from the driver, through NVML (`pynvml`, of nvidia-ml-py).

What the driver does not report is None, never an error and never zero. A `Device` is a GPU or, of a
GPU that is divided (MIG), one of its instances. Memory is in bytes, shares are from 0 to 1.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from aflow_tune.errors import AflowTuneError
from aflow_tune.gpus.claims import holder_of
from aflow_tune.gpus.processes import Seen, look, printable

_CHECK = "check with `nvidia-smi`"
_NO_DRIVER = (  # nvmlReturn_t 12 in nvml.h
    "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)",
    f"install it and {_CHECK}; start a container with the GPUs (`docker run --gpus all`)",
)
_ABSENT = (None, 3, 6, 13)
"""NVML codes: not supported, not found, function not found. None: an error of the bindings."""
_LISTS = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("compute", "nvmlDeviceGetMPSComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
)


class NvmlUnavailable(AflowTuneError):
    """There is no NVIDIA driver, or it refuses. `reason` and `cure` are in the message."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(reason, cure)
        self.reason = reason
        self.cure = cure

    def __str__(self) -> str:
        return f"no NVIDIA GPU can be seen: {self.reason}\n    do: {self.cure}"


class _Nvml:
    """The initialised bindings."""

    def __init__(self, library: Any) -> None:
        self._library = library
        mismatch = getattr(library, "NVMLLibraryMismatchError", library.NVMLError)
        self.errors = (library.NVMLError, mismatch, UnicodeDecodeError)  # a name that is not UTF-8

    def ask(self, name: str, *arguments: Any) -> Any:
        """The answer; None on any NVML error."""
        return self.ask_or_why(name, *arguments)[0]

    def ask_or_why(self, name: str, *arguments: Any) -> tuple[Any, str]:
        """(answer, ''), or (None, why); why is '' if the driver does not support or have it."""
        try:
            return getattr(self._library, name)(*arguments), ""
        except AttributeError:
            return None, ""
        except self.errors as error:
            absent = getattr(error, "value", None) in _ABSENT
            return None, "" if absent else str(error) or type(error).__name__

    def text(self, name: str, *arguments: Any) -> str | None:
        value = self.ask(name, *arguments)
        return None if value is None else printable(str(value))

    def memory(self, handle: Any) -> tuple[int | None, int | None]:
        """(total, used) in bytes."""
        told = self.ask("nvmlDeviceGetMemoryInfo", handle)
        return _bytes(getattr(told, "total", None)), _bytes(getattr(told, "used", None))

    def use(self, handle: Any) -> float | None:
        rates = self.ask("nvmlDeviceGetUtilizationRates", handle)
        return None if rates is None else rates.gpu / 100


@contextlib.contextmanager
def _opened() -> Iterator[_Nvml]:
    """NVML, initialised for the block. May be nested and used from several threads: NVML counts
    initialisations. NvmlUnavailable: no driver, or one that refuses."""
    pynvml = importlib.import_module("pynvml")  # untyped
    nvml = _Nvml(pynvml)
    try:
        pynvml.nvmlInit()
    except nvml.errors as error:
        absent = getattr(error, "value", None) == 12
        raise NvmlUnavailable(*(_NO_DRIVER if absent else (str(error), _CHECK))) from None
    try:
        yield nvml
    finally:
        nvml.ask("nvmlShutdown")


@dataclass(frozen=True)
class GpuProcess:
    """A process that the driver lists on a device. `kinds`: compute, graphics, or both. `seen`:
    None if it is not visible from here, such as the host's processes in a container."""

    pid: int
    kinds: tuple[str, ...]
    memory: int | None
    seen: Seen | None

    def to_json(self, owner: int | None = None) -> dict[str, Any]:
        """`owner`: the user id whose processes are `own`."""
        seen = self.seen
        return {
            "pid": self.pid,
            "kinds": list(self.kinds),
            "memory": self.memory,
            "visible": seen is not None,
            "user": seen and seen.user,
            "uid": seen and seen.uids[0],
            "program": seen and seen.program,
            "own": seen is not None and owner is not None and set(seen.uids) == {owner},
            "command": seen and seen.command,
            "since": seen and seen.since,
            "container": seen and seen.in_container,
        }


@dataclass(frozen=True)
class Device:
    """A GPU or an instance of a divided one."""

    index: int
    """Of the GPU, in the order of the PCI bus."""
    name: str
    uuid: str | None
    mig: int | None = None
    """Index of the instance; None for a GPU."""
    memory_total: int | None = None
    memory_used: int | None = None
    use: float | None = None  # share of the driver's last sample period in which a kernel ran
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    processes_unknown: str | None = None
    """Why `processes` is None."""
    divided: bool = False
    """In MIG mode; then only its `instances` can compute."""
    instances: tuple[Device, ...] = ()
    problem: str | None = None
    """Why the driver cannot access it, for example a GPU that has fallen off the bus."""
    claimed: str | None = None  # the run of aflow-tune that has claimed it

    @property
    def label(self) -> str:
        """`0`, or `0:1` for instance 1 of GPU 0."""
        return str(self.index) if self.mig is None else f"{self.index}:{self.mig}"

    def to_json(self, owner: int | None = None) -> dict[str, Any]:
        told = {"device": self.label, **vars(self)}
        del told["index"], told["mig"]
        if self.processes is not None:
            told["processes"] = [process.to_json(owner) for process in self.processes]
        told["instances"] = [instance.to_json(owner) for instance in self.instances]
        return told


@dataclass(frozen=True)
class Snapshot:
    """All GPUs at one moment. `time`: seconds since the epoch. `cuda`: the newest version that the
    driver supports."""

    time: float
    host: str
    driver: str | None
    cuda: str | None
    devices: tuple[Device, ...] = ()

    def all(self) -> list[Device]:
        """Every GPU, each followed by its instances."""
        return [each for device in self.devices for each in (device, *device.instances)]

    def units(self) -> list[Device]:
        """The devices that CUDA can use: whole GPUs, and the instances of divided ones."""
        return [each for each in self.all() if not each.divided and each.problem is None]

    def find(self, word: str) -> Device | None:
        """A device by its label, or by its UUID or a unique prefix (5 characters up); else None."""
        found = [device for device in self.all() if device.label == word]
        if not found and len(word) >= 5:
            found = [d for d in self.all() if d.uuid and d.uuid.lower().startswith(word.lower())]
        return found[0] if len(found) == 1 else None

    def to_json(self, owner: int | None = None) -> dict[str, Any]:
        devices = [device.to_json(owner) for device in self.devices]
        return {**vars(self), "devices": devices}


def snapshot() -> Snapshot:
    """All GPUs, with their processes. NvmlUnavailable: no driver, or one that refuses."""
    with _opened() as nvml:
        count, why = nvml.ask_or_why("nvmlDeviceGetCount")
        if count is None:  # an unknown count is not 0
            raise NvmlUnavailable(f"the driver does not tell how many ({why})", _CHECK)
        cuda = nvml.ask("nvmlSystemGetCudaDriverVersion")
        return Snapshot(
            time=time.time(),
            host=socket.gethostname(),
            driver=nvml.text("nvmlSystemGetDriverVersion"),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            devices=tuple(_gpu(nvml, index) for index in range(count)),
        )


def use_and_memory(uuids: list[str]) -> dict[str, tuple[float | None, int | None]]:
    """(share in use, bytes used) by UUID; devices that do not answer are left out. MIG instances
    have no share: None. NvmlUnavailable: no driver, or one that refuses."""
    found = {}
    with _opened() as nvml:
        for uuid in uuids:
            handle = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
            if handle is not None:
                found[uuid] = (nvml.use(handle), nvml.memory(handle)[1])
    return found


def _gpu(nvml: _Nvml, index: int) -> Device:
    handle, why = nvml.ask_or_why("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return Device(index, "unknown", None, problem=why or "unknown to the driver")
    mode = nvml.ask("nvmlDeviceGetMigMode", handle)
    if not mode or mode[0] != 1:
        return _device(nvml, handle, index)
    most, hidden = nvml.ask_or_why("nvmlDeviceGetMaxMigDeviceCount", handle)
    instances: list[Device] = []
    for number in range(most or 0):
        part, why = nvml.ask_or_why("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        if part is not None:
            instances.append(_device(nvml, part, index, number))
        elif why:
            lost = Device(index, "unknown", None, number, processes_unknown=why, problem=why)
            instances.append(lost)
    whole = replace(_device(nvml, handle, index), divided=True, instances=tuple(instances))
    known = [part.processes for part in instances if part.processes is not None]
    if whole.processes is None and len(known) == len(instances) and not hidden:
        # Only root may ask for the processes of the whole GPU.
        within = tuple(process for part in known for process in part)
        whole = replace(whole, processes=within, processes_unknown=None)
    return whole


def _device(nvml: _Nvml, handle: Any, index: int, mig: int | None = None) -> Device:
    total, used = nvml.memory(handle)
    processes, why = _processes(nvml, handle)
    uuid = nvml.text("nvmlDeviceGetUUID", handle)
    holder = holder_of(uuid) if uuid else None
    power = nvml.ask("nvmlDeviceGetPowerUsage", handle)
    limit = nvml.ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    return Device(
        index=index,
        mig=mig,
        name=nvml.text("nvmlDeviceGetName", handle) or "unnamed",
        uuid=uuid,
        memory_total=total,
        memory_used=used,
        use=nvml.use(handle),
        temperature_c=nvml.ask("nvmlDeviceGetTemperature", handle, 0),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        processes=processes,
        processes_unknown=why,
        claimed=None if holder is None else holder.words(),
    )


def _processes(nvml: _Nvml, handle: Any) -> tuple[tuple[GpuProcess, ...] | None, str | None]:
    """(processes in order of their ids, None), or (None, why there is no list)."""
    kinds: dict[int, dict[str, None]] = {}
    memory: dict[int, int | None] = {}
    for kind, name in _LISTS:
        listed, why = nvml.ask_or_why(name, handle)
        if listed is None and (why or name == _LISTS[0][1]):
            return None, why or "not supported"
        for entry in listed or ():
            pid = int(entry.pid or 0)  # 0: a process whose id is not known
            kinds.setdefault(pid, {})[kind] = None
            memory[pid] = memory.get(pid) or _bytes(getattr(entry, "usedGpuMemory", None))
    return tuple(GpuProcess(p, tuple(kinds[p]), memory[p], look(p)) for p in sorted(kinds)), None


def _bytes(value: Any) -> int | None:
    # The driver reports an unknown value as 2**64 - 1.
    return None if value is None or value >= 2**63 else int(value)
