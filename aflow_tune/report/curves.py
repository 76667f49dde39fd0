"""Which curves the report shows, and from which numbers. A curve without numbers is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aflow_tune.report.charts import Curve, Point, line_chart, stacked_chart
from aflow_tune.report.evaluation import Evaluation
from aflow_tune.report.gpu_use import devices, use_by_step
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
    sampling_speed,
    training_speed,
    workflow_metrics,
)

Scale = Literal["fit", "zero", "unit"]
"""The value axis: what the curves need, also zero, or also 0 and 1 where they look like shares."""

_MOST_WORKFLOW_METRICS = 6
_HEALTH_COLOURS = {"mixed": 0, "all best": 2, "all worst": 1}


@dataclass(frozen=True)
class Chart:
    """A drawing with its caption, and what its colours mean: (colour, label)."""

    title: str
    note: str
    svg: str
    legend: Sequence[tuple[int, str]]


def charts(
    lines: list[MetricsLine], evaluations: Mapping[str, Mapping[int, Evaluation]]
) -> list[Chart]:
    """All charts of a run, the most telling first."""
    steps = _steps(lines, evaluations)
    found = [
        *_held_out(evaluations, steps),
        _lines(
            "Reward of the rollouts", "mean over tasks", [(REWARD, "reward")], lines, steps, "unit"
        ),
        _health(lines, steps),
        _workflow(lines, steps),
        _lines("Loss", "of the step's batch", _first(LOSS, "loss", lines), lines, steps),
        _lines("KL", "as the algorithm logs it", _labelled(KL), lines, steps),
        _lines("Entropy", "nats a token", _first(ENTROPY, "entropy", lines), lines, steps),
        _lines("Gradient norm", "before clipping", _labelled(GRADIENT_NORM), lines, steps, "zero"),
        _lines(
            "Sampler against trainer",
            "mean difference of a fixed text's log-probabilities after each sync",
            [(MISMATCH, "mismatch")],
            lines,
            steps,
            "zero",
        ),
        _lines("Learning rate", "", _labelled(LEARNING_RATE), lines, steps, "zero"),
        _response_length(lines, steps),
        _speed("Sampling speed", "tokens drawn a second", sampling_speed, lines, steps),
        _speed("Training speed", "tokens a second, prompts included", training_speed, lines, steps),
        _times(lines, steps),
        _gpu_use(lines, steps),
        _failures(lines, steps),
    ]
    return [chart for chart in found if chart is not None]


def _steps(
    lines: list[MetricsLine], evaluations: Mapping[str, Mapping[int, Evaluation]]
) -> tuple[int, int]:
    every = [line.step for line in lines] + [
        step for found in evaluations.values() for step in found
    ]
    return min(every, default=0), max(every, default=0)


def _held_out(
    evaluations: Mapping[str, Mapping[int, Evaluation]], steps: tuple[int, int]
) -> list[Chart]:
    charts = []
    for name, found in evaluations.items():
        points = []
        for step, evaluation in found.items():
            interval = evaluation.interval()
            if interval is not None and evaluation.whole:
                points.append(Point(step, interval.mean, interval.low, interval.high))
        if points:
            title = f"Held-out score: {name}"
            svg = line_chart(title, [Curve("held-out score", points)], steps, _unit(points))
            charts.append(Chart(title, "mean over items, 95% interval", svg, []))
    return charts


def _health(lines: list[MetricsLine], steps: tuple[int, int]) -> Chart | None:
    curves = [
        Curve(kind, _points(series(lines, name)), _HEALTH_COLOURS[kind])
        for kind, name in GROUP_HEALTH.items()
    ]
    if not any(curve.points for curve in curves):
        return None
    return Chart(
        "Health of the groups",
        "share of tasks; only mixed groups teach",
        stacked_chart("Health of the groups", curves, steps, top=1.0),
        [(curve.colour, curve.label) for curve in curves],
    )


def _workflow(lines: list[MetricsLine], steps: tuple[int, int]) -> Chart | None:
    names = workflow_metrics(lines)[:_MOST_WORKFLOW_METRICS]
    labelled = [(f"rollout/{name}/mean", name) for name in names]
    return _lines("What the workflow recorded", "mean over tasks", labelled, lines, steps, "unit")


def _response_length(lines: list[MetricsLine], steps: tuple[int, int]) -> Chart | None:
    lows = dict(series(lines, "response_length/min"))
    highs = dict(series(lines, "response_length/max"))
    points = [
        Point(step, value, lows.get(step), highs.get(step))
        for step, value in series(lines, "response_length/mean")
    ]
    if not points:
        per_run = [("rollout/response_tokens/mean", "tokens")]
        return _lines("Length of the responses", "tokens a run", per_run, lines, steps, "zero")
    title = "Length of the responses"
    svg = line_chart(title, [Curve("tokens", points)], steps, (0.0, 0.0))
    return Chart(title, "tokens a call: mean, shortest to longest", svg, [])


def _speed(
    title: str,
    note: str,
    quantity: Callable[[Mapping[str, float]], float | None],
    lines: list[MetricsLine],
    steps: tuple[int, int],
) -> Chart | None:
    return _chart(
        title, note, [Curve("tokens/s", _points(derived(lines, quantity)))], steps, "zero"
    )


def _times(lines: list[MetricsLine], steps: tuple[int, int]) -> Chart | None:
    labelled = [
        ("explorer/time/wait_explore_step", "roll out"),
        ("time/train_step", "train"),
        ("time/sync_weight", "synchronise"),
    ]
    return _lines("Seconds a step", "", labelled, lines, steps, "zero")


def _gpu_use(lines: list[MetricsLine], steps: tuple[int, int]) -> Chart | None:
    curves = [
        Curve(f"GPU {label}", _points(use_by_step(lines, f"gpu/{label}/use")), number % 6)
        for number, label in enumerate(devices(lines))
    ]
    note = "share of the time until the step was done in which any kernel ran"
    return _chart("GPU use", note, curves, steps, "unit")


def _failures(lines: list[MetricsLine], steps: tuple[int, int]) -> Chart | None:
    by_kind: dict[str, dict[int, float]] = {}
    for line in lines:
        for kind, count in failure_counts(line.metrics).items():
            by_kind.setdefault(kind, {})[line.step] = count
    curves = [
        Curve(kind, _points(sorted(counts.items())), (index + 1) % 6)
        for index, (kind, counts) in enumerate(sorted(by_kind.items()))
    ]
    if not curves:
        return None
    return Chart(
        "Failed runs in training",
        "by kind; they cost nothing but themselves",
        stacked_chart("Failed runs in training", curves, steps),
        [(curve.colour, curve.label) for curve in curves],
    )


def _lines(
    title: str,
    note: str,
    labelled: Sequence[tuple[str, str]],
    lines: list[MetricsLine],
    steps: tuple[int, int],
    scale: Scale = "fit",
) -> Chart | None:
    curves = [
        Curve(label, _points(series(lines, name)), index % 6)
        for index, (name, label) in enumerate(labelled)
    ]
    return _chart(title, note, curves, steps, scale)


def _chart(
    title: str,
    note: str,
    curves: Sequence[Curve],
    steps: tuple[int, int],
    scale: Scale,
) -> Chart | None:
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return None
    bounds = (0.0, 0.0) if scale == "zero" else None
    if scale == "unit":
        bounds = _unit([point for curve in drawn for point in curve.points])
    legend = [(curve.colour, curve.label) for curve in drawn] if len(curves) > 1 else []
    return Chart(title, note, line_chart(title, drawn, steps, bounds), legend)


def _unit(points: Sequence[Point]) -> tuple[float, float] | None:
    """Scores and rewards between 0 and 1 are shown on that whole scale once they use much of it,
    so that noise does not look like progress."""
    values = [point.value for point in points]
    return (0.0, 1.0) if min(values) >= 0 and 0.2 < max(values) <= 1 else None


def _points(values: Sequence[tuple[int, float]]) -> list[Point]:
    return [Point(step, value) for step, value in values]


def _labelled(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, name.removeprefix("actor/")) for name in names]


def _first(names: Sequence[str], label: str, lines: list[MetricsLine]) -> list[tuple[str, str]]:
    """The first of several names that the run logged."""
    return [(name, label) for name in names if any(name in line.metrics for line in lines)][:1]
