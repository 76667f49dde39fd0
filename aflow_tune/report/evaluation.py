"""Held-out evaluations of a run, comparisons between two of them, and their usage and cost.

A failed rollout has no score: a crash is not a wrong answer. The primary comparison uses the items
that both sides scored. That could flatter a model that crashes on what it cannot do, so a second
comparison counts every failed rollout as 0, and the caveats say if the two disagree. An incomplete
evaluation (by `metrics.jsonl`) is never compared, since the rollouts that finish first are not a
fair sample. A sum with a missing part is None, never 0.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from aflow_tune.trace import POLICY

FOLDER = "evaluations"
_COST, _UNPRICED = "cost/", "unpriced_calls/"
Scores = Mapping[int, Mapping[str, float]]
"""Mean score by step and task set."""


@dataclass(frozen=True)
class Evaluation:
    """All records of one task set with the weights of one step, ordered by item and rollout.

    `whole` is False if the evaluation did not finish.
    """

    taskset: str
    step: int
    records: tuple[EvalRecord, ...]
    whole: bool = True

    def scores(self, *, failed_as: float | None = None) -> dict[int, float]:
        """Mean score of each item over its rollouts. Rollouts without a score count as `failed_as`;
        None: they are left out."""
        return mean_by_item(
            (r.item, failed_as if r.score is None else r.score) for r in self.records
        )

    def _values(self, name: str) -> list[tuple[int, float | None]]:
        return [
            (r.item, r.reward if name == "reward" else r.metrics.get(name)) for r in self.records
        ]

    def metric(self, name: str) -> dict[int, float]:
        """Mean of 'reward' or of a recorded metric, for each item with a value."""
        return mean_by_item(self._values(name))

    def metric_interval(self, name: str) -> Interval | None:
        """Mean of `metric(name)` over items with its interval, as in `interval`."""
        shares = {value for _, value in self._values(name)} <= {None, 0.0, 1.0}
        return share_or_mean_interval(list(self.metric(name).values()), shares=shares)

    def metric_names(self) -> list[str]:
        """'reward' and all recorded metrics, in order of first appearance."""
        return list(dict.fromkeys(["reward", *(name for r in self.records for name in r.metrics)]))

    @property
    def items(self) -> int:
        return len({record.item for record in self.records})

    @property
    def failed_rollouts(self) -> int:
        """The number of rollouts without a score."""
        return sum(record.score is None for record in self.records)

    @property
    def failures(self) -> dict[str, int]:
        """Rollouts without a score by kind, most frequent first."""
        kinds = Counter(r.failure or "not scored" for r in self.records if r.score is None)
        return dict(kinds.most_common())

    def interval(self) -> Interval | None:
        """Mean score over items with its 95% interval (see `share_or_mean_interval`); None if no
        item was scored."""
        right_or_wrong = all(r.score in (None, 0.0, 1.0) for r in self.records)
        return share_or_mean_interval(list(self.scores().values()), shares=right_or_wrong)

    def pass_at(
        self, k: int, solved_at: float = 1.0, *, failed_as_unsolved: bool = False
    ) -> Interval | None:
        """Mean pass@k over items with its 95% interval; a score of `solved_at` or more solves the
        item. Rollouts without a score are left out, or count as unsolved. Items with fewer than `k`
        counted rollouts are left out; None if no item is left."""
        by_item: dict[int, list[bool]] = defaultdict(list)
        for record in self.records:
            if record.score is not None or failed_as_unsolved:
                solved = record.score is not None and record.score >= solved_at
                by_item[record.item].append(solved)
        estimates = [
            pass_at_k(len(solved), sum(solved), k)
            for _, solved in sorted(by_item.items())
            if len(solved) >= k
        ]
        return share_or_mean_interval(estimates, shares=True)

    def solved_rollouts(self, solved_at: float = 1.0) -> int:
        """The number of rollouts whose score is at least `solved_at`."""
        return sum(r.score is not None and r.score >= solved_at for r in self.records)


Evaluations = Mapping[str, Mapping[int, Evaluation]]
"""Evaluations by task set, then by step."""


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
    def direction(self) -> int:
        """1 for a significant rise, -1 for a fall, 0 for neither: the interval has to exclude zero
        and, for fewer than `SMALL_SAMPLE` items, the sign test to have p < 0.05."""
        enough = self.difference.count >= SMALL_SAMPLE or self.p_value < 0.05
        if not (self.difference.excludes_zero and enough):
            return 0
        return 1 if self.difference.mean > 0 else -1

    def numbers(self) -> str:
        """`from 0.120 to 0.710 (+0.590, 95% interval +0.490 to +0.690, 128 paired items)`."""
        change = self.difference
        text = f"from {self.mean_before:.3f} to {self.mean_after:.3f} ({change.mean:+.3f}"
        if change.low is not None:
            text += f", 95% interval {change.low:+.3f} to {change.high:+.3f}"
        return f"{text}, {change.count} paired items)"


@dataclass(frozen=True)
class Comparison:
    """Two evaluations of one task set. `primary` uses the items that both scored; `failed_as_zero`
    (None if no rollout failed) the items of both, with failed rollouts as 0."""

    before: Evaluation
    after: Evaluation
    primary: Paired
    failed_as_zero: Paired | None

    @property
    def difference(self) -> Interval:
        return self.primary.difference

    @property
    def direction(self) -> int:
        """1 for a significant improvement, -1 for a loss, 0 for neither, or if `failed_as_zero`
        disagrees."""
        other = self.failed_as_zero or self.primary
        return self.primary.direction if other.direction == self.primary.direction else 0

    @property
    def left_out(self) -> int:
        """The number of items that only one side, or neither, scored."""
        items = {record.item for side in (self.before, self.after) for record in side.records}
        return len(items) - self.difference.count

    def verdict(self) -> str:
        """One sentence on the primary comparison."""
        numbers, change = self.primary.numbers(), self.difference
        word = "rose" if change.mean > 0 else "fell"
        if self.primary.direction:
            return f"Held-out score {word} {numbers}."
        if not change.excludes_zero:
            why = "one item is too few" if change.low is None else "the interval includes zero"
            return f"No change shown: held-out score went {numbers}; {why}."
        return (
            f"Too few items to tell: held-out score {word} {numbers}, but chance "
            f"alone does as much (exact sign test, p = {self.primary.p_value:.2g})."
        )

    def caveats(self) -> list[str]:
        """Sentences that qualify the verdict: items left out, and failed rollouts counted as 0."""
        sentences = []
        if self.left_out:
            sentences.append(
                f"Items left out, because a side has no scored rollout on them: {self.left_out} "
                f"(failed rollouts: {self.before.failed_rollouts} before, "
                f"{self.after.failed_rollouts} after)."
            )
        if (other := self.failed_as_zero) is not None:
            doubt = " The two readings do not agree: look at the failed rollouts first."
            agree = other.direction == self.primary.direction
            text = f"With every failed rollout counted as 0 it went {other.numbers()}."
            sentences.append(f"{text}{'' if agree else doubt}")
        return sentences


def load_evaluations(run_dir: Path) -> dict[str, dict[int, Evaluation]]:
    """Every evaluation of a run: task set -> step -> evaluation, steps in order. Of several records
    of one rollout the last one counts. Raises ValueError, with file and line: a record file is
    damaged."""
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
    """Before and after on the items that both have; None if there are none."""
    items = sorted(before.keys() & after.keys())
    if not items:
        return None
    first, second = [before[item] for item in items], [after[item] for item in items]
    changes = [after[item] - before[item] for item in items]
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
    """For each task set with two or more whole evaluations, the first against the last."""
    comparisons = {}
    for name, steps in evaluations.items():
        whole = [evaluation for evaluation in steps.values() if evaluation.whole]
        if len(whole) > 1 and (comparison := compare(whole[0], whole[-1])) is not None:
            comparisons[name] = comparison
    return comparisons


def scores_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """The mean score of every whole evaluation of a run, by step and task set. Raises ValueError,
    with file and line: a record file is damaged."""
    scores: dict[int, dict[str, float]] = {}
    for name, evaluations in load_evaluations(run_dir).items():
        for step, evaluation in evaluations.items():
            interval = evaluation.interval()
            if evaluation.whole and interval is not None:
                scores.setdefault(step, {})[name] = interval.mean
    return scores


def ranked(scores: Scores, steps: Iterable[int]) -> list[tuple[int, float]]:
    """Those of `steps` that were evaluated on the most task sets, with their mean over these, best
    first, ties by step. All commands use this order for `best`."""
    wanted = set(steps)
    of_steps = {step: list(of.values()) for step, of in scores.items() if step in wanted and of}
    most = max(map(len, of_steps.values()), default=0)
    means = [(step, mean(values)) for step, values in of_steps.items() if len(values) == most]
    return sorted(means, key=lambda pair: (-pair[1], pair[0]))


def best_step(run_dir: Path, steps: Iterable[int]) -> int | None:
    """The first of `ranked` among `steps`; None if none of them was evaluated."""
    found = ranked(scores_of(run_dir), steps)
    return found[0][0] if found else None


def mean_by_item(values: Iterable[tuple[int, float | None]]) -> dict[int, float]:
    """The mean of the known values of each item; items without one are left out."""
    by_item: dict[int, list[float]] = defaultdict(list)
    for item, value in values:
        if value is not None:
            by_item[item].append(value)
    return {item: mean(found) for item, found in sorted(by_item.items())}


# Usage and cost

Price = Callable[[int, int], float]
"""US dollars of one call of the evaluated model, from its prompt and its sampled tokens."""


@dataclass(frozen=True)
class Usage:
    """Calls and tokens of the evaluated model in `runs` rollouts (the name in `eval.json`);
    `tokens` are the sampled ones. Tokens are None if some answered call lacks its count."""

    runs: int
    calls: int
    failed_calls: int
    truncated_calls: int
    prompt_tokens: int | None
    tokens: int | None

    @property
    def total_tokens(self) -> int | None:
        """Prompt and sampled tokens together."""
        if self.prompt_tokens is None or self.tokens is None:
            return None
        return self.prompt_tokens + self.tokens


@dataclass(frozen=True)
class CallerUse:
    """The calls of one caller. `token_share`: its share of the sampled tokens, None if unknown;
    `outcomes` counts the outcomes of the operator of that name."""

    caller: str
    usage: Usage
    token_share: float | None
    outcomes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """US dollars by role; roles with an unknown cost are in `unknown` instead. `total`: of all
    roles, None if one is unknown."""

    by_role: dict[str, float]
    unknown: tuple[str, ...]

    @property
    def total(self) -> float | None:
        return None if self.unknown else math.fsum(self.by_role.values())


def usage(calls: Sequence[Mapping[str, Any]], rollouts: int) -> Usage:
    """The usage of `calls` made in `rollouts` rollouts; failed calls have no tokens."""
    answered = [call for call in calls if not call.get("failed")]
    sums: dict[str, int | None] = {}
    for name in ("prompt_tokens", "tokens"):
        known = [n for call in answered if isinstance(n := call.get(name), int)]
        sums[name] = sum(known) if len(known) == len(answered) else None
    truncated = sum(bool(call.get("truncated")) for call in answered)
    return Usage(rollouts, len(calls), len(calls) - len(answered), truncated, **sums)


def usage_of(records: Sequence[EvalRecord]) -> Usage:
    """Calls and tokens of all `records`."""
    return usage([call for record in records for call in record.calls], len(records))


def callers(records: Sequence[EvalRecord]) -> list[CallerUse]:
    """One entry per caller, most sampled tokens first. An operator's caller is
    `.../Operator.instance`; operators that called no model come last, with outcomes only."""
    by_caller: dict[str, list[dict[str, Any]]] = defaultdict(list)
    rollouts: Counter[str] = Counter()
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        for call in record.calls:
            by_caller[str(call.get("caller"))].append(call)
        rollouts.update({str(call.get("caller")) for call in record.calls})
        for use in record.operators:
            operator, name = str(use.get("operator")), str(use.get("instance") or "")
            if not (name == operator or name.startswith(f"{operator}.")):
                name = f"{operator}.{name}" if name else operator
            outcomes[name][str(use.get("outcome"))] += 1
    total = usage_of(records).tokens
    found = []
    for caller, calls in by_caller.items():
        own = usage(calls, rollouts[caller])
        share = own.tokens / total if total and own.tokens is not None else None
        found.append(CallerUse(caller, own, share, dict(outcomes[caller.rpartition("/")[2]])))
    found.sort(key=lambda use: (-(use.usage.tokens or 0), use.caller))
    calling = {caller.rpartition("/")[2] for caller in by_caller}
    return found + [
        CallerUse(name, usage([], 0), 0.0 if total else None, dict(counts))
        for name, counts in sorted(outcomes.items())
        if name not in calling
    ]


def cost(records: Sequence[EvalRecord], price: Price | None) -> Cost:
    """The cost of the rollouts. `price` is the evaluated model's (None: unknown). Its cost comes
    from the recorded calls, as its cost metrics cover only calls through our clients."""
    by_role: dict[str, float] = defaultdict(float)
    unknown: set[str] = set()
    for record in records:
        for name, value in record.metrics.items():
            if name.startswith(_COST) and name != _COST + POLICY:
                by_role[name.removeprefix(_COST)] += value
            elif name.startswith(_UNPRICED) and name != _UNPRICED + POLICY and value > 0:
                unknown.add(name.removeprefix(_UNPRICED))
    calls = [call for record in records for call in record.calls if not call.get("failed")]
    if price is not None and all(isinstance(call.get("tokens"), int) for call in calls):
        by_role[POLICY] = math.fsum(price(call["prompt_tokens"], call["tokens"]) for call in calls)
    elif calls:
        unknown.add(POLICY)
    known = {role: value for role, value in by_role.items() if role not in unknown}
    return Cost(known, tuple(sorted(unknown)))


def per_solved(amount: float | None, solved: int) -> float | None:
    """`amount` per solved rollout; None if the amount is unknown or no rollout solved its task."""
    return amount / solved if amount is not None and solved else None
