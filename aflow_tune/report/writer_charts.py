"""The curves of a policy that writes workflows: over training steps and over evaluations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from aflow_tune.report.charts import Curve, Point, line_chart, stacked_chart
from aflow_tune.report.curves import Chart
from aflow_tune.report.statistics import Interval
from aflow_tune.report.transcripts import plain_text
from aflow_tune.report.writer_numbers import Numbers, count
from aflow_tune.report.writer_records import WriterRecords
from aflow_tune.writer.types import Level

LEVEL_NAMES = {
    Level.CLEAN: "as written",
    Level.DEFAULT_PROMPTS: "default prompts",
    Level.SIMPLER: "simpler graph",
    Level.DEFAULT_WORKFLOW: "default workflow",
}
_LEVEL_COLOURS = {
    Level.CLEAN: 2,
    Level.DEFAULT_PROMPTS: 0,
    Level.SIMPLER: 1,
    Level.DEFAULT_WORKFLOW: 3,
}
_MOST_CURVES = 6
"""As many as the page has colours."""

Value = Callable[[Numbers], float | Interval | None]


def writer_charts(records: WriterRecords) -> list[Chart]:
    """All charts that the records have numbers for."""
    training = {step: count(runs) for step, runs in records.training.items()}
    held_out = {
        name: {step: count(runs) for step, runs in steps.items()}
        for name, steps in list(records.held_out.items())[:_MOST_CURVES]
    }
    found = [
        _chart("Valid graphs", "training: share of the runs, 95% interval", training, _valid, True),
        _held_out("Valid graphs, held-out", "share of the runs, 95% interval", held_out, _valid),
        _held_out(
            "Right answers of clean runs, held-out",
            "score; 0 where a fallback answered",
            held_out,
            lambda numbers: numbers.correct_clean,
        ),
        _levels(training),
        _named("Refusals by kind", "share of the runs that were told it", training, _refusals),
        _named("Operators used", "share of the graphs that name it", training, _operators),
        _chart(
            "Graph length",
            "calls in the source: mean, smallest to largest",
            training,
            lambda numbers: numbers.nodes,
        ),
        _chart(
            "Distinct structures",
            "among the valid graphs of a step",
            training,
            lambda numbers: float(len(numbers.structures)),
        ),
        _chart(
            "Most frequent structure",
            "its share of the valid graphs of a step",
            training,
            lambda numbers: numbers.dominance,
            True,
        ),
        _chart(
            "Distinct prompts",
            "pairs of instance and text in a step",
            training,
            lambda numbers: float(numbers.prompts),
        ),
        _cost(training),
    ]
    return [chart for chart in found if chart is not None]


def _valid(numbers: Numbers) -> Interval:
    return numbers.valid


def _refusals(numbers: Numbers) -> Mapping[str, float]:
    return numbers.refusals


def _operators(numbers: Numbers) -> Mapping[str, float]:
    return numbers.operators


def _cost(training: Mapping[int, Numbers]) -> Chart | None:
    """In dollars where all are known, else in tokens."""
    title = "Cost of a solved task"
    in_usd = all(
        n.usd_per_solved is not None or n.tokens_per_solved is None for n in training.values()
    )
    if in_usd:
        return _chart(title, "US dollars of executing", training, lambda n: n.usd_per_solved)
    return _chart(title, "tokens of executing", training, lambda n: n.tokens_per_solved)


def _levels(training: Mapping[int, Numbers]) -> Chart | None:
    curves = [
        Curve(
            LEVEL_NAMES[level],
            [Point(step, numbers.levels[level]) for step, numbers in training.items()],
            _LEVEL_COLOURS[level],
        )
        for level in Level
    ]
    if len(training) < 2 or not any(point.value for curve in curves for point in curve.points):
        return None
    title = "Which workflow answered"
    svg = stacked_chart(title, curves, _span(training), top=1.0)
    return Chart(
        title,
        "share of the runs, by what gave the answer",
        svg,
        [(curve.colour, curve.label) for curve in curves],
    )


def _named(
    title: str,
    note: str,
    training: Mapping[int, Numbers],
    shares: Callable[[Numbers], Mapping[str, float]],
) -> Chart | None:
    """A curve for each of the most frequent names; a step without one has a share of 0."""
    totals: dict[str, float] = defaultdict(float)
    for numbers in training.values():
        for name, share in shares(numbers).items():
            totals[name] += share
    most = sorted(totals, key=lambda name: (-totals[name], name))[:_MOST_CURVES]
    curves = [
        Curve(
            plain_text(name),
            [Point(step, shares(numbers).get(name, 0.0)) for step, numbers in training.items()],
            colour,
        )
        for colour, name in enumerate(most)
    ]
    if not curves:
        return None
    svg = line_chart(title, curves, _span(training), (0.0, 1.0))
    return Chart(title, note, svg, [(curve.colour, curve.label) for curve in curves])


def _chart(
    title: str, note: str, training: Mapping[int, Numbers], value: Value, unit: bool = False
) -> Chart | None:
    points = _points(training, value)
    if not points:
        return None
    bounds = (0.0, 1.0) if unit else (0.0, 0.0)
    return Chart(
        title, note, line_chart(title, [Curve(title, points)], _span(training), bounds), []
    )


def _held_out(
    title: str, note: str, held_out: Mapping[str, Mapping[int, Numbers]], value: Value
) -> Chart | None:
    curves = [
        Curve(name, points, colour)
        for colour, (name, steps) in enumerate(held_out.items())
        if (points := _points(steps, value))
    ]
    if not curves:
        return None
    every = [step for steps in held_out.values() for step in steps]
    svg = line_chart(title, curves, (min(every), max(every)), (0.0, 1.0))
    return Chart(title, note, svg, [(curve.colour, curve.label) for curve in curves])


def _points(steps: Mapping[int, Numbers], value: Value) -> list[Point]:
    points = []
    for step, numbers in steps.items():
        found = value(numbers)
        if isinstance(found, Interval):
            points.append(Point(step, found.mean, found.low, found.high))
        elif found is not None:
            points.append(Point(step, found))
    return points


def _span(steps: Mapping[int, Numbers]) -> tuple[int, int]:
    return min(steps, default=0), max(steps, default=0)
