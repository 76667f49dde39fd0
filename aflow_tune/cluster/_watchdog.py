"""Waits until the command that started it is gone, then ends the Ray processes it left.

Run as a script of its own, without importing the package. Reads its standard input, a pipe that
only the command holds open. Linux only; elsewhere a killed command leaves its Ray to `ray stop`.
"""

import contextlib
import os
import select
import signal
import sys

import psutil

Processes = set[psutil.Process]
"""Known by their start too: a process id that is given again is another process."""


def session_processes(marker: str) -> Processes:
    """The processes of a session: Ray's servers carry its marker in their environment; workers
    overwrite theirs, and are found as descendants."""
    found: Processes = set()
    everything = [each for each in psutil.process_iter(["ppid"]) if each.pid != os.getpid()]
    for each in everything:
        with contextlib.suppress(psutil.Error, OSError):
            if each.environ().get("AFLOW_TUNE_RAY_SESSION") == marker:
                found.add(each)
    grown = True
    while grown:
        parents = {each.pid for each in found}
        children = {each for each in everything if each.info["ppid"] in parents} - found
        found |= children
        grown = bool(children)
    return found


def alive(processes: Processes) -> list[psutil.Process]:
    """Those of the processes that still run."""
    running = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                running.append(each)
    return running


def end_session(marker: str, seen: Processes | None = None, spare: int | None = None) -> None:
    """Terminate every process of the session but `spare`, and those `seen` earlier, whose parents
    may be gone by now; kill what is left after 3 s."""
    processes = {each for each in (seen or set()) | session_processes(marker) if each.pid != spare}
    for number in (signal.SIGTERM, signal.SIGKILL):
        for each in alive(processes):
            with contextlib.suppress(psutil.Error):
                each.send_signal(number)
        psutil.wait_procs(alive(processes), timeout=3)


def main() -> None:
    """Block until the pipe closes, then end the session. Ray's node server goes down with the
    command and orphans its agents: so the session's processes are noted once a second before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    marker, command = sys.argv[1], os.getppid()
    seen: Processes = set()
    while not select.select([0], [], [], 1.0)[0]:
        seen = {*alive(seen), *session_processes(marker)}
        seen = {each for each in seen if each.pid != command}
    end_session(marker, seen)


if __name__ == "__main__":
    main()
