"""How many processes the system lets this user start: too few, and Ray hangs or is aborted."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from aflow_tune.errors import Fault

NEEDED = 400
"""Processes and threads of the smallest run on a Ray of its own, on two cores."""
_EXEMPT = 1 << 21 | 1 << 24
"""CAP_SYS_ADMIN and CAP_SYS_RESOURCE: who has either may start any number."""


def check_process_room(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> Iterator[Fault]:
    """What keeps a Ray of our own from starting its processes.

    Args:
        proc, cgroups: where the system tells of processes and of their groups' limits.
    """
    for where, limit, used, cure in (*_of_user(proc), *_of_groups(proc, cgroups)):
        if limit - used < NEEDED:
            found = f"{max(limit - used, 0)}: {used} run, and the limit is {limit}"
            expected = f"room for {NEEDED} processes and threads, which Ray and a run have"
            yield Fault(where, expected, found, f"{cure}, or run in one process: --inline")


def _of_user(proc: Path) -> Iterator[tuple[str, int, int, str]]:
    limit, most = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit == resource.RLIM_INFINITY or os.getuid() == 0:
        return
    status = _status(proc / "self")
    if int(status.get("CapEff", "0"), 16) & _EXEMPT:
        return
    uid, used = str(os.getuid()), 0
    for folder in proc.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                of_one = _status(folder)
                used += int(of_one["Threads"]) * (of_one["Uid"].split()[0] == uid)
    cure = "raise the limit: ulimit -u unlimited"
    if most != resource.RLIM_INFINITY and most < used + NEEDED:
        cure = "let the administrator raise `nproc` in /etc/security/limits.conf"
    yield "ulimit -u", limit, used, cure


def _of_groups(proc: Path, cgroups: Path) -> Iterator[tuple[str, int, int, str]]:
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "pids"):
                continue
            root = cgroups / controllers
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                # In a container the path may be that of the host, and the limit at the root.
                with contextlib.suppress(OSError, ValueError):
                    limit = int((folder / "pids.max").read_text())
                    used = int((folder / "pids.current").read_text())
                    yield str(folder / "pids.max"), limit, used, _CURE
                if folder == root:
                    break


_CURE = "raise the limit (in a container: docker run --pids-limit=-1)"


def _status(folder: Path) -> dict[str, str]:
    lines = (folder / "status").read_text(errors="replace").splitlines()
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}
