"""Waits until the command that started it is gone, then ends the Ray processes that it left.

Runs as a script of its own, without importing the package. Its standard input is a pipe that only
the command holds open, so end of file means that the command has ended. Tested on Linux only.
"""

import contextlib
import os
import select
import signal
import sys

import psutil

Processes = set[psutil.Process]
"""psutil compares processes by id and start time, so a reused id is another process."""


def session_processes(marker: str) -> Processes:
    """The processes of a session: those with its marker in their environment (Ray's servers), and
    their descendants (workers, which overwrite their environment)."""
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
    """The processes that still run; zombies do not count."""
    running = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                running.append(each)
    return running


def end_session(marker: str, seen: Processes | None = None, spare: int | None = None) -> None:
    """Terminate the processes of the session and those `seen` in it earlier, whose parents may be
    gone by now, except `spare` (a process id); kill what is left after 3 s."""
    processes = {each for each in (seen or set()) | session_processes(marker) if each.pid != spare}
    for number in (signal.SIGTERM, signal.SIGKILL):
        for each in alive(processes):
            with contextlib.suppress(psutil.Error):
                each.send_signal(number)
        psutil.wait_procs(alive(processes), timeout=3)


def main() -> None:
    """Block until the pipe closes, then end the session. Ray's node server ends with the command
    and orphans its agents, so the session's processes are recorded once a second until then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    marker, command = sys.argv[1], os.getppid()
    seen: Processes = set()
    while not select.select([0], [], [], 1.0)[0]:
        seen = {*alive(seen), *session_processes(marker)}
        seen = {each for each in seen if each.pid != command}
    end_session(marker, seen)


if __name__ == "__main__":
    main()
