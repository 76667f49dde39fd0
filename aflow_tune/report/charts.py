"""The charts of the reports, as inline SVG.

Colours (0 to 5) are CSS classes of the page. Labels are escaped here, so a chart goes into a page
unchanged. `charts` returns the charts of a run's page, `draw` draws a list of charts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal, NamedTuple

from markupsafe import Markup

from aflow_tune.report.evaluation import Evaluations
from aflow_tune.report.metrics import MetricsLine, series
from aflow_tune.report.quantities import (
    ENTROPY,
    EXPLAINED_VARIANCE,
    GRADIENT_NORM,
    GROUP_HEALTH,
    KL,
    LEARNING_RATE,
    LOSS,
    MISMATCH,
    REWARD,
    derived,
    gpu_devices,
    sampling_speed,
    training_speed,
    use_by_step,
    workflow_metrics,
)

_WIDTH, _HEIGHT = 400.0, 185.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 9.0, 9.0, 24.0
_MOST_DOTS = 60
_MOST_WORKFLOW_METRICS = 6
_TIMES = {
    "explorer/time/wait_explore_step": "roll out",
    "time/train_step": "train",
    "time/sync_weight": "synchronise",
}
_LENGTHS = {
    "response_length/mean": "of a call, mean",
    "response_length/max": "of a call, longest",
    "rollout/response_tokens/mean": "of a rollout, mean",
}

Bounds = tuple[float, float]


class Point(NamedTuple):
    """A value at a step, perhaps with its interval."""

    step: int
    value: float
    low: float | None = None
    high: float | None = None


class Curve(NamedTuple):
    """One line of a chart, in order of steps; an empty label stands for the chart's title."""

    label: str
    points: Sequence[Point]
    colour: int = 0


class Mark(NamedTuple):
    """A value at a position of any axis; `label` is its tooltip."""

    at: float
    value: float
    label: str
    low: float | None = None
    high: float | None = None
    colour: int = 0


class _Frame:
    """Maps steps and values to the drawing, and draws axes and grid."""

    def __init__(self, steps: Bounds, marks: Iterable[Point | Mark], more: Sequence[float]) -> None:
        self.first, self.last = steps
        values = [value for m in marks for value in (m.value, m.low, m.high) if value is not None]
        low, high = min([*values, *more]), max([*values, *more])
        self.ticks = nice_ticks(low, high)
        self.low, self.high = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def x(self, step: float) -> str:
        span = self.last - self.first
        share = (step - self.first) / span if span else 0.5
        return f"{_LEFT + share * (_WIDTH - _LEFT - _RIGHT):.1f}"

    def y(self, value: float) -> str:
        share = (value - self.low) / (self.high - self.low)
        return f"{_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(at)},{self.y(value)}" for at, value in points)

    def svg(
        self, title: str, drawing: Sequence[str], places: Sequence[tuple[float, str]] = ()
    ) -> str:
        """The drawing with its axes; ticks of the lower one are at `places`, else at steps."""
        places = places or [(at, str(at)) for at in step_ticks(int(self.first), int(self.last))]
        left, right, bottom = f"{_LEFT:g}", f"{_WIDTH - _RIGHT:g}", _HEIGHT - _BOTTOM
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(_line("grid", left, right, y, y))
            parts.append(_text(f"{_LEFT - 6:g}", y, number(tick), "end", ' dy="0.35em"'))
        parts += [_text(self.x(at), f"{bottom + 17:g}", name) for at, name in places]
        parts += [*drawing, _line("axis", left, right, f"{bottom:g}", f"{bottom:g}")]
        box = f'viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(title)}"'
        return f"<svg {box}>{''.join(parts)}</svg>"


def line_chart(
    title: str, curves: Sequence[Curve], steps: tuple[int, int], bounds: Sequence[float] = ()
) -> str:
    """Lines over steps, each with a band where its points have bounds.

    There is at least one point. `steps` are the first and last of the axis, which charts of one
    page share; `bounds` are values that the vertical axis has to include.
    """
    frame = _Frame(steps, [point for curve in curves for point in curve.points], bounds)
    drawing = []
    for label, points, colour in curves:
        over = [(p.step, p.high) for p in points if p.low is not None and p.high is not None]
        under = [(p.step, p.low) for p in points if p.low is not None and p.high is not None]
        if len(over) > 1:
            band = frame.path([*over, *reversed(under)])
            drawing.append(f'<polygon class="band c{colour}" points="{band}"/>')
        path = frame.path([(p.step, p.value) for p in points])
        drawing.append(f'<polyline class="line c{colour}" points="{path}"/>')
        for p in points if len(points) <= _MOST_DOTS else ():
            told = (f"{label}, step {p.step}", p.value, p.low, p.high)
            drawing.append(_dot(frame.x(p.step), frame.y(p.value), "2.6", colour, *told))
    return frame.svg(title, drawing)


def scatter_chart(
    title: str,
    marks: Sequence[Mark],
    ends: Bounds,
    ticks: Sequence[tuple[float, str]],
) -> str:
    """Values (at least one) at positions, each with its interval if it has one. `ends` are the ends
    of the axis, `ticks` positions with their names."""
    frame, drawing = _Frame(ends, marks, ()), []
    for at, value, label, low, high, colour in marks:
        x = frame.x(at)
        if low is not None and high is not None:
            y1, y2 = frame.y(low), frame.y(high)
            drawing.append(_line(f"line c{colour}", x, x, y1, y2, ' opacity="0.35"'))
        drawing.append(_dot(x, frame.y(value), "4", colour, label, value, low, high))
    return frame.svg(title, drawing, ticks)


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round values (1, 2 or 5 times a power of ten) from at most `low` to at
    least `high`. Equal bounds are widened."""
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def step_ticks(first: int, last: int) -> list[int]:
    """Steps for the ticks of an axis, including both ends."""
    if last <= first:
        return [first]
    gap = max(1, round(nice_ticks(0, last - first, 7)[1]))
    inner = range(-(-first // gap) * gap, last + 1, gap)
    apart = [step for step in inner if min(step - first, last - step) >= 0.6 * gap]
    return [first, *apart, last]


def number(value: float) -> str:
    """Three significant digits, short: 0, 0.25, 12k, 5e-05."""
    if 1e3 <= abs(value) < 1e9:
        power, unit = (1e6, "M") if abs(value) >= 1e6 else (1e3, "k")
        return f"{value / power:.3g}{unit}"
    return f"{value:.3g}"


def _line(css: str, x1: str, x2: str, y1: str, y2: str, more: str = "") -> str:
    return f'<line class="{css}" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}"{more}/>'


def _text(x: str, y: str, content: str, anchor: str = "middle", more: str = "") -> str:
    place = f'x="{x}" y="{y}"{more} text-anchor="{anchor}"'
    return f'<text class="tick" {place}>{escape(content)}</text>'


def _dot(
    x: str, y: str, radius: str, colour: int, label: str,
    value: float, low: float | None, high: float | None,
) -> str:  # fmt: skip
    """A dot with the tooltip `reward, step 4: 0.25 (0.1 to 0.4)`."""
    bounds = "" if low is None or high is None else f" ({number(low)} to {number(high)})"
    told = escape(f"{label}: {number(value)}{bounds}")
    circle = f'class="dot c{colour}" cx="{x}" cy="{y}" r="{radius}"'
    return f"<circle {circle}><title>{told}</title></circle>"


# The charts of a run


class Chart(NamedTuple):
    """One chart: curves on one vertical axis.

    `scale`: the range of the curves (fit); that and 0 (zero); that and 0 and 1 if the values look
    like shares (unit), or always (share).
    """

    title: str
    note: str
    curves: Sequence[Curve]
    scale: Literal["fit", "zero", "unit", "share"] = "fit"


def draw(listed: Iterable[Chart], steps: tuple[int, int]) -> list[dict[str, Any]]:
    """The charts with points, for `chart.html.jinja`; `legend` are colours and labels."""
    found = []
    for title, note, every, scale in listed:
        curves = [curve._replace(label=curve.label or title) for curve in every if curve.points]
        if not curves:
            continue
        values = [point.value for curve in curves for point in curve.points]
        # Scores and rewards in [0, 1] get that whole scale once they reach 0.2, so that noise does
        # not look like progress.
        unit = scale == "unit" and min(values) >= 0 and 0.2 < max(values) <= 1
        bounds = (0.0, 1.0) if unit or scale == "share" else (0.0,) if scale == "zero" else ()
        legend = [(curve.colour, curve.label) for curve in curves if len(every) > 1]
        svg = Markup(line_chart(title, curves, steps, bounds))
        found.append({"title": title, "note": note, "legend": legend, "svg": svg})
    return found


def charts(lines: Sequence[MetricsLine], evaluations: Evaluations) -> list[dict[str, Any]]:
    """All charts of a run that have points, the most important first."""
    every = [line.step for line in lines] + [step for of in evaluations.values() for step in of]

    def curve(label: str, values: Iterable[tuple[int, float]], colour: int = 0) -> Curve:
        return Curve(label, [Point(step, value) for step, value in values], colour % 6)

    def logged(names: Mapping[str, str]) -> list[Curve]:
        """Curves of metrics; `names` maps metrics to labels."""
        named = enumerate(names.items())
        return [curve(label, series(lines, name), n) for n, (name, label) in named]

    def plain(names: Sequence[str]) -> list[Curve]:
        return logged({name: name.removeprefix("actor/") for name in names})

    held_out = []
    for name, evaluated in evaluations.items():
        measured = [(step, e.interval()) for step, e in evaluated.items() if e.whole]
        points = [Point(step, i.mean, i.low, i.high) for step, i in measured if i is not None]
        curves = [Curve("held-out score", points)]
        held_out.append(
            Chart(f"Held-out score: {name}", "mean over items, 95% interval", curves, "unit")
        )
    recorded = workflow_metrics(lines)[:_MOST_WORKFLOW_METRICS]
    health = {name: kind for kind, name in GROUP_HEALTH.items()}
    workflow = {f"rollout/{name}/mean": name for name in recorded}
    speeds = [
        curve("sampling", derived(lines, sampling_speed)),
        curve("training, prompts included", derived(lines, training_speed), 1),
    ]
    devices = [
        curve(f"GPU {label}", use_by_step(lines, f"gpu/{label}/use"), n)
        for n, label in enumerate(gpu_devices(lines))
    ]
    mismatch = "mean difference of a fixed text's log-probabilities after each sync"
    listed = [
        *held_out,
        Chart("Reward of the rollouts", "mean over tasks", logged({REWARD: "reward"}), "unit"),
        Chart(
            "Health of the groups",
            "share of tasks; only mixed groups teach",
            logged(health),
            "share",
        ),
        Chart("What the workflow recorded", "mean over tasks", logged(workflow), "unit"),
        Chart("Loss", "of the step's batch", plain(LOSS)),
        Chart("KL", "as the algorithm logs it", plain(KL)),
        Chart("Entropy", "nats a token", plain(ENTROPY)),
        Chart("Gradient norm", "before clipping", plain(GRADIENT_NORM), "zero"),
        Chart("Explained variance", "of the returns by the critic", plain(EXPLAINED_VARIANCE)),
        Chart("Sampler against trainer", mismatch, logged({MISMATCH: "mismatch"}), "zero"),
        Chart("Learning rate", "", plain(LEARNING_RATE), "zero"),
        Chart("Length of the responses", "tokens", logged(_LENGTHS), "zero"),
        Chart("Speed", "tokens a second", speeds, "zero"),
        Chart("Seconds a step", "", logged(_TIMES), "zero"),
        Chart("GPU use", "share of the time in which any kernel ran", devices, "unit"),
    ]
    return draw(listed, (min(every, default=0), max(every, default=0)))
