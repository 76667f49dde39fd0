"""Which devices a run has claimed: a lock file for each, that ends with the run.

The lock is the kernel's (`flock`): whatever ends the process, even a power cut, ends the claim. A
file stays behind; only a held lock counts. Files lie in one folder for all users of the machine
and say who holds them, which is shown and otherwise not trusted.

Not covered: containers with folders of their own, and other machines that see the same GPU. There
only the driver's list of processes and its memory tell that a device is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from aflow_tune.gpus.processes import printable, user_name

FOLDER = Path("/tmp")
"""Where every user may make files and none may remove another's."""

_ATTEMPTS = 5
_PAUSE_SECONDS = 0.05
"""Who only looks at a lock holds it for a moment."""
_TURN_SECONDS = 30.0
_FRESH_SECONDS = 6 * 3600.0
"""How often a held file gets a new date: those who clean the folder go by it."""
_LONGEST = 1 << 16


@dataclass(frozen=True)
class Holder:
    """What a held lock file says about its run."""

    pid: int
    uid: int
    run: str
    since: float
    protected: list[int] = field(default_factory=list)

    def words(self) -> str:
        """For people."""
        return f"run {printable(self.run)[:80]} of {user_name(self.uid)} (pid {self.pid})"


class Claims:
    """Locks on devices, by their UUID. Held until `release()` or the end of the process."""

    def __init__(self, run: str, protected: Iterable[int] = ()) -> None:
        self._holder = Holder(os.getpid(), os.getuid(), run, time.time(), sorted(protected))
        self._descriptors: dict[str, int] = {}
        self._released = threading.Event()
        threading.Thread(target=self._keep_fresh, name="gpu-claims", daemon=True).start()

    def take(self, uuid: str) -> bool:
        """Claim a device; False if another run holds it.

        Raises:
            OSError: the lock file cannot be used.
        """
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_SECONDS)
            descriptor = _open(_path(uuid), create=True)
            if descriptor is None:
                continue
            if _lock(descriptor) and _is_still(_path(uuid), descriptor):
                try:
                    self._tell(descriptor)
                except OSError:
                    os.close(descriptor)
                    raise
                self._descriptors[uuid] = descriptor
                return True
            os.close(descriptor)
        return False

    def _tell(self, descriptor: int) -> None:
        """Say who holds it. On a full disk the lock is what counts, unless others would not learn
        what they must leave alone."""
        text = json.dumps(asdict(self._holder)).encode()
        if len(text) > _LONGEST:
            raise OSError(f"protected_pids: more than a lock file holds ({_LONGEST} bytes)")
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text, 0)
        except OSError:
            if self._holder.protected:
                raise

    def give_back(self, uuid: str) -> None:
        """Let go of one device."""
        descriptor = self._descriptors.pop(uuid, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)

    def release(self) -> None:
        """Let go of all."""
        self._released.set()
        for uuid in list(self._descriptors):
            self.give_back(uuid)

    def _keep_fresh(self) -> None:
        while not self._released.wait(_FRESH_SECONDS):
            for descriptor in list(self._descriptors.values()):
                with contextlib.suppress(OSError):
                    os.utime(descriptor)


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Only one run at a time chooses: two that each got half of what they need would both fail.

    Raises:
        TimeoutError: another one has been choosing for 30 s.
    """
    deadline = time.monotonic() + _TURN_SECONDS
    while True:
        descriptor = _open(_path("choosing"), create=True)
        if descriptor is not None:
            if _lock(descriptor) and _is_still(_path("choosing"), descriptor):
                break
            os.close(descriptor)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"another run has been choosing GPUs for {_TURN_SECONDS:.0f} s: "
                f"the lock on {_path('choosing')} is held"
            )
        time.sleep(_PAUSE_SECONDS)
    try:
        yield
    finally:
        os.close(descriptor)


def holder_of(uuid: str) -> Holder | None:
    """Who holds a device; None if nobody does."""
    return _holder(_path(uuid))


def _holder(path: Path) -> Holder | None:
    try:
        descriptor = _open(path, create=False)
    except OSError:
        return None
    if descriptor is None:
        return None
    try:
        if _lock(descriptor, shared=True):
            return None
        raw = json.loads(os.pread(descriptor, _LONGEST, 0))
        return Holder(
            int(raw["pid"]),
            int(raw["uid"]),
            str(raw["run"]),
            float(raw["since"]),
            [int(pid) for pid in raw["protected"]],
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        # Anybody may write it: also Infinity, or brackets without end.
        return Holder(0, os.stat(descriptor).st_uid, "unknown", 0.0)
    finally:
        os.close(descriptor)


def protected_by_runs() -> set[int]:
    """Processes that those who hold devices want left alone: also devices that the driver does
    not name any more, as when one has fallen off the bus."""
    holders = [_holder(path) for path in FOLDER.glob("aflow-tune-gpu-*.lock")]
    return {pid for holder in holders if holder is not None for pid in holder.protected}


def _path(uuid: str) -> Path:
    return FOLDER / f"aflow-tune-gpu-{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock"


def _open(path: Path, *, create: bool) -> int | None:
    """A descriptor of a plain file that everybody may lock; None if it is not there (now).

    Made in a second attempt only: kernels refuse to 'create' a file of another user's that is
    there already (fs.protected_regular).
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        if not create:
            return None
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(descriptor, 0o666)  # whatever the umask says
        except FileExistsError:
            return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no plain file")
    return descriptor


def _lock(descriptor: int, shared: bool = False) -> bool:
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the locked file is the one under this name: it may have been removed meanwhile."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
