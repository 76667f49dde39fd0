"""How much a run uses its GPUs: a thread that asks the driver once a second and keeps means.

What it writes, and how a step is known, is the caller's matter. Nothing that goes wrong here may
harm the run: what cannot be asked or written is said once, and the thread ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from aflow_tune.gpus.devices import Device, NvmlUnavailable, use_and_memory

INTERVAL_SECONDS = 1.0
LOW_USE = 0.5
"""Below this mean share a warning is due."""
_AT_LEAST_SECONDS = 300.0
"""A record is written at every step, and at least so often."""
_WARN_AFTER_SECONDS = 600.0
"""Loading and a first evaluation are not judged while the run goes on."""

Write = Callable[[int, dict[str, float]], None]


@dataclass
class _Sum:
    """Of one device since the last record."""

    share_seconds: float = 0.0
    seconds: float = 0.0
    peak: int = 0


class UseLog:
    """`with UseLog(devices, step, write, warn): ...`

    Args:
        devices: what is watched; those whose UUID is unknown are left out.
        step: the number of the last step that the run finished; asked once a second.
        write: takes a step and its numbers: `gpu/use` (mean share over devices and time),
            `gpu/seconds` (the time it was measured over), and for each device `gpu/LABEL/use`
            and `gpu/LABEL/memory_gib` (its peak).
        warn: told in words, at most twice.
        interval: seconds between two looks; None: `INTERVAL_SECONDS`.
        most: how many of the devices the run uses, where it cannot be told which: the mean is
            that of the busiest so many.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        step: Callable[[], int],
        write: Write,
        warn: Callable[[str], None],
        interval: float | None = None,
        most: int | None = None,
    ) -> None:
        self._labels = {device.uuid: device.label for device in devices if device.uuid}
        self._step = step
        self._write = write
        self._warn = warn
        self._interval = INTERVAL_SECONDS if interval is None else interval
        self._most = most
        self._sums = {label: _Sum() for label in self._labels.values()}
        self._totals = {label: _Sum() for label in self._labels.values()}
        self._judged = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-use", daemon=True)

    def __enter__(self) -> UseLog:
        if self._labels:
            with contextlib.suppress(RuntimeError):  # no more threads
                self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._follow()
        except NvmlUnavailable as error:
            self._warn(f"GPU use is not recorded any more: {error.reason}")
        except OSError as error:
            self._warn(f"GPU use cannot be written: {error}")

    def _follow(self) -> None:
        at, last, written = self._step(), time.monotonic(), time.monotonic()
        while True:
            stopped = self._stop.wait(self._interval)
            now = time.monotonic()
            self._add(now - last)
            last = now
            step = self._step()
            if step != at or stopped or now - written >= _AT_LEAST_SECONDS:
                at, written = step, now
                self._record(step)
            if stopped:
                return

    def _add(self, seconds: float) -> None:
        for uuid, (share, used) in use_and_memory(list(self._labels)).items():
            label = self._labels[uuid]
            own = self._sums[label]
            own.peak = max(own.peak, used or 0)
            if share is not None:
                for each in (own, self._totals[label]):
                    each.share_seconds += share * seconds
                    each.seconds += seconds
        measured = self._used(self._totals)
        mean = _mean(measured)
        enough = sum(t.seconds for t in measured) >= _WARN_AFTER_SECONDS * len(measured) > 0
        if enough and not self._judged:
            self._judged = True
            if mean is not None and mean < LOW_USE:
                self._warn(
                    f"the GPUs of this run were in use {mean:.0%} of its first "
                    f"{_WARN_AFTER_SECONDS / 60:.0f} minutes"
                )

    def _record(self, step: int) -> None:
        found: dict[str, float] = {}
        measured = self._used(self._sums)
        mean = _mean(measured)
        if mean is not None:
            found["gpu/use"] = mean
            found["gpu/seconds"] = sum(each.seconds for each in measured) / len(measured)
        for label, each in self._sums.items():
            mean = _mean([each])
            if mean is not None:
                found[f"gpu/{label}/use"] = mean
            if each.peak:
                found[f"gpu/{label}/memory_gib"] = each.peak / 2**30
        self._sums = {label: _Sum() for label in self._sums}
        if found:
            self._write(step, found)

    def _used(self, sums: Mapping[str, _Sum]) -> list[_Sum]:
        """Those that the run is taken to use, of what could be measured."""
        measured = [each for each in sums.values() if each.seconds > 0]
        measured.sort(key=lambda each: each.share_seconds / each.seconds, reverse=True)
        return measured[: self._most]


def _mean(sums: Sequence[_Sum]) -> float | None:
    seconds = sum(each.seconds for each in sums)
    return sum(each.share_seconds for each in sums) / seconds if seconds > 0 else None
