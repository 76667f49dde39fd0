"""A stand-in for NVIDIA's libnvidia-ml.so: the bindings (`pynvml`) above it are the real ones.

The bindings load a library with ctypes and call its functions by name with pointers to C
structures. `install` puts a `Library` in its place, whose functions fill the same structures
from the `Gpu` objects that a test describes, so that everything above the C boundary runs as it
does on a machine with GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

GIB = 2**30
UNKNOWN = 2**64 - 1


@dataclass
class Gpu:
    """What the driver would say of a GPU, or of an instance of one (in `instances`)."""

    name: str = "NVIDIA Test 80GB"
    uuid: str = ""
    total: int = 80 * GIB
    used: int = GIB // 2
    use: int | None = 7
    """Per cent; None: not supported, as for instances."""
    compute: list[tuple[int, int]] = field(default_factory=list)
    """(process id, bytes)."""
    graphics: list[tuple[int, int]] = field(default_factory=list)
    instances: list[Gpu] | None = None
    """None: not divided."""
    refuse: dict[str, int] = field(default_factory=dict)
    """C function to the NVML error that it returns."""


class Function:
    """A C function: has what the bindings set on it."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class Library:
    """The loaded library. `missing` are functions that this version does not have."""

    def __init__(self, gpus: list[Gpu], missing: tuple[str, ...] = (), init: int = 0) -> None:
        self.gpus = gpus
        self.missing = missing
        self.init = init
        for number, gpu in enumerate(gpus):
            gpu.uuid = gpu.uuid or f"GPU-{number:08d}-test"
            for part, instance in enumerate(gpu.instances or ()):
                instance.uuid = instance.uuid or f"MIG-{number:08d}-{part}-test"

    def __getattr__(self, name: str) -> Function:
        call = None if name in self.missing else _FUNCTIONS.get(name)
        if call is None:
            raise AttributeError(name)
        return Function(lambda *arguments: call(self, name, *arguments))

    def handles(self) -> list[Gpu]:
        return [each for gpu in self.gpus for each in (gpu, *(gpu.instances or ()))]

    def at(self, handle: Any) -> Gpu:
        return self.handles()[ctypes.cast(handle, ctypes.c_void_p).value - 1]

    def put(self, handle: Any, gpu: Gpu) -> int:
        place = next(i for i, each in enumerate(self.handles()) if each is gpu)
        ctypes.c_void_p.from_buffer(handle._obj).value = place + 1
        return 0


_FUNCTIONS: dict[str, Callable[..., int]] = {}


def _function(*names: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def register(call: Callable[..., int]) -> Callable[..., int]:
        _FUNCTIONS.update(dict.fromkeys(names, call))
        return call

    return register


def _of_device(*names: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A function of a device, which may be one that refuses this question."""

    def register(call: Callable[..., int]) -> Callable[..., int]:
        def checked(library: Library, name: str, handle: Any, *arguments: Any) -> int:
            gpu = library.at(handle)
            return gpu.refuse.get(name) or call(library, gpu, *arguments)

        return _function(*names)(checked)

    return register


def _sets(values: Callable[[Any], dict[str, Any]], at: int) -> Callable[..., int]:
    """A call that fills what its pointer leads to with values of its argument number `at`."""

    def call(*arguments: Any) -> int:
        target = getattr(arguments[2], "_obj", arguments[2])
        for name, value in values(arguments[at]).items():
            setattr(target, name, value)
        return 0

    return call


_FUNCTIONS["nvmlInitWithFlags"] = lambda library, name, flags: library.init
_FUNCTIONS["nvmlShutdown"] = lambda library, name: 0
for _name, _values in {
    "nvmlSystemGetDriverVersion": lambda library: {"value": b"580.00"},
    "nvmlSystemGetCudaDriverVersion": lambda library: {"value": 13010},
    "nvmlDeviceGetCount_v2": lambda library: {"value": len(library.gpus)},
}.items():
    _function(_name)(_sets(_values, 0))
for _name, _values in {
    "nvmlDeviceGetName": lambda gpu: {"value": gpu.name.encode()},
    "nvmlDeviceGetUUID": lambda gpu: {"value": gpu.uuid.encode()},
    "nvmlDeviceGetMemoryInfo": lambda gpu: {"total": gpu.total, "used": gpu.used},
    "nvmlDeviceGetPowerUsage": lambda gpu: {"value": 123_400},
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: {"value": 700_000},
    "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: {"value": 7},
}.items():
    _of_device(_name)(_sets(_values, 1))


@_function("nvmlDeviceGetHandleByIndex_v2")
def _by_index(library: Library, name: str, index: Any, handle: Any) -> int:
    gpu = library.gpus[index.value]
    return gpu.refuse.get(name) or library.put(handle, gpu)


@_function("nvmlDeviceGetHandleByUUID")
def _by_uuid(library: Library, name: str, uuid: Any, handle: Any) -> int:
    for gpu in library.handles():
        if gpu.uuid.encode() == uuid.value:
            return library.put(handle, gpu)
    return pynvml.NVML_ERROR_NOT_FOUND


@_of_device("nvmlDeviceGetUtilizationRates")
def _rates(library: Library, gpu: Gpu, rates: Any) -> int:
    if gpu.use is None:
        return pynvml.NVML_ERROR_NOT_SUPPORTED
    rates._obj.gpu = gpu.use
    return 0


@_of_device("nvmlDeviceGetTemperature")
def _temperature(library: Library, gpu: Gpu, sensor: Any, degrees: Any) -> int:
    degrees._obj.value = 41
    return 0


@_of_device("nvmlDeviceGetMigMode")
def _mig_mode(library: Library, gpu: Gpu, current: Any, pending: Any) -> int:
    if gpu in (i for g in library.gpus for i in g.instances or ()):
        return pynvml.NVML_ERROR_NOT_SUPPORTED
    current._obj.value = pending._obj.value = int(gpu.instances is not None)
    return 0


@_of_device("nvmlDeviceGetMigDeviceHandleByIndex")
def _instance(library: Library, gpu: Gpu, index: Any, handle: Any) -> int:
    instances = gpu.instances or []
    if index.value >= len(instances):
        return pynvml.NVML_ERROR_NOT_FOUND
    return library.put(handle, instances[index.value])


def _fill(processes: list[tuple[int, int]], count: Any, array: Any) -> int:
    """As the driver does: first the number, then the entries."""
    if not processes:
        count._obj.value = 0
        return 0
    if array is None or count._obj.value < len(processes):
        count._obj.value = len(processes)
        return pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    for entry, (pid, memory) in zip(array, processes, strict=False):
        entry.pid, entry.usedGpuMemory = pid, memory
    count._obj.value = len(processes)
    return 0


@_of_device("nvmlDeviceGetComputeRunningProcesses_v3")
def _compute(library: Library, gpu: Gpu, count: Any, array: Any) -> int:
    every = gpu.compute + [each for part in gpu.instances or () for each in part.compute]
    return _fill(every, count, array)


@_of_device("nvmlDeviceGetGraphicsRunningProcesses_v3")
def _graphics(library: Library, gpu: Gpu, count: Any, array: Any) -> int:
    return _fill(gpu.graphics, count, array)


@_of_device("nvmlDeviceGetMPSComputeRunningProcesses_v3")
def _mps(library: Library, gpu: Gpu, count: Any, array: Any) -> int:
    return _fill([], count, array)


def install(gpus: list[Gpu], missing: tuple[str, ...] = (), init: int = 0) -> Library:
    """Put a library with these GPUs under the bindings; `uninstall` takes it away."""
    library = Library(gpus, missing, init)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlLib = library
    return library


def uninstall() -> None:
    """Back to the machine's own driver, if it has one."""
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlLib = None
