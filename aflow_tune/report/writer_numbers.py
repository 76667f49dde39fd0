"""What is counted of the records of a policy that writes workflows.

Numbers of some runs: those of a step, of an evaluation, of several steps together. What they
are read from is the matter of `writer_records.py`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aflow_tune.report.evaluation import load_evaluations
from aflow_tune.report.statistics import Interval, mean, share_or_mean_interval
from aflow_tune.report.usage import per_solved
from aflow_tune.report.writer_records import WriterRun, load_writer
from aflow_tune.writer.types import Level

SOLVED_AT = 1.0
"""The score from which on a run has solved its task."""


@dataclass(frozen=True)
class Numbers:
    """What is counted of some runs: those of a step, of an evaluation, of several steps.

    Intervals are over tasks, the runs of a task being averaged first. A graph counts as read
    where it has a structure, whether or not it was refused.
    """

    runs: int
    valid: Interval
    levels: Mapping[int, float]
    """Share of the runs by `Level`."""
    refusals: Mapping[str, float]
    """Share of the runs with a refusal of this kind, most frequent first."""
    operators: Mapping[str, float]
    """Share of the graphs that were read and name this operator, most frequent first."""
    nodes: Interval | None
    """Calls in the source of a graph: the mean, the smallest and the largest."""
    structures: Mapping[str, int]
    """Valid graphs by structure, most frequent first."""
    prompts: int
    """Distinct prompts: pairs of instance and text."""
    correct: Interval | None
    correct_clean: Interval | None
    usd_per_solved: float | None
    tokens_per_solved: float | None
    """What all runs spent on executing, for each solved one. None: unknown, or none solved."""

    @property
    def fallbacks(self) -> float:
        """Share of the runs whose answer did not come from the graph as written."""
        return math.fsum(share for level, share in self.levels.items() if level != Level.CLEAN)

    @property
    def dominance(self) -> float | None:
        """Share of the most frequent structure among the valid graphs; None without any."""
        counts = list(self.structures.values())
        return counts[0] / sum(counts) if counts else None


@dataclass(frozen=True)
class WriterSummary:
    """A run folder in one row, for a table over several: its newest picture."""

    where: str
    """Such as 'held-out, step 40' or 'training, steps 36 to 40'."""
    numbers: Numbers

    @property
    def valid(self) -> Interval:
        return self.numbers.valid

    @property
    def correct_clean(self) -> Interval | None:
        return self.numbers.correct_clean

    @property
    def structures(self) -> int:
        """How many different structures the valid graphs have."""
        return len(self.numbers.structures)


def writer_summary(run_dir: Path) -> WriterSummary | None:
    """The newest numbers of the writer in a run folder: of the last evaluations where there are
    any, else of the last training steps. None where no run kept a record.

    Raises:
        ValueError: the evaluation records are damaged; file and line are named.
    """
    records = load_writer(run_dir, load_evaluations(run_dir))
    if records is None:
        return None
    kind = "held-out" if records.after else "training"
    return WriterSummary(f"{kind}, {steps_told(records.latest)}", count(records.latest))


def steps_told(runs: Sequence[WriterRun]) -> str:
    """`step 4`, or `steps 1 to 5`."""
    steps = sorted({run.step for run in runs})
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def count(runs: Sequence[WriterRun]) -> Numbers:
    """The numbers of these runs.

    Raises:
        ValueError: there are no runs.
    """
    valid = task_interval(runs, lambda run: float(run.valid))
    if valid is None:
        raise ValueError("numbers of no runs")
    levels = Counter(run.level for run in runs if run.level is not None)
    graphs = [run for run in runs if run.structure is not None]
    nodes = [run.nodes for run in graphs if run.nodes is not None]
    solved = sum(run.score is not None and run.score >= SOLVED_AT for run in runs)
    usd, tokens = [run.usd for run in runs], [run.tokens for run in runs]
    known_usd = [value for value in usd if value is not None]
    known_tokens = [value for value in tokens if value is not None]
    return Numbers(
        runs=len(runs),
        valid=valid,
        levels={level.value: levels[level] / len(runs) for level in Level},
        refusals=_shares(({refusal.kind for refusal in run.refusals} for run in runs), len(runs)),
        operators=_shares((run.operators.keys() for run in graphs), len(graphs)),
        nodes=Interval(mean(nodes), min(nodes), max(nodes), len(nodes)) if nodes else None,
        structures=dict(
            Counter(run.structure for run in graphs if run.valid and run.structure).most_common()
        ),
        prompts=len({prompt for run in runs for prompt in run.prompts.items()}),
        correct=task_interval(runs, lambda run: run.score),
        correct_clean=task_interval(runs, lambda run: run.correct_clean),
        usd_per_solved=per_solved(math.fsum(known_usd), solved)
        if len(known_usd) == len(runs)
        else None,
        tokens_per_solved=per_solved(float(sum(known_tokens)), solved)
        if len(known_tokens) == len(runs)
        else None,
    )


def task_means(
    runs: Iterable[WriterRun], value: Callable[[WriterRun], float | None]
) -> dict[tuple[str, int], float]:
    """The mean of a value over the runs of each task that has it."""
    by_task: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in runs:
        found = value(run)
        if found is not None:
            by_task[run.task].append(found)
    return {task: mean(values) for task, values in sorted(by_task.items())}


def task_interval(
    runs: Iterable[WriterRun], value: Callable[[WriterRun], float | None]
) -> Interval | None:
    """The mean over tasks of a value in [0, 1] with its 95% interval; None if no run has it."""
    return share_or_mean_interval(list(task_means(runs, value).values()), shares=True)


def _shares(names: Iterable[Iterable[str]], of: int) -> dict[str, float]:
    counts = Counter(name for found in names for name in found)
    return {name: number / of for name, number in counts.most_common()}
