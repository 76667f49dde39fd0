"""Waits until the command that started it is gone, then ends the Ray processes it left.

Run as a script of its own, without importing the package: it must start in milliseconds and
use almost no memory. Reads its standard input, a pipe that only the command holds open.
Linux only (it reads /proc); elsewhere a killed command leaves its Ray to `ray stop`.
"""

import contextlib
import os
import select
import signal
import sys
import time


def session_processes(marker: str) -> dict[int, str]:
    """Process ids of the session, with their start times.

    Ray's own servers carry the session's marker in their environment. Its workers rename
    themselves, which overwrites theirs: they are found as descendants of the servers.
    """
    needle = f"AFLOW_TUNE_RAY_SESSION={marker}".encode()
    parent_of: dict[int, int] = {}
    started: dict[int, str] = {}
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        pid = int(name)
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                fields = file.read().rpartition(")")[2].split()
            parent_of[pid], started[pid] = int(fields[1]), fields[19]
            with open(f"/proc/{pid}/environ", "rb") as file:
                if needle in file.read().split(b"\0"):
                    found.add(pid)
    grown = True
    while grown:
        children = {pid for pid, parent in parent_of.items() if parent in found} - found
        found |= children
        grown = bool(children)
    return {pid: started[pid] for pid in found}


def alive(processes: dict[int, str]) -> list[int]:
    """Those of the processes that still run; a reused process id does not count."""
    running = []
    for pid, started in processes.items():
        with contextlib.suppress(OSError, IndexError):
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                fields = file.read().rpartition(")")[2].split()
            if fields[19] == started and fields[0] != "Z":
                running.append(pid)
    return running


def end_session(marker: str, seen: dict[int, str] | None = None, spare: int | None = None) -> None:
    """Terminate every process of the session but `spare`; kill what is left after 3 s.

    `seen` are processes of the session found earlier, whose parents may be gone by now.
    """
    processes = {**(seen or {}), **session_processes(marker)}
    processes.pop(spare or -1, None)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in alive(processes):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + 3
        while alive(processes) and time.monotonic() < deadline:
            time.sleep(0.05)


def main() -> None:
    """Block until the pipe closes, then end the session.

    Ray's node server goes down with the command and orphans its agents before anyone could
    look: so the session's processes are noted once a second while it lives.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    marker, command = sys.argv[1], os.getppid()
    seen: dict[int, str] = {}
    while not select.select([0], [], [], 1.0)[0]:
        seen = {pid: started for pid, started in seen.items() if alive({pid: started})}
        seen.update(session_processes(marker))
        seen.pop(command, None)
    end_session(marker, seen)


if __name__ == "__main__":
    main()
