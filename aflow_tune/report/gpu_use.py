"""How much a run used its GPUs, from the lines that its sampler left in `metrics.jsonl`.

Each such line holds `gpu/use`, a mean share, and `gpu/seconds`, the time it was measured over; a
step may have several lines. All means here are weighted by that time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aflow_tune.gpus.use import LOW_USE
from aflow_tune.report.audit import Finding
from aflow_tune.report.metrics import MetricsLine

ROLE = "gpus"
"""The role under which the sampler writes."""
CHECK = "use of the GPUs"
USE, SECONDS = "gpu/use", "gpu/seconds"

_OF_DEVICE = re.compile(r"gpu/([\d:]+)/(use|memory_gib)$")


def use_by_step(lines: Sequence[MetricsLine], name: str = USE) -> list[tuple[int, float]]:
    """(step, mean share) in the order of steps."""
    sums: dict[int, tuple[float, float]] = {}
    for line in lines:
        if name in line.metrics and SECONDS in line.metrics:
            weighted, seconds = sums.get(line.step, (0.0, 0.0))
            more = line.metrics[SECONDS]
            sums[line.step] = (weighted + line.metrics[name] * more, seconds + more)
    return [(step, total / time) for step, (total, time) in sorted(sums.items()) if time > 0]


def mean_use(lines: Sequence[MetricsLine]) -> tuple[float, float] | None:
    """Mean share over the whole run, and the seconds it was measured over; None if never."""
    measured = [line.metrics for line in lines if USE in line.metrics and SECONDS in line.metrics]
    seconds = sum(metrics[SECONDS] for metrics in measured)
    if seconds <= 0:
        return None
    return sum(m[USE] * m[SECONDS] for m in measured) / seconds, seconds


def devices(lines: Sequence[MetricsLine]) -> list[str]:
    """Labels of the devices with a figure of their own."""
    names = {name for line in lines if line.role == ROLE for name in line.metrics}
    found = {match[1] for name in names if (match := _OF_DEVICE.match(name))}
    return sorted(found, key=lambda label: [int(part) for part in label.split(":")])


def peak_memory(lines: Sequence[MetricsLine], device: str) -> float | None:
    """The most memory that was in use on a device, by all its processes, in GiB."""
    name = f"gpu/{device}/memory_gib"
    return max((line.metrics[name] for line in lines if name in line.metrics), default=None)


def facts(lines: Sequence[MetricsLine]) -> list[tuple[str, str]]:
    """Labels and figures for the head of a report; none where nothing was measured."""
    found = []
    measured = mean_use(lines)
    if measured is not None:
        found.append(("GPU use", f"{measured[0]:.0%}"))
    peaks = [(label, peak_memory(lines, label)) for label in devices(lines)]
    shown = [f"{peak:.1f} GiB on {label}" for label, peak in peaks if peak is not None]
    if shown:
        found.append(("peak GPU memory", ", ".join(shown)))
    return found


def low_use(lines: Sequence[MetricsLine]) -> Finding | None:
    """The GPUs idled for most of the run."""
    measured = mean_use(lines)
    if measured is None or measured[0] >= LOW_USE:
        return None
    share, seconds = measured
    return Finding(
        CHECK,
        f"The GPUs of this run were in use {share:.0%} of the time (over {_duration(seconds)}).",
        "The curve of GPU use beside `Seconds a step` shows what it waited for: rolling out "
        "(raise explorer.runner_per_model or buffer.batch_size; slow tools, models behind an API), "
        "evaluating (quick_eval, explorer.eval_interval), or one side waiting for the other "
        "(synchronizer.sync_style, the split of GPUs).",
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
