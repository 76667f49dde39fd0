"""Free devices for a run: chooses them, claims each, and hides all others from the run.

A device is free if no run has claimed it, the driver lists no other process on it, and hardly any
of its memory is used (which also reveals processes outside of a container). A device that the user
names may also have graphics processes, as a desktop's only GPU does.

CUDA reads `CUDA_VISIBLE_DEVICES` once, so `isolated` must come before anything initialises CUDA.
Whole GPUs are given by number in PCI bus order, because vLLM reads numbers only; if any GPU is
divided (MIG), CUDA numbers differently, so UUIDs are given.
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

FREE_BYTES, FREE_SHARE = 2**30, 0.03
"""A device with more memory in use than both of these is not free."""

_EXAMPLE = "physical_gpus: auto, or a list such as [0, 1]"
_REFUSED = "There are no GPUs for this run; nothing was started."


@dataclass(frozen=True)
class Chosen:
    """Devices for a run, in the order in which it will see them, and whether to use UUIDs."""

    devices: list[Device]
    by_uuid: bool


def wanted(value: Any) -> str | tuple[str, ...]:
    """`auto`, or the devices named by a setting: numbers, `GPU:INSTANCE`, UUIDs. ValueError: it is
    neither; the message is the faulty value."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
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
        by_uuid = word.upper().startswith(("GPU-", "MIG-"))
        if isinstance(entry, (bool, float)) or not (numbered or by_uuid):
            raise ValueError(repr(entry))
        words.append(word)
    if len(set(words)) < len(words):
        raise ValueError(f"{value!r}, which names one device twice")
    return tuple(words)


def wanted_faults(value: Any, where: str) -> list[Fault]:
    """Faults of the setting's form; asks no driver."""
    try:
        if value is not None:
            wanted(value)
    except ValueError as error:
        expected = "auto, or GPUs by number, by UUID, or as GPU:INSTANCE"
        return [Fault(where, expected, str(error), _EXAMPLE)]
    return []


def visible(now: Snapshot, environ: Mapping[str, str]) -> list[Device]:
    """The devices that CUDA sees in this environment, in its order. BadInput: there are
    several GPU models, so the order of numbers in `CUDA_VISIBLE_DEVICES` is unknown."""
    units, text = now.units(), environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return units
    words = [word.strip() for word in text.split(",")]
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not by_bus and len({d.name for d in now.devices}) > 1 and any(w.isdigit() for w in words):
        expected = "UUIDs, or CUDA_DEVICE_ORDER=PCI_BUS_ID, as there are GPUs of several kinds"
        fix = "export CUDA_DEVICE_ORDER=PCI_BUS_ID, or unset CUDA_VISIBLE_DEVICES"
        raise BadInput.of(_REFUSED, "CUDA_VISIBLE_DEVICES", expected, repr(text), fix)
    found: list[Device] = []
    for word in words:
        device = now.find(word)
        if device is not None and device.divided:  # CUDA uses the first instance
            device = next(iter(device.instances), None)
        if device not in units or device in found:
            break  # as CUDA does: ignores all from the first unknown one on
        found.append(device)
    return found


def taken(device: Device, *, named: bool = False) -> str | None:
    """Why a device is not free; None if it is. `named`: by the user, who then accepts processes
    that only do graphics."""
    if device.uuid is None:
        return "the driver does not tell its UUID"
    if (holder := holder_of(device.uuid)) is not None:
        return f"claimed by {holder.words()}"
    listed = [each for each in device.processes or () if each.pid != os.getpid()]
    for process in listed:
        if not named or "compute" in process.kinds:
            who = f" of {process.seen.user}" if process.seen is not None else ""
            return f"used by process {process.pid}{who}"
    if device.memory_used is None:
        return "its processes and memory are unknown" if device.processes is None else None
    least = max(FREE_BYTES, FREE_SHARE * (device.memory_total or 0))
    if device.memory_used > least and not (named and device.processes):
        return f"{device.memory_used / 2**30:.1f} GiB of it are used by processes unseen"
    return None


def choose(value: Any, count: int | None, claims: Claims | None, where: str) -> Chosen:
    """Claim the devices for a run. BadInput: too few are free, a named one is missing or taken,
    there is no driver, or the lock files cannot be used.

    Args:
        value: the setting, free of `wanted_faults`.
        count: how many the run needs; None: all that are free, or all that are named.
        claims: takes the locks; the caller releases them. None: only check.
        where: the place of the setting, for messages.
    """
    try:
        with in_turn():
            now = snapshot()
            reachable, words = visible(now, os.environ), wanted(value)
            if isinstance(words, str):
                got = _auto(now, reachable, count, claims, where)
            else:
                got = _named(now, reachable, words, count, claims, where)
            return Chosen(got, any(device.divided for device in now.devices))
    except NvmlUnavailable as error:
        fix = f"{error.cure}; or remove physical_gpus to run without a GPU"
        raise BadInput.of(_REFUSED, where, "NVIDIA GPUs", error.reason, fix) from None
    except OSError as error:  # TimeoutError is one
        expected, fix = "lock files to claim GPUs with", "look who owns this file, and remove it"
        raise BadInput.of(_REFUSED, where, expected, str(error), fix) from None


def obstacles(value: Any, count: int | None, where: str) -> list[Fault]:
    """The faults with which `choose` would refuse now. Claims nothing."""
    try:
        choose(value, count, None, where)
    except BadInput as error:
        return list(error.faults)
    return []


def _claim(device: Device, claims: Claims | None, *, named: bool = False) -> str | None:
    """Claim a device; returns None, or why it is not available."""
    if why := taken(device, named=named):
        return why
    free = claims is None or claims.take(str(device.uuid))
    return None if free else "claimed by another run"


def _auto(
    now: Snapshot, reachable: list[Device], count: int | None, claims: Claims | None, where: str
) -> list[Device]:
    # CUDA gives a process one MIG instance, so they cannot serve a run that needs several devices.
    whole = [device for device in reachable if device.mig is None]
    usable = reachable if count == 1 and not whole else whole
    got: list[Device] = []
    reasons = []
    for device in usable:
        if count is not None and len(got) == count:
            break
        if why := _claim(device, claims):
            reasons.append(f"GPU {device.label}: {why}")
        else:
            got.append(device)
    if len(got) < (count or 1):
        if len(usable) < len(reachable):
            reasons.append("instances of divided GPUs cannot serve this run")
        if len(reachable) < len(now.units()):
            reasons.append("CUDA_VISIBLE_DEVICES hides others")
        found, expected = "; ".join([f"{len(got)} free", *reasons]), f"{count or 1} free GPUs"
        fix = f"wait, `aflow-tune gpus free DEVICE` ends processes of yours, or {_EXAMPLE}"
        raise BadInput.of(_REFUSED, where, expected, found, fix)
    return got


def _named(
    now: Snapshot,
    reachable: list[Device],
    words: Sequence[str],
    count: int | None,
    claims: Claims | None,
    where: str,
) -> list[Device]:
    got: list[Device] = []
    faults: list[Fault] = []
    there = ", ".join(each.label for each in now.units()) or "none"
    for word in words:
        device, fix = now.find(word), _EXAMPLE
        if device is None:
            why: str | None = "not there"
        elif device.divided:
            parts = ", ".join(part.label for part in device.instances) or "none yet"
            why, fix = "divided (MIG): CUDA computes on instances only", f"name one of: {parts}"
        elif device in got or device not in reachable:
            why = device.problem or "named twice, or CUDA_VISIBLE_DEVICES hides it"
        else:
            why = _claim(device, claims, named=True)
            fix = f"wait, `aflow-tune gpus free {device.label}` if the processes are yours, or to "
            fix += "share it leave physical_gpus out and set CUDA_VISIBLE_DEVICES"
            got += [] if why else [device]
        if why:
            expected = f"a free GPU of this machine ({there})"
            faults.append(Fault(where, expected, f"GPU {word}: {why}", fix))
    if not faults and len(got) > 1 and any(device.mig is not None for device in got):
        expected = "one instance (MIG) alone, or whole GPUs: CUDA gives a process one instance"
        faults.append(Fault(where, expected, ", ".join(words), "name one of them"))
    if not faults and count is not None and len(got) != count:
        fix = "name as many, or set cluster.gpu_per_node to the number named"
        faults.append(Fault(where, f"{count} of this machine", str(len(got)), fix))
    if faults:
        raise BadInput(_REFUSED, faults)
    return got


@contextlib.contextmanager
def isolated(
    value: Any, count: int | None, *, run: str, protected: Iterable[int], where: str
) -> Iterator[Chosen]:
    """For the block, claim devices and hide all others from this process and those that it starts.
    BadInput: as `choose`, or this process has already initialised CUDA.

    Args:
        value, count, where: as for `choose`.
        run: the name of the run, shown to others who want the devices.
        protected: ids of processes that `gpus free` of others leaves alone meanwhile.
    """
    if _cuda_is_in_use():
        expected, fix = "a process that has not used CUDA yet", "start Python anew, or its kernel"
        raise BadInput.of(_REFUSED, where, expected, "CUDA was used in this process before", fix)
    claims = Claims(run, protected)
    before: dict[str, str | None] = {}
    try:
        chosen = choose(value, count, claims, where)
        names = [str(d.uuid) if chosen.by_uuid else str(d.index) for d in chosen.devices]
        values = {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(names),
            # PyTorch then asks NVML whether there is a GPU and does not initialise CUDA.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        yield chosen
    finally:
        # If this process uses CUDA, it holds the device until it ends, so the claim stays too.
        if not _cuda_is_in_use():
            claims.release()
            for name, text in before.items():
                if text is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = text


def _cuda_is_in_use() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
