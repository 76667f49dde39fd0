"""The GPUs at one moment, as the driver tells it through NVML (`pynvml`, of nvidia-ml-py).

A device, a driver or a container answers only some of NVML's questions, and which ones differs from
machine to machine: what the driver will not say is None, never an error and never zero. A `Device`
is a GPU or, under a GPU that is divided (MIG), one of its instances. Memory is in bytes, shares are
from 0 to 1. Reading takes a few milliseconds a GPU and changes nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aflow_tune.errors import AflowTuneError
from aflow_tune.gpus.claims import holder_of
from aflow_tune.gpus.processes import Seen, look, printable

_LIBRARY_NOT_FOUND = 12
_DRIVER_NOT_LOADED = 9
_NO_PERMISSION = 4
_VERSION_MISMATCH = 18
_NOT_SUPPORTED = 3
_NO_SUCH_FUNCTION = 13
_NOT_FOUND = 6
# nvmlReturn_t in nvml.h

_CURES = {
    _LIBRARY_NOT_FOUND: (
        "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)",
        "on a machine with an NVIDIA GPU install its driver and check it with `nvidia-smi`; in a "
        "container, start it with the GPUs (`docker run --gpus all`)",
    ),
    _DRIVER_NOT_LOADED: (
        "the NVIDIA driver is installed but not loaded",
        "check it with `nvidia-smi` and `lsmod | grep nvidia`; load it with `modprobe nvidia`",
    ),
    _NO_PERMISSION: (
        "this user may not talk to the NVIDIA driver",
        "check the rights of /dev/nvidiactl with `ls -l /dev/nvidia*`, and `nvidia-smi`",
    ),
    _VERSION_MISMATCH: (
        "the NVIDIA driver was updated while its older kernel module is loaded",
        "restart the machine (in a container: start the container anew); check with `nvidia-smi`",
    ),
}


class NvmlUnavailable(AflowTuneError):
    """There is no driver to ask. `reason` and `cure` are in the message."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(reason, cure)
        self.reason = reason
        self.cure = cure

    def __str__(self) -> str:
        return f"no NVIDIA GPU can be seen: {self.reason}\n    do: {self.cure}"


class Nvml:
    """An initialised library."""

    def __init__(self, library: Any) -> None:
        self._library = library
        names = ("NVMLError", "NVMLLibraryMismatchError")
        self.errors: tuple[type[BaseException], ...] = tuple(
            kind for name in names if isinstance(kind := getattr(library, name, None), type)
        )
        self.errors += (UnicodeDecodeError,)  # a name that is no text

    def ask(self, name: str, *arguments: Any) -> Any:
        """The answer of a function; None where it is missing, unsupported or forbidden."""
        return self.ask_or_why(name, *arguments)[0]

    def ask_or_why(self, name: str, *arguments: Any) -> tuple[Any, str | None]:
        """The answer and None, or None and why there is none."""
        function = getattr(self._library, name, None)
        if function is None:
            return None, "not offered by this version of pynvml"
        try:
            answer = function(*arguments)
        except self.errors as error:
            return None, str(error) or type(error).__name__
        return (answer.decode(errors="replace") if isinstance(answer, bytes) else answer), None

    def lacks(self, name: str, *arguments: Any) -> bool:
        """Whether there is nothing that this asks for; not, that it is kept from us."""
        function = getattr(self._library, name, None)
        try:
            return function is None or function(*arguments) is None
        except self.errors as error:
            # Without a number it is the bindings' own: a library older than they are.
            absent = (None, _NOT_SUPPORTED, _NO_SUCH_FUNCTION, _NOT_FOUND)
            return getattr(error, "value", None) in absent


@contextlib.contextmanager
def opened() -> Iterator[Nvml]:
    """The library for the block. May be nested and used from several threads: NVML counts.

    Raises:
        NvmlUnavailable: no bindings, no driver, or a driver that refuses.
    """
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        raise NvmlUnavailable(
            "the package nvidia-ml-py is not installed", "pip install nvidia-ml-py"
        ) from None
    nvml = Nvml(library)
    try:
        library.nvmlInit()
    except nvml.errors as error:
        known = _CURES.get(getattr(error, "value", -1))
        reason, cure = known or (str(error) or type(error).__name__, "check with `nvidia-smi`")
        raise NvmlUnavailable(reason, cure) from None
    try:
        yield nvml
    finally:
        nvml.ask("nvmlShutdown")


@dataclass(frozen=True)
class GpuProcess:
    """A process that the driver lists on a device."""

    pid: int
    kinds: tuple[str, ...]
    """compute, graphics, or both."""
    memory: int | None
    seen: Seen | None
    """What /proc says of it; None where it cannot be seen from here, as with the processes of
    the host in a container."""

    def to_json(self, owner: int | None = None) -> dict[str, Any]:
        """`owner`: the user id whose processes are `own`."""
        seen = self.seen
        return {
            "pid": self.pid,
            "kinds": list(self.kinds),
            "memory": self.memory,
            "visible": seen is not None,
            "user": None if seen is None else seen.user,
            "uid": None if seen is None else seen.uids[0],
            "own": seen is not None and owner is not None and set(seen.uids) == {owner},
            "program": None if seen is None else seen.program,
            "command": None if seen is None else seen.command,
            "since": None if seen is None else seen.since,
            "container": None if seen is None else seen.in_container,
        }


@dataclass(frozen=True)
class Device:
    """A GPU or an instance of a divided one."""

    index: int
    """Of the GPU, in the order of the PCI bus."""
    name: str
    uuid: str | None
    mig: int | None = None
    """Of the instance; None for a GPU."""
    memory_total: int | None = None
    memory_used: int | None = None
    use: float | None = None
    """Share of the driver's last sample (1/6 s to 1 s) in which any kernel ran."""
    temperature: int | None = None
    """Degrees Celsius."""
    power: float | None = None
    power_limit: float | None = None
    """Watts."""
    processes: tuple[GpuProcess, ...] | None = None
    """None where the driver does not say."""
    unknown_why: str | None = None
    """Why `processes` is None."""
    divided: bool = False
    """Whether the GPU is in MIG mode: then only its `instances` can compute."""
    instances: tuple[Device, ...] = ()
    problem: str | None = None
    """Why nothing could be asked of it, as with a GPU that has fallen off the bus."""
    claimed: str | None = None
    """Which run of aflow-tune holds it, in words."""

    @property
    def label(self) -> str:
        """`0`, or `0:1` for instance 1 of GPU 0."""
        return str(self.index) if self.mig is None else f"{self.index}:{self.mig}"

    def to_json(self, owner: int | None = None) -> dict[str, Any]:
        """Plain JSON values; instances nested."""
        processes = self.processes
        return {
            "device": self.label,
            "name": self.name,
            "uuid": self.uuid,
            "memory_total": self.memory_total,
            "memory_used": self.memory_used,
            "use": self.use,
            "temperature_c": self.temperature,
            "power_w": self.power,
            "power_limit_w": self.power_limit,
            "divided": self.divided,
            "processes": None if processes is None else [p.to_json(owner) for p in processes],
            "processes_unknown": self.unknown_why,
            "instances": [instance.to_json(owner) for instance in self.instances],
            "problem": self.problem,
            "claimed": self.claimed,
        }


@dataclass(frozen=True)
class Snapshot:
    """All GPUs at one moment."""

    time: float
    """Seconds since the epoch."""
    host: str
    driver: str | None
    cuda: str | None
    """The newest CUDA version that the driver supports."""
    devices: tuple[Device, ...] = ()

    def all(self) -> Iterator[Device]:
        """Every GPU, each followed by its instances."""
        for device in self.devices:
            yield device
            yield from device.instances

    def units(self) -> list[Device]:
        """What CUDA can be given: whole GPUs, and the instances of divided ones."""
        return [
            unit
            for device in self.devices
            for unit in (device.instances if device.divided else (device,))
            if unit.problem is None
        ]

    def find(self, word: str) -> Device | None:
        """A device by its label, its UUID or the beginning of it; None if there is not one."""
        found = [device for device in self.all() if device.label == word]
        if not found and len(word) >= 5:
            found = [d for d in self.all() if d.uuid and d.uuid.lower().startswith(word.lower())]
        return found[0] if len(found) == 1 else None

    def to_json(self, owner: int | None = None) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "time": self.time,
            "host": self.host,
            "driver": self.driver,
            "cuda": self.cuda,
            "devices": [device.to_json(owner) for device in self.devices],
        }


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
