"""The quantities that reports show, and the metrics from which they are computed.

Names differ between engines and versions, so each quantity lists its sources in order of
preference; what a run does not log is absent, never zero. `gpu/use` is a mean share, `gpu/seconds`
the time over which it was measured; means of it are weighted by that time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from aflow_tune.report.metrics import MetricsLine

REWARD = "rollout/reward/mean"
GROUP_HEALTH = {
    "mixed": "experience_pipeline/group/frac_mixed",
    "all best": "experience_pipeline/group/frac_all_best",
    "all worst": "experience_pipeline/group/frac_all_worst",
}
"""Shares of the groups by their rewards. Only mixed groups have advantages other than zero."""

LOSS = ("actor/final_loss", "actor/pg_loss", "actor/loss")
KL = ("actor/ppo_kl", "actor/kl_loss", "actor/kl")
ENTROPY = ("actor/entropy_loss", "actor/entropy")
GRADIENT_NORM = ("actor/grad_norm",)
EXPLAINED_VARIANCE = ("critic/vf_explained_var",)
"""Of PPO's returns by its critic, before the critic is fitted to them; verl's name."""
MISMATCH = "rollout/mismatch"
"""Mean absolute difference of sampler's and trainer's logprobs of a fixed text, after a sync."""
LEARNING_RATE = ("actor/lr",)

_FAILURE = "rollout/failure/"
_FINISHED = re.compile(r"eval/(.*)/finished_task_count")
WRITER_METRICS = "writer/"
"""Prefix of the writer's metrics, which have a section of their own in the report."""
VALID_GRAPHS = f"rollout/{WRITER_METRICS}valid/mean"
"""Share of the rollouts of a step in which the policy wrote a valid graph."""
TRACE_METRICS = ("operator/", "sandbox/", "cost/", "unpriced_calls/")
"""Prefixes of metrics that come from a rollout's trace, not from the workflow itself."""
GPU_ROLE = "gpus"
GPU_USE, GPU_SECONDS = "gpu/use", "gpu/seconds"

_OF_DEVICE = re.compile(r"gpu/([\d:]+)/(use|memory_gib)$")
_OWN_ROLLOUT_METRICS = (
    "reward",
    "calls",
    "untrained_calls",
    "response_tokens",
    "response_truncated",
    "tokens_per_second",
)


def is_training(line: MetricsLine) -> bool:
    """Whether this line reports a finished training step."""
    return line.role == "trainer" or any(name.startswith("actor/") for name in line.metrics)


def failure_counts(metrics: Mapping[str, float]) -> dict[str, float]:
    """Failed rollouts of one step by kind; kinds that did not happen are absent."""
    counts: dict[str, float] = {}
    for name, value in metrics.items():
        if name.startswith(_FAILURE) and value > 0:
            kind = name[len(_FAILURE) :].rpartition("/")[0] or name[len(_FAILURE) :]
            counts[kind] = counts.get(kind, 0.0) + value
    return counts


def finished_evaluations(metrics: Mapping[str, float]) -> dict[str, int]:
    """The task sets whose evaluation this line reports as finished, with the logged count."""
    found = ((_FINISHED.fullmatch(name), value) for name, value in metrics.items())
    return {match[1]: int(value) for match, value in found if match}


def sampling_speed(metrics: Mapping[str, float]) -> float | None:
    """Sampled tokens per second, as logged, else (tokens per rollout / calls per rollout) x calls
    of the step / seconds: exact if every call has one choice and no rollout failed."""
    logged = metrics.get("rollout/tokens_per_second", metrics.get("explorer/tokens_per_second"))
    if logged is not None:
        return logged
    tokens = metrics.get("rollout/response_tokens/mean")
    calls = metrics.get("rollout/calls/mean")
    experiences = metrics.get("experience_pipeline/experience_count")
    seconds = metrics.get("explorer/time/wait_explore_step")
    if tokens is None or not calls or experiences is None or not seconds:
        return None
    return tokens / calls * experiences / seconds


def training_speed(metrics: Mapping[str, float]) -> float | None:
    """Tokens per second of the trainer, prompts included."""
    logged = metrics.get("trainer/tokens_per_second")
    if logged is not None:
        return logged
    tokens, seconds = metrics.get("perf/total_num_tokens"), metrics.get("time/train_step")
    return tokens / seconds if tokens is not None and seconds else None


def workflow_metrics(lines: Sequence[MetricsLine]) -> list[str]:
    """Names, without prefix, of the metrics that the workflow itself recorded in training."""
    others = ("time/", "failure/", WRITER_METRICS, *TRACE_METRICS)
    names: dict[str, None] = {}
    for key in dict.fromkeys(key for line in lines for key in line.metrics):
        name = key.removeprefix("rollout/").removesuffix("/mean")
        if key == f"rollout/{name}/mean" and not name.startswith(others):
            names[name] = None
    return [name for name in names if name not in _OWN_ROLLOUT_METRICS]


def derived(
    lines: Sequence[MetricsLine], quantity: Callable[[Mapping[str, float]], float | None]
) -> list[tuple[int, float]]:
    """(step, value) of a quantity in order of steps; the last value of a step counts."""
    values = {line.step: v for line in lines if (v := quantity(line.metrics)) is not None}
    return sorted(values.items())


def use_by_step(lines: Sequence[MetricsLine], name: str = GPU_USE) -> list[tuple[int, float]]:
    """(step, mean share) in order of steps."""
    of_step: dict[int, list[MetricsLine]] = {}
    for line in lines:
        of_step.setdefault(line.step, []).append(line)
    means = ((step, mean_gpu_use(of_step[step], name)) for step in sorted(of_step))
    return [(step, found[0]) for step, found in means if found is not None]


def mean_gpu_use(lines: Sequence[MetricsLine], name: str = GPU_USE) -> tuple[float, float] | None:
    """Mean share over all lines, and the seconds of its measurement; None if not measured."""
    measured = [x.metrics for x in lines if name in x.metrics and GPU_SECONDS in x.metrics]
    seconds = sum(metrics[GPU_SECONDS] for metrics in measured)
    if seconds <= 0:
        return None
    return sum(m[name] * m[GPU_SECONDS] for m in measured) / seconds, seconds


def gpu_devices(lines: Sequence[MetricsLine]) -> list[str]:
    """Labels of the devices with a figure of their own."""
    names = {name for line in lines if line.role == GPU_ROLE for name in line.metrics}
    found = {match[1] for name in names if (match := _OF_DEVICE.match(name))}
    return sorted(found, key=lambda label: [int(part) for part in label.split(":")])


def peak_memory(lines: Sequence[MetricsLine], device: str) -> float | None:
    """The peak memory in use on a device, by all processes, in GiB; None if not measured."""
    name = f"gpu/{device}/memory_gib"
    return max((line.metrics[name] for line in lines if name in line.metrics), default=None)


def gpu_facts(lines: Sequence[MetricsLine]) -> list[tuple[str, str]]:
    """Labels and figures for the head of a report; empty if nothing was measured."""
    found = []
    measured = mean_gpu_use(lines)
    if measured is not None:
        found.append(("GPU use", f"{measured[0]:.0%}"))
    peaks = [(label, peak_memory(lines, label)) for label in gpu_devices(lines)]
    shown = [f"{peak:.1f} GiB on {label}" for label, peak in peaks if peak is not None]
    if shown:
        found.append(("peak GPU memory", ", ".join(shown)))
    return found
