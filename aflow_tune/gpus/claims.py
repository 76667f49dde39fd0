"""Claims of runs on devices: a lock file for each device.

The lock is the kernel's (`flock`), so the claim ends with the process. All users of the machine
share the files. Their content names the holder and is only shown, not trusted; `filelock` would
truncate it. Containers with a `/tmp` of their own do not see the claims.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from aflow_tune.gpus.processes import printable, user_name

FOLDER = Path("/tmp")
"""Where every user may create files and none may remove another's."""

_TURN_SECONDS, _TAKE_SECONDS = 30.0, 0.2
"""The second is above 0 because readers hold the lock for a moment."""


@dataclass(frozen=True)
class Holder:
    """The content of a held lock file: the run that holds it."""

    pid: int
    uid: int
    run: str
    protected: list[int] = field(default_factory=list)

    def words(self) -> str:
        return f"run {printable(self.run)[:80]} of {user_name(self.uid)} (pid {self.pid})"


class Claims:
    """Locks on devices, held until `release()` or the end of the process."""

    def __init__(self, run: str, protected: Iterable[int] = ()) -> None:
        self._holder = Holder(os.getpid(), os.getuid(), run, sorted(protected))
        self._descriptors: list[int] = []

    def take(self, uuid: str) -> bool:
        """Claim a device by its UUID; False if another run holds it. Raises OSError."""
        descriptor = _locked(_path(uuid), _TAKE_SECONDS)
        if descriptor is None:
            return False
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, 0)
        content = asdict(self._holder) | {"since": time.time()}
        os.pwrite(descriptor, json.dumps(content).encode(), 0)
        return True

    def release(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Let only one run at a time choose: of two that each got half of what they need, both would
    fail. TimeoutError: another one has held the lock for 30 s."""
    descriptor = _locked(_path("choosing"), _TURN_SECONDS)
    if descriptor is None:
        raise TimeoutError(f"another run has held {_path('choosing')} for long")
    try:
        yield
    finally:
        os.close(descriptor)


def holder_of(uuid: str) -> Holder | None:
    """The holder of a device's lock; None if it is free."""
    return _holder(_path(uuid))


def protected_by_runs() -> set[int]:
    """Ids of the processes that all runs with claims want left alone."""
    holders = [_holder(path) for path in FOLDER.glob("aflow-tune-gpu-*.lock")]
    return {pid for holder in holders if holder is not None for pid in holder.protected}


def _holder(path: Path) -> Holder | None:
    try:
        descriptor = _open(path)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            raw = json.loads(os.pread(descriptor, 1 << 16, 0))
            protected = [int(pid) for pid in raw["protected"]]
            return Holder(int(raw["pid"]), int(raw["uid"]), str(raw["run"]), protected)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            # Any user may write anything into the file, such as Infinity or endless brackets.
            return Holder(0, os.stat(descriptor).st_uid, "unknown")
    finally:
        os.close(descriptor)
    return None


def _path(uuid: str) -> Path:
    return FOLDER / f"aflow-tune-gpu-{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock"


def _locked(path: Path, seconds: float) -> int | None:
    """A descriptor that holds the lock on this file; None: not free within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # removed or made meanwhile
            descriptor = _open(path, create=not os.path.lexists(path))
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.lstat(path), os.fstat(descriptor)):
                    return descriptor
            os.close(descriptor)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)


def _open(path: Path, *, create: bool = False) -> int:
    """A descriptor of a regular file that everybody may lock. `create` only if it is missing: with
    fs.protected_regular the kernel refuses O_CREAT on another user's existing file."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o666)
    if create:
        os.fchmod(descriptor, 0o666)  # whatever the umask says
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no plain file")
    return descriptor
