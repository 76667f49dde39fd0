"""Writes `report.html` of a run or of a chain of stages, and the summary printed at the end.

A run's page shows whether it learned, and what changed. A chain's page compares the held-out scores
of its stages; it reads `chain.json` and each stage's files.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aflow_tune.models.redaction import masked
from aflow_tune.report.audit import CHECKS, GPU_CHECK, audit_run
from aflow_tune.report.charts import charts
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
from aflow_tune.report.page import plain_text, write_page
from aflow_tune.report.quantities import (
    TRACE_METRICS,
    failure_counts,
    gpu_facts,
    is_training,
    mean_gpu_use,
)
from aflow_tune.report.writer import (
    WRITER_CHECKS,
    audit_writer,
    load_writer,
    summary_line,
    writer_section,
)

REPORT_NAME = "report.html"
CHAIN_FILE = "chain.json"
COUNTS_FILE = "harvest.json"
"""The file with the counts of a harvest."""
CORESET_FILE, REPLAY_FILE = "coreset.json", "replay.json"
"""Which rows a run on a data set learns from; `told` says it in a line."""

_FACTS = {
    "workflow": "workflow",
    "model.model_path": "model",
    "algorithm.algorithm_type": "algorithm",
    "engine": "engine",
    "seed": "seed",
}
_MOST_ROWS = 12


class _Read:
    """The contents of a run folder, read once for its page or its summary."""

    def __init__(self, run_dir: Path) -> None:
        self.lines = read_metrics(run_dir)
        self.evaluations: dict[str, dict[int, Evaluation]] = {}
        self.damage: list[str] = []
        try:
            self.evaluations = load_evaluations(run_dir)
        except ValueError as error:
            self.damage = [f"The evaluation records cannot be read: {error}"]
        self.comparisons = compare_ends(self.evaluations)
        self.written = load_writer(run_dir, self.evaluations)
        self.findings = audit_run(self.lines, self.evaluations)
        self.checks: tuple[str, ...] = (*CHECKS, GPU_CHECK) if mean_gpu_use(self.lines) else CHECKS
        if self.written:
            self.findings += audit_writer(self.written, self.evaluations)
            self.checks += WRITER_CHECKS
        self.nothing = "No held-out task set was evaluated twice: nothing was shown about learning."
        of_steps = {x.step: found for x in self.lines if (found := failure_counts(x.metrics))}
        self.failures = dict(sum(map(Counter, of_steps.values()), Counter()).most_common())
        """Failed rollouts of the training by kind, most frequent first."""
        places = {"merged": "export/merged", "adapter": "export/adapter", "monitor": "monitor"}
        there = {name: run_dir / place for name, place in places.items()}
        self.places = {name: str(path) if path.exists() else "" for name, path in there.items()}
        """Paths of the run's products; "" for those that do not exist."""
        steps = (path.name.removeprefix("global_step_") for path in run_dir.glob("global_step_*"))
        self.saved = sorted(int(step) for step in steps if step.isdigit())


def write_report(
    run_dir: Path, config: Mapping[str, Any] | None = None, changes: Sequence[Any] = ()
) -> Path:
    """Write the report of a run folder; returns its path. `config` is the flattened configuration
    (secrets are masked, functions left out), `changes` lists what validation changed, as objects
    with key, before, after, why."""
    read = _Read(run_dir)
    settings = {
        str(key): plain_text(str(masked(str(key), value)))
        for key, value in (config or {}).items()
        if not callable(value)
    }
    told = dict(settings)
    if settings.get("mode") in ("bench", "harvest", "pairs"):  # these modes do not use it
        told.pop("algorithm.algorithm_type", None)
    harvest = {}
    with contextlib.suppress(OSError, ValueError):
        harvest = json.loads((run_dir / COUNTS_FILE).read_text(encoding="utf-8"))
    facts = [(label, told[k]) for k, label in _FACTS.items() if told.get(k, "None") != "None"]
    return write_page(
        run_dir / REPORT_NAME,
        "report.html.jinja",
        title=run_dir.resolve().name,
        run_dir=str(run_dir),
        facts=[*facts, *_data_facts(run_dir), *gpu_facts(read.lines)],
        score=settings.get("report.score", "reward"),
        steps=_steps_done(read.lines),
        read=read,
        measures=_measures,
        evaluations=[e for steps in read.evaluations.values() for e in steps.values()],
        charts=charts(read.lines, read.evaluations),
        writer=writer_section(read.written) if read.written else None,
        harvest=harvest,
        changes=changes,
        settings=sorted(settings.items()),
        python=repr,
        shell=shlex.quote,
    )


def _data_facts(run_dir: Path) -> list[tuple[str, str]]:
    """What a run on a data set says about the rows that it learned from."""
    facts = []
    for name in (CORESET_FILE, REPLAY_FILE):
        with contextlib.suppress(OSError, ValueError, KeyError):
            told = json.loads((run_dir / name).read_text(encoding="utf-8"))["told"]
            facts.append((name.removesuffix(".json"), told))
    return facts


def summary_text(run_dir: Path, report: Path) -> str:
    """The text printed at the end of a run: verdicts, warnings, paths, a command for the curves."""
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
        sentences.append(summary_line(read.written))
    sentences += [f"{name}: {told}" for name, told in _data_facts(run_dir)]
    sentences += [f"Audit: {finding}" for finding in read.findings]
    if not read.findings:
        sentences.append(f"Audit: nothing found ({', '.join(read.checks)}).")
    places = {
        "report": str(report),
        "model": read.places["merged"],
        "adapter": read.places["adapter"],
        "checkpoint": str(run_dir / f"global_step_{read.saved[-1]}") if read.saved else "",
        "curves": f"tensorboard --logdir {shlex.quote(str(run_dir / 'monitor'))}",
    }
    shown = [f"{label + ':':<12}{text}" for label, text in places.items() if text]
    return "\n".join([*sentences, "", *shown])


def _steps_done(lines: Sequence[MetricsLine]) -> int:
    """The last step that the trainer finished; 0 before the first."""
    return max((line.step for line in lines if is_training(line)), default=0)


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


# Chains of stages


def read_chain(folder: Path) -> tuple[list[dict[str, Any]], list[tuple[str, Comparison]]]:
    """The stages of a chain, and for each task set that several stages evaluated, the chain's first
    evaluation against its last. A stage's `scores` have the task set, its number of items, and the
    mean scores of its first and its last evaluation (None if there was only one)."""
    lines = []
    of_chain: dict[str, list[tuple[str, Evaluation]]] = defaultdict(list)
    for entry in json.loads((folder / CHAIN_FILE).read_text("utf-8"))["stages"]:
        place, target = folder / entry["name"], int(entry.get("target") or 0)
        model, seconds = Path(str(entry.get("model") or "")), int(float(entry.get("seconds") or 0))
        if model.is_relative_to(folder.resolve()):  # the output of an earlier stage
            model = model.relative_to(folder.resolve())
        evaluations: dict[str, dict[int, Evaluation]] = {}
        with contextlib.suppress(ValueError):  # the stage's own report tells of damaged records
            evaluations = load_evaluations(place)
        scores = []
        for name, steps in evaluations.items():
            whole = [evaluation for evaluation in steps.values() if evaluation.whole]
            of_chain[name] += [(entry["name"], evaluation) for evaluation in whole]
            means = [(e.items, f"{i.mean:.3f}") for e in whole if (i := e.interval()) is not None]
            if means:
                scores.append((name, *means[0], means[-1][1] if len(means) > 1 else None))
        reported = (place / REPORT_NAME).exists()
        lines.append(
            {
                **{key: entry[key] for key in ("name", "mode", "status")},
                "steps": f"{_steps_done(read_metrics(place))} of {target}" if target else "",
                "seconds": f"{seconds // 60}:{seconds % 60:02d}" if entry.get("seconds") else "",
                "model": str(model) if entry.get("model") else "",
                "scores": scores,
                "link": f"{entry['name']}/{REPORT_NAME}" if reported else None,
            }
        )
    compared = [
        (name, compare(of[0][1], of[-1][1]))
        for name, of in of_chain.items()
        if len({stage for stage, _ in of}) > 1
    ]
    return lines, [(name, found) for name, found in compared if found is not None]


def write_chain_report(folder: Path) -> Path:
    """Write the page of a chain; returns its path."""
    stages, compared = read_chain(folder)
    told = {"title": folder.resolve().name, "stages": stages, "compared": compared}
    return write_page(folder / REPORT_NAME, "chain.html.jinja", **told)


def chain_summary(folder: Path, report: Path) -> str:
    """The text printed at the end of a chain."""
    stages, compared = read_chain(folder)
    table = []
    for line in stages:
        told = [line["name"], line["mode"], line["status"], line["steps"] or "-"]
        for name, _, before, after in line["scores"]:
            told.append(f"held-out {name} {before}" + (f" -> {after}" if after else ""))
        table.append("  ".join(told))
    sentences = [f"{name}, over all stages: {found.verdict()}" for name, found in compared]
    return "\n".join([*table, "", *sentences, f"report:     {report}"])
