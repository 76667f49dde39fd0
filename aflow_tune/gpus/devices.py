"""What is known of the GPUs at one moment: the vocabulary of this room.

A `Device` is a GPU or, under a GPU that is divided (MIG), one of its instances. What the driver
did not say is None: unknown is never zero. Memory is in bytes, shares are from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aflow_tune.gpus.processes import Seen


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
    devices: tuple[Device, ...] = field(default=())

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
