"""Freeing devices: who is on them, who of those may be ended, and after a yes their end.

Two ways to name processes: by number (`--pid`), where one that may not be ended refuses the whole
request before anything happens, and by device, where only one's own on it are meant and the
others are shown and left alone. Either way nothing is signalled before `confirm` said yes to the
list, and nothing that was not on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from aflow_tune.errors import BadInput, Fault
from aflow_tune.gpus.claims import protected_by_runs
from aflow_tune.gpus.devices import Device, GpuProcess, Snapshot
from aflow_tune.gpus.ending import Pin, end, pin
from aflow_tune.gpus.nvml import NvmlUnavailable
from aflow_tune.gpus.owner import Guard, invoking_user
from aflow_tune.gpus.processes import Seen, look
from aflow_tune.gpus.reading import snapshot
from aflow_tune.gpus.showing import process_line


@dataclass(frozen=True)
class Freed:
    """What became of a request."""

    confirmed: bool
    outcomes: dict[int, str]
    """Process id to 'ended', 'killed', 'left alone: WHY' or 'still there: WHY'."""
    spared: dict[int, str]
    """Processes on a named device that were not touched, and why."""

    unknown: tuple[str, ...] = ()
    """Labels of the named devices whose processes the driver does not tell."""

    @property
    def whole(self) -> bool:
        """Whether all that was named is gone, and every named device is free of processes."""
        gone = all(outcome in ("ended", "killed") for outcome in self.outcomes.values())
        return self.confirmed and gone and not self.spared and not self.unknown


def free(
    devices: Sequence[str],
    pids: Sequence[int],
    *,
    protect: Iterable[int] = (),
    grace: float,
    confirm: Callable[[int], bool],
    say: Callable[[str], None] = print,
) -> Freed:
    """End processes of one's own on GPUs.

    Args:
        devices: labels or UUIDs; all of one's own processes on them are meant.
        pids: processes on any GPU (on one of `devices`, where both are given).
        protect: processes to leave alone, with their descendants and ancestors; those that
            running runs protect are added.
        grace: seconds between SIGTERM and SIGKILL.
        confirm: asked once, with the number of processes, after they were shown.
        say: shows a line.

    Raises:
        BadInput: a device or process that is not there or may not be ended; nothing was done.
        NvmlUnavailable: there is no driver to ask.
    """
    now = snapshot()
    named = _named_devices(now, devices)
    listed = _listed(named or list(now.all()))
    named_protected = frozenset(protect)
    guard = Guard(invoking_user(), named_protected | protected_by_runs())
    pins: dict[int, Pin] = {}
    try:
        asked = list(dict.fromkeys(pids or listed))
        for pid in asked:
            held = pin(pid) if pid in listed else None
            if held is not None and _same(listed[pid].seen, held.seen):
                pins[pid] = held
            elif held is not None:
                held.close()
        refused = guard.refusals([(pid, look(pid)) for pid in asked])
        if pids:
            _refuse(asked, listed, refused, devices)
        beside = [pid for pid in _listed(named) if pid not in asked]
        spared = dict.fromkeys(beside, "it was not named") if pids else refused
        unknown = tuple(device.label for device in named if device.processes is None)
        chosen = [held for pid, held in pins.items() if pid not in refused]
        # Listed, not refused and not to be pinned: it has ended since the driver was asked.
        outcomes = {pid: "ended" for pid in asked if pid not in refused and pid not in pins}
        _show(named, listed, chosen, spared, say)
        if not chosen:
            say("there is no process of yours to end" if not outcomes else "already ended")
            return Freed(True, outcomes, spared, unknown)
        if not confirm(len(chosen)):
            say("nothing was signalled")
            return Freed(False, {}, spared, unknown)
        # A run may have begun while the question stood.
        guard = Guard(guard.owner, named_protected | protected_by_runs())
        outcomes |= end(chosen, guard, grace, say)
        for pid, outcome in outcomes.items():
            say(f"{pid}: {outcome}")
        came, lost = _meanwhile(named, {*asked, *beside})
        for pid, why in came.items():
            say(f"{pid}: left alone: {why}")
        return Freed(True, outcomes, spared | came, (*unknown, *lost))
    finally:
        for held in pins.values():
            held.close()


def pid_faults(pids: Iterable[int], where: str) -> list[Fault]:
    """Numbers that no process of a user can have."""
    return [
        Fault(where, "a process id above 1", str(pid), "take the number from `aflow-tune gpus`")
        for pid in pids
        if pid <= 1
    ]


def _named_devices(now: Snapshot, words: Sequence[str]) -> list[Device]:
    found, faults = [], []
    for word in words:
        device = now.find(word)
        if device is None:
            there = ", ".join(device.label for device in now.all()) or "none"
            faults.append(
                Fault(word, f"a GPU of this machine: {there}", "none of them", "`aflow-tune gpus`")
            )
        else:
            found.append(device)
    if faults:
        raise BadInput("These GPUs are not there; nothing was signalled.", faults)
    return found


def _meanwhile(named: Sequence[Device], known: set[int]) -> tuple[dict[int, str], list[str]]:
    """Processes that came onto the named devices since they were shown, such as one that is
    started again whenever it ends; and the devices that do not tell any more."""
    try:
        now = snapshot()
    except NvmlUnavailable:
        return {}, [device.label for device in named]
    again = [now.find(device.label) for device in named]
    here = [device for device in again if device is not None and device.processes is not None]
    came = {pid: "it came meanwhile" for pid in _listed(here) if pid not in known}
    told = {device.label for device in here}
    return came, [device.label for device in named if device.label not in told]


def _listed(devices: Iterable[Device]) -> dict[int, GpuProcess]:
    found: dict[int, GpuProcess] = {}
    for device in devices:
        for process in device.processes or ():
            found.setdefault(process.pid, process)
    return found


def _same(first: Seen | None, second: Seen) -> bool:
    """Whether the driver's process is still the one under this number."""
    return first is not None and first.started == second.started


def _refuse(
    pids: Sequence[int],
    listed: dict[int, GpuProcess],
    refused: dict[int, str],
    devices: Sequence[str],
) -> None:
    """BadInput if any of the named processes may not be ended or is on no GPU."""
    place = f"on GPU {', '.join(devices)}" if devices else "on a GPU"
    faults = []
    for pid in pids:
        if pid not in listed:
            found, cure = "the driver does not list it there", "look at `aflow-tune gpus`"
        elif pid in refused:
            found, cure = refused[pid], "leave it out, or ask its owner"
        else:
            continue
        faults.append(Fault(f"--pid {pid}", f"a process of yours {place}", found, cure))
    if faults:
        raise BadInput("These processes are not ended; nothing was signalled.", faults)


def _show(
    devices: Sequence[Device],
    listed: dict[int, GpuProcess],
    chosen: Sequence[Pin],
    spared: dict[int, str],
    say: Callable[[str], None],
) -> None:
    for device in devices:
        say(f"GPU {device.label} {device.name}" + (f", {device.claimed}" if device.claimed else ""))
        if device.processes is None:
            say(f"  its processes are unknown: {device.unknown_why}")
    if chosen:
        say("to be ended:")
        for held in chosen:
            say("  " + process_line(listed[held.pid]))
    if spared:
        say("left alone:")
        for pid, why in spared.items():
            say(f"  {process_line(listed[pid])}\n    {why}")
