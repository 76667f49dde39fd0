"""The backends: how to start a sandbox of each, what each covers, and what this machine supports.

A confined program never runs as root. Tools are looked up on a fixed system path, not the caller's.
A backend counts as available once a sandbox of it has started and passed a check: bubblewrap's is
made from outside at every start (`process.py`); Landlock's once, by a program that tries to escape,
and every later start refuses to run its program if a step of confinement fails.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.sandbox import _confine, seccomp
from aflow_tune.sandbox.policy import find_packages
from aflow_tune.sandbox.process import FILTER, Job, Launch, Sandbox, code_of
from aflow_tune.sandbox.types import BackendFailed, Level, Limits
from aflow_tune.sandbox.view import DEVICES, SystemPaths, stage, system_paths

NOBODY = 65534
_TOOLS = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_HIDDEN_PROC = ("kcore", "keys", "key-users", "kallsyms", "timer_list", "sched_debug", "cmdline")
_UNUSED_IDS = range(2_000_000_000, 2_100_000_000)
"""User ids that no system assigns: above the ranges of containers (systemd's UIDS-GIDS.md)."""

INSTALL = "sudo apt-get install -y bubblewrap"
"""The command that installs bubblewrap on Debian and Ubuntu."""

_CONFINED = (
    "files: only a read-only system, the interpreter and one private folder",
    "network: none; no socket can be made",
    "processes: none but its own in reach, and none left behind",
    "identity: no environment, no capabilities; started by root, another user",
    "kernel: a system-call filter",
    "limits: time, processor time, memory of the whole tree, processes, files, disk, output",
)
_OPEN = "faults of the kernel itself; side channels; what the system tells about itself"
# What each backend covers and what not; details are in docs/sandbox.md.
COVERS: dict[Level, tuple[str, ...]] = {
    Level.BUBBLEWRAP: (*_CONFINED, "own namespaces, which the kernel ends as a whole"),
    Level.LANDLOCK: _CONFINED,
    Level.UNSAFE_SUBPROCESS: ("limits, of a well-behaved program",),
}
DOES_NOT_COVER: dict[Level, tuple[str, ...]] = {
    Level.BUBBLEWRAP: (_OPEN,),
    Level.LANDLOCK: (
        _OPEN,
        "that a path exists, its size and times (stat)",
        "clean ends if the supervisor itself is killed from outside",
        "programs that change modes, owners or times of files: these calls fail",
    ),
    Level.UNSAFE_SUBPROCESS: (
        "files: it reads and writes whatever you can, keys and this project included",
        "network: it can reach everything that you can",
        "processes: it can stop and inspect yours, and may leave some running",
    ),
}
OLDEST_LANDLOCK = 3  # the first version that covers truncation
_numbers = itertools.count()


@dataclass(frozen=True)
class Detection:
    """The backend to use, or None, and for each that was tried the reason."""

    level: Level | None
    reasons: dict[str, str]

    @property
    def why(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=_TOOLS)


def check_machine(level: Level) -> None:
    """Raises BackendFailed if this machine lacks what the level needs."""
    if not seccomp.supported():
        raise BackendFailed("needs Linux on x86-64 or AArch64")
    if level is Level.BUBBLEWRAP and find_tool("bwrap") is None:
        raise BackendFailed("bwrap is not installed")
    if level is Level.LANDLOCK and (version := _confine.version()) < OLDEST_LANDLOCK:
        raise BackendFailed(f"Landlock {version} is offered, {OLDEST_LANDLOCK} needed: Linux 6.2")
    if os.geteuid() == 0 and not is_mapped(NOBODY):
        raise BackendFailed("root of a namespace that has no other user to run programs as")
    stage(())


def launch(level: Level, disk_mb: int, names: tuple[str, ...] = ()) -> Launch:
    """How to start a sandbox whose program may import the packages `names`. Raises BadInput: one is
    not installed; BackendFailed: one cannot be reached; FileNotFoundError: a tool is missing."""
    files, wanted = find_packages(names)
    # An unguessable name; the sandbox makes the folder, and fails if it exists.
    folder = f"{os.path.realpath(tempfile.gettempdir())}/aflow-tune-{secrets.token_hex(12)}"
    if level is Level.BUBBLEWRAP:
        folder = "/tmp"
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
    setup: dict[str, Any] = {"backend": level.value, "folder": folder}
    setup |= {"uid": None, "confine": None, "packages": files}
    if level is Level.UNSAFE_SUBPROCESS:
        return Launch((), environment, setup)
    staged = stage(wanted)
    descriptors = () if staged is None else (staged,)
    prefix: list[str] = []
    if staged is not None:
        prefix = [_need("nsenter"), f"--mount=/proc/self/fd/{staged}"]
    if level is Level.BUBBLEWRAP:
        if staged is not None:
            prefix += ["--setuid", str(NOBODY), "--setgid", str(NOBODY), "--"]
        elif os.geteuid() == 0:
            ids = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
            prefix = [_need("setpriv"), *ids]
        command = [*prefix, *_bubblewrap(environment, disk_mb, wanted)]
        return Launch(tuple(command), {}, setup, descriptors, seccomp.filter_program())
    version, user = _confine.version(), None
    if os.geteuid() == 0:
        user = _UNUSED_IDS[(os.getpid() * 997 + next(_numbers)) % len(_UNUSED_IDS)]
        # A container with few user ids has NOBODY only.
        user = user if is_mapped(user) else NOBODY
    alone = user is not None and user != NOBODY
    setup["uid"], setup["confine"] = user, code_of("_confine")
    setup["rules"] = _rules(system_paths(), folder)
    setup["rules"] += [("read", path) for path in wanted]
    refuse = version < 6 and not alone
    setup["filter"] = seccomp.filter_program(landlock=True, refuse_signals=refuse)
    return Launch(tuple([*prefix, "--"] if prefix else []), environment, setup, descriptors)


def _bubblewrap(environment: dict[str, str], disk_mb: int, wanted: Sequence[str]) -> list[str]:
    paths = system_paths()
    arguments = [
        _need("bwrap"),
        *("--unshare-user", "--unshare-all", "--disable-userns"),
        *("--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"),
        *("--die-with-parent", "--as-pid-1", "--hostname", "sandbox"),
        "--clearenv",
    ]
    for name, value in environment.items():
        arguments += ["--setenv", name, value]
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
    streams = [(f"/dev/std{n}", f"/proc/self/fd/{i}") for i, n in enumerate(("in", "out", "err"))]
    for link, target in (("/dev/shm", "/tmp"), ("/dev/fd", "/proc/self/fd"), *streams):
        arguments += ["--symlink", target, link]
    arguments += ["--perms", "0700", "--size", str(disk_mb << 20), "--tmpfs", "/tmp"]
    # The root is a file system in memory, writable and unbounded unless remounted.
    return [*arguments, "--remount-ro", "/", "--chdir", "/tmp", "--seccomp", FILTER, "--"]


def _rules(paths: SystemPaths, folder: str) -> list[tuple[str, str]]:
    """Pairs of kind (`_confine.MEANINGS`) and path. Landlock has no exceptions below a path."""
    rules = [("all", folder), *(("device", device) for device in DEVICES)]
    pending = list(paths.trees)
    while pending:
        tree = pending.pop()
        if any(hidden.startswith(tree + "/") for hidden in paths.packages):
            rules.append(("list", tree))
            pending += [os.path.join(tree, name) for name in os.listdir(tree)]
        elif tree not in paths.packages:
            rules.append(("read", tree))
    return rules


def is_mapped(user: int) -> bool:
    """Whether our user namespace maps this user id."""
    with open("/proc/self/uid_map") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    return any(first <= user < first + count for first, _, count in ranges)


def _need(tool: str) -> str:
    found = find_tool(tool)
    if found is None:
        raise FileNotFoundError(f"{tool} is not installed")
    return found


_PROBE = """
import os, socket, sys
secret, target, parent = sys.stdin.read().split("\\n")
done = []
def attempt(name, function):
    try:
        function()
        done.append(name)
    except OSError:
        pass
attempt("read", lambda: open(secret).read())
attempt("write", lambda: open(target, "w").close())
attempt("signal", lambda: os.kill(int(parent), 0))
attempt("socket", lambda: socket.socket())
attempt("environment", lambda: open(f"/proc/{parent}/environ", "rb").read())
print(" ".join(done) or "contained")
"""


async def attack(sandbox: Sandbox) -> None:
    """Run a program that tries to escape. Raises BackendFailed: an attempt succeeded."""
    with tempfile.TemporaryDirectory(prefix="aflow-tune-probe-") as name:
        os.chmod(name, 0o777)
        secret, target = Path(name) / "secret", Path(name) / "target"
        secret.write_text("not for you")
        stdin = f"{secret}\n{target}\n{os.getpid()}"
        execution = await sandbox.run(Job(_PROBE, stdin, Limits(), {}, False))
    if execution.stdout != "contained\n":
        reason = execution.stdout.strip() or execution.stderr.strip()[-200:]
        raise BackendFailed(f"a program in it could do this or failed: {reason}")


def unavailable(policy: str, found: Detection) -> str:
    """The message for when no backend can be used."""
    told = f"no sandbox can be built here (sandbox: {policy}), so the program was not run"
    tried = [f"    {name}: {reason}" for name, reason in found.reasons.items()]
    fix = f"    do: install bubblewrap on Linux: {INSTALL}"
    if find_tool("bwrap") is not None:
        fix = "    do: allow user namespaces to bwrap (docs/sandbox.md), or use Linux 6.2 or later"
    trust = "    or, only for code that you trust as your own, set `sandbox: unsafe_subprocess`"
    return "\n".join([told, *tried, fix, trust])


def unsafe_warning() -> str:
    """The warning about what a plain subprocess does not protect from."""
    told = "programs that a model wrote run unconfined, with your rights. Not protected:"
    lines = [f"  - {line}" for line in DOES_NOT_COVER[Level.UNSAFE_SUBPROCESS]]
    return "\n".join([f"aflow-tune: sandbox: unsafe_subprocess: {told}", *lines])
