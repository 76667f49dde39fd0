"""Held-out evaluations of a run, and the comparison of two of them.

The one evaluator: it reads the records that the adapter wrote, whichever engine ran. A rollout
that failed has no score. The primary comparison counts an item only where both sides scored it
and says how many did not: a crash is not a wrong answer. Because leaving failures out could also
flatter a model that crashes on what it cannot do, a second comparison counts every failed rollout
as 0, and the verdict says so when the two do not agree.

An evaluation that was cut off is never compared: the rollouts that finish first are not a fair
sample. Whether one was finished is what `metrics.jsonl` says; where it says nothing about a
task set, its evaluations are taken as whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aflow_tune.report.metrics import read_metrics
from aflow_tune.report.quantities import finished_evaluations
from aflow_tune.report.records import EvalRecord, read_records, record_files
from aflow_tune.report.statistics import (
    SMALL_SAMPLE,
    Interval,
    mean,
    paired_difference,
    pass_at_k,
    share_or_mean_interval,
    sign_test,
)

FOLDER = "evaluations"
Scores = Mapping[int, Mapping[str, float]]
"""Mean score by step and task set."""


@dataclass(frozen=True)
class Evaluation:
    """All records of one task set with the weights of one step, ordered by item and rollout.

    `whole` is False where the evaluation was cut off before its last item.
    """

    taskset: str
    step: int
    records: tuple[EvalRecord, ...]
    whole: bool = True

    def scores(self, *, failed_as: float | None = None) -> dict[int, float]:
        """Mean score of each item over its rollouts.

        Those without a score count as `failed_as`; None leaves them out, and with them the
        items that have no other rollout.
        """
        return mean_by_item(
            (r.item, failed_as if r.score is None else r.score) for r in self.records
        )

    def metric(self, name: str) -> dict[int, float]:
        """Mean of 'reward' or of a recorded metric for each item that has it."""
        return mean_by_item((r.item, _metric(r, name)) for r in self.records)

    def metric_interval(self, name: str) -> Interval | None:
        """Mean of `metric(name)` over items with its interval, as `interval` has it."""
        values = {_metric(record, name) for record in self.records}
        means = list(self.metric(name).values())
        return share_or_mean_interval(means, shares=values <= {None, 0.0, 1.0})

    def metric_names(self) -> list[str]:
        """'reward' and every metric that a rollout recorded, in the order first seen."""
        return list(dict.fromkeys(["reward", *(name for r in self.records for name in r.metrics)]))

    @property
    def items(self) -> int:
        return len({record.item for record in self.records})

    @property
    def failed_rollouts(self) -> int:
        """How many ended without a score."""
        return sum(record.score is None for record in self.records)

    @property
    def failures(self) -> dict[str, int]:
        """Rollouts without a score by kind, most frequent first."""
        kinds = Counter(r.failure or "not scored" for r in self.records if r.score is None)
        return dict(kinds.most_common())

    def interval(self) -> Interval | None:
        """Mean score over items with its 95% interval; None if nothing was scored.

        Wilson's interval where every item is right or wrong, else the t interval, which ends at
        0 and 1 where every rollout is right or wrong.
        """
        right_or_wrong = all(r.score in (None, 0.0, 1.0) for r in self.records)
        return share_or_mean_interval(list(self.scores().values()), shares=right_or_wrong)

    def pass_at(
        self, k: int, solved_at: float = 1.0, *, failed_as_unsolved: bool = False
    ) -> Interval | None:
        """pass@k over items with its 95% interval; a rollout solves its item from `solved_at` on.

        Rollouts without a score are left out, or count as unsolved. Items with fewer than `k`
        are left out; None if no item has as many.
        """
        by_item: dict[int, list[float | None]] = defaultdict(list)
        for record in self.records:
            by_item[record.item].append(record.score)
        estimates = []
        for _, scores in sorted(by_item.items()):
            counted = [score for score in scores if score is not None]
            samples = len(scores) if failed_as_unsolved else len(counted)
            if samples >= k:
                solved = sum(score >= solved_at for score in counted)
                estimates.append(pass_at_k(samples, solved, k))
        return share_or_mean_interval(estimates, shares=True)

    def solved_rollouts(self, solved_at: float = 1.0) -> int:
        """Rollouts whose score is at least `solved_at`."""
        return sum(r.score is not None and r.score >= solved_at for r in self.records)


Evaluations = Mapping[str, Mapping[int, Evaluation]]
"""By task set, then by step."""


@dataclass(frozen=True)
class Paired:
    """Before and after on the same items. `better` and `worse` count items that changed."""

    mean_before: float
    mean_after: float
    difference: Interval
    p_value: float
    better: int
    worse: int

    @property
    def shown(self) -> bool:
        """Whether a change is shown: the interval excludes zero and, on few items, the exact
        sign test agrees."""
        enough = self.difference.count >= SMALL_SAMPLE or self.p_value < 0.05
        return self.difference.excludes_zero and enough

    @property
    def direction(self) -> int:
        """1 for a rise that is shown, -1 for a fall, 0 for neither."""
        return 0 if not self.shown else (1 if self.difference.mean > 0 else -1)

    def numbers(self) -> str:
        """`from 0.120 to 0.710 (+0.590, 95% interval +0.490 to +0.690, 128 paired items)`."""
        change = self.difference
        text = f"from {self.mean_before:.3f} to {self.mean_after:.3f} ({change.mean:+.3f}"
        if change.low is not None and change.high is not None:
            text += f", 95% interval {change.low:+.3f} to {change.high:+.3f}"
        return f"{text}, {change.count} paired item{'s' if change.count != 1 else ''})"


@dataclass(frozen=True)
class Comparison:
    """Two evaluations of one task set.

    `primary` counts the items that both scored; `failed_as_zero` counts all items of both and a
    failed rollout as 0, and is None where none failed.
    """

    before: Evaluation
    after: Evaluation
    primary: Paired
    failed_as_zero: Paired | None

    @property
    def difference(self) -> Interval:
        return self.primary.difference

    @property
    def direction(self) -> int:
        """1 if an improvement is shown, -1 if a loss is, 0 if neither, or if counting failed
        rollouts as 0 says otherwise."""
        other = self.failed_as_zero
        if other is not None and other.direction != self.primary.direction:
            return 0
        return self.primary.direction

    @property
    def left_out(self) -> int:
        """Items that only one side, or neither, could score."""
        items = {record.item for side in (self.before, self.after) for record in side.records}
        return len(items) - self.difference.count

    def verdict(self) -> str:
        """One honest sentence on the primary comparison."""
        paired, change = self.primary, self.difference
        word = "rose" if change.mean > 0 else "fell"
        if change.low is None:
            return f"Nothing is shown: held-out score went {paired.numbers()}; one item is too few."
        if not change.excludes_zero:
            return (
                f"No change shown: held-out score went {paired.numbers()}; "
                "the interval includes zero."
            )
        if not paired.shown:
            return (
                f"Too few items to tell: held-out score {word} {paired.numbers()}, but chance "
                f"alone does as much (exact sign test, p = {paired.p_value:.2g})."
            )
        return f"Held-out score {word} {paired.numbers()}."

    def caveats(self) -> list[str]:
        """What has to be said beside the verdict; empty where nothing failed."""
        sentences = []
        if self.left_out:
            sentences.append(
                f"{_items(self.left_out)} left out, because a side has no scored rollout on "
                f"{'it' if self.left_out == 1 else 'them'} (failed rollouts: "
                f"{self.before.failed_rollouts} before, {self.after.failed_rollouts} after)."
            )
        other = self.failed_as_zero
        if other is not None:
            text = f"With every failed rollout counted as 0 it went {other.numbers()}"
            if other.direction == self.primary.direction:
                sentences.append(f"{text}.")
            else:
                told = {1: "a rise", 0: "no change", -1: "a fall"}
                sentences.append(
                    f"{text}, which shows {told[other.direction]}: the two readings do not agree, "
                    "so look at the failed rollouts first."
                )
        return sentences


def load_evaluations(run_dir: Path) -> dict[str, dict[int, Evaluation]]:
    """Every evaluation of a run: task set -> step -> evaluation, steps in order.

    Of several records of one rollout of one item, as an evaluation that was done again may leave,
    the last one counts.

    Raises:
        ValueError: a record file is damaged; file and line are named.
    """
    finished: dict[str, set[int]] = defaultdict(set)
    for line in read_metrics(run_dir):
        for name in finished_evaluations(line.metrics):
            finished[name].add(line.step)
    found: dict[str, dict[int, Evaluation]] = defaultdict(dict)
    folder = run_dir / FOLDER
    for step, path in record_files(folder):
        name = path.parent.relative_to(folder).as_posix()
        latest = {(record.item, record.run): record for record in read_records(path)}
        if latest:
            records = tuple(latest[key] for key in sorted(latest))
            whole = name not in finished or step in finished[name]
            found[name][step] = Evaluation(name, step, records, whole)
    return {name: dict(sorted(steps.items())) for name, steps in sorted(found.items())}


def pair(before: Mapping[int, float], after: Mapping[int, float]) -> Paired | None:
    """The items that both have; None if there are none."""
    items = sorted(before.keys() & after.keys())
    if not items:
        return None
    first, second = [before[item] for item in items], [after[item] for item in items]
    changes = [b - a for a, b in zip(first, second, strict=True)]
    return Paired(
        mean_before=mean(first),
        mean_after=mean(second),
        difference=paired_difference(first, second),
        p_value=sign_test(changes),
        better=sum(change > 0 for change in changes),
        worse=sum(change < 0 for change in changes),
    )


def compare(before: Evaluation, after: Evaluation) -> Comparison | None:
    """Paired comparison by item; None if no item was scored on both sides."""
    primary = pair(before.scores(), after.scores())
    if primary is None:
        return None
    failed_as_zero = None
    if before.failed_rollouts + after.failed_rollouts:
        failed_as_zero = pair(before.scores(failed_as=0.0), after.scores(failed_as=0.0))
    return Comparison(before, after, primary, failed_as_zero)


def compare_ends(evaluations: Evaluations) -> dict[str, Comparison]:
    """For each task set with two whole evaluations or more, its first against its last."""
    comparisons = {}
    for name, steps in evaluations.items():
        whole = [evaluation for evaluation in steps.values() if evaluation.whole]
        if len(whole) > 1 and (comparison := compare(whole[0], whole[-1])) is not None:
            comparisons[name] = comparison
    return comparisons


def first_and_last(run_dir: Path) -> dict[str, Comparison]:
    """`compare_ends` of a run folder."""
    return compare_ends(load_evaluations(run_dir))


def scores_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """The mean score of every whole evaluation of a run, by step and task set.

    Raises:
        ValueError: a record file is damaged; file and line are named.
    """
    scores: dict[int, dict[str, float]] = {}
    for name, evaluations in load_evaluations(run_dir).items():
        for step, evaluation in evaluations.items():
            interval = evaluation.interval()
            if evaluation.whole and interval is not None:
                scores.setdefault(step, {})[name] = interval.mean
    return scores


def ranked(scores: Scores, steps: Iterable[int]) -> list[tuple[int, float]]:
    """Those of `steps` that were evaluated on the most task sets, with their mean over these: the
    command line's `best`, the checkpoints that a run keeps and the list of runs go by it.

    The best first, the earliest of equals before later ones.
    """
    wanted = set(steps)
    of_steps = {step: list(of.values()) for step, of in scores.items() if step in wanted and of}
    most = max(map(len, of_steps.values()), default=0)
    means = [(step, mean(values)) for step, values in of_steps.items() if len(values) == most]
    return sorted(means, key=lambda pair: (-pair[1], pair[0]))


def best_step(run_dir: Path, steps: Iterable[int]) -> int | None:
    """Of `steps` the one whose evaluation in the run scored best; None if none was evaluated."""
    found = ranked(scores_of(run_dir), steps)
    return found[0][0] if found else None


def mean_by_item(values: Iterable[tuple[int, float | None]]) -> dict[int, float]:
    """The mean of the known values of each item, by item; items without one are left out."""
    by_item: dict[int, list[float]] = defaultdict(list)
    for item, value in values:
        if value is not None:
            by_item[item].append(value)
    return {item: mean(found) for item, found in sorted(by_item.items())}


def _metric(record: EvalRecord, name: str) -> float | None:
    return record.reward if name == "reward" else record.metrics.get(name)


def _items(count: int) -> str:
    return f"{count} item is" if count == 1 else f"{count} items are"
