"""GPU utilisation of a run: a thread that asks the driver once a second and records means.

Errors here must not harm the run: if the driver cannot be asked or the record cannot be written,
the thread warns once and ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aflow_tune.gpus.devices import Device, NvmlUnavailable, use_and_memory

INTERVAL_SECONDS = 1.0
LOW_USE = 0.5
"""The report warns below this mean share."""


@dataclass
class _Sum:
    """Totals of one device since the last record."""

    share_seconds: float = 0.0
    seconds: float = 0.0
    peak: int = 0

    @property
    def mean(self) -> float:
        return self.share_seconds / self.seconds


class UseLog:
    """`with UseLog(devices, step, write, warn): ...`

    Args:
        devices: the devices to watch; those whose UUID is unknown are left out.
        step: returns the last step that the run finished; called once a second.
        write: takes a step and its metrics: `gpu/use` (mean share over devices and time),
            `gpu/seconds` (the time that it covers), and for each device `gpu/LABEL/use` and
            `gpu/LABEL/memory_gib` (its peak).
        warn: called once with a message if recording ends early.
        most: how many of the devices the run uses, if it is unknown which: the mean is over so
            many of the busiest.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        step: Callable[[], int],
        write: Callable[[int, dict[str, float]], None],
        warn: Callable[[str], None],
        most: int | None = None,
    ) -> None:
        self._labels = {device.uuid: device.label for device in devices if device.uuid}
        self._step, self._write, self._warn, self._most = step, write, warn, most
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-use", daemon=True)

    def __enter__(self) -> UseLog:
        if self._labels:
            with contextlib.suppress(RuntimeError):  # no thread can be started
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
        sums, at, last, stopped = (
            defaultdict[str, _Sum](_Sum),
            self._step(),
            time.monotonic(),
            False,
        )
        while not stopped:
            stopped = self._stop.wait(INTERVAL_SECONDS)
            now = time.monotonic()
            for uuid, (share, used) in use_and_memory(list(self._labels)).items():
                each = sums[self._labels[uuid]]
                each.peak = max(each.peak, used or 0)
                if share is not None:
                    each.share_seconds += share * (now - last)
                    each.seconds += now - last
            last, step = now, self._step()
            if step == at and not stopped:
                continue
            at, found = step, {}
            measured = sorted((s for s in sums.values() if s.seconds), key=lambda s: -s.mean)
            if busiest := measured[: self._most]:
                seconds = sum(each.seconds for each in busiest)
                share = sum(each.share_seconds for each in busiest) / seconds
                found = {"gpu/use": share, "gpu/seconds": seconds / len(busiest)}
            for label, each in sums.items():
                found |= {f"gpu/{label}/use": each.mean} if each.seconds else {}
                found |= {f"gpu/{label}/memory_gib": each.peak / 2**30} if each.peak else {}
            sums.clear()
            if found:
                self._write(step, found)
