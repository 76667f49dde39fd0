"""The command line that starts a sandbox behind each wall, and what each wall covers.

Whoever starts us, the program's user is not root: as root the ids are given up on the way in.
The programs that build the walls are found on the system's own path, not on the caller's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from aflow_tune.sandbox import seccomp
from aflow_tune.sandbox.packages import Packages
from aflow_tune.sandbox.paths import DEVICES, SystemPaths, system_paths
from aflow_tune.sandbox.types import Level

NOBODY = 65534
NO_PACKAGES = Packages()
_TOOLS = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_HIDDEN_PROC = ("kcore", "keys", "key-users", "kallsyms", "timer_list", "sched_debug", "cmdline")
_UNUSED_IDS = range(2_000_000_000, 2_100_000_000)
"""User ids that nothing hands out: above containers' ranges (systemd's UIDS-GIDS.md)."""

INSTALL = "sudo apt-get install -y bubblewrap"
"""The line that gets the primary wall, on Debian and Ubuntu."""

COVERS: dict[Level, tuple[str, ...]] = {
    Level.BUBBLEWRAP: (
        "files: only a read-only system and the interpreter are there; /tmp is private and small",
        "network: none; no socket can be made",
        "processes: own process namespace, which ends with the program, the parent or the time",
        "identity: no environment, an unprivileged user without capabilities, own namespaces, "
        "no further ones",
        "kernel: a system-call filter without other processes' memory, mounts, keys, io_uring, bpf",
        "limits: time, processor time, memory of the whole tree, processes, files, disk, output",
    ),
    Level.LANDLOCK: (
        "files: read-only system and interpreter, one private folder; nothing else opens",
        "network: no socket can be made",
        "processes: no signals to others, none left behind: a supervisor ends every descendant",
        "identity: no environment; started by root, a user of its own without capabilities",
        "kernel: a system-call filter, as behind bubblewrap and stricter",
        "limits: time, processor time, memory of the whole tree, processes, files, disk, output",
    ),
    Level.UNSAFE_SUBPROCESS: (
        "limits, of a well-behaved program: time, memory, processes, output",
    ),
}
DOES_NOT_COVER: dict[Level, tuple[str, ...]] = {
    Level.BUBBLEWRAP: (
        "faults of the kernel itself; side channels (timing, caches, load)",
        "what the system tells about itself: versions, processor, memory, mounted paths' names",
    ),
    Level.LANDLOCK: (
        "faults of the kernel itself; side channels (timing, caches, load)",
        "that a path exists, its size and times (stat); which processes there are is hidden",
        "clean ends if the supervisor itself is killed from outside; disk and memory are "
        "bounded by looking every few hundredths of a second",
        "programs that change modes, owners or times of files: these calls fail",
    ),
    Level.UNSAFE_SUBPROCESS: (
        "files: it reads and writes whatever you can, keys and this project included",
        "network: it can reach everything that you can",
        "processes: it can stop and inspect yours, and may leave some running",
    ),
}


@dataclass(frozen=True)
class Launch:
    """How to start one sandbox: the command before the interpreter, and what it is told."""

    command: tuple[str, ...]
    environment: dict[str, str]
    setup: dict[str, Any]
    descriptors: tuple[int, ...] = ()
    """To be inherited beside the sandbox's own."""
    filter_program: bytes | None = None
    """For the descriptor whose number replaces FILTER in the command."""


FILTER = "<filter>"


def find_tool(name: str) -> str | None:
    """A program of the system, by its full path."""
    return shutil.which(name, path=_TOOLS)


def environment(folder: str) -> dict[str, str]:
    """What a sandboxed program's environment holds: nothing of ours."""
    return {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}


def bubblewrap(disk_mb: int, staged: int | None, packages: Packages = NO_PACKAGES) -> Launch:
    """A sandbox of namespaces. FileNotFoundError: bwrap or a tool of root's is not there."""
    prefix: list[str] = []
    if os.geteuid() == 0:
        prefix = _as_nobody(staged)
    command = [
        *prefix,
        _need("bwrap"),
        *("--unshare-user", "--unshare-all", "--disable-userns"),
        *("--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"),
        "--clearenv",
    ]
    for name, value in environment("/tmp").items():
        command += ["--setenv", name, value]
    command += _file_systems(system_paths(), disk_mb, packages.folders)
    command += ["--chdir", "/tmp", "--seccomp", FILTER, "--"]
    return Launch(
        command=tuple(command),
        environment={},
        setup={
            "wall": Level.BUBBLEWRAP.value,
            "folder": "/tmp",
            "uid": None,
            "confine": None,
            "packages": dict(packages.files),
        },
        descriptors=() if staged is None else (staged,),
        filter_program=seccomp.filter_program(),
    )


def _file_systems(paths: SystemPaths, disk_mb: int, wanted: Sequence[str]) -> list[str]:
    arguments: list[str] = []
    for tree in paths.trees:
        arguments += ["--ro-bind", tree, tree]
    for link, target in paths.links:
        arguments += ["--symlink", target, link]
    for folder in paths.packages:
        arguments += ["--perms", "0555", "--size", "4096", "--tmpfs", folder]
    for folder in wanted:
        arguments += ["--ro-bind", folder, folder]
    for folder in paths.packages:
        arguments += ["--remount-ro", folder]
    arguments += ["--proc", "/proc"]
    for name in _HIDDEN_PROC:
        if os.path.exists(f"/proc/{name}"):
            arguments += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    for device in DEVICES:
        arguments += ["--dev-bind", device, device]
    for link, target in (
        ("/dev/shm", "/tmp"),
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ):
        arguments += ["--symlink", target, link]
    arguments += ["--perms", "0700", "--size", str(disk_mb << 20), "--tmpfs", "/tmp"]
    # The root itself is a file system in memory, writable and without a bound.
    return [*arguments, "--remount-ro", "/"]


def landlock(
    folder: str,
    number: int,
    confine: CodeType,
    version: int,
    staged: int | None,
    packages: Packages = NO_PACKAGES,
) -> Launch:
    """A sandbox of Landlock and the filter, in a folder that it makes and removes.

    Args:
        number: counts sandboxes; as root each has a user of its own.
        confine: compiled code of `_confine.py`.
        version: of the kernel's Landlock.
    """
    root = os.geteuid() == 0
    prefix = [] if staged is None else [_need("nsenter"), f"--mount=/proc/self/fd/{staged}"]
    user = own_id(number) if root else None
    alone = user is not None and user != NOBODY
    filter_program = seccomp.filter_program(landlock=True, refuse_signals=version < 6 and not alone)
    return Launch(
        command=tuple([*prefix, "--"] if prefix else []),
        environment=environment(folder),
        setup={
            "wall": Level.LANDLOCK.value,
            "folder": folder,
            "uid": user,
            "confine": confine,
            "rules": [
                *_rules(system_paths(), folder),
                *(("read", path) for path in packages.folders),
            ],
            "filter": filter_program,
            "packages": dict(packages.files),
        },
        descriptors=() if staged is None else (staged,),
    )


def _rules(paths: SystemPaths, folder: str) -> list[tuple[str, str]]:
    """Pairs of meaning (`_confine.MEANINGS`) and path. Landlock only allows, never excepts."""
    rules: list[tuple[str, str]] = [("all", folder)]
    for device in DEVICES:
        rules.append(("device", device))
    pending = list(paths.trees)
    while pending:
        tree = pending.pop()
        if any(folder_.startswith(tree + "/") for folder_ in paths.packages):
            rules.append(("list", tree))
            pending += [os.path.join(tree, name) for name in os.listdir(tree)]
        elif tree not in paths.packages:
            rules.append(("read", tree))
    return rules


def unsafe(folder: str, packages: Packages = NO_PACKAGES) -> Launch:
    """No wall."""
    return Launch(
        command=(),
        environment=environment(folder),
        setup={
            "wall": Level.UNSAFE_SUBPROCESS.value,
            "folder": folder,
            "uid": None,
            "confine": None,
            "packages": dict(packages.files),
        },
    )


def own_id(number: int) -> int:
    """A user id that nobody else has; the common one where this container has few."""
    wanted = _UNUSED_IDS[(os.getpid() * 997 + number) % len(_UNUSED_IDS)]
    return wanted if is_mapped(wanted) else NOBODY


def is_mapped(user: int) -> bool:
    """Whether this user id exists in our user namespace."""
    with open("/proc/self/uid_map") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    return any(first <= user < first + count for first, _, count in ranges)


def _as_nobody(staged: int | None) -> list[str]:
    if staged is None:
        ids = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
        return [_need("setpriv"), *ids]
    user = ["--setuid", str(NOBODY), "--setgid", str(NOBODY), "--"]
    return [_need("nsenter"), f"--mount=/proc/self/fd/{staged}", *user]


def _need(tool: str) -> str:
    found = find_tool(tool)
    if found is None:
        raise FileNotFoundError(f"{tool} is not installed")
    return found
