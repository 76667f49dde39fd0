"""The numbers that a person is shown, and the metrics that they are read from.

Names differ between engines and versions, so each quantity lists its sources in order of
preference; what a run does not log is absent, never zero. Panel and report both read from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aflow_tune.report.metrics import MetricsLine

REWARD = "rollout/reward/mean"
GROUP_HEALTH = {
    "mixed": "experience_pipeline/group/frac_mixed",
    "all best": "experience_pipeline/group/frac_all_best",
    "all worst": "experience_pipeline/group/frac_all_worst",
}
"""Shares of task groups by their runs' rewards. Only a mixed group has a gradient."""

LOSS = ("actor/final_loss", "actor/pg_loss", "actor/loss")
KL = ("actor/ppo_kl", "actor/kl_loss", "actor/kl")
ENTROPY = ("actor/entropy_loss", "actor/entropy")
GRADIENT_NORM = ("actor/grad_norm",)
MISMATCH = "rollout/mismatch"
"""Mean absolute difference between what sampler and trainer score a fixed text, after a sync."""
LEARNING_RATE = ("actor/lr",)

_FAILURE = "rollout/failure/"
_EVALUATION = "eval/"
_FINISHED = "/finished_task_count"
WRITER_METRICS = "writer/"
"""How the names of what the writer's workflow records about its graphs begin; they have a section
of the report of their own."""
VALID_GRAPHS = f"rollout/{WRITER_METRICS}valid/mean"
"""Share of the runs of a step whose policy wrote a valid graph."""
TRACE_METRICS = ("operator/", "sandbox/", "cost/", "unpriced_calls/")
"""How the names of what a run's trace counts begin; not recorded by the workflow itself."""
_OWN_ROLLOUT_METRICS = (
    "reward",
    "calls",
    "untrained_calls",
    "response_tokens",
    "response_truncated",
    "tokens_per_second",
)


def is_training(line: MetricsLine) -> bool:
    """Whether the trainer logged this line when it finished a step."""
    return line.role == "trainer" or any(name.startswith("actor/") for name in line.metrics)


def failure_counts(metrics: Mapping[str, float]) -> dict[str, float]:
    """Failed runs of one step by kind; kinds that did not happen are absent."""
    counts: dict[str, float] = {}
    for name, value in metrics.items():
        if name.startswith(_FAILURE) and value > 0:
            kind = name[len(_FAILURE) :].rpartition("/")[0] or name[len(_FAILURE) :]
            counts[kind] = counts.get(kind, 0.0) + value
    return counts


def finished_evaluations(metrics: Mapping[str, float]) -> dict[str, int]:
    """The task sets whose evaluation this line closes, with their number of items."""
    return {
        name[len(_EVALUATION) : -len(_FINISHED)]: int(value)
        for name, value in metrics.items()
        if name.startswith(_EVALUATION) and name.endswith(_FINISHED)
    }


def sampling_speed(metrics: Mapping[str, float]) -> float | None:
    """Sampled tokens a second of a rollout; from its tokens and its time if not logged itself.

    Tokens of a run / calls of a run x calls of the step / seconds: exact where every call has
    one choice and no run failed.
    """
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
    """Tokens a second that the trainer computed, prompts included."""
    logged = metrics.get("trainer/tokens_per_second")
    if logged is not None:
        return logged
    tokens, seconds = metrics.get("perf/total_num_tokens"), metrics.get("time/train_step")
    return tokens / seconds if tokens is not None and seconds else None


def workflow_metrics(lines: list[MetricsLine]) -> list[str]:
    """The names, without prefix, of what the workflow itself recorded in training."""
    names: dict[str, None] = {}
    for line in lines:
        for key in line.metrics:
            name = key.removeprefix("rollout/").removesuffix("/mean")
            if (
                key == f"rollout/{name}/mean"
                and name not in _OWN_ROLLOUT_METRICS
                and not name.startswith(("time/", "failure/", WRITER_METRICS, *TRACE_METRICS))
            ):
                names[name] = None
    return list(names)


def derived(
    lines: list[MetricsLine], quantity: Callable[[Mapping[str, float]], float | None]
) -> list[tuple[int, float]]:
    """(step, value) of a quantity in the order of steps; the latest value of a step wins."""
    values: dict[int, float] = {}
    for line in lines:
        value = quantity(line.metrics)
        if value is not None:
            values[line.step] = value
    return sorted(values.items())
