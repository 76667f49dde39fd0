"""The report's curves, and small charts as inline SVG that follow the page's colours.

Colours (0 to 5) are the page's CSS variables, every point tells its value under the pointer, and
titles are read out in place of the drawing. Labels are escaped here, so a chart may go into a page
as it is. `charts` lists what a run's page shows, `draw` draws such a list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal, NamedTuple

from markupsafe import Markup

from aflow_tune.report.evaluation import Evaluation, Evaluations
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
from aflow_tune.report.statistics import Interval

_WIDTH, _HEIGHT = 400.0, 185.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 9.0, 9.0, 24.0
_MOST_DOTS = 60
_MOST_WORKFLOW_METRICS = 6
_ROW = 26.0
_TIMES = {
    "explorer/time/wait_explore_step": "roll out",
    "time/train_step": "train",
    "time/sync_weight": "synchronise",
}

Bounds = tuple[float, float]


class Point(NamedTuple):
    """A value at a step; `low` and `high` bound it where that is known."""

    step: int
    value: float
    low: float | None = None
    high: float | None = None


class Curve(NamedTuple):
    """One line of a chart, in the order of steps; without a label it has the chart's title."""

    label: str
    points: Sequence[Point]
    colour: int = 0


class Mark(NamedTuple):
    """A value at a place of any axis; `label` is told under the pointer."""

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
        share = (step - self.first) / span if span else 0.5 + step - self.first
        return f"{_LEFT + min(1.0, max(0.0, share)) * (_WIDTH - _LEFT - _RIGHT):.1f}"

    def y(self, value: float) -> str:
        share = (value - self.low) / (self.high - self.low)
        return f"{_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(at)},{self.y(value)}" for at, value in points)

    def svg(
        self, title: str, drawing: Sequence[str], places: Sequence[tuple[float, str]] = ()
    ) -> str:
        """The drawing between its axes; `places` are named on the lower one, else steps are."""
        places = places or [(at, str(at)) for at in step_ticks(int(self.first), int(self.last))]
        left, right, bottom = f"{_LEFT:g}", f"{_WIDTH - _RIGHT:g}", _HEIGHT - _BOTTOM
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(_line("grid", left, right, y, y))
            parts.append(_text(f"{_LEFT - 6:g}", y, number(tick), "end", ' dy="0.35em"'))
        parts += [_text(self.x(at), f"{bottom + 17:g}", name) for at, name in places]
        axis = _line("axis", left, right, f"{bottom:g}", f"{bottom:g}")
        return _svg(title, _HEIGHT, [*parts, *drawing, axis])


def line_chart(
    title: str, curves: Sequence[Curve], steps: tuple[int, int], bounds: Sequence[float] = ()
) -> str:
    """Lines over steps, each with a band where its points have bounds.

    There is at least one point. `steps` are the first and last of the axis, which charts of one
    page share; `bounds` are values that the axis shows at least.
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


def stacked_chart(
    title: str, curves: Sequence[Curve], steps: tuple[int, int], top: float | None = None
) -> str:
    """Values stacked on each other at every step, as stairs; a missing value counts as 0."""
    at = [{point.step: point.value for point in curve.points} for curve in curves]
    every = sorted({step for values in at for step in values})
    totals = [math.fsum(values.get(step, 0.0) for values in at) for step in every]
    frame = _Frame(steps, (), (0.0, max([*totals, 1.0]) if top is None else top))
    edges = [step - 0.5 for step in every] + [every[-1] + 0.5]
    base = [0.0] * len(every)
    drawing = []
    for curve, values in zip(curves, at, strict=True):
        tops = [below + values.get(step, 0.0) for below, step in zip(base, every, strict=True)]
        path = [f"M{frame.x(edges[0])},{frame.y(base[0])}"]
        for index, value in enumerate(tops):
            path.append(f"V{frame.y(value)}H{frame.x(edges[index + 1])}")
        for index in reversed(range(len(every))):
            path.append(f"V{frame.y(base[index])}H{frame.x(edges[index])}")
        area = f'class="area c{curve.colour}" d="{"".join(path)}Z"'
        drawing.append(f"<path {area}><title>{escape(curve.label)}</title></path>")
        base = tops
    return frame.svg(title, drawing)


def scatter_chart(
    title: str,
    marks: Sequence[Mark],
    ends: Bounds,
    ticks: Sequence[tuple[float, str]],
    *,
    line: Sequence[tuple[float, float]] = (),
) -> str:
    """Values (at least one) at places, each with its interval where it has one. `ends` are the
    first and last place of the axis, `ticks` places with their names, `line` places and values that
    are joined."""
    frame = _Frame(ends, marks, [value for _, value in line])
    drawing = [f'<polyline class="line c5" points="{frame.path(line)}"/>'] if line else []
    for at, value, label, low, high, colour in marks:
        x = frame.x(at)
        if low is not None and high is not None:
            y1, y2 = frame.y(low), frame.y(high)
            drawing.append(_line(f"line c{colour}", x, x, y1, y2, ' opacity="0.35"'))
        drawing.append(_dot(x, frame.y(value), "4", colour, label, value, low, high))
    return frame.svg(title, drawing, ticks)


def interval_chart(
    title: str,
    estimates: Sequence[tuple[str, Interval | None, int]],
    bounds: Sequence[float] = (),
) -> str:
    """Estimates (label, interval, colour), at least one with an interval, below each other on one
    axis of values, which shows `bounds` at least."""
    intervals = [interval for _, interval, _ in estimates if interval is not None]
    shown = [v for i in intervals for v in (i.mean, i.low, i.high) if v is not None]
    ticks = nice_ticks(min([*shown, *bounds]), max([*shown, *bounds]))
    low, high = min(ticks[0], *shown), max(ticks[-1], *shown)
    left, right = 0.4 * _WIDTH, _WIDTH - 14.0
    bottom = _TOP + _ROW * len(estimates)

    def x(value: float) -> str:
        return f"{left + (value - low) / (high - low) * (right - left):.1f}"

    parts = []
    for tick in ticks:
        parts.append(_line("grid", x(tick), x(tick), f"{_TOP:g}", f"{bottom:g}"))
        parts.append(_text(x(tick), f"{bottom + 17:g}", number(tick)))
    for row, (label, value, colour) in enumerate(estimates):
        y = f"{_TOP + _ROW * (row + 0.5):.1f}"
        short = label if len(label) <= 26 else f"{label[:25]}…"
        parts.append(_text(f"{left - 8:g}", y, short, "end", ' dy="0.35em"'))
        if value is None:
            continue
        if value.low is not None and value.high is not None:
            parts.append(_line(f"line c{colour}", x(value.low), x(value.high), y, y))
        told = (label, value.mean, value.low, value.high)
        parts.append(_dot(x(value.mean), y, "4", colour, *told))
    return _svg(title, bottom + _BOTTOM, parts)


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


def step_ticks(first: int, last: int, count: int = 7) -> list[int]:
    """Whole steps for the axis, both ends among them."""
    if last <= first:
        return [first]
    gap = max(1, round(nice_ticks(0, last - first, count)[1]))
    inner = range(-(-first // gap) * gap, last + 1, gap)
    apart = [step for step in inner if min(step - first, last - step) >= 0.6 * gap]
    return [first, *apart, last]


def number(value: float) -> str:
    """Three significant digits, short: 0, 0.25, 12k, 5e-4."""
    size = abs(value)
    if size < 1e-15:
        return "0"
    if 1e3 <= size < 1e9:
        power, unit = (1e6, "M") if size >= 1e6 else (1e3, "k")
        return f"{value / power:.3g}{unit}"
    if 1e-3 <= size < 1e9:
        return f"{value:.3g}"
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="{escape(title)}"'
    return f"<svg {box}>{''.join(parts)}</svg>"


def _line(css: str, x1: str, x2: str, y1: str, y2: str, more: str = "") -> str:
    return f'<line class="{css}" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}"{more}/>'


def _text(x: str, y: str, content: str, anchor: str = "middle", more: str = "") -> str:
    place = f'x="{x}" y="{y}"{more} text-anchor="{anchor}"'
    return f'<text class="tick" {place}>{escape(content)}</text>'


def _dot(
    x: str, y: str, radius: str, colour: int, label: str,
    value: float, low: float | None, high: float | None,
) -> str:  # fmt: skip
    """What the pointer shows at it: `reward, step 4: 0.25 (0.1 to 0.4)`."""
    bounds = "" if low is None or high is None else f" ({number(low)} to {number(high)})"
    told = escape(f"{label}: {number(value)}{bounds}")
    circle = f'class="dot c{colour}" cx="{x}" cy="{y}" r="{radius}"'
    return f"<circle {circle}><title>{told}</title></circle>"


# What is drawn of a run


class Chart(NamedTuple):
    """What is drawn: curves on one axis of values.

    `scale`: what the curves need (fit), also zero, also 0 and 1 where the values look like shares
    (unit), or always these (share). `stacked`: on each other, as stairs. `legend` None: where there
    are several curves. `steps` None: the page's own.
    """

    title: str
    note: str
    curves: Sequence[Curve]
    scale: Literal["fit", "zero", "unit", "share"] = "fit"
    stacked: bool = False
    legend: bool | None = None
    steps: tuple[int, int] | None = None


def draw(listed: Iterable[Chart], steps: tuple[int, int]) -> list[dict[str, Any]]:
    """The charts that have points, for `chart.html.jinja`; `legend` are colours and labels."""
    found = []
    for chart in listed:
        curves = [curve._replace(label=curve.label or chart.title) for curve in chart.curves]
        drawn = [curve for curve in curves if curve.points]
        if not drawn:
            continue
        ends = chart.steps or steps
        values = [point.value for curve in drawn for point in curve.points]
        # Scores and rewards between 0 and 1 are shown on that whole scale once they use much of
        # it, so that noise does not look like progress.
        unit = chart.scale == "unit" and min(values) >= 0 and 0.2 < max(values) <= 1
        bounds = (0.0, 1.0) if unit or chart.scale == "share" else ()
        if chart.stacked:
            svg = stacked_chart(chart.title, curves, ends, 1.0 if bounds else None)
        else:
            svg = line_chart(chart.title, drawn, ends, (0.0,) if chart.scale == "zero" else bounds)
        named = len(chart.curves) > 1 if chart.legend is None else chart.legend
        legend = [(c.colour, c.label) for c in (curves if chart.stacked else drawn) if named]
        told = {"title": chart.title, "note": chart.note, "legend": legend}
        found.append({**told, "svg": Markup(svg)})
    return found


def charts(lines: Sequence[MetricsLine], evaluations: Evaluations) -> list[dict[str, Any]]:
    """All charts of a run, the most telling first."""
    every = [line.step for line in lines] + [step for of in evaluations.values() for step in of]
    logged_names = {name for line in lines for name in line.metrics}

    def curve(label: str, values: Iterable[tuple[int, float]], colour: int = 0) -> Curve:
        return Curve(label, [Point(step, value) for step, value in values], colour % 6)

    def logged(names: Mapping[str, str]) -> list[Curve]:
        """Curves of metrics, given with their labels."""
        named = enumerate(names.items())
        return [curve(label, series(lines, name), n) for n, (name, label) in named]

    def plain(names: Sequence[str]) -> list[Curve]:
        return logged({name: name.removeprefix("actor/") for name in names})

    def first(names: Sequence[str], label: str) -> list[Curve]:
        """The first of several names that the run logged."""
        return logged({name: label for name in [n for n in names if n in logged_names][:1]})

    def held_out(of_steps: Mapping[int, Evaluation]) -> list[Curve]:
        measured = [(step, e.interval()) for step, e in of_steps.items() if e.whole]
        points = [Point(step, i.mean, i.low, i.high) for step, i in measured if i is not None]
        return [Curve("held-out score", points)]

    recorded = workflow_metrics(lines)[:_MOST_WORKFLOW_METRICS]
    lows, highs = (dict(series(lines, f"response_length/{end}")) for end in ("min", "max"))
    lengths = [
        Point(step, value, lows.get(step), highs.get(step))
        for step, value in series(lines, "response_length/mean")
    ]
    length_note = "tokens a call: mean, shortest to longest" if lengths else "tokens a rollout"
    if not lengths:
        lengths = [Point(*at) for at in series(lines, "rollout/response_tokens/mean")]
    failed: dict[str, dict[int, float]] = {}
    for line in lines:
        for kind, count in failure_counts(line.metrics).items():
            failed.setdefault(kind, {})[line.step] = count
    listed = [
        *(
            Chart(f"Held-out score: {name}", "mean over items, 95% interval", held_out(of), "unit")
            for name, of in evaluations.items()
        ),
        Chart("Reward of the rollouts", "mean over tasks", logged({REWARD: "reward"}), "unit"),
        Chart(
            "Health of the groups",
            "share of tasks; only mixed groups teach",
            [
                curve(kind, series(lines, name), colour)
                for (kind, name), colour in zip(GROUP_HEALTH.items(), (0, 2, 1), strict=True)
            ],
            "share",
            stacked=True,
        ),
        Chart(
            "What the workflow recorded",
            "mean over tasks",
            logged({f"rollout/{name}/mean": name for name in recorded}),
            "unit",
        ),
        Chart("Loss", "of the step's batch", first(LOSS, "loss")),
        Chart("KL", "as the algorithm logs it", plain(KL)),
        Chart("Entropy", "nats a token", first(ENTROPY, "entropy")),
        Chart("Gradient norm", "before clipping", plain(GRADIENT_NORM), "zero"),
        Chart(
            "Sampler against trainer",
            "mean difference of a fixed text's log-probabilities after each sync",
            logged({MISMATCH: "mismatch"}),
            "zero",
        ),
        Chart("Learning rate", "", plain(LEARNING_RATE), "zero"),
        Chart("Length of the responses", length_note, [Curve("tokens", lengths)], "zero"),
        Chart(
            "Sampling speed",
            "tokens drawn a second",
            [curve("tokens/s", derived(lines, sampling_speed))],
            "zero",
        ),
        Chart(
            "Training speed",
            "tokens a second, prompts included",
            [curve("tokens/s", derived(lines, training_speed))],
            "zero",
        ),
        Chart("Seconds a step", "", logged(_TIMES), "zero"),
        Chart(
            "GPU use",
            "share of the time until the step was done in which any kernel ran",
            [
                curve(f"GPU {label}", use_by_step(lines, f"gpu/{label}/use"), n)
                for n, label in enumerate(gpu_devices(lines))
            ],
            "unit",
        ),
        Chart(
            "Failed rollouts in training",
            "by kind; they cost nothing but themselves",
            [
                curve(kind, sorted(counts.items()), n)
                for n, (kind, counts) in enumerate(sorted(failed.items()), 1)
            ],
            stacked=True,
            legend=True,
        ),
    ]
    return draw(listed, (min(every, default=0), max(every, default=0)))
