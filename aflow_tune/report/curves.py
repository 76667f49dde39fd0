"""Which curves the report shows, and from which numbers. A curve without numbers is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aflow_tune.report.charts import Curve, Point, line_chart, stacked_chart
from aflow_tune.report.evaluation import Evaluations
from aflow_tune.report.metrics import MetricsLine, series
from aflow_tune.report.quantities import (
    ENTROPY,
    GRADIENT_NORM,
    GROUP_HEALTH,
    KL,
    LEARNING_RATE,
    LOSS,
    MISMATCH,
    REWARD,
    derived,
    failure_counts,
    gpu_devices,
    sampling_speed,
    training_speed,
    use_by_step,
    workflow_metrics,
)

Scale = Literal["fit", "zero", "unit", "share"]
"""The value axis: what the curves need, also zero, also 0 and 1 where the values look like
shares, or always 0 and 1."""
Named = Sequence[tuple[str, str]]
"""Metrics, each with what it is called in the chart."""

_MOST_WORKFLOW_METRICS = 6
_HEALTH_COLOURS = {"mixed": 0, "all best": 2, "all worst": 1}


@dataclass(frozen=True)
class Chart:
    """A drawing with its caption, and what its colours mean: (colour, label)."""

    title: str
    note: str
    svg: str
    legend: Sequence[tuple[int, str]]


def draw_chart(
    title: str,
    note: str,
    curves: Sequence[Curve],
    steps: tuple[int, int],
    scale: Scale = "fit",
    *,
    legend: bool | None = None,
    stacked: bool = False,
) -> Chart | None:
    """The chart of the curves that have points; None where none has.

    Args:
        steps: first and last step of the axis.
        legend: None: where there could be several curves.
        stacked: on each other, as stairs; with the scale `share` up to 1.
    """
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return None
    if stacked:
        svg = stacked_chart(title, curves, steps, 1.0 if scale == "share" else None)
        drawn = list(curves)
    else:
        values = [point.value for curve in drawn for point in curve.points]
        # Scores and rewards between 0 and 1 are shown on that whole scale once they use much of
        # it, so that noise does not look like progress.
        unit = scale == "unit" and min(values) >= 0 and 0.2 < max(values) <= 1
        bounds = (0.0, 1.0) if unit or scale == "share" else None
        svg = line_chart(title, drawn, steps, (0.0, 0.0) if scale == "zero" else bounds)
    if legend is None:
        legend = len(curves) > 1
    return Chart(title, note, svg, [(c.colour, c.label) for c in drawn] if legend else [])


def charts(lines: Sequence[MetricsLine], evaluations: Evaluations) -> list[Chart]:
    """All charts of a run, the most telling first."""
    every = [line.step for line in lines] + [step for of in evaluations.values() for step in of]
    steps = min(every, default=0), max(every, default=0)

    def logged(title: str, note: str, named: Named, scale: Scale = "fit") -> Chart | None:
        curves = [
            Curve(label, points_of(series(lines, name)), number % 6)
            for number, (name, label) in enumerate(named)
        ]
        return draw_chart(title, note, curves, steps, scale)

    def first(names: Sequence[str], label: str) -> Named:
        """The first of several names that the run logged."""
        return [(name, label) for name in names if any(name in x.metrics for x in lines)][:1]

    def labelled(names: Sequence[str]) -> Named:
        return [(name, name.removeprefix("actor/")) for name in names]

    def speed(
        title: str, note: str, quantity: Callable[[Mapping[str, float]], float | None]
    ) -> Chart | None:
        curve = Curve("tokens/s", points_of(derived(lines, quantity)))
        return draw_chart(title, note, [curve], steps, "zero")

    health = [
        Curve(kind, points_of(series(lines, name)), _HEALTH_COLOURS[kind])
        for kind, name in GROUP_HEALTH.items()
    ]
    recorded = [
        (f"rollout/{name}/mean", name) for name in workflow_metrics(lines)[:_MOST_WORKFLOW_METRICS]
    ]
    times = [
        ("explorer/time/wait_explore_step", "roll out"),
        ("time/train_step", "train"),
        ("time/sync_weight", "synchronise"),
    ]
    gpus = [
        Curve(f"GPU {label}", points_of(use_by_step(lines, f"gpu/{label}/use")), number % 6)
        for number, label in enumerate(gpu_devices(lines))
    ]
    drift = "mean difference of a fixed text's log-probabilities after each sync"
    gpu_note = "share of the time until the step was done in which any kernel ran"
    found = [
        *_held_out(evaluations, steps),
        logged("Reward of the rollouts", "mean over tasks", [(REWARD, "reward")], "unit"),
        draw_chart(
            "Health of the groups",
            "share of tasks; only mixed groups teach",
            health,
            steps,
            "share",
            stacked=True,
        ),
        logged("What the workflow recorded", "mean over tasks", recorded, "unit"),
        logged("Loss", "of the step's batch", first(LOSS, "loss")),
        logged("KL", "as the algorithm logs it", labelled(KL)),
        logged("Entropy", "nats a token", first(ENTROPY, "entropy")),
        logged("Gradient norm", "before clipping", labelled(GRADIENT_NORM), "zero"),
        logged("Sampler against trainer", drift, [(MISMATCH, "mismatch")], "zero"),
        logged("Learning rate", "", labelled(LEARNING_RATE), "zero"),
        _response_length(lines, steps)
        or logged(
            "Length of the responses",
            "tokens a rollout",
            [("rollout/response_tokens/mean", "tokens")],
            "zero",
        ),
        speed("Sampling speed", "tokens drawn a second", sampling_speed),
        speed("Training speed", "tokens a second, prompts included", training_speed),
        logged("Seconds a step", "", times, "zero"),
        draw_chart("GPU use", gpu_note, gpus, steps, "unit"),
        _failures(lines, steps),
    ]
    return [chart for chart in found if chart is not None]


def points_of(values: Sequence[tuple[int, float]]) -> list[Point]:
    """Points of (step, value)."""
    return [Point(step, value) for step, value in values]


def _held_out(evaluations: Evaluations, steps: tuple[int, int]) -> list[Chart | None]:
    found = []
    for name, of_steps in evaluations.items():
        measured = [(step, e.interval()) for step, e in of_steps.items() if e.whole]
        points = [Point(step, i.mean, i.low, i.high) for step, i in measured if i is not None]
        curve, note = Curve("held-out score", points), "mean over items, 95% interval"
        found.append(draw_chart(f"Held-out score: {name}", note, [curve], steps, "unit"))
    return found


def _response_length(lines: Sequence[MetricsLine], steps: tuple[int, int]) -> Chart | None:
    lows, highs = (dict(series(lines, f"response_length/{end}")) for end in ("min", "max"))
    points = [
        Point(step, value, lows.get(step), highs.get(step))
        for step, value in series(lines, "response_length/mean")
    ]
    note = "tokens a call: mean, shortest to longest"
    return draw_chart("Length of the responses", note, [Curve("tokens", points)], steps, "zero")


def _failures(lines: Sequence[MetricsLine], steps: tuple[int, int]) -> Chart | None:
    by_kind: dict[str, dict[int, float]] = {}
    for line in lines:
        for kind, count in failure_counts(line.metrics).items():
            by_kind.setdefault(kind, {})[line.step] = count
    curves = [
        Curve(kind, points_of(sorted(counts.items())), number % 6)
        for number, (kind, counts) in enumerate(sorted(by_kind.items()), 1)
    ]
    title, note = "Failed rollouts in training", "by kind; they cost nothing but themselves"
    return draw_chart(title, note, curves, steps, legend=True, stacked=True)
