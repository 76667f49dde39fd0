"""`report.html`: one file that shows whether a run learned, and what changed.

How pages are made is the matter of `page.py`. A run without evaluations, steps or transcripts
gives a shorter page that says so.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.models.redaction import masked
from aflow_tune.report import gpu_use
from aflow_tune.report.audit import CHECKS, Finding, audit_run, describe
from aflow_tune.report.charts import interval_strip
from aflow_tune.report.curves import charts
from aflow_tune.report.evaluation import (
    Comparison,
    Evaluation,
    Paired,
    compare_ends,
    load_evaluations,
    pair,
)
from aflow_tune.report.harvest import harvest_rows
from aflow_tune.report.metrics import MetricsLine, read_metrics
from aflow_tune.report.page import render, write_page
from aflow_tune.report.quantities import TRACE_METRICS, failure_counts, is_training
from aflow_tune.report.transcripts import pairs, plain_text
from aflow_tune.report.writer_audit import WRITER_CHECKS, audit_writer
from aflow_tune.report.writer_charts import LEVEL_NAMES
from aflow_tune.report.writer_records import WriterRecords, load_writer
from aflow_tune.report.writer_section import summary_lines, writer_section

REPORT_NAME = "report.html"

_TEMPLATE = "report.html.jinja"
_FACTS = {
    "workflow": "workflow",
    "model.model_path": "model",
    "algorithm.algorithm_type": "algorithm",
    "engine": "engine",
    "seed": "seed",
}
_MOST_MEASURES = 12


@dataclass(frozen=True)
class Instruction:
    """What to do with the result: a sentence and the command or code for it."""

    text: str
    code: str


@dataclass(frozen=True)
class Verdict:
    """One task set's answer to 'did it learn?', ready to be shown."""

    taskset: str
    comparison: Comparison
    strip: str
    measures: Sequence[tuple[str, Paired]]

    @property
    def tone(self) -> str:
        return {1: "rose", -1: "fell", 0: "unclear"}[self.comparison.direction]


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

    lines = read_metrics(run_dir)
    evaluations, damage = _evaluations(run_dir)
    written = load_writer(run_dir, evaluations)
    verdicts = [
        Verdict(
            name, comparison, Markup(interval_strip(comparison.difference)), _measures(comparison)
        )
        for name, comparison in compare_ends(evaluations).items()
    ]
    settings = _settings(config or {})
    text = render(
        _TEMPLATE,
        title=run_dir.resolve().name,
        run_dir=str(run_dir),
        written=time.strftime("%Y-%m-%d %H:%M"),
        facts=[
            (label, settings[key])
            for key, label in _FACTS.items()
            if settings.get(key, "None") != "None" and not _is_beside(key, settings)
        ]
        + gpu_use.facts(lines),
        score=settings.get("report.score", "reward"),
        steps=steps_done(lines),
        nothing=_nothing(evaluations),
        damage=damage,
        verdicts=verdicts,
        evaluations=[evaluation for steps in evaluations.values() for evaluation in steps.values()],
        charts=[(chart, Markup(chart.svg)) for chart in charts(lines, evaluations)],
        failures=training_failures(lines),
        findings=_findings(lines, evaluations, written),
        checks=_checks(lines, written),
        writer=writer_section(written) if written else None,
        harvest=harvest_rows(run_dir),
        level_names=LEVEL_NAMES,
        plain=plain_text,
        transcripts=[(verdict.taskset, pairs(verdict.comparison)) for verdict in verdicts],
        changes=changes,
        settings=sorted(settings.items()),
        instructions=instructions(run_dir),
    )
    return write_page(run_dir / REPORT_NAME, text)


def _is_beside(key: str, settings: Mapping[str, str]) -> bool:
    """Whether a setting is a default that this kind of run never reads."""
    return key == "algorithm.algorithm_type" and settings.get("mode") in ("bench", "harvest")


def summary_text(run_dir: Path, report: Path) -> str:
    """What is printed at the end of a run: the verdict, where things are, what to type next."""
    evaluations, sentences = _evaluations(run_dir)
    comparisons = compare_ends(evaluations)
    for name, comparison in comparisons.items():
        prefix = f"{name}: " if len(comparisons) > 1 else ""
        sentences += [prefix + comparison.verdict(), *comparison.caveats()]
    if not comparisons:
        sentences.append(_nothing(evaluations))
    lines = read_metrics(run_dir)
    failures = training_failures(lines)
    if failures:
        listed = ", ".join(f"{count:.0f} {kind}" for kind, count in failures.items())
        sentences.append(f"Failed runs in training: {listed}.")
    written = load_writer(run_dir, evaluations)
    if written is not None:
        sentences += summary_lines(written)
    sentences += describe(_findings(lines, evaluations, written), _checks(lines, written))
    places = [("report", str(report)), *_places(run_dir)]
    places.append(("curves", f"tensorboard --logdir {_quoted(run_dir / 'monitor')}"))
    return "\n".join([*sentences, "", *(f"{label + ':':<12}{text}" for label, text in places)])


def steps_done(lines: Sequence[MetricsLine]) -> int:
    """The last step that the trainer finished."""
    return max((line.step for line in lines if is_training(line)), default=0)


def training_failures(lines: Sequence[MetricsLine]) -> dict[str, float]:
    """Failed runs of the whole training by kind, most frequent first."""
    by_step = {line.step: found for line in lines if (found := failure_counts(line.metrics))}
    totals: dict[str, float] = {}
    for found in by_step.values():
        for kind, count in found.items():
            totals[kind] = totals.get(kind, 0.0) + count
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def instructions(run_dir: Path) -> list[Instruction]:
    """How to use, continue and look at what the run folder holds."""
    found = []
    merged, adapter = run_dir / "export" / "merged", run_dir / "export" / "adapter"
    if merged.is_dir():
        found.append(
            Instruction(
                "Use the tuned model: a Hugging Face folder, adapter merged in. Any framework "
                "loads it, and a configuration takes it as its model.",
                f"AutoModelForCausalLM.from_pretrained({str(merged)!r})\n"
                f"aflow-tune CONFIG.yaml name=next model.model_path={_quoted(merged)}",
            )
        )
    if adapter.is_dir():
        found.append(
            Instruction(
                "The adapter alone, as a PEFT folder over the model that was tuned.",
                f"PeftModel.from_pretrained(base_model, {str(adapter)!r})",
            )
        )
    if any(run_dir.glob("global_step_*")):
        found.append(
            Instruction(
                "Go on: the command of this run resumes it from its newest checkpoint if it was "
                "interrupted, and trains further with a higher target.",
                "aflow-tune CONFIG.yaml buffer.total_steps=MORE",
            )
        )
    if (run_dir / "monitor").is_dir():
        found.append(
            Instruction("All curves.", f"tensorboard --logdir {_quoted(run_dir / 'monitor')}")
        )
    return found


def _evaluations(run_dir: Path) -> tuple[dict[str, dict[int, Evaluation]], list[str]]:
    """The evaluations, and what could not be read of them in words."""
    try:
        return load_evaluations(run_dir), []
    except ValueError as error:
        return {}, [f"The evaluation records cannot be read: {error}"]


def _findings(
    lines: Sequence[MetricsLine],
    evaluations: Mapping[str, Mapping[int, Evaluation]],
    written: WriterRecords | None,
) -> list[Finding]:
    found = audit_run(lines, evaluations)
    if idle := gpu_use.low_use(lines):
        found.append(idle)
    return found + audit_writer(written, evaluations) if written else found


def _checks(lines: Sequence[MetricsLine], written: WriterRecords | None) -> tuple[str, ...]:
    """What the audit looked for."""
    checks = (*CHECKS, gpu_use.CHECK) if gpu_use.mean_use(lines) else CHECKS
    return (*checks, *WRITER_CHECKS) if written else checks


def _nothing(evaluations: Mapping[str, Mapping[int, Evaluation]]) -> str:
    """Why there is no comparison."""
    if not evaluations:
        return "No held-out task set was evaluated: nothing was shown about learning."
    return (
        "No held-out task set was evaluated twice with scored runs: nothing was shown about "
        "learning."
    )


def _measures(comparison: Comparison) -> list[tuple[str, Paired]]:
    """Reward and recorded metrics before and after, on the items that have both."""
    before, after = comparison.before, comparison.after
    found = []
    for name in dict.fromkeys([*before.metric_names(), *after.metric_names()]):
        paired = pair(before.metric(name), after.metric(name))
        if paired is not None and not name.startswith(TRACE_METRICS):
            found.append((name, paired))
    return found[:_MOST_MEASURES]


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Settings as text: functions left out, secrets masked."""
    return {
        str(key): plain_text(str(masked(str(key), value)))
        for key, value in config.items()
        if not callable(value)
    }


def _places(run_dir: Path) -> list[tuple[str, str]]:
    """What the folder holds, by label."""
    candidates = [
        ("model", run_dir / "export" / "merged"),
        ("adapter", run_dir / "export" / "adapter"),
    ]
    saved = [
        path
        for path in run_dir.glob("global_step_*")
        if path.name.removeprefix("global_step_").isdigit()
    ]
    if saved:
        newest = max(saved, key=lambda path: int(path.name.removeprefix("global_step_")))
        candidates.append(("checkpoint", newest))
    return [(label, str(path)) for label, path in candidates if path.exists()]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
