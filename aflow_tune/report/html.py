"""The pages of a run and of a chain of stages: `report.html` in their folders, and what is printed
at the end.

A run's page shows whether it learned, and what changed; one without evaluations, steps or
transcripts is shorter and says so. A chain's page puts the held-out scores of its stages side by
side; it reads `chain.json` and each stage's own files.
"""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aflow_tune.models.redaction import masked
from aflow_tune.report.audit import CHECKS, GPU_CHECK, Finding, audit_run, describe
from aflow_tune.report.charts import interval_strip
from aflow_tune.report.curves import charts
from aflow_tune.report.evaluation import (
    Comparison,
    Evaluation,
    Paired,
    compare,
    compare_ends,
    load_evaluations,
    pair,
)
from aflow_tune.report.metrics import MetricsLine, read_metrics
from aflow_tune.report.page import TONES, plain_text, render, transcript_pairs, write_page
from aflow_tune.report.quantities import (
    TRACE_METRICS,
    failure_counts,
    gpu_facts,
    is_training,
    mean_gpu_use,
)
from aflow_tune.report.writer import WRITER_CHECKS, WriterRecords, audit_writer, load_writer
from aflow_tune.report.writer_section import LEVEL_NAMES, summary_lines, writer_section

REPORT_NAME = "report.html"
CHAIN_FILE = "chain.json"
COUNTS_FILE = "harvest.json"
"""What a harvest leaves in its folder: the counts that its page shows."""

_FACTS = {
    "workflow": "workflow",
    "model.model_path": "model",
    "algorithm.algorithm_type": "algorithm",
    "engine": "engine",
    "seed": "seed",
}
_MOST_ROWS = 12
_HARVEST_ROWS = {
    "problems": "problems",
    "solved_problems": "of them solved by some graph",
    "leaks": "dropped: they stand among the held-out problems",
    "refused": "graphs refused by the check",
    "failed": "graphs that failed while they ran",
    "wrong": "graphs with a wrong answer",
    "unscored": "graphs whose answer could not be scored",
    "untried": "graphs not judged, since a model did not answer in time",
    "solved": "graphs that solved their problem",
    "dropped_for_balance": "left out because their structure had its share",
    "kept": "pairs kept",
}


class _Read:
    """What a run folder holds, read once for its page or its summary."""

    def __init__(self, run_dir: Path) -> None:
        self.lines = read_metrics(run_dir)
        self.evaluations: dict[str, dict[int, Evaluation]] = {}
        self.damage: list[str] = []
        try:
            self.evaluations = load_evaluations(run_dir)
        except ValueError as error:
            self.damage = [f"The evaluation records cannot be read: {error}"]
        self.comparisons = compare_ends(self.evaluations)
        self.written: WriterRecords | None = load_writer(run_dir, self.evaluations)

    @property
    def failures(self) -> dict[str, float]:
        """Failed rollouts of the whole training by kind, most frequent first."""
        by_step = {
            line.step: found for line in self.lines if (found := failure_counts(line.metrics))
        }
        totals: Counter[str] = Counter()
        for found in by_step.values():
            totals.update(found)
        return dict(totals.most_common())

    @property
    def findings(self) -> list[Finding]:
        found = audit_run(self.lines, self.evaluations)
        return found + (audit_writer(self.written, self.evaluations) if self.written else [])

    @property
    def checks(self) -> tuple[str, ...]:
        """What the audit looked for."""
        checks = (*CHECKS, GPU_CHECK) if mean_gpu_use(self.lines) else CHECKS
        return (*checks, *WRITER_CHECKS) if self.written else checks

    @property
    def nothing(self) -> str:
        """Why there is no comparison."""
        how = "evaluated twice with scored rollouts" if self.evaluations else "evaluated"
        return f"No held-out task set was {how}: nothing was shown about learning."


def write_report(
    run_dir: Path, config: Mapping[str, Any] | None = None, changes: Sequence[Any] = ()
) -> Path:
    """Write the report of a run folder; returns its path.

    Args:
        config: the flattened configuration, for the settings table; secrets are masked and
            functions left out.
        changes: what validation changed: objects with key, before, after, why.
    """
    from markupsafe import Markup

    read = _Read(run_dir)
    settings = {
        str(key): plain_text(str(masked(str(key), value)))
        for key, value in (config or {}).items()
        if not callable(value)
    }
    facts = [(label, settings[key]) for key, label in _FACTS.items() if _is_told(key, settings)]
    text = render(
        "report.html.jinja",
        title=run_dir.resolve().name,
        run_dir=str(run_dir),
        written=time.strftime("%Y-%m-%d %H:%M"),
        facts=[*facts, *gpu_facts(read.lines)],
        score=settings.get("report.score", "reward"),
        steps=steps_done(read.lines),
        nothing=read.nothing,
        damage=read.damage,
        verdicts=[
            {
                "taskset": name,
                "comparison": comparison,
                "tone": TONES[comparison.direction],
                "strip": Markup(interval_strip(comparison.difference)),
                "measures": _measures(comparison),
                "transcripts": transcript_pairs(comparison),
            }
            for name, comparison in read.comparisons.items()
        ],
        evaluations=[e for steps in read.evaluations.values() for e in steps.values()],
        charts=[(chart, Markup(chart.svg)) for chart in charts(read.lines, read.evaluations)],
        failures=read.failures,
        findings=read.findings,
        checks=read.checks,
        writer=writer_section(read.written) if read.written else None,
        harvest=harvest_rows(run_dir),
        level_names=LEVEL_NAMES,
        plain=plain_text,
        changes=changes,
        settings=sorted(settings.items()),
        merged=_there(run_dir / "export" / "merged"),
        adapter=_there(run_dir / "export" / "adapter"),
        monitor=_there(run_dir / "monitor"),
        resumable=any(run_dir.glob("global_step_*")),
        python=repr,
        shell=shlex.quote,
    )
    return write_page(run_dir / REPORT_NAME, text)


def summary_text(run_dir: Path, report: Path) -> str:
    """What is printed at the end of a run: the verdict, where things are, what to type next."""
    read = _Read(run_dir)
    sentences = list(read.damage)
    for name, comparison in read.comparisons.items():
        prefix = f"{name}: " if len(read.comparisons) > 1 else ""
        sentences += [prefix + comparison.verdict(), *comparison.caveats()]
    if not read.comparisons:
        sentences.append(read.nothing)
    if read.failures:
        listed = ", ".join(f"{count:.0f} {kind}" for kind, count in read.failures.items())
        sentences.append(f"Failed rollouts in training: {listed}.")
    if read.written is not None:
        sentences += summary_lines(read.written)
    sentences += describe(read.findings, read.checks)
    places = [
        ("report", str(report)),
        ("model", _there(run_dir / "export" / "merged")),
        ("adapter", _there(run_dir / "export" / "adapter")),
        ("checkpoint", _newest_checkpoint(run_dir)),
        ("curves", f"tensorboard --logdir {shlex.quote(str(run_dir / 'monitor'))}"),
    ]
    shown = [f"{label + ':':<12}{text}" for label, text in places if text]
    return "\n".join([*sentences, "", *shown])


def steps_done(lines: Sequence[MetricsLine]) -> int:
    """The last step that the trainer finished."""
    return max((line.step for line in lines if is_training(line)), default=0)


def harvest_rows(run_dir: Path) -> list[tuple[str, str]]:
    """What a harvest found, as labels and numbers in reading order; nothing where no harvest
    ended in this folder."""
    try:
        counts = json.loads((run_dir / COUNTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(counts, Mapping):
        return []
    rows = [(label, str(counts[key])) for key, label in _HARVEST_ROWS.items() if key in counts]
    parts = {"kept_by_source": "pairs from", "kept_by_structure": "pairs of the structure"}
    for key, label in parts.items():
        of = counts.get(key)
        if isinstance(of, Mapping):
            most = sorted(of.items(), key=lambda item: (-float(item[1]), str(item[0])))
            rows += [(f"{label} {name}", str(count)) for name, count in most[:_MOST_ROWS]]
    executor = counts.get("executor")
    if isinstance(executor, Mapping):
        rows.append(("calls of the executor", str(executor.get("calls"))))
        rows.append(("tokens of the executor", str(executor.get("tokens"))))
    return rows


def read_chain(folder: Path) -> list[dict[str, Any]]:
    """The stages of the chain in `folder` as they are shown, in their order. `link` is relative
    to the folder, None before the stage ran; `scores` has a task set, its items, and the mean
    score of its first and (None where there was one evaluation only) its last evaluation."""
    lines = []
    for entry in _stages(folder):
        place, target = folder / entry["name"], int(entry.get("target") or 0)
        model, seconds = Path(str(entry.get("model") or "")), int(float(entry.get("seconds") or 0))
        if model.is_absolute() and model.is_relative_to(folder.resolve()):
            model = model.relative_to(folder.resolve())  # one that an earlier stage left
        reported = (place / REPORT_NAME).exists()
        lines.append(
            {
                **{key: entry[key] for key in ("name", "mode", "status")},
                "steps": f"{steps_done(read_metrics(place))} of {target}" if target else "",
                "seconds": f"{seconds // 60}:{seconds % 60:02d}" if entry.get("seconds") else "",
                "model": str(model) if entry.get("model") else "",
                "scores": _scores(place),
                "link": f"{entry['name']}/{REPORT_NAME}" if reported else None,
            }
        )
    return lines


def across_stages(folder: Path) -> list[tuple[str, Comparison]]:
    """For each task set that several stages evaluated: the first evaluation of the chain against
    its last. Items are paired."""
    found: dict[str, list[tuple[str, Evaluation]]] = defaultdict(list)
    for entry in _stages(folder):
        for name, whole in _whole(folder / entry["name"]).items():
            found[name] += [(entry["name"], evaluation) for evaluation in whole]
    compared = [
        (name, compare(of[0][1], of[-1][1]))
        for name, of in found.items()
        if len({stage for stage, _ in of}) > 1
    ]
    return [(name, comparison) for name, comparison in compared if comparison is not None]


def write_chain_report(folder: Path) -> Path:
    """Write the page of a chain; returns its path."""
    text = render(
        "chain.html.jinja",
        title=folder.resolve().name,
        written=time.strftime("%Y-%m-%d %H:%M"),
        stages=read_chain(folder),
        compared=across_stages(folder),
        tones=TONES,
    )
    return write_page(folder / REPORT_NAME, text)


def chain_summary(folder: Path, report: Path) -> str:
    """What is printed at the end of a chain."""
    rows = [("stage", "mode", "status", "steps", "held-out")]
    for line in read_chain(folder):
        scores = ", ".join(
            f"{name} {before}" + (f" -> {after}" if after else "")
            for name, _, before, after in line["scores"]
        )
        names = [line["name"], line["mode"], line["status"]]
        rows.append((*names, line["steps"] or "-", scores or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    sentences = [f"{name}, over all stages: {c.verdict()}" for name, c in across_stages(folder)]
    return "\n".join([*table, "", *sentences, f"report:     {report}"])


def _stages(folder: Path) -> list[dict[str, Any]]:
    stages: list[dict[str, Any]] = json.loads((folder / CHAIN_FILE).read_text("utf-8"))["stages"]
    return stages


def _whole(place: Path) -> dict[str, list[Evaluation]]:
    """The whole evaluations of a stage by task set; none where its records are damaged, which
    its own report says."""
    try:
        found = load_evaluations(place)
    except ValueError:
        return {}
    return {name: [e for e in steps.values() if e.whole] for name, steps in found.items()}


def _scores(place: Path) -> list[tuple[str, int, str, str | None]]:
    found = []
    for name, whole in _whole(place).items():
        means = [(e.items, i.mean) for e in whole if (i := e.interval()) is not None]
        if means:
            after = f"{means[-1][1]:.3f}" if len(means) > 1 else None
            found.append((name, means[0][0], f"{means[0][1]:.3f}", after))
    return found


def _is_told(key: str, settings: Mapping[str, str]) -> bool:
    """Whether a setting is there, and no default that this kind of run never reads."""
    unread = key == "algorithm.algorithm_type" and settings.get("mode") in ("bench", "harvest")
    return settings.get(key, "None") != "None" and not unread


def _measures(comparison: Comparison) -> list[tuple[str, Paired]]:
    """Reward and recorded metrics before and after, on the items that have both."""
    before, after = comparison.before, comparison.after
    names = dict.fromkeys([*before.metric_names(), *after.metric_names()])
    paired = [
        (name, pair(before.metric(name), after.metric(name)))
        for name in names
        if not name.startswith(TRACE_METRICS)
    ]
    return [(name, found) for name, found in paired if found is not None][:_MOST_ROWS]


def _newest_checkpoint(run_dir: Path) -> str:
    steps = {path.name.removeprefix("global_step_"): path for path in run_dir.glob("global_step_*")}
    saved = {int(step): path for step, path in steps.items() if step.isdigit()}
    return str(saved[max(saved)]) if saved else ""


def _there(path: Path) -> str:
    return str(path) if path.exists() else ""
