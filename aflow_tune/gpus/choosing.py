"""Free devices for a run: which ones, a claim on each, and no others in its sight.

A device is free if no run holds it, the driver lists no other process that computes or draws on
it, and hardly any of its memory is used (which also tells of processes that cannot be seen from
inside a container). Devices that the user names may show a picture meanwhile, as a desktop's only
GPU does, but no other process may compute on them.

CUDA reads `CUDA_VISIBLE_DEVICES` once, when it is first used in a process, so `isolated` comes
before anything may look for CUDA. What the process starts (Ray, its workers) inherits it. Whole
GPUs are given by number, in the order of the bus, because vLLM reads numbers only; instances of
divided ones have no number and are given by UUID, and where any GPU is divided so are the whole
ones, since CUDA then numbers differently.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.gpus.claims import Claims, holder_of, in_turn
from aflow_tune.gpus.devices import Device, NvmlUnavailable, Snapshot, snapshot

AUTO = "auto"
FREE_BYTES = 2**30
FREE_SHARE = 0.03
"""A device with more memory in use than both of these is not free. Drivers count some of a large
GPU's memory as used while nothing runs."""

_EXAMPLE = "physical_gpus: auto, or a list such as [0, 1]"


@dataclass(frozen=True)
class Chosen:
    """Devices for a run, in the order in which it will see them."""

    devices: list[Device]
    by_uuid: bool
    """Whether CUDA must be told their UUIDs: where any GPU of the machine is divided, its own
    numbers are not the driver's."""


def wanted(value: Any) -> str | tuple[str, ...]:
    """`auto`, or the devices named by a setting: numbers, `GPU:INSTANCE`, UUIDs.

    Raises:
        ValueError: it is neither; the message says what it is.
    """
    if isinstance(value, str) and value.strip().lower() == AUTO:
        return AUTO
    entries = value.split(",") if isinstance(value, str) else value
    if isinstance(entries, int) and not isinstance(entries, bool):
        entries = [entries]
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ValueError(repr(value))
    words = []
    for entry in entries:
        word = str(entry).strip()
        gpu, colon, instance = word.partition(":")
        numbered = gpu.isdigit() and (not colon or instance.isdigit())
        if isinstance(entry, (bool, float)) or not (
            numbered or word.upper().startswith(("GPU-", "MIG-"))
        ):
            raise ValueError(repr(entry))
        words.append(word)
    if len(set(words)) < len(words):
        raise ValueError(f"{value!r}, which names one device twice")
    return tuple(words)


def wanted_faults(value: Any, where: str) -> list[Fault]:
    """What is wrong with the setting by itself."""
    if value is None:
        return []
    try:
        wanted(value)
    except ValueError as error:
        expected = "auto, or GPUs by number, by UUID, or as GPU:INSTANCE"
        return [Fault(where, expected, str(error), _EXAMPLE)]
    return []


def visible(now: Snapshot, environ: Mapping[str, str]) -> list[Device]:
    """What CUDA would be given in this environment, in its order.

    Raises:
        BadInput: `CUDA_VISIBLE_DEVICES` holds numbers whose order nobody can tell.
    """
    units = now.units()
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return units
    words = [word.strip() for word in text.split(",")]
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not by_bus and len({d.name for d in now.devices}) > 1 and any(w.isdigit() for w in words):
        raise BadInput(
            "The GPUs of this environment cannot be told apart.",
            [
                Fault(
                    "CUDA_VISIBLE_DEVICES",
                    "UUIDs, or numbers in the order of the bus, as there are GPUs of several kinds",
                    f"{text!r} without CUDA_DEVICE_ORDER=PCI_BUS_ID",
                    "export CUDA_DEVICE_ORDER=PCI_BUS_ID, or unset CUDA_VISIBLE_DEVICES",
                )
            ],
        )
    found: list[Device] = []
    for word in words:
        device = now.find(word)
        if device is not None and device.divided:  # CUDA gives the first instance
            device = device.instances[0] if device.instances else None
        if device is None or device not in units or device in found:
            break  # as CUDA does: what follows the first unknown one does not count
        found.append(device)
    return found


def taken(device: Device, *, named: bool = False) -> str | None:
    """Why a device is not free; None if it is.

    Args:
        named: whether the user named it: then what only draws on it does not count.
    """
    holder = holder_of(device.uuid) if device.uuid else None
    if holder is not None:
        return f"claimed by {holder.words()}"
    others = [
        process
        for process in device.processes or ()
        if process.pid != os.getpid() and (not named or "compute" in process.kinds)
    ]
    if others:
        first = others[0]
        who = f" of {first.seen.user}" if first.seen is not None else ""
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return f"used by process {first.pid}{who}{more}"
    drawn = {p.pid for p in device.processes or ()}
    if device.memory_used is None and device.processes is None:
        return "the driver tells neither its processes nor its memory"
    if device.memory_used is not None and not (named and drawn):
        bound = max(FREE_BYTES, FREE_SHARE * (device.memory_total or 0))
        if device.memory_used > bound:
            return f"{device.memory_used / 2**30:.1f} GiB of it are used by processes unseen"
    return None


def choose(value: Any, count: int | None, claims: Claims | None, where: str) -> Chosen:
    """Claim the devices for a run, at once all or none.

    Args:
        value: the setting, free of `wanted_faults`.
        count: how many the run needs; None: all that are free (or named).
        claims: takes the locks; the caller releases them. None: only look.
        where: the place of the setting, for messages.

    Raises:
        BadInput: there are not so many free ones, or a named one is missing or taken.
    """
    try:
        with in_turn():
            now = snapshot()
            reachable = visible(now, os.environ)
            asked = wanted(value)
            if asked == AUTO:
                got = _auto(now, reachable, count, claims, where)
            else:
                got = _named(now, reachable, asked, count, claims, where)
            return Chosen(got, any(device.divided for device in now.devices))
    except NvmlUnavailable as error:
        cure = f"{error.cure}; or remove physical_gpus to run without a GPU"
        raise _refused([Fault(where, "NVIDIA GPUs", error.reason, cure)]) from None
    except (OSError, TimeoutError) as error:
        cure = "look who owns this file, and remove it"
        raise _refused([Fault(where, "lock files to claim GPUs with", str(error), cure)]) from None


def obstacles(value: Any, count: int | None, where: str) -> list[Fault]:
    """What would make `choose` refuse now. Claims nothing."""
    try:
        choose(value, count, None, where)
    except BadInput as error:
        return list(error.faults)
    return []


def _auto(
    now: Snapshot, reachable: list[Device], count: int | None, claims: Claims | None, where: str
) -> list[Device]:
    got: list[Device] = []
    reasons = []
    # One process gets one instance, so instances never serve a run that needs several devices.
    usable = [d for d in reachable if d.mig is None or (count == 1 and not _whole(reachable))]
    for device in usable:
        if count is not None and len(got) == count:
            break
        why = taken(device) or _claim(device, claims)
        if why is None:
            got.append(device)
        else:
            reasons.append(f"GPU {device.label}: {why}")
    if not got or (count is not None and len(got) < count):
        if len(usable) < len(reachable):
            reasons.append("instances of divided GPUs cannot serve this run")
        if len(reachable) < len(now.units()):
            reasons.append("CUDA_VISIBLE_DEVICES hides others")
        if not now.devices:
            reasons.append("this machine has none")
        needed = "a free GPU" if (count or 1) == 1 else f"{count} free GPUs"
        found = f"{len(got)} free; " + "; ".join(reasons)
        cure = (
            "wait for one, `aflow-tune gpus free DEVICE` ends processes of yours, or name devices: "
            "physical_gpus: [0]"
        )
        raise _refused([Fault(where, needed, found, cure)])
    return got


def _whole(devices: Sequence[Device]) -> list[Device]:
    return [device for device in devices if device.mig is None]


def _named(
    now: Snapshot,
    reachable: list[Device],
    words: str | tuple[str, ...],
    count: int | None,
    claims: Claims | None,
    where: str,
) -> list[Device]:
    faults: list[Fault] = []
    got: list[Device] = []
    there = ", ".join(device.label for device in now.units()) or "none"
    for word in words:
        device = now.find(word)
        expected, cure = f"a GPU of this machine: {there}", _EXAMPLE
        if device is None:
            why: str | None = f"{word}, which is none"
        elif device.divided:
            parts = ", ".join(part.label for part in device.instances) or "none yet"
            expected, why = "a whole GPU, or an instance of it", f"GPU {word} is divided (MIG)"
            cure = f"name an instance: {parts}"
        elif device.problem is not None:
            expected, why = "a GPU that works", f"GPU {word}: {device.problem}"
        elif device not in reachable:
            expected = "a GPU that CUDA_VISIBLE_DEVICES shows"
            why, cure = f"GPU {word}, hidden by it", "unset CUDA_VISIBLE_DEVICES, or name another"
        elif device in got:
            expected, why = "each device once", f"GPU {device.label} twice"
        else:
            expected, why = "a free GPU", taken(device, named=True) or _claim(device, claims)
            cure = (
                f"wait, `aflow-tune gpus free {device.label}` if the processes are yours, or name "
                "another; to share it, leave physical_gpus out and set CUDA_VISIBLE_DEVICES"
            )
            if why is None:
                got.append(device)
            else:
                why = f"GPU {word}: {why}"
        if why is not None:
            faults.append(Fault(where, expected, why, cure))
    if not faults and len(got) > 1 and any(device.mig is not None for device in got):
        expected = "one instance (MIG) alone, or whole GPUs: CUDA gives a process one instance"
        faults.append(Fault(where, expected, ", ".join(words), "name one of them"))
    if not faults and count is not None and len(got) != count:
        cure = "name as many, or set cluster.gpu_per_node to the number named"
        faults.append(Fault(where, f"{count} of this machine", str(len(got)), cure))
    if faults:
        raise _refused(faults)
    return got


def _claim(device: Device, claims: Claims | None) -> str | None:
    """Take the lock; why it could not be had, or None."""
    if device.uuid is None:
        return "the driver does not tell its UUID"
    if claims is None or claims.take(device.uuid):
        return None
    holder = holder_of(device.uuid)
    return f"claimed by {holder.words() if holder is not None else 'another run'}"


def _refused(faults: list[Fault]) -> BadInput:
    return BadInput("There are no GPUs for this run; nothing was started.", faults)


@contextlib.contextmanager
def isolated(
    value: Any, count: int | None, *, run: str, protected: Iterable[int], where: str
) -> Iterator[Chosen]:
    """Claim devices and let this process and what it starts see no others, for the block.

    Args:
        value, count, where: as for `choose`.
        run: what others are told about who holds them.
        protected: processes that others' `gpus free` leaves alone meanwhile.

    Raises:
        BadInput: not to be had, or too late: CUDA is in use in this process.
    """
    if _cuda_is_in_use():
        raise BadInput(
            "GPUs cannot be chosen any more.",
            [
                Fault(
                    where,
                    "a process that has not used CUDA yet",
                    "CUDA was used in this process before",
                    "start Python anew (a notebook: restart its kernel), and call tune() first",
                )
            ],
        )
    claims = Claims(run, protected)
    try:
        chosen = choose(value, count, claims, where)
        with _environment(visible_to_cuda(chosen)):
            yield chosen
    finally:
        # What this process itself holds on a device stays there until it ends, and so do claims.
        if not _cuda_is_in_use():
            claims.release()


def visible_to_cuda(chosen: Chosen) -> dict[str, str]:
    """The environment in which the chosen devices are cuda:0, cuda:1 and so on."""
    names = [str(d.uuid) if chosen.by_uuid else str(d.index) for d in chosen.devices]
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(names),
        # PyTorch then asks NVML whether there is a GPU, and CUDA stays unused in this process.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def mapping_lines(devices: Sequence[Device]) -> list[str]:
    """Which physical device is which for the run."""
    return [
        f"GPU {device.label} ({device.name}, {device.uuid}) is cuda:{number} of this run"
        for number, device in enumerate(devices)
    ]


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        if not _cuda_is_in_use():
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _cuda_is_in_use() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
