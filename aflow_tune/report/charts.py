"""Small charts as inline SVG that follow the page's colours in light and dark.

Drawn by hand rather than by a plotting library: a chart is a few hundred bytes a curve, its
colours are the page's CSS variables, every point tells its value under the pointer, and nothing
has to be imported. Labels are escaped here, so a chart may go into a page as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from aflow_tune.report.statistics import Interval

_WIDTH, _HEIGHT = 400.0, 185.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 9.0, 9.0, 24.0
_MOST_DOTS = 60
_ROW = 26.0


@dataclass(frozen=True)
class Point:
    """A value at a step; `low` and `high` bound it where that is known."""

    step: int
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Curve:
    """One line of a chart, in the order of steps. `colour`: 0 to 5, a variable of the page."""

    label: str
    points: Sequence[Point]
    colour: int = 0


class _Frame:
    """Maps steps and values to the drawing, and draws axes and grid."""

    def __init__(self, steps: tuple[float, float], values: tuple[float, float]) -> None:
        self.first, self.last = steps
        self.ticks = nice_ticks(*values)
        self.low, self.high = min(values[0], self.ticks[0]), max(values[1], self.ticks[-1])

    def x(self, step: float) -> str:
        span = self.last - self.first
        share = (step - self.first) / span if span else 0.5 + step - self.first
        return f"{_LEFT + min(1.0, max(0.0, share)) * (_WIDTH - _LEFT - _RIGHT):.1f}"

    def y(self, value: float) -> str:
        share = (value - self.low) / (self.high - self.low)
        return f"{_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    def svg(
        self,
        title: str,
        drawing: Sequence[str],
        places: Sequence[tuple[float, str]] | None = None,
    ) -> str:
        """The drawing between its axes; `places` are named on the lower one, else steps are."""
        if places is None:
            places = [(at, str(at)) for at in step_ticks(int(self.first), int(self.last))]
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        parts = [
            f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(title)}">'
        ]
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT:g}" x2="{right:g}" y1="{y}" y2="{y}"/>')
            parts.append(
                f'<text class="tick" x="{_LEFT - 6:g}" y="{y}" dy="0.35em" '
                f'text-anchor="end">{number(tick)}</text>'
            )
        for at, name in places:
            parts.append(
                f'<text class="tick" x="{self.x(at)}" y="{bottom + 17:g}" '
                f'text-anchor="middle">{escape(name)}</text>'
            )
        parts += drawing
        parts.append(
            f'<line class="axis" x1="{_LEFT:g}" x2="{right:g}" y1="{bottom:g}" y2="{bottom:g}"/>'
            "</svg>"
        )
        return "".join(parts)


def line_chart(
    title: str,
    curves: Sequence[Curve],
    steps: tuple[int, int],
    bounds: tuple[float, float] | None = None,
) -> str:
    """Lines over steps, each with a band where its points have bounds.

    Args:
        title: read out in place of the drawing.
        curves: at least one, with at least one point.
        steps: first and last step of the axis; charts of one page share it.
        bounds: values that the axis shows at least.
    """
    shown = [
        value
        for curve in curves
        for point in curve.points
        for value in (point.value, point.low, point.high)
        if value is not None
    ]
    frame = _Frame(steps, (min([*shown, *(bounds or ())]), max([*shown, *(bounds or ())])))
    drawing = []
    for curve in curves:
        banded = [p for p in curve.points if p.low is not None and p.high is not None]
        if len(banded) > 1:
            over = [f"{frame.x(p.step)},{frame.y(p.high or 0.0)}" for p in banded]
            under = [f"{frame.x(p.step)},{frame.y(p.low or 0.0)}" for p in reversed(banded)]
            drawing.append(
                f'<polygon class="band c{curve.colour}" points="{" ".join(over + under)}"/>'
            )
        path = " ".join(f"{frame.x(p.step)},{frame.y(p.value)}" for p in curve.points)
        drawing.append(f'<polyline class="line c{curve.colour}" points="{path}"/>')
        if len(curve.points) <= _MOST_DOTS:
            drawing += [_dot(frame, curve, point) for point in curve.points]
    return frame.svg(title, drawing)


def stacked_chart(
    title: str, curves: Sequence[Curve], steps: tuple[int, int], top: float | None = None
) -> str:
    """Values stacked on each other at every step, as stairs; a missing value counts as 0."""
    at = [{point.step: point.value for point in curve.points} for curve in curves]
    every = sorted({step for values in at for step in values})
    totals = [math.fsum(values.get(step, 0.0) for values in at) for step in every]
    frame = _Frame((steps[0], steps[1]), (0.0, top if top is not None else max([*totals, 1.0])))
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
        drawing.append(
            f'<path class="area c{curve.colour}" d="{"".join(path)}Z">'
            f"<title>{escape(curve.label)}</title></path>"
        )
        base = tops
    return frame.svg(title, drawing)


@dataclass(frozen=True)
class Estimate:
    """One row of an interval chart; `interval` is None where nothing was measured."""

    label: str
    interval: Interval | None
    colour: int = 0


def interval_chart(
    title: str, estimates: Sequence[Estimate], bounds: tuple[float, float] | None = None
) -> str:
    """Estimates below each other, each with its interval, on one axis of values.

    Args:
        title: read out in place of the drawing.
        estimates: at least one with an interval.
        bounds: values that the axis shows at least.
    """
    shown = [
        value
        for estimate in estimates
        if estimate.interval is not None
        for value in (estimate.interval.mean, estimate.interval.low, estimate.interval.high)
        if value is not None
    ]
    ticks = nice_ticks(min([*shown, *(bounds or ())]), max([*shown, *(bounds or ())]))
    low, high = min(ticks[0], *shown), max(ticks[-1], *shown)
    left, right = 0.4 * _WIDTH, _WIDTH - 14.0
    height = _TOP + _ROW * len(estimates) + _BOTTOM

    def x(value: float) -> str:
        return f"{left + (value - low) / (high - low) * (right - left):.1f}"

    bottom = height - _BOTTOM
    parts = [f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="{escape(title)}">']
    for tick in ticks:
        parts.append(
            f'<line class="grid" x1="{x(tick)}" x2="{x(tick)}" y1="{_TOP:g}" y2="{bottom:g}"/>'
            f'<text class="tick" x="{x(tick)}" y="{bottom + 17:g}" text-anchor="middle">'
            f"{number(tick)}</text>"
        )
    for row, estimate in enumerate(estimates):
        y = f"{_TOP + _ROW * (row + 0.5):.1f}"
        label = estimate.label if len(estimate.label) <= 26 else f"{estimate.label[:25]}…"
        parts.append(
            f'<text class="tick" x="{left - 8:g}" y="{y}" dy="0.35em" text-anchor="end">'
            f"{escape(label)}</text>"
        )
        if estimate.interval is None:
            continue
        value = estimate.interval
        told = f"{estimate.label}: {number(value.mean)}"
        if value.low is not None and value.high is not None:
            told += f" ({number(value.low)} to {number(value.high)})"
            parts.append(
                f'<line class="line c{estimate.colour}" x1="{x(value.low)}" x2="{x(value.high)}" '
                f'y1="{y}" y2="{y}"/>'
            )
        parts.append(
            f'<circle class="dot c{estimate.colour}" cx="{x(value.mean)}" cy="{y}" r="4">'
            f"<title>{escape(told)}</title></circle>"
        )
    parts.append("</svg>")
    return "".join(parts)


@dataclass(frozen=True)
class Mark:
    """A value at a place of any axis; `label` is told under the pointer."""

    at: float
    value: float
    label: str
    low: float | None = None
    high: float | None = None
    colour: int = 0


def scatter_chart(
    title: str,
    marks: Sequence[Mark],
    ends: tuple[float, float],
    ticks: Sequence[tuple[float, str]],
    *,
    line: Sequence[tuple[float, float]] = (),
) -> str:
    """Values at places, each with its interval where it has one.

    Args:
        title: read out in place of the drawing.
        marks: at least one.
        ends: first and last place of the axis.
        ticks: places with their names.
        line: places and values that are joined.
    """
    bounds = [b for m in marks for b in (m.value, m.low, m.high) if b is not None]
    bounds += [value for _, value in line]
    frame = _Frame(ends, (min(bounds), max(bounds)))
    drawing = []
    if line:
        path = " ".join(f"{frame.x(at)},{frame.y(value)}" for at, value in line)
        drawing.append(f'<polyline class="line c5" points="{path}"/>')
    for mark in marks:
        x, told = frame.x(mark.at), f"{mark.label}: {number(mark.value)}"
        if mark.low is not None and mark.high is not None:
            told += f" ({number(mark.low)} to {number(mark.high)})"
            drawing.append(
                f'<line class="line c{mark.colour}" x1="{x}" x2="{x}" '
                f'y1="{frame.y(mark.low)}" y2="{frame.y(mark.high)}" opacity="0.35"/>'
            )
        drawing.append(
            f'<circle class="dot c{mark.colour}" cx="{x}" cy="{frame.y(mark.value)}" r="4">'
            f"<title>{escape(told)}</title></circle>"
        )
    return frame.svg(title, drawing, ticks)


def interval_strip(interval: Interval) -> str:
    """An estimate with its interval on a line through zero; empty where there is no interval."""
    if interval.low is None or interval.high is None:
        return ""
    reach = 1.12 * max(abs(interval.low), abs(interval.high), 1e-9)

    def x(value: float) -> str:
        return f"{130 + value / reach * 120:.1f}"

    return (
        '<svg class="strip" viewBox="0 0 260 40" role="img" aria-label="interval">'
        '<line class="grid" x1="10" x2="250" y1="16" y2="16"/>'
        '<line class="zero" x1="130" x2="130" y1="5" y2="27"/>'
        '<text class="tick" x="130" y="38" text-anchor="middle">0</text>'
        f'<line class="whisker" x1="{x(interval.low)}" x2="{x(interval.high)}" y1="16" y2="16"/>'
        f'<circle class="estimate" cx="{x(interval.mean)}" cy="16" r="5"/></svg>'
    )


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
    inner = [step for step in range(-(-first // gap) * gap, last + 1, gap)]
    inner = [step for step in inner if step - first >= 0.6 * gap and last - step >= 0.6 * gap]
    return [first, *inner, last]


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


def _dot(frame: _Frame, curve: Curve, point: Point) -> str:
    text = f"{curve.label}, step {point.step}: {number(point.value)}"
    if point.low is not None and point.high is not None:
        text += f" ({number(point.low)} to {number(point.high)})"
    return (
        f'<circle class="dot c{curve.colour}" cx="{frame.x(point.step)}" '
        f'cy="{frame.y(point.value)}" r="2.6"><title>{escape(text)}</title></circle>'
    )
