"""The report's section on the workflows that the policy wrote, ready for its template.

What is read and counted is the matter of the other `writer_` files; here their findings become
tables, sentences and texts of bounded size. Escaping is the template's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from aflow_tune.report.charts import number
from aflow_tune.report.curves import Chart
from aflow_tune.report.evaluation import Paired, pair
from aflow_tune.report.statistics import Interval
from aflow_tune.report.transcripts import plain_text
from aflow_tune.report.writer_charts import LEVEL_NAMES, writer_charts
from aflow_tune.report.writer_graphs import (
    Shown,
    Structure,
    TypeRow,
    best_and_worst,
    by_type,
    structures,
)
from aflow_tune.report.writer_numbers import Numbers, count, steps_told, task_means
from aflow_tune.report.writer_prompts import Change, prompt_changes
from aflow_tune.report.writer_records import WriterRecords, WriterRun
from aflow_tune.writer.types import Level

MOST_KINDS = 8
_MOST_TASKSETS = 6


@dataclass(frozen=True)
class Phase:
    """Some runs that stand together in a table: a column of it."""

    label: str
    runs: Sequence[WriterRun]
    numbers: Numbers


@dataclass(frozen=True)
class RefusalRow:
    """One kind of refusal: its share of each phase's runs, and an example of the latest."""

    kind: str
    shares: tuple[float, ...]
    example: str


@dataclass(frozen=True)
class HeldOut:
    """One held-out task set before and after, on the same tasks."""

    taskset: str
    before: int
    after: int
    """Steps."""
    valid: Paired | None


@dataclass(frozen=True)
class WriterSection:
    """All that the section shows."""

    runs: int
    phases: Sequence[Phase]
    rows: Sequence[tuple[str, tuple[str, ...]]]
    """The table of numbers: a label, and a text for each phase."""
    held_out: Sequence[HeldOut]
    charts: Sequence[tuple[Chart, Markup]]
    refusals: Sequence[RefusalRow]
    structures: Sequence[Structure]
    distinct: int
    """Structures of the newest picture's valid graphs."""
    types: Sequence[TypeRow]
    types_sentence: str
    where: str
    """Where structures and types were counted."""
    graphs: Sequence[Shown]
    changes: Sequence[Change]


def writer_section(records: WriterRecords) -> WriterSection:
    """The section of a run folder's records."""
    phases = _phases(records)
    shown = structures(records)
    types = by_type(records.latest, shown)
    kind = "held-out, " if records.after else "training, "
    return WriterSection(
        runs=len(records.every),
        phases=phases,
        rows=_rows(phases),
        held_out=_held_out(records),
        charts=[(chart, Markup(chart.svg)) for chart in writer_charts(records)],
        refusals=_refusals(phases),
        structures=shown,
        distinct=len(count(records.latest).structures),
        types=types,
        types_sentence=_types_sentence(types),
        where=kind + steps_told(records.latest),
        graphs=best_and_worst(records),
        changes=prompt_changes(records.training),
    )


def summary_lines(records: WriterRecords) -> list[str]:
    """Two lines for the end of a run: valid graphs and fallbacks, and distinct structures."""
    after = count(records.latest)
    where = "held-out" if records.after else "training"
    if records.earliest:
        before = count(records.earliest)
        place = f"{where}, {steps_told(records.earliest)} to {steps_told(records.latest)}"
        first = (
            f"Written graphs: {before.valid.mean:.0%} -> {after.valid.mean:.0%} valid, "
            f"{before.fallbacks:.0%} -> {after.fallbacks:.0%} answered by a fallback ({place})."
        )
    else:
        place = f"{where}, {steps_told(records.latest)}"
        first = (
            f"Written graphs: {after.valid.mean:.0%} valid, "
            f"{after.fallbacks:.0%} answered by a fallback ({place})."
        )
    graphs = sum(after.structures.values())
    second = f"Distinct structures: {len(after.structures)} among {graphs} valid graphs"
    if after.dominance is not None:
        second += f", the most frequent in {after.dominance:.0%}"
    return [first, f"{second}."]


def _phases(records: WriterRecords) -> list[Phase]:
    first, last = records.training_ends
    found = [
        ("training", records.of_steps(first)),
        ("training", records.of_steps(last)),
        ("held-out", records.before),
        ("held-out", records.after),
    ]
    return [
        Phase(f"{label}, {steps_told(runs)}", runs, count(runs)) for label, runs in found if runs
    ]


def _rows(phases: Sequence[Phase]) -> list[tuple[str, tuple[str, ...]]]:
    """Numbers by phase; a row that no phase has is left out."""

    def row(label: str, texts: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
        return [(label, tuple(texts))] if any(texts) else []

    numbers = [phase.numbers for phase in phases]
    rows = row("runs", [str(n.runs) for n in numbers])
    rows += row("valid graphs", [_interval(n.valid) for n in numbers])
    for level in Level:
        label = (
            "answered by the graph as written"
            if level == Level.CLEAN
            else (f"answered by fallback {level.value}: {LEVEL_NAMES[level]}")
        )
        rows += row(label, [f"{n.levels[level]:.0%}" for n in numbers])
    rows += row("score", [_interval(n.correct) for n in numbers])
    rows += row(
        "score of clean runs, fallbacks as 0", [_interval(n.correct_clean) for n in numbers]
    )
    rows += row(
        "calls in a graph, mean", [f"{n.nodes.mean:.1f}" if n.nodes else "" for n in numbers]
    )
    rows += row("distinct structures", [str(len(n.structures)) for n in numbers])
    rows += row("distinct prompts", [str(n.prompts) for n in numbers])
    rows += row(
        "US dollars a solved task",
        [number(n.usd_per_solved) if n.usd_per_solved is not None else "" for n in numbers],
    )
    rows += row(
        "tokens a solved task",
        [f"{n.tokens_per_solved:,.0f}" if n.tokens_per_solved is not None else "" for n in numbers],
    )
    return rows


def _held_out(records: WriterRecords) -> list[HeldOut]:
    found = []
    for name, steps in list(records.held_out.items())[:_MOST_TASKSETS]:
        if len(steps) < 2:
            continue
        first, last = (
            {item: share for (_, item), share in task_means(steps[end(steps)], _valid).items()}
            for end in (min, max)
        )
        found.append(HeldOut(name, min(steps), max(steps), pair(first, last)))
    return found


def _refusals(phases: Sequence[Phase]) -> list[RefusalRow]:
    """The most frequent kinds over all phases."""
    totals: dict[str, float] = {}
    for phase in phases:
        for kind, share in phase.numbers.refusals.items():
            totals[kind] = totals.get(kind, 0.0) + share
    return [
        RefusalRow(
            kind,
            tuple(phase.numbers.refusals.get(kind, 0.0) for phase in phases),
            plain_text(_example(phases, kind)),
        )
        for kind in sorted(totals, key=lambda kind: (-totals[kind], kind))[:MOST_KINDS]
    ]


def _example(phases: Sequence[Phase], kind: str) -> str:
    """The sentence of this kind that most runs of the newest phase were told."""
    for phase in reversed(phases):
        told = Counter(
            refusal.message
            for run in phase.runs
            for refusal in run.refusals
            if refusal.kind == kind and refusal.message
        )
        if told:
            return told.most_common(1)[0][0]
    return ""


def _types_sentence(types: Sequence[TypeRow]) -> str:
    """Whether kinds of task get different graphs, judged by their most frequent structure."""
    named = [row for row in types if row.graphs]
    if len(named) < 2:
        return ""
    most = {row.most for row in named}
    if len(most) == 1 and "" not in most:
        return f"All types have the same most frequent structure, {named[0].most}."
    told = ", ".join(f"{row.problem_type}: {row.most or 'another'}" for row in named)
    return f"Types differ in their most frequent structure ({told})."


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return ""
    if interval.low is None or interval.high is None:
        return f"{interval.mean:.3f}"
    return f"{interval.mean:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _valid(run: WriterRun) -> float:
    return float(run.valid)
