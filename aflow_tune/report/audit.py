"""Warnings about a run, from its metrics and records: signs of reward hacking and wasted training.

Checks use confidence intervals or thresholds with a least count, and say what they counted. Not
covered: a reward that pays for the wrong thing in training and on held-out tasks alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from aflow_tune.gpus.use import LOW_USE
from aflow_tune.report.evaluation import Evaluation, Evaluations
from aflow_tune.report.metrics import MetricsLine, series
from aflow_tune.report.quantities import GROUP_HEALTH, REWARD, mean_gpu_use
from aflow_tune.report.records import EvalRecord
from aflow_tune.report.statistics import CONFIDENCE, mean, paired_difference, rise, wilson_interval

DOMINANT_SHARE = 0.5
"""An answer dominates if the 95% Wilson interval of its share of items is above this."""
DOMINANT_ITEMS = 20
"""Fewer items are not judged: equal answers happen by chance."""
UNEARNED_SHARE = 0.05
"""Share of rewarded rollouts that may have an empty answer or only failed steps."""
UNEARNED_ROLLOUTS = 3
"""Fewer such rollouts are not judged."""
MIXED_SHARE = 0.1
"""Below this share of groups with different rewards there is hardly any gradient."""
RECENT_STEPS = 5
"""Steps over which that share is averaged; fewer are not judged."""

CHECKS = (
    "training reward against held-out score",
    "one answer to most items",
    "rewards for empty outputs and exceptions",
    "groups without variance",
)
GPU_CHECK = "use of the GPUs"

_FAILED_USES = ("unreadable", "program_failed", "model_failed", "sandbox_unavailable", "raised")
"""Outcomes of operator calls without a usable result."""


@dataclass(frozen=True)
class Finding:
    """One warning: the check, a sentence with the counts, and what to do."""

    check: str
    found: str
    cure: str

    def __str__(self) -> str:
        return f"{self.found} {self.cure}"


def audit_run(lines: Sequence[MetricsLine], evaluations: Evaluations) -> list[Finding]:
    """All warnings about a run."""
    found = [groups_without_variance(lines)]
    for steps in evaluations.values():
        whole = [evaluation for evaluation in steps.values() if evaluation.whole]
        if whole:
            found.append(reward_without_score(lines, whole))
            found += audit_evaluation(whole[-1], f" at step {whole[-1].step}")
    return [finding for finding in [*found, low_gpu_use(lines)] if finding is not None]


def audit_evaluation(evaluation: Evaluation, place: str = "") -> list[Finding]:
    """Warnings from the records of one evaluation. `place` is appended to the task set's name."""
    records, where = evaluation.records, f"{evaluation.taskset}{place}"
    found = one_answer_dominates(records, where), unearned_rewards(records, where)
    return [finding for finding in found if finding is not None]


def reward_without_score(
    lines: Sequence[MetricsLine], evaluations: Sequence[Evaluation]
) -> Finding | None:
    """Warn if the training reward rises while the held-out score falls.

    The score falls if the last evaluation is below the best earlier one on the same items. As that
    one is chosen after the fact, the interval is corrected for the number of candidates
    (Bonferroni). The reward rises from the first to the second half of the steps between the two.
    """
    *earlier, last = evaluations
    after = last.scores()
    scored = [(e.step, scores) for e in earlier if (scores := e.scores()).keys() & after.keys()]
    if not scored:
        return None
    step, before = max(scored, key=lambda pair: mean(list(pair[1].values())))
    items = sorted(before.keys() & after.keys())
    confidence = 1 - (1 - CONFIDENCE) / len(scored)
    change = paired_difference(
        [before[item] for item in items], [after[item] for item in items], confidence
    )
    reward = rise([value for at, value in series(lines, REWARD) if step < at <= last.step])
    falls = change.high is not None and change.high < 0
    if not falls or reward is None or reward.low is None or reward.low <= 0:
        return None
    return Finding(
        CHECKS[0],
        f"From step {step} to {last.step} the training reward rose by {reward.mean:.3f} "
        f"while the held-out score on {last.taskset} fell by {-change.mean:.3f} "
        f"({change.count} paired items).",
        "Read transcripts of both steps: the reward may pay for something else than the task, "
        f"or the training tasks are learned by heart. The weights of step {step} are better.",
    )


def one_answer_dominates(records: Sequence[EvalRecord], where: str) -> Finding | None:
    """Warn if most items have the same answer; of each item the first recorded answer counts."""
    answers: dict[int, str] = {}
    for record in records:
        if record.answer:
            answers.setdefault(record.item, record.answer)
    if len(answers) < DOMINANT_ITEMS:
        return None
    answer, count = Counter(answers.values()).most_common(1)[0]
    if wilson_interval(count, len(answers))[0] <= DOMINANT_SHARE:
        return None
    return Finding(
        CHECKS[1],
        f"On {where} {count} of {len(answers)} items end with the same answer: {answer!r}.",
        "Unless that answer is right for so many, the model no longer reads the task: look at "
        "the transcripts, and at what the reward pays for this answer.",
    )


def unearned_rewards(records: Sequence[EvalRecord], where: str) -> Finding | None:
    """Warn if rollouts with an empty answer, or with only failed steps, are rewarded.

    Rewarded means above the lowest reward and at least the mean, so that the scale does not matter.
    Only failed steps means that all programs, or all operator calls, of the rollout failed; such a
    reward comes from the handling of an exception.
    """

    def only_failures(record: EvalRecord) -> bool:
        endings = {name for name, count in record.metrics.items() if count > 0}
        endings = {name for name in endings if name.startswith("sandbox/")}
        if endings and "sandbox/finished" not in endings:
            return True
        outcomes = [use.get("outcome") for use in record.operators]
        return bool(outcomes) and all(outcome in _FAILED_USES for outcome in outcomes)

    rewards = [(record, record.reward) for record in records if record.reward is not None]
    if not rewards:
        return None
    values = [reward for _, reward in rewards]
    lowest, average = min(values), mean(values)
    rewarded = [record for record, reward in rewards if reward > lowest and reward >= average]
    empty = sum(record.answer == "" for record in rewarded)
    broken = sum(record.answer != "" and only_failures(record) for record in rewarded)
    count = empty + broken
    if count < UNEARNED_ROLLOUTS or count < UNEARNED_SHARE * len(rewarded):
        return None
    return Finding(
        CHECKS[2],
        f"On {where} {count} of {len(rewarded)} rewarded rollouts did nothing to earn it: "
        f"{empty} with an empty output, {broken} whose programs or operators all failed.",
        "Let the reward of such a rollout be the lowest, or raise: one that raises has no reward.",
    )


def groups_without_variance(lines: Sequence[MetricsLine]) -> Finding | None:
    """Warn if in the last steps hardly any group has different rewards."""
    recent = {
        name: [value for _, value in series(lines, key)[-RECENT_STEPS:]]
        for name, key in GROUP_HEALTH.items()
    }
    if len(recent["mixed"]) < RECENT_STEPS or mean(recent["mixed"]) >= MIXED_SHARE:
        return None
    best, worst = (mean(recent[name] or [0.0]) for name in ("all best", "all worst"))
    return Finding(
        CHECKS[3],
        f"In the last {RECENT_STEPS} steps only {mean(recent['mixed']):.0%} of the groups had "
        f"rollouts with different rewards; the others teach nothing ({best:.0%} solve their task "
        f"in every rollout, {worst:.0%} in none).",
        "Where most solve it the tasks are too easy: add harder ones, or stop here. Where most "
        "fail they are too hard: add easier ones, pay for parts, or raise repeat_times.",
    )


def low_gpu_use(lines: Sequence[MetricsLine]) -> Finding | None:
    """Warn if the GPUs were idle for much of the run."""
    measured = mean_gpu_use(lines)
    if measured is None or measured[0] >= LOW_USE:
        return None
    share, seconds = measured
    return Finding(
        GPU_CHECK,
        f"The GPUs of this run were in use {share:.0%} of the time (over {seconds / 60:.0f} min).",
        "The curve of GPU use beside `Seconds a step` shows what it waited for: rolling out "
        "(raise explorer.runner_per_model or buffer.batch_size; slow tools, models behind an API), "
        "evaluating (quick_eval, explorer.eval_interval), or one side waiting for the other "
        "(synchronizer.sync_style, the split of GPUs).",
    )
