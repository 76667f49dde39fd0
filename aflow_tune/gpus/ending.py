"""Ending processes that were pinned: SIGTERM, a wait, SIGKILL.

A pin (`pidfd`) stands for one process, not for its number: when the process has ended, a signal
sent through the pin reaches nobody, even if another process got the number in between. What may
be ended is decided in `owner.py`, and asked again right before each signal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aflow_tune.errors import AflowTuneError
from aflow_tune.gpus.owner import Guard, with_rights_of
from aflow_tune.gpus.processes import Seen, look

KILL_SECONDS = 10.0
"""How long the end of a process is awaited after SIGKILL. Only the kernel can hold it then."""


@dataclass
class Pin:
    """One process held fast, with what /proc said of it while it was."""

    pid: int
    descriptor: int
    seen: Seen

    @property
    def ended(self) -> bool:
        """Whether the process has ended; a zombie has."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Let go of it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def pin(pid: int) -> Pin | None:
    """Hold a process fast; None if there is none (any more).

    Raises:
        AflowTuneError: this system cannot do it safely.
    """
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        raise _unsafe("this Python or system has no pidfd_open (Linux 5.3 or newer has it)")
    try:
        descriptor = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError):
        return None
    except OSError as error:
        if look(pid) is None:  # the number of a thread
            return None
        raise _unsafe(f"pidfd_open: {error.strerror}") from None
    seen = look(pid)
    if seen is not None:
        held = Pin(pid, descriptor, seen)
        # It is alive now, so its number was not another's while /proc was read.
        if not held.ended:
            return held
    os.close(descriptor)
    return None


def end(
    pins: Iterable[Pin],
    guard: Guard,
    grace: float,
    say: Callable[[str], None],
) -> dict[int, str]:
    """End pinned processes; what became of each, by its number.

    Args:
        grace: seconds between SIGTERM and SIGKILL.

    Returns:
        'ended', 'killed', 'left alone: WHY' or 'still there: WHY'. Only the first two are gone.
    """
    outcome: dict[int, str] = {}
    asked = _signal(pins, guard, signal.SIGTERM, outcome)
    if asked:
        say(f"SIGTERM sent to {_listed(asked)}; waiting up to {grace:g} s")
    stubborn = _wait(asked, grace)
    outcome.update({held.pid: "ended" for held in asked if held not in stubborn})
    killed = _signal(stubborn, guard, signal.SIGKILL, outcome)
    if killed:
        say(f"SIGKILL sent to {_listed(killed)}")
    left = _wait(killed, KILL_SECONDS)
    for held in killed:
        outcome[held.pid] = "killed"
        if held in left:
            now = look(held.pid)
            state = "" if now is None else f" in state {now.state}"
            outcome[held.pid] = f"still there: {KILL_SECONDS:g} s after SIGKILL{state}"
    return outcome


def _signal(
    pins: Iterable[Pin], guard: Guard, number: signal.Signals, outcome: dict[int, str]
) -> list[Pin]:
    """Signal what still may be; returns those that were."""
    sent = []
    for held in pins:
        if held.ended:
            outcome[held.pid] = "ended"
            continue
        now = look(held.pid)
        if now is not None and now.started != held.seen.started:
            outcome[held.pid] = "ended"  # between the two looks; this is another process
            continue
        why = guard.refusals([(held.pid, now)]).get(held.pid)
        if why is None:
            try:
                with with_rights_of(guard.owner):
                    signal.pidfd_send_signal(held.descriptor, number)
            except ProcessLookupError:
                outcome[held.pid] = "ended"
                continue
            except PermissionError:
                why = "the kernel refuses"
        if why is None:
            sent.append(held)
        else:
            outcome[held.pid] = f"left alone: {why}"
    return sent


def _wait(pins: list[Pin], seconds: float) -> list[Pin]:
    """Those that have not ended after this time."""
    deadline = time.monotonic() + seconds
    left = [held for held in pins if not held.ended]
    while left and (remaining := deadline - time.monotonic()) > 0:
        poll = select.poll()
        for held in left:
            poll.register(held.descriptor, select.POLLIN)
        with contextlib.suppress(InterruptedError):
            poll.poll(remaining * 1000)
        left = [held for held in left if not held.ended]
    return left


def _listed(pins: list[Pin]) -> str:
    return ", ".join(str(held.pid) for held in pins)


def _unsafe(why: str) -> AflowTuneError:
    return AflowTuneError(
        f"processes cannot be ended safely here: {why}. Nothing was signalled; look at them with "
        "`ps` and end them by hand."
    )
