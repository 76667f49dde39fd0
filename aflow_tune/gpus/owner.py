"""Whose processes may be ended, and why each other one may not.

One's own are those of the user who typed the command: also under `sudo`, where the kernel would
let everything pass. A process is refused if any of its four user ids is another one, and if it
could be somebody's in a way that cannot be seen from here: a refusal costs a `kill` by hand, a
mistake costs somebody's week.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from aflow_tune.errors import BadInput, Fault
from aflow_tune.gpus.processes import (
    Seen,
    ancestors,
    holds_gpu,
    kin,
    parents,
    process_of,
    user_name,
)


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
        mine = {os.getpid(), *ancestors(os.getpid(), tree)}
        protected = {process_of(pid) for pid in self.protected}
        below, above = kin(protected, tree)
        found: dict[int, str] = {}
        for pid, seen in processes:
            why = self._refusal(pid, seen, mine, protected, below, above)
            if why is not None:
                found[pid] = why
        return found

    def _refusal(
        self,
        pid: int,
        seen: Seen | None,
        mine: set[int],
        protected: set[int],
        below: set[int],
        above: set[int],
    ) -> str | None:
        if pid in mine or pid <= 1:
            return "it is this command, or runs it"
        if pid in protected:
            return "it is protected"
        if pid in below:
            return "it descends from a protected process"
        if pid in above:
            return "a protected process descends from it"
        if seen is None:
            return "it cannot be seen from here: gone, hidden, or in another container or the host"
        others = [uid for uid in seen.uids if uid != self.owner]
        if others:
            return f"it is of user {user_name(others[0])}, not of {user_name(self.owner)}"
        if self.owner == _nobody() and not _sees_all_users():
            return "many users have this id here: users of other containers cannot be told apart"
        if self.owner == 0 and seen.in_container is not False:
            return "root in another container may be anybody"
        if not seen.ended and holds_gpu(pid) is False:
            return (
                "it has no GPU open: the driver means another process of this number, in a "
                "container or the host"
            )
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
