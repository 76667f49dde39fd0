"""What tests see of a sandbox from outside: its processes, and what became of the machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from aflow_tune.sandbox import Execution, Limits, detect, run_program_sync

BACKENDS = ("bubblewrap", "landlock")


def need(policy: str) -> str:
    """Skip, saying why, where this backend cannot be built."""
    found = detect(policy)
    if found.level is None:
        pytest.skip(f"no {policy} here: {found.why}")
    return policy


def run(policy: str, source: str, stdin: str = "", **limits: float) -> Execution:
    return run_program_sync(
        source,
        stdin=stdin,
        policy=policy,
        limits=Limits(**{"seconds": 60.0, **limits}),  # type: ignore[arg-type]
    )


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder outside that every user may read and write: only a backend can protect it."""
    folder = Path(tempfile.mkdtemp(prefix="outside-"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def below() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def commands() -> list[str]:
    """Command lines of every process of the machine that we may see."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return found


def runs(mark: str) -> bool:
    """Whether a process of the machine that we may see has a text in its command line."""
    return any(mark in command for command in commands())


class Watcher:
    """Looks at something outside every hundredth of a second while a program runs."""

    def __init__(self, look: Callable[[], float]) -> None:
        self.look, self.most = look, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        while not self._stop.wait(0.01):
            self.most = max(self.most, self.look())

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def newly_below(measure: Callable[[int], float]) -> Callable[[], float]:
    """The sum of a measure over the processes that start below this one from now on: earlier
    tests have left sandboxes that wait, of every kind that they used."""
    earlier = set(below())

    def look() -> float:
        total = 0.0
        for process in set(below()) - earlier:
            with contextlib.suppress(OSError, IndexError, ValueError):
                total += measure(process.pid)
        return total

    return look


def memory_of(pid: int) -> float:
    """MB of a process, shared pages divided among their users; none of what is just being
    started and still has the memory of this process."""
    ours = Path("/proc/self/cmdline").read_bytes()
    return 0.0 if Path(f"/proc/{pid}/cmdline").read_bytes() == ours else pss(pid) / (1 << 20)


def written_by(pid: int) -> float:
    """MB that a process has written so far, wherever to. What is free on the machine's disk says
    less: others write there too."""
    return int(Path(f"/proc/{pid}/io").read_text().split("wchar:")[1].split()[0]) / (1 << 20)


def pss(pid: int) -> int:
    with contextlib.suppress(PermissionError):
        told = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(told.split("\nPss:")[1].split()[0]) * 1024
    resident = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident[1]) - int(resident[2])) * os.sysconf("SC_PAGE_SIZE")


def alive(process: psutil.Process) -> bool:
    """Whether it runs; one that ended may stay listed until its new parent takes note."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it becomes true; what ends by itself may take a moment on a busy machine."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
