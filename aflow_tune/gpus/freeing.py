"""Freeing devices: who is on them, who of those may be ended, and after a yes their end.

Two ways to name processes: by number (`--pid`), where one that may not be ended refuses the whole
request before anything happens, and by device, where only one's own on it are meant and the
others are shown and left alone. Either way nothing is signalled before `confirm` said yes to the
list, and nothing that was not on it; whether it may be is asked again right before each signal.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psutil

from aflow_tune.errors import BadInput, Fault
from aflow_tune.gpus.claims import protected_by_runs
from aflow_tune.gpus.devices import Device, GpuProcess, NvmlUnavailable, Snapshot, snapshot
from aflow_tune.gpus.processes import Guard, Seen, invoking_user, look, with_rights_of
from aflow_tune.gpus.showing import process_line

KILL_SECONDS = 10.0
"""How long the end of a process is awaited after SIGKILL. Only the kernel can hold it then."""
_POLL_SECONDS = 0.05


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
    protected = frozenset(protect)
    guard = Guard(invoking_user(), protected | protected_by_runs())
    asked = list(dict.fromkeys(pids or listed))
    seen = {pid: look(pid) for pid in asked}
    refused = guard.refusals(seen.items())
    if pids:
        _refuse(asked, listed, refused, devices)
    beside = [pid for pid in _listed(named) if pid not in asked]
    spared = dict.fromkeys(beside, "it was not named") if pids else refused
    unknown = tuple(device.label for device in named if device.processes is None)
    # Listed, not refused and another one now: it has ended since the driver was asked.
    chosen = [
        found
        for pid, found in seen.items()
        if pid not in refused and found is not None and found == listed[pid].seen
    ]
    here = {found.pid for found in chosen if not found.ended}
    outcomes = {pid: "ended" for pid in asked if pid not in refused and pid not in here}
    chosen = [found for found in chosen if found.pid in here]
    _show(named, listed, chosen, spared, say)
    if not chosen:
        say("there is no process of yours to end" if not outcomes else "already ended")
        return Freed(True, outcomes, spared, unknown)
    if not confirm(len(chosen)):
        say("nothing was signalled")
        return Freed(False, {}, spared, unknown)
    # A run may have begun while the question stood.
    guard = Guard(guard.owner, protected | protected_by_runs())
    outcomes |= end(chosen, guard, grace, say)
    for pid, outcome in outcomes.items():
        say(f"{pid}: {outcome}")
    came, lost = _meanwhile(named, {*asked, *beside})
    for pid, why in came.items():
        say(f"{pid}: left alone: {why}")
    return Freed(True, outcomes, spared | came, (*unknown, *lost))


def end(
    processes: Iterable[Seen], guard: Guard, grace: float, say: Callable[[str], None]
) -> dict[int, str]:
    """SIGTERM, a wait of `grace` seconds, SIGKILL; what became of each, by its number.

    Returns:
        'ended', 'killed', 'left alone: WHY' or 'still there: WHY'. Only the first two are gone.
    """
    outcome: dict[int, str] = {}
    asked = _signal(processes, guard, signal.SIGTERM, outcome)
    if asked:
        say(f"SIGTERM sent to {_numbers(asked)}; waiting up to {grace:g} s")
    stubborn = _wait(asked, grace)
    outcome.update({each.pid: "ended" for each in asked if each not in stubborn})
    killed = _signal(stubborn, guard, signal.SIGKILL, outcome)
    if killed:
        say(f"SIGKILL sent to {_numbers(killed)}")
    left = _wait(killed, KILL_SECONDS)
    for each in killed:
        outcome[each.pid] = "killed"
        if each in left:
            outcome[each.pid] = f"still there: {KILL_SECONDS:g} s after SIGKILL"
    return outcome


def pid_faults(pids: Iterable[int], where: str) -> list[Fault]:
    """Numbers that no process of a user can have."""
    return [
        Fault(where, "a process id above 1", str(pid), "take the number from `aflow-tune gpus`")
        for pid in pids
        if pid <= 1
    ]


def _signal(
    processes: Iterable[Seen], guard: Guard, number: signal.Signals, outcome: dict[int, str]
) -> list[Seen]:
    """Signal what still may be; returns those that were."""
    sent = []
    for each in processes:
        now = look(each.pid)
        if now != each or now.ended:
            outcome[each.pid] = "ended"
            continue
        why = guard.refusals([(each.pid, now)]).get(each.pid)
        if why is None:
            try:
                with with_rights_of(guard.owner):
                    each.process.send_signal(number)  # to this process, not to its number
            except psutil.NoSuchProcess:
                outcome[each.pid] = "ended"
                continue
            except (psutil.AccessDenied, PermissionError):
                why = "the kernel refuses"
        if why is None:
            sent.append(each)
        else:
            outcome[each.pid] = f"left alone: {why}"
    return sent


def _wait(processes: list[Seen], seconds: float) -> list[Seen]:
    """Those that have not ended after this time. Takes no child's exit code from its parent."""
    deadline = time.monotonic() + seconds
    while True:
        left = [each for each in processes if (now := look(each.pid)) == each and not now.ended]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_SECONDS)


def _numbers(processes: list[Seen]) -> str:
    return ", ".join(str(each.pid) for each in processes)


def _named_devices(now: Snapshot, words: Sequence[str]) -> list[Device]:
    found = {word: now.find(word) for word in words}
    there = ", ".join(device.label for device in now.all()) or "none"
    faults = [
        Fault(word, f"a GPU of this machine: {there}", "none of them", "`aflow-tune gpus`")
        for word, device in found.items()
        if device is None
    ]
    if faults:
        raise BadInput("These GPUs are not there; nothing was signalled.", faults)
    return [device for device in found.values() if device is not None]


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
            found, fix = "the driver does not list it there", "look at `aflow-tune gpus`"
        elif pid in refused:
            found, fix = refused[pid], "leave it out, or ask its owner"
        else:
            continue
        faults.append(Fault(f"--pid {pid}", f"a process of yours {place}", found, fix))
    if faults:
        raise BadInput("These processes are not ended; nothing was signalled.", faults)


def _show(
    devices: Sequence[Device],
    listed: dict[int, GpuProcess],
    chosen: Sequence[Seen],
    spared: dict[int, str],
    say: Callable[[str], None],
) -> None:
    for device in devices:
        say(f"GPU {device.label} {device.name}" + (f", {device.claimed}" if device.claimed else ""))
        if device.processes is None:
            say(f"  its processes are unknown: {device.unknown_why}")
    if chosen:
        say("to be ended:")
        for each in chosen:
            say("  " + process_line(listed[each.pid]))
    if spared:
        say("left alone:")
        for pid, why in spared.items():
            say(f"  {process_line(listed[pid])}\n    {why}")
