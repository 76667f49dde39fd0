"""A sampling profiler of processor time for the Python threads of this process.

A thread of its own wakes every few milliseconds and samples the stack of every other thread. A
sample counts if the thread has used the processor since the previous one and is not in a call that
only waits, so a thread that sleeps in its event loop counts for nothing. A function's cumulative
share is that of the counted samples with it anywhere on the stack; its own share, with it on top
(calls into C included).

It does not see threads without Python (Ray's own, although the process's processor time includes
them), or the inside of C functions. Sampling needs the interpreter lock, so the interpreter
switches threads more often meanwhile; both slow the process down by some percent, so a profiled
round does not count as a measurement. Linux only.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from types import CodeType, FrameType
from typing import Any

INTERVAL = 0.005
"""Seconds between samples."""
MOST = 100
"""Functions in a profile."""
_SWITCH = 1e-4
"""The interpreter's switch interval in seconds. With Python's 5 ms most samples would be taken when
the other threads wait, as that is when they release the lock by themselves."""
_WAITING = {
    ("selectors.py", "select"),
    ("threading.py", "wait"),
    ("threading.py", "_wait_for_tstate_lock"),
    ("thread.py", "_worker"),
    ("worker.py", "main_loop"),
}
"""(file, function) on top of a stack that only waits: for events, a lock, work, or (Ray's worker)
C++."""


class ThreadSampler:
    """Samples between `start()` and `stop()`."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="sampler", daemon=True)
        self._spent: dict[int, float] = {}
        self._looks = self._counted = 0
        self._anywhere: Counter[CodeType] = Counter()
        self._on_top: Counter[CodeType] = Counter()
        self._started = (0.0, 0.0)
        self._switch = sys.getswitchinterval()

    def start(self) -> None:
        """Start. OSError: the system does not report processor time per thread."""
        _thread_seconds(threading.get_native_id())
        for thread in threading.enumerate():
            if thread.native_id is not None:
                self._used(thread.native_id)
        sys.setswitchinterval(_SWITCH)
        self._started = (time.perf_counter(), time.process_time())
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Stop. Returns `seconds`, `cpu_seconds` of the process, `looks` (rounds of samples),
        `counted` samples, and for the top `functions` name, cumulative and own share."""
        seconds = time.perf_counter() - self._started[0]
        cpu_seconds = time.process_time() - self._started[1]
        self._over.set()
        self._thread.join()
        sys.setswitchinterval(self._switch)
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "looks": self._looks,
            "counted": self._counted,
            "functions": [
                {
                    "name": f"{_short(code.co_filename)}:{code.co_firstlineno} {code.co_qualname}",
                    "cumulative": count / self._counted,
                    "own": self._on_top[code] / self._counted,
                }
                for code, count in self._anywhere.most_common(MOST)
            ],
        }

    def _look_on(self) -> None:
        own = threading.get_native_id()
        while not self._over.wait(self._interval):
            self._looks += 1
            frames = sys._current_frames()
            for thread in threading.enumerate():
                number, frame = thread.native_id, frames.get(thread.ident or 0)
                if number is None or number == own or frame is None:
                    continue
                if self._used(number) and not _waits(frame):
                    self._count(frame)
            del frames  # a frame keeps alive every local variable of its function

    def _used(self, number: int) -> bool:
        """Whether a thread has used the processor since the last call for it."""
        try:
            seconds = _thread_seconds(number)
        except OSError:  # it has just ended
            return False
        before = self._spent.get(number, 0.0)
        self._spent[number] = seconds
        return seconds != before  # less, if a new thread has the same id

    def _count(self, top: FrameType) -> None:
        self._counted += 1
        self._on_top[top.f_code] += 1
        codes: set[CodeType] = set()
        frame: FrameType | None = top
        while frame is not None:
            codes.add(frame.f_code)
            frame = frame.f_back
        self._anywhere.update(codes)


def _thread_seconds(number: int) -> float:
    """Processor seconds of a thread of this process, by its kernel id.

    The clock's id is computed as in the kernel (include/linux/posix-timers.h,
    `make_thread_cpuclock`): for a thread that has ended this raises OSError, where
    `time.pthread_getcpuclockid` would crash.
    """
    return time.clock_gettime((~number << 3) | 6)


def _waits(frame: FrameType) -> bool:
    code = frame.f_code
    return (code.co_filename.rpartition("/")[2], code.co_name) in _WAITING


def _short(path: str) -> str:
    """The path without the folder of installed libraries; else its last two parts."""
    for folder in ("/site-packages/", "/lib/python3.11/", "/lib/python3.12/"):
        if folder in path:
            return path.rpartition(folder)[2]
    return "/".join(path.split("/")[-2:])


def table(profile: dict[str, Any], rows: int = 25) -> list[str]:
    """Lines for the terminal: the top functions by cumulative share."""
    lines = [
        f"{profile['cpu_seconds']:.1f} s of processor time in {profile['seconds']:.1f} s; "
        f"{profile['counted']} counted looks of {profile['looks']} rounds",
        f"{'cumulative':>10} {'own':>6}  function",
    ]
    for row in profile["functions"][:rows]:
        lines.append(f"{row['cumulative']:>9.1%} {row['own']:>6.1%}  {row['name']}")
    return lines
