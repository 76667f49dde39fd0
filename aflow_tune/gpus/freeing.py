"""`aflow-tune gpus free`: end one's own processes on GPUs, after confirmation.

A process named by id (`--pid`) that may not be ended refuses the whole request. A named device
stands for the user's own processes on it; others are shown and left alone. Nothing is signalled
before `confirm` returned True, and permission is checked again right before each signal.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psutil

from aflow_tune.errors import BadInput, Fault
from aflow_tune.gpus.claims import protected_by_runs
from aflow_tune.gpus.devices import Device, GpuProcess, snapshot
from aflow_tune.gpus.processes import Guard, Seen, invoking_user, look, with_rights_of
from aflow_tune.gpus.showing import process_line

KILL_SECONDS = 10.0  # after SIGKILL, when only the kernel can keep a process alive


@dataclass(frozen=True)
class Freed:
    """The outcome of a request. `outcomes`: by process id 'ended', 'killed', 'left alone: WHY' or
    'still there: WHY'. `spared`: why other processes were not touched, by id. `whole`: whether all
    chosen processes are gone and the named devices have none left."""

    outcomes: dict[int, str]
    spared: dict[int, str]
    whole: bool


def free(
    devices: Sequence[str],
    pids: Sequence[int],
    *,
    protect: Iterable[int] = (),
    grace: float,
    confirm: Callable[[int], bool],
    say: Callable[[str], None] = print,
) -> Freed:
    """End the user's own processes on GPUs. BadInput: a device or process does not exist or may not
    be ended; nothing was signalled. NvmlUnavailable: no driver, or one that refuses.

    Args:
        devices: labels or UUIDs; without `pids`, all of the user's own processes on them.
        pids: ids of processes on any GPU, or on one of `devices` if both are given.
        protect: ids of processes to leave alone, with their descendants and ancestors; those
            that current runs protect are added.
        grace: seconds between SIGTERM and SIGKILL.
        confirm: asked once, with the number of processes, after they were shown.
    """
    now = snapshot()
    by_word = {word: now.find(word) for word in devices}
    named = [device for device in by_word.values() if device is not None]
    listed = _listed(named or now.all())
    protected, owner = frozenset(protect), invoking_user()
    asked = list(dict.fromkeys(pids or listed))
    refused = Guard(owner, protected | protected_by_runs()).refusals((p, look(p)) for p in asked)
    there = ", ".join(device.label for device in now.all()) or "none"
    faults = [
        Fault(word, f"a GPU of this machine: {there}", "none of them", "`aflow-tune gpus`")
        for word, device in by_word.items()
        if device is None
    ]
    if pids and not faults:
        unlisted = {pid: "the driver does not list it there" for pid in pids if pid not in listed}
        faults = [
            Fault(f"--pid {pid}", "a process of yours on the GPU", why, "look at `aflow-tune gpus`")
            for pid, why in (refused | unlisted).items()
        ]
    if faults:
        raise BadInput("This cannot be freed; nothing was signalled.", faults)
    chosen = {pid: listed[pid].seen for pid in asked if pid not in refused}
    alive = [seen for seen in chosen.values() if seen is not None and _is_there(seen)]
    outcomes = {pid: "ended" for pid in chosen}
    spared = {p: refused.get(p, "it was not named") for p in _listed(named) if p not in chosen}
    for device in named:
        say(f"GPU {device.label} {device.name}" + (f", {device.claimed}" if device.claimed else ""))
    for seen in alive:
        say(f"to be ended: {process_line(listed[seen.pid])}")
    for pid, why in spared.items():
        say(f"left alone:  {process_line(listed[pid])}\n    {why}")
    if not alive:
        say("already ended" if outcomes else "there is no process of yours to end")
    elif not confirm(len(alive)):
        say("nothing was signalled")
        return Freed({}, spared, False)
    else:  # a run may have started while `confirm` waited, so read again what runs protect
        outcomes |= end(alive, Guard(owner, protected | protected_by_runs()), grace, say)
        for pid, outcome in outcomes.items():
            say(f"{pid}: {outcome}")
    gone = {pid for pid, outcome in outcomes.items() if outcome in ("ended", "killed")}
    now = snapshot()  # ended processes may have been restarted
    after = [now.find(device.label) for device in named]
    left = set(_listed(device for device in after if device)) - gone
    if left:
        say(f"still on these GPUs: {', '.join(map(str, sorted(left)))}")
    known = all(device and device.processes is not None for device in after)
    if not known:
        say("who is on these GPUs cannot be told")
    return Freed(outcomes, spared, gone == {*outcomes} and not left and known)


def end(
    processes: Iterable[Seen], guard: Guard, grace: float, say: Callable[[str], None]
) -> dict[int, str]:
    """SIGTERM, up to `grace` seconds, then SIGKILL; returns outcomes as in `Freed`."""
    outcome: dict[int, str] = {}
    asked = _signal(processes, guard, signal.SIGTERM, outcome)
    if asked:
        say(f"SIGTERM sent; waiting up to {grace:g} s")
    stubborn = _wait(asked, grace)
    outcome.update({each.pid: "ended" for each in asked if each not in stubborn})
    killed = _signal(stubborn, guard, signal.SIGKILL, outcome)
    outcome.update({each.pid: "killed" for each in killed})
    for each in _wait(killed, KILL_SECONDS):
        outcome[each.pid] = f"still there: {KILL_SECONDS:g} s after SIGKILL"
    return outcome


def pid_faults(pids: Iterable[int], where: str) -> list[Fault]:
    return [
        Fault(where, "a process id above 1", str(pid), "take the number from `aflow-tune gpus`")
        for pid in pids
        if pid <= 1
    ]


def _signal(
    processes: Iterable[Seen], guard: Guard, number: signal.Signals, outcome: dict[int, str]
) -> list[Seen]:
    """Signal the processes that may still be ended; returns those that were signalled."""
    sent = []
    for each in processes:
        now = look(each.pid)
        if now != each or now.ended:
            outcome[each.pid] = "ended"
        elif why := guard.refusals([(each.pid, now)]).get(each.pid):
            outcome[each.pid] = f"left alone: {why}"
        else:
            try:
                with with_rights_of(guard.owner):
                    each.process.send_signal(number)  # psutil checks that the id was not reused
                sent.append(each)
            except psutil.NoSuchProcess:
                outcome[each.pid] = "ended"
            except (psutil.AccessDenied, PermissionError):
                outcome[each.pid] = "left alone: the kernel refuses"
    return sent


def _wait(processes: list[Seen], seconds: float) -> list[Seen]:
    """Those that have not ended after this time. Unlike `psutil.wait_procs`, reaps no child."""
    deadline = time.monotonic() + seconds
    while (left := [each for each in processes if _is_there(each)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _is_there(seen: Seen) -> bool:
    now = look(seen.pid)
    return now == seen and not now.ended


def _listed(devices: Iterable[Device]) -> dict[int, GpuProcess]:
    found: dict[int, GpuProcess] = {}
    for device in devices:
        for process in device.processes or ():
            found.setdefault(process.pid, process)
    return found
