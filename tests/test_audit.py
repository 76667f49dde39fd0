"""The audit of a run: each check on data that it must warn about and on data that it must not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_run import TASKSET, write_evaluation, write_fake_run, write_step

from aflow_tune.report.audit import (
    CHECKS,
    DOMINANT_ITEMS,
    RECENT_STEPS,
    audit_run,
    groups_without_variance,
    one_answer_dominates,
    reward_without_score,
    unearned_rewards,
)
from aflow_tune.report.evaluation import load_evaluations
from aflow_tune.report.html import summary_text, write_report
from aflow_tune.report.metrics import MetricsLine, read_metrics
from aflow_tune.report.records import EvalRecord

RISING = [0.1, 0.12, 0.11, 0.13, 0.5, 0.52, 0.49, 0.51]
FLAT = [0.3, 0.5, 0.4, 0.45, 0.42, 0.35, 0.5, 0.38]


def run_with(folder: Path, rewards: Sequence[float], *evaluations: tuple[int, list[float]]) -> Path:
    """A run folder with one training reward a step and these held-out scores by step."""
    folder.mkdir(exist_ok=True)
    for step, reward in enumerate(rewards, 1):
        write_step(folder, step, reward)
    for step, scores in evaluations:
        write_evaluation(folder, step, scores)
    return folder


def check_reward(run_dir: Path) -> object:
    steps = load_evaluations(run_dir)[TASKSET]
    return reward_without_score(read_metrics(run_dir), list(steps.values()))


GOOD, BAD = [1.0] * 30 + [0.0] * 10, [1.0] * 10 + [0.0] * 30


def test_a_rising_reward_with_a_falling_score_is_told(tmp_path: Path) -> None:
    run_dir = run_with(tmp_path / "run", RISING, (0, GOOD), (8, BAD))
    found = check_reward(run_dir)
    # rewards: second half 0.505, first half 0.115; scores: 30 of 40 to 10 of 40
    assert str(found).startswith(
        "From step 0 to 8 the training reward rose by 0.390 while the held-out score on held_out "
        "fell by 0.500 (40 paired items)."
    )


def test_the_fall_is_measured_from_the_best_evaluation(tmp_path: Path) -> None:
    rewards = [0.1, 0.2, 0.15, 0.2, *RISING]
    run_dir = run_with(tmp_path / "run", rewards, (0, BAD), (4, GOOD), (12, BAD))
    assert "From step 4 to 12" in str(check_reward(run_dir))


def records(answers: Sequence[str | None], rewards: Sequence[float] = ()) -> list[EvalRecord]:
    """One run an item with these answers and rewards (1.0 where none are given)."""
    return [
        EvalRecord(
            step=1, taskset=TASKSET, item=item, run=0, score=1.0, answer=answer,
            reward=rewards[item] if rewards else 1.0,
        )
        for item, answer in enumerate(answers)
    ]  # fmt: skip


def test_one_answer_to_most_items_is_told() -> None:
    found = one_answer_dominates(records(["42"] * 18 + ["1", "2"]), "held_out")
    assert found is not None
    assert found.found == "On held_out 18 of 20 items end with the same answer: '42'."


@pytest.mark.parametrize(
    "answers",
    [
        [str(n) for n in range(40)],
        ["yes", "no"] * 20,
        ["yes"] * 22 + ["no"] * 18,
        ["42"] * (DOMINANT_ITEMS - 1),
        [""] * 40,
        [None] * 40,
    ],
    ids=["all differ", "half each", "55%", "too few", "empty ones are another check's", "none"],
)
def test_answers_that_differ_or_are_few_are_not_told(answers: list[str | None]) -> None:
    assert one_answer_dominates(records(answers), "held_out") is None


def test_rewards_for_empty_outputs_are_told() -> None:
    rewards = [1.0] * 5 + [1.0] * 5 + [0.0] * 10
    found = unearned_rewards(records([""] * 5 + ["x"] * 15, rewards), "held_out")
    assert found is not None
    assert (
        "5 of 10 rewarded rollouts did nothing to earn it: 5 with an empty output." in found.found
    )


def test_rewards_from_handled_exceptions_are_told() -> None:
    made = records(["x"] * 20, [1.0] * 10 + [0.0] * 10)
    crashed = [replace(r, metrics={"sandbox/failed": 2.0}) for r in made[:2]]
    unread = [
        replace(r, operators=[{"operator": "Custom", "instance": "a", "outcome": "unreadable"}])
        for r in made[2:4]
    ]
    found = unearned_rewards([*crashed, *unread, *made[4:]], "held_out")
    assert found is not None
    assert "4 of 10 rewarded rollouts" in found.found
    assert "4 whose programs or operators all failed" in found.found


@pytest.mark.parametrize(
    ("answers", "rewards"),
    [
        ([""] * 2 + ["x"] * 18, [1.0] * 20),
        ([""] * 5 + ["x"] * 15, [0.05] * 5 + [1.0] * 15),
        ([""] * 20, [0.0] * 20),
        (["x"] * 20, [1.0] * 10 + [0.0] * 10),
    ],
    ids=["two only", "a little for form", "no reward at all", "all earned"],
)
def test_earned_rewards_are_not_told(answers: list[str], rewards: list[float]) -> None:
    assert unearned_rewards(records(answers, rewards), "held_out") is None


def health(mixed: float, best: float, worst: float, steps: int = RECENT_STEPS) -> list[MetricsLine]:
    prefix = "experience_pipeline/group/frac_"
    metrics = {f"{prefix}mixed": mixed, f"{prefix}all_best": best, f"{prefix}all_worst": worst}
    return [MetricsLine(0.0, "explorer", step, metrics) for step in range(1, steps + 1)]


def test_groups_without_variance_are_told_with_their_reason() -> None:
    easy = groups_without_variance(health(0.05, 0.95, 0.0))
    hard = groups_without_variance(health(0.0, 0.0, 1.0))
    both = groups_without_variance(health(0.0, 0.5, 0.5))
    assert easy is not None
    assert hard is not None
    assert both is not None
    assert "only 5% of the groups" in easy.found
    assert (easy.cure[:23], hard.cure[:23]) == (
        "The tasks are too easy ", "The tasks are too hard:",
    )  # fmt: skip
    assert "50% solve their task in every rollout and 50% never" in both.found


def test_a_healthy_run_passes_and_says_what_was_looked_for(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "run")
    assert audit_run(read_metrics(run_dir), load_evaluations(run_dir)) == []
    text = summary_text(run_dir, write_report(run_dir))
    assert "Audit: nothing found" in text
    page = (run_dir / "report.html").read_text()
    assert "Nothing was found." in page
    assert all(check in page for check in CHECKS)
