"""The processes on GPUs: what they are, whose they are, and which of them may be ended.

What cannot be read is None. The user's own processes are those of the user who typed the command,
also under `sudo`, where the kernel would permit every signal. A process that might be somebody
else's, as far as can be seen from here, is refused: ending it could destroy days of work.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from aflow_tune.errors import BadInput

_CONTROL_NODE = Path("/dev/nvidiactl")
_LONGEST_COMMAND = 1000


@dataclass(frozen=True)
class Seen:
    """A process at one moment; equal to a later `Seen` of the same process."""

    pid: int
    since: float
    """Start time in seconds since the epoch; with `pid` its identity."""
    uids: tuple[int, int, int] = field(compare=False)
    """Real, effective and saved."""
    ended: bool = field(compare=False)
    """A zombie."""
    program: str = field(compare=False)
    """The program; for Python with its script or module, but without other arguments."""
    command: str = field(compare=False)
    in_container: bool | None = field(compare=False)
    """Whether it is in another PID namespace than this process; None if that cannot be read."""
    process: psutil.Process = field(compare=False, repr=False)

    @property
    def user(self) -> str:
        return user_name(self.uids[0])


def look(pid: int) -> Seen | None:
    """A process by its id; None if there is none, or it cannot be read."""
    if pid <= 0 or not psutil.pid_exists(pid):
        return None
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            arguments: list[str] = []
            in_container: bool | None = None
            with contextlib.suppress(OSError):
                spaces = (os.readlink(f"/proc/{it}/ns/pid") for it in (pid, "self"))
                in_container = len({*spaces}) > 1
            with contextlib.suppress(psutil.ZombieProcess):
                arguments = [word for word in process.cmdline() if word]
            name = process.name()
            return Seen(
                pid=pid,
                since=process.create_time(),
                uids=tuple(process.uids()),
                ended=process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD),
                program=printable(_program(arguments) or name),
                command=printable(" ".join(arguments) or f"[{name}]")[:_LONGEST_COMMAND],
                in_container=in_container,
                process=process,
            )
    except (psutil.Error, OSError, OverflowError):
        return None


def user_name(uid: int) -> str:
    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return str(uid)


def printable(text: str) -> str:
    """The text with unprintable characters escaped, so that a terminal does not obey them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def invoking_user() -> int:
    """The id of the user who typed the command, also under sudo. BadInput: bad `SUDO_UID`."""
    text = os.environ.get("SUDO_UID")
    if os.geteuid() != 0 or os.getuid() != 0 or text is None:
        return os.getuid()
    if not (text.isascii() and text.isdigit()):
        title = "It cannot be told whose processes are yours."
        raise BadInput.of(title, "SUDO_UID", "a user id", repr(text), "unset SUDO_UID")
    return int(text)


@contextlib.contextmanager
def with_rights_of(uid: int) -> Iterator[None]:
    """As root, drop to this user's rights for the block, so that the kernel too refuses to signal
    anybody else's process."""
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
    """Decides what must not be signalled: processes of others than `owner`, this command, and
    `protected` ones with their descendants and ancestors."""

    owner: int
    protected: frozenset[int] = frozenset()

    def refusals(self, processes: Iterable[tuple[int, Seen | None]]) -> dict[int, str]:
        """Why processes may not be ended, by id; those that may be ended are left out."""
        parent = {each.pid: each.info["ppid"] or 0 for each in psutil.process_iter(["ppid"])}
        above = {each for pid in self.protected for each in _ancestors(pid, parent)}
        mine = {os.getpid(), *_ancestors(os.getpid(), parent)}
        found: dict[int, str] = {}
        for pid, seen in processes:
            others = [] if seen is None else [uid for uid in seen.uids if uid != self.owner]
            if pid in mine or pid <= 1:
                found[pid] = "it is this command, or runs it"
            elif pid in self.protected:
                found[pid] = "it is protected"
            elif _ancestors(pid, parent) & self.protected:
                found[pid] = "it descends from a protected process"
            elif pid in above:
                found[pid] = "a protected process descends from it"
            elif seen is None:
                found[pid] = "it cannot be seen: gone, hidden, or in another container or the host"
            elif others:
                owners = f"{user_name(others[0])}, not of {user_name(self.owner)}"
                found[pid] = f"it is of user {owners}"
            elif self.owner == 0 and seen.in_container is not False:
                found[pid] = "root in another container may be anybody"
            elif not seen.ended and not _may_hold_gpu(pid):
                found[pid] = "it has no GPU open: the driver means a process of another container"
        return found


def _ancestors(pid: int, parent: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while (pid := parent.get(pid, 0)) and pid not in found:
        found.add(pid)
    return found


def _may_hold_gpu(pid: int) -> bool:
    """False if the process has no device file of the driver open, which every process on a GPU has.
    In a container the driver may report ids of the host, which name other processes here."""
    if not _CONTROL_NODE.exists():
        return True
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return True
    return any(os.path.realpath(link).startswith("/dev/nvidia") for link in links)


def _program(arguments: list[str]) -> str:
    """`python train.py`, `python -m package.module`, `ray::Trainer.train`."""
    name = os.path.basename((arguments or [""])[0].split(" ")[0])
    if not name.startswith("python"):
        return name
    for position, word in enumerate(arguments[1:], 1):
        if word == "-m":
            return " ".join([name, *arguments[position : position + 2]])
        if word == "-c" or not word.startswith("-"):
            return f"{name} {os.path.basename(word)}"
    return name
