"""A process as /proc tells it: who owns it, since when it runs, from whom it descends.

Linux only, as NVIDIA's driver for computing is. A process is known by its number and the tick at
which it started: the number alone may belong to another one by now. What cannot be read, because
the process is gone, hidden (`hidepid`) or in a container that cannot be seen from here, is None.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_PROC = Path("/proc")
_CONTROL_NODE = Path("/dev/nvidiactl")
_LONGEST_COMMAND = 1000
_SECONDS_A_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Seen:
    """What /proc says of a process."""

    pid: int
    started: int
    """Clock ticks from the start of the machine to its own: with `pid` its identity."""
    since: float
    """The same in seconds since the epoch."""
    parent: int
    uids: tuple[int, int, int, int]
    """Real, effective, saved and file system user id."""
    state: str
    """R, S, D, T, Z ... as in ps."""
    program: str
    """The program, and the script or module of an interpreter; no other argument."""
    command: str
    """The whole command line, unprintable characters made visible."""
    in_container: bool | None
    """Whether it has other process numbers than we have; None where that cannot be read."""

    @property
    def user(self) -> str:
        """The name of its real user, or the number where there is no name."""
        return user_name(self.uids[0])

    @property
    def ended(self) -> bool:
        """Whether it is only waiting for its parent to take notice."""
        return self.state in ("Z", "X")


def look(pid: int) -> Seen | None:
    """A process; None where there is none of this number, or only a thread."""
    folder = _PROC / str(pid)
    try:
        stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        status = _fields((folder / "status").read_text(errors="replace"))
        words = (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    try:
        if int(status["Tgid"]) != pid:
            return None
        real, effective, saved, files = (int(word) for word in status["Uid"].split())
        started, name = int(stat[19]), status["Name"]
        parent, state = int(stat[1]), stat[0]
    except (KeyError, ValueError, IndexError):  # it ended while it was read
        return None
    arguments = [word.decode(errors="replace") for word in words if word]
    return Seen(
        pid=pid,
        started=started,
        since=_boot_time() + started * _SECONDS_A_TICK,
        parent=parent,
        uids=(real, effective, saved, files),
        state=state,
        program=printable(_program(arguments) or name),
        command=printable(" ".join(arguments) or f"[{name}]")[:_LONGEST_COMMAND],
        in_container=_in_container(folder),
    )


def process_of(number: int) -> int:
    """The process of a thread, whose number `htop` shows among those of processes; else the
    number itself."""
    try:
        status = (_PROC / str(number) / "status").read_text(errors="replace")
        return int(_fields(status)["Tgid"])
    except (OSError, KeyError, ValueError):
        return number


def user_name(uid: int) -> str:
    """The name of a user, or its number as text."""
    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return str(uid)


def parents() -> dict[int, int]:
    """Process number to that of its parent, for all processes that can be seen."""
    found = {}
    for name in os.listdir(_PROC):
        if name.isdigit():
            try:
                text = (_PROC / name / "stat").read_text(errors="replace")
                found[int(name)] = int(text.rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    return found


def ancestors(pid: int, parent_of: dict[int, int]) -> set[int]:
    """Parent, grandparent and so on, without the process itself."""
    found: set[int] = set()
    while (pid := parent_of.get(pid, 0)) and pid not in found:
        found.add(pid)
    return found


def kin(pids: Iterable[int], parent_of: dict[int, int]) -> tuple[set[int], set[int]]:
    """All descendants and all ancestors of some processes."""
    roots = set(pids)
    descendants = {pid for pid in parent_of if ancestors(pid, parent_of) & roots}
    above = {each for pid in roots for each in ancestors(pid, parent_of)}
    return descendants, above


def holds_gpu(pid: int) -> bool | None:
    """Whether the process has a device file of the driver open; None where nobody can tell.

    In a container the driver may give the numbers of the host, under which quite other processes
    run here: whatever computes on a GPU has one of these files open.
    """
    if not _CONTROL_NODE.exists():
        return None
    folder = _PROC / str(pid) / "fd"
    try:
        links = os.listdir(folder)
    except OSError:
        return None
    for link in links:
        try:
            if os.readlink(folder / link).startswith("/dev/nvidia"):
                return True
        except OSError:
            continue
    return False


def printable(text: str) -> str:
    """The text without what a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _fields(status: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in status.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _program(arguments: list[str]) -> str:
    """`python train.py`, `python -m package.module`, `ray::Trainer.train`."""
    if not arguments:
        return ""
    name = os.path.basename(arguments[0]) if arguments[0].startswith("/") else arguments[0]
    name = name.split()[0] if name.split() else name
    if not os.path.basename(name).startswith("python"):
        return name
    for position, word in enumerate(arguments[1:], 1):
        if word == "-m" and position + 1 < len(arguments):
            return f"{name} -m {arguments[position + 1]}"
        if word == "-c":
            return f"{name} -c"
        if not word.startswith("-"):
            return f"{name} {os.path.basename(word)}"
    return name


def _in_container(folder: Path) -> bool | None:
    try:
        return os.readlink(folder / "ns" / "pid") != os.readlink(_PROC / "self" / "ns" / "pid")
    except OSError:
        return None


@lru_cache(maxsize=1)
def _boot_time() -> float:
    for line in (_PROC / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
