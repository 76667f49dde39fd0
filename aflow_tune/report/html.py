"""`report.html`: one file that shows whether a run learned, and what changed.

Self-contained: curves are inline SVG, nothing is loaded from elsewhere. Everything that a
model or a user wrote is escaped by the template.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from aflow_tune.report.evaluation import Comparison, Evaluation, first_and_last, load_evaluations
from aflow_tune.report.metrics import MetricsLine, read_metrics, series

REPORT_NAME = "report.html"

_CURVES = (
    ("Reward of the rollouts", (("rollout/reward/mean", "mean reward"),)),
    (
        "Health of the groups",
        (
            ("experience_pipeline/group/frac_mixed", "mixed: these teach"),
            ("experience_pipeline/group/frac_all_best", "all best"),
            ("experience_pipeline/group/frac_all_worst", "all worst"),
        ),
    ),
    ("Gradient norm", (("actor/grad_norm", "before clipping"),)),
    ("Learning rate", (("actor/lr", "rate"),)),
    ("KL to the reference", (("actor/kl_loss", "KL loss"),)),
    ("Tokens of a response", (("rollout/response_tokens/mean", "mean a run"),)),
    ("Sampling speed", (("rollout/tokens_per_second", "tokens a second"),)),
)


def write_report(
    run_dir: Path, config: Mapping[str, Any] | None = None, changes: Sequence[Any] = ()
) -> Path:
    """Write the report of a run folder; returns its path.

    Args:
        config: the flattened configuration, for the settings table.
        changes: what validation changed: objects with key, before, after, why.
    """
    import jinja2

    lines = read_metrics(run_dir)
    evaluations = load_evaluations(run_dir)
    comparisons = first_and_last(run_dir)
    source = resources.files("aflow_tune.report").joinpath("report.html.jinja")
    template = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    ).from_string(source.read_text(encoding="utf-8"))
    text = template.render(
        title=run_dir.name,
        run_dir=str(run_dir),
        verdicts=[(name, c.verdict(), c) for name, c in comparisons.items()],
        evaluations=[_rows(steps) for steps in evaluations.values()],
        curves=_curves(lines, evaluations),
        failures=_failures(lines),
        transcripts=[pair for c in comparisons.values() for pair in _transcripts(c)],
        changes=changes,
        config=sorted((config or {}).items()),
        steps=max((line.step for line in lines), default=0),
    )
    path = run_dir / REPORT_NAME
    path.write_text(text, encoding="utf-8")
    return path


def summary_text(run_dir: Path, report: Path) -> str:
    """What is printed at the end of a run."""
    comparisons = first_and_last(run_dir)
    lines = [comparison.verdict() for comparison in comparisons.values()]
    if not lines:
        lines = ["No held-out task set was evaluated twice: nothing was shown about learning."]
    lines += ["", f"report:     {report}"]
    merged = run_dir / "export" / "merged"
    if merged.exists():
        lines.append(f"model:      {merged}")
    adapter = run_dir / "export" / "adapter"
    if adapter.exists():
        lines.append(f"adapter:    {adapter}")
    lines.append(f"curves:     tensorboard --logdir {run_dir / 'monitor'}")
    return "\n".join(lines)


def _rows(steps: Mapping[int, Evaluation]) -> list[dict[str, Any]]:
    rows = []
    for evaluation in steps.values():
        interval = evaluation.interval()
        rows.append(
            {
                "taskset": evaluation.taskset,
                "step": evaluation.step,
                "items": evaluation.items,
                "mean": None if interval is None else interval.mean,
                "low": None if interval is None else interval.low,
                "high": None if interval is None else interval.high,
                "failed": evaluation.failed_runs,
            }
        )
    return rows


def _failures(lines: list[MetricsLine]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for line in lines:
        for name, value in line.metrics.items():
            if name.startswith("rollout/failure/"):
                kind = name.split("/")[2]
                totals[kind] = totals.get(kind, 0.0) + value
    return totals


def _transcripts(comparison: Comparison) -> list[dict[str, Any]]:
    after = {(record.item, record.run): record for record in comparison.after.records}
    pairs = []
    for record in comparison.before.records:
        other = after.get((record.item, record.run))
        if other is not None and record.transcript and other.transcript:
            pairs.append({"item": record.item, "before": record, "after": other})
    return pairs


def _curves(
    lines: list[MetricsLine], evaluations: Mapping[str, Mapping[int, Evaluation]]
) -> list[tuple[str, str]]:
    drawings = []
    for name, steps in evaluations.items():
        points = []
        for step, evaluation in steps.items():
            interval = evaluation.interval()
            if interval is not None:
                points.append((step, interval.mean, interval.low, interval.high))
        if len(points) > 1:
            drawings.append((f"Held-out score: {name}", _draw_held_out(points)))
    for title, names in _CURVES:
        found = [(label, series(lines, name)) for name, label in names]
        found = [(label, points) for label, points in found if points]
        if found:
            drawings.append((title, _draw(found)))
    return drawings


def _draw(curves: list[tuple[str, list[tuple[int, float]]]]) -> str:
    figure, axes = _axes()
    for label, points in curves:
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker="o", markersize=3, label=label)
    return _svg(figure, axes)


def _draw_held_out(points: list[tuple[int, float, float | None, float | None]]) -> str:
    figure, axes = _axes()
    steps = [point[0] for point in points]
    means = [point[1] for point in points]
    low = [point[1] if point[2] is None else point[2] for point in points]
    high = [point[1] if point[3] is None else point[3] for point in points]
    axes.plot(steps, means, marker="o", label="mean over items")
    axes.fill_between(steps, low, high, alpha=0.2, label="95% interval")
    return _svg(figure, axes)


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.2, 2.8), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _svg(figure: Any, axes: Any) -> str:
    axes.legend(frameon=False, fontsize=8)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
