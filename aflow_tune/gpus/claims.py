"""Which devices a run has claimed: a lock file for each, that ends with the run.

The lock is the kernel's (`flock`), so whatever ends the process ends the claim. The files are for
all users of the machine and say who holds them, which is shown and otherwise not trusted
(`filelock` would empty them). Containers with folders of their own do not see the claims.
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
"""Where every user may make files and none may remove another's."""

_TURN_SECONDS, _TAKE_SECONDS = 30.0, 0.2
"""Who only looks at a lock holds it for a moment."""


@dataclass(frozen=True)
class Holder:
    """What a held lock file says about its run."""

    pid: int
    uid: int
    run: str
    protected: list[int] = field(default_factory=list)

    def words(self) -> str:
        return f"run {printable(self.run)[:80]} of {user_name(self.uid)} (pid {self.pid})"


class Claims:
    """Locks on devices, by their UUID, until `release()` or the end of the process."""

    def __init__(self, run: str, protected: Iterable[int] = ()) -> None:
        self._holder = Holder(os.getpid(), os.getuid(), run, sorted(protected))
        self._descriptors: list[int] = []

    def take(self, uuid: str) -> bool:
        """Claim a device; False if another run holds it. OSError: the file cannot be used."""
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
    """Only one run at a time chooses: two that each got half of what they need would both fail.
    TimeoutError: another one has been choosing for 30 s."""
    descriptor = _locked(_path("choosing"), _TURN_SECONDS)
    if descriptor is None:
        raise TimeoutError(f"another run has held {_path('choosing')} for long")
    try:
        yield
    finally:
        os.close(descriptor)


def holder_of(uuid: str) -> Holder | None:
    """Who holds a device; None if nobody does."""
    return _holder(_path(uuid))


def protected_by_runs() -> set[int]:
    """Processes that those who hold devices, in the driver's sight or not, want left alone."""
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
            # Anybody may write it: also Infinity, or brackets without end.
            return Holder(0, os.stat(descriptor).st_uid, "unknown")
    finally:
        os.close(descriptor)
    return None


def _path(uuid: str) -> Path:
    return FOLDER / f"aflow-tune-gpu-{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock"


def _locked(path: Path, seconds: float) -> int | None:
    """A descriptor with the lock on the file of this name; None: somebody else holds it so long."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # removed, or made, meanwhile
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
    """A descriptor of a plain file that everybody may lock. It is made only where it is missing:
    kernels refuse to 'create' a file of another user's that is there (fs.protected_regular)."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o666)
    if create:
        os.fchmod(descriptor, 0o666)  # whatever the umask says
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no plain file")
    return descriptor
