"""How much a run uses its GPUs: a thread that asks the driver once a second and keeps means.

Nothing that goes wrong here may harm the run: what cannot be asked or written is said once, and the
thread ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aflow_tune.gpus.devices import Device, NvmlUnavailable, use_and_memory

INTERVAL_SECONDS = 1.0
LOW_USE = 0.5
"""Below this mean share a warning is due."""
_AT_LEAST_SECONDS = 300.0
"""A record is written at every step, and at least so often."""
_WARN_AFTER_SECONDS = 600.0
"""Loading and a first evaluation are not judged while the run goes on."""


@dataclass
class _Sum:
    """Of one device since the last record, or since the start."""

    share_seconds: float = 0.0
    seconds: float = 0.0
    peak: int = 0

    @property
    def mean(self) -> float:
        return self.share_seconds / self.seconds


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
        write: Callable[[int, dict[str, float]], None],
        warn: Callable[[str], None],
        interval: float | None = None,
        most: int | None = None,
    ) -> None:
        self._labels = {device.uuid: device.label for device in devices if device.uuid}
        self._step, self._write, self._warn = step, write, warn
        self._interval = INTERVAL_SECONDS if interval is None else interval
        self._most = most
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-use", daemon=True)

    def __enter__(self) -> UseLog:
        if self._labels:
            with contextlib.suppress(RuntimeError):  # no more threads
                self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
        sums, totals = defaultdict[str, _Sum](_Sum), defaultdict[str, _Sum](_Sum)
        at, last, judged, stopped = self._step(), time.monotonic(), False, False
        written = last
        while not stopped:
            stopped = self._stop.wait(self._interval)
            now = time.monotonic()
            for uuid, (share, used) in use_and_memory(list(self._labels)).items():
                for each in (sums[self._labels[uuid]], totals[self._labels[uuid]]):
                    each.peak = max(each.peak, used or 0)
                    if share is not None:
                        each.share_seconds += share * (now - last)
                        each.seconds += now - last
            last = now
            mean, seconds = self._mean(totals)
            if seconds >= _WARN_AFTER_SECONDS and not judged:
                judged = True
                if mean < LOW_USE:
                    after = f"{_WARN_AFTER_SECONDS / 60:.0f} minutes"
                    self._warn(f"the GPUs of this run were in use {mean:.0%} of its first {after}")
            step = self._step()
            if step == at and not stopped and now - written < _AT_LEAST_SECONDS:
                continue
            at, written = step, now
            mean, seconds = self._mean(sums)
            found = {"gpu/use": mean, "gpu/seconds": seconds} if seconds else {}
            for label, each in sums.items():
                found |= {f"gpu/{label}/use": each.mean} if each.seconds else {}
                found |= {f"gpu/{label}/memory_gib": each.peak / 2**30} if each.peak else {}
            sums.clear()
            if found:
                self._write(step, found)

    def _mean(self, sums: Mapping[str, _Sum]) -> tuple[float, float]:
        """Mean share over those that the run is taken to use, and the mean time it is over in
        seconds; 0 where nothing was measured."""
        measured = [each for each in sums.values() if each.seconds > 0]
        used = sorted(measured, key=lambda each: each.mean, reverse=True)[: self._most]
        seconds = sum(each.seconds for each in used)
        share = sum(each.share_seconds for each in used)
        return (share / seconds, seconds / len(used)) if used else (0.0, 0.0)
