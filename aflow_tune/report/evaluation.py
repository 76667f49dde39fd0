"""Held-out evaluations of a run, and the comparison of two of them.

The one evaluator: it reads the records that the adapter wrote, whichever engine ran. A run
that failed has no score. The comparison counts an item only where both sides scored it, and
says how many did not; a crash is not a wrong answer, and is not hidden either.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from aflow_tune.report.records import EvalRecord, read_records
from aflow_tune.report.statistics import Interval, mean_interval, paired_difference


@dataclass(frozen=True)
class Evaluation:
    """All records of one task set with the weights of one step."""

    taskset: str
    step: int
    records: tuple[EvalRecord, ...]

    def scores(self) -> dict[int, float]:
        """Mean score of each item over its scored runs; items without any are left out."""
        by_item: dict[int, list[float]] = defaultdict(list)
        for record in self.records:
            if record.score is not None:
                by_item[record.item].append(record.score)
        return {item: sum(scores) / len(scores) for item, scores in sorted(by_item.items())}

    @property
    def items(self) -> int:
        """How many items were run."""
        return len({record.item for record in self.records})

    @property
    def failed_runs(self) -> int:
        """How many runs ended without a score."""
        return sum(record.score is None for record in self.records)

    def interval(self) -> Interval | None:
        """Mean score over items with its 95% interval; None if nothing was scored."""
        scores = list(self.scores().values())
        return mean_interval(scores) if scores else None


@dataclass(frozen=True)
class Comparison:
    """Before and after on the items that both scored."""

    before: Evaluation
    after: Evaluation
    mean_before: float
    mean_after: float
    difference: Interval

    @property
    def left_out(self) -> int:
        """Items that only one side, or neither, could score."""
        return max(self.before.items, self.after.items) - self.difference.count

    def verdict(self) -> str:
        """One honest sentence."""
        change = self.difference
        numbers = f"from {self.mean_before:.3f} to {self.mean_after:.3f} ({change.mean:+.3f}"
        if change.low is None or change.high is None:
            return f"Held-out score went {numbers}, one item: no interval)."
        numbers += f", 95% interval {change.low:+.3f} to {change.high:+.3f}"
        numbers += f", {change.count} paired items)"
        if not change.excludes_zero:
            return f"No change shown: held-out score went {numbers}; the interval includes zero."
        word = "rose" if change.mean > 0 else "fell"
        return f"Held-out score {word} {numbers}."


def load_evaluations(run_dir: Path) -> dict[str, dict[int, Evaluation]]:
    """Every evaluation of a run: task set -> step -> evaluation, steps in order."""
    found: dict[str, dict[int, Evaluation]] = defaultdict(dict)
    for path in (run_dir / "evaluations").glob("*/step_*.jsonl"):
        step = int(path.stem.removeprefix("step_"))
        records = tuple(sorted(read_records(path), key=lambda record: (record.item, record.run)))
        if records:
            found[path.parent.name][step] = Evaluation(path.parent.name, step, records)
    return {name: dict(sorted(steps.items())) for name, steps in sorted(found.items())}


def compare(before: Evaluation, after: Evaluation) -> Comparison | None:
    """Paired comparison by item; None if no item was scored on both sides."""
    first, second = before.scores(), after.scores()
    items = sorted(first.keys() & second.keys())
    if not items:
        return None
    difference = paired_difference([first[i] for i in items], [second[i] for i in items])
    return Comparison(
        before=before,
        after=after,
        mean_before=sum(first[i] for i in items) / len(items),
        mean_after=sum(second[i] for i in items) / len(items),
        difference=difference,
    )


def first_and_last(run_dir: Path) -> dict[str, Comparison]:
    """For each task set that was evaluated at least twice, its first against its last."""
    comparisons = {}
    for name, steps in load_evaluations(run_dir).items():
        ordered = list(steps.values())
        if len(ordered) > 1:
            comparison = compare(ordered[0], ordered[-1])
            if comparison is not None:
                comparisons[name] = comparison
    return comparisons
