"""The processes on GPUs: what they are, whose they are, and which of them may be ended.

What a process is comes from psutil, which knows one by its number and its start: the number alone
may belong to another process by now. What cannot be read, because the process is gone, hidden
(`hidepid`) or in a container that cannot be seen from here, is None.

One's own are those of the user who typed the command, also under `sudo`, where the kernel would let
everything pass. What could be somebody else's in a way that cannot be seen from here is refused: a
refusal costs a `kill` by hand, a mistake costs somebody's week.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from aflow_tune.errors import BadInput, Fault

_CONTROL_NODE = Path("/dev/nvidiactl")
_LONGEST_COMMAND = 1000


@dataclass(frozen=True)
class Seen:
    """A process as it was when it was looked at. Equal to a later look at the same process."""

    pid: int
    since: float
    """When it started, in seconds since the epoch: with `pid` its identity."""
    uids: tuple[int, int, int] = field(compare=False)
    """Real, effective and saved user id."""
    state: str = field(compare=False)
    program: str = field(compare=False)
    """The program, and the script or module of an interpreter; no other argument."""
    command: str = field(compare=False)
    """The whole command line, unprintable characters made visible."""
    in_container: bool | None = field(compare=False)
    """Whether it has other process numbers than we have; None where that cannot be read."""
    process: psutil.Process = field(compare=False, repr=False)

    @property
    def user(self) -> str:
        """The name of its real user, or the number where there is no name."""
        return user_name(self.uids[0])

    @property
    def ended(self) -> bool:
        """Whether it is only waiting for its parent to take notice."""
        return self.state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def look(pid: int) -> Seen | None:
    """A process; None where there is none of this number, or only a thread."""
    if pid <= 0 or not psutil.pid_exists(pid):
        return None
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            try:
                arguments = [word for word in process.cmdline() if word]
            except psutil.ZombieProcess:
                arguments = []
            name = process.name()
            return Seen(
                pid=pid,
                since=process.create_time(),
                uids=tuple(process.uids()),
                state=process.status(),
                program=printable(_program(arguments) or name),
                command=printable(" ".join(arguments) or f"[{name}]")[:_LONGEST_COMMAND],
                in_container=_in_container(pid),
                process=process,
            )
    except (psutil.Error, OSError, OverflowError):
        return None


def parents() -> dict[int, int]:
    """Process number to that of its parent, for all processes that can be seen."""
    return {each.pid: each.info["ppid"] or 0 for each in psutil.process_iter(["ppid"])}


def user_name(uid: int) -> str:
    """The name of a user, or its number as text."""
    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return str(uid)


def printable(text: str) -> str:
    """The text without what a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def invoking_user() -> int:
    """The id of the user who typed the command.

    Raises:
        BadInput: `SUDO_UID` is set to what is no user id, so that nobody can tell.
    """
    if os.geteuid() != 0 or os.getuid() != 0:
        return os.getuid()
    text = os.environ.get("SUDO_UID")
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit()):
        raise BadInput(
            "Nobody can tell whose processes are yours.",
            [Fault("SUDO_UID", "a user id, as sudo sets it", repr(text), "unset SUDO_UID")],
        )
    return int(text)


@contextlib.contextmanager
def with_rights_of(uid: int) -> Iterator[None]:
    """As root: for the block with no more rights than this user, so that the kernel too refuses
    to signal anybody else's process. For others there is nothing to lay down."""
    if os.geteuid() != 0 or uid == 0:
        yield
        return
    before = os.getresuid()
    os.setresuid(uid, uid, 0)
    try:
        yield
    finally:
        os.setresuid(*before)


@dataclass(frozen=True)
class Guard:
    """What must not be signalled.

    Args:
        owner: the user whose processes may be.
        protected: processes that may not, nor what descends from them, nor what they descend
            from: its end could be theirs.
    """

    owner: int
    protected: frozenset[int] = field(default_factory=frozenset)

    def refusals(self, processes: Iterable[tuple[int, Seen | None]]) -> dict[int, str]:
        """Process id to why it may not be ended; those that may be are left out."""
        tree = parents()
        protected = {_process_of(pid) for pid in self.protected}
        above = {each for pid in protected for each in _ancestors(pid, tree)}
        mine = {os.getpid(), *_ancestors(os.getpid(), tree)}
        found: dict[int, str] = {}
        for pid, seen in processes:
            if pid in mine or pid <= 1:
                found[pid] = "it is this command, or runs it"
            elif pid in protected:
                found[pid] = "it is protected"
            elif _ancestors(pid, tree) & protected:
                found[pid] = "it descends from a protected process"
            elif pid in above:
                found[pid] = "a protected process descends from it"
            elif (why := self._not_ours(seen)) is not None:
                found[pid] = why
        return found

    def _not_ours(self, seen: Seen | None) -> str | None:
        if seen is None:
            return "it cannot be seen from here: gone, hidden, or in another container or the host"
        others = [uid for uid in seen.uids if uid != self.owner]
        if others:
            return f"it is of user {user_name(others[0])}, not of {user_name(self.owner)}"
        if self.owner == _nobody() and not _sees_all_users():
            return "many users have this id here: users of other containers cannot be told apart"
        if self.owner == 0 and seen.in_container is not False:
            return "root in another container may be anybody"
        if not seen.ended and _holds_gpu(seen.pid) is False:
            return (
                "it has no GPU open: the driver means another process of this number, in a "
                "container or the host"
            )
        return None


def _ancestors(pid: int, parent_of: dict[int, int]) -> set[int]:
    """Parent, grandparent and so on, without the process itself."""
    found: set[int] = set()
    while (pid := parent_of.get(pid, 0)) and pid not in found:
        found.add(pid)
    return found


def _process_of(number: int) -> int:
    """The process of a thread, whose number `htop` shows among those of processes."""
    try:
        status = Path(f"/proc/{number}/status").read_text(errors="replace")
        return int(status.partition("Tgid:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return number


def _holds_gpu(pid: int) -> bool | None:
    """Whether the process has a device file of the driver open; None where nobody can tell.

    In a container the driver may give the numbers of the host, under which quite other processes
    run here: whatever computes on a GPU has one of these files open.
    """
    if not _CONTROL_NODE.exists():
        return None
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    for link in links:
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith("/dev/nvidia"):
                return True
    return False


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


def _in_container(pid: int) -> bool | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _nobody() -> int:
    """The id that users without one in this container are shown as."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def _sees_all_users() -> bool:
    try:
        return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    except OSError:
        return False
