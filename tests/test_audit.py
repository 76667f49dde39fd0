"""The audit of a run: each check on data that it must warn about and on data that it must not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_run import TASKSET, write_evaluation, write_fake_run, write_step

from aflow_tune.report.audit import (
    CHECKS,
    DOMINANT_ITEMS,
    audit_run,
    groups_without_variance,
    one_answer_dominates,
    unearned_rewards,
)
from aflow_tune.report.evaluation import load_evaluations
from aflow_tune.report.html import summary_text, write_report
from aflow_tune.report.metrics import MetricsLine, read_metrics
from aflow_tune.report.records import EvalRecord

RISING = [0.1, 0.12, 0.11, 0.13, 0.5, 0.52, 0.49, 0.51]
FLAT = [0.3, 0.5, 0.4, 0.45, 0.42, 0.35, 0.5, 0.38]
GOOD, BAD = [1.0] * 30 + [0.0] * 10, [1.0] * 10 + [0.0] * 30


@pytest.mark.parametrize(
    ("rewards", "scores", "told"),
    [
        # rewards: second half 0.505, first half 0.115; scores: 30 of 40 to 10 of 40
        (RISING, {0: GOOD, 8: BAD}, ["step 0 to 8", "0.390", "fell by 0.500 (40 paired items)"]),
        ([0.1, 0.2, 0.15, 0.2, *RISING], {0: BAD, 4: GOOD, 12: BAD}, ["From step 4 to 12"]),
        (FLAT, {0: GOOD, 8: BAD}, None),
        (RISING, {0: BAD, 8: GOOD}, None),
    ],
)
def test_a_rising_reward_with_a_falling_score(
    tmp_path: Path,
    rewards: list[float],
    scores: dict[int, list[float]],
    told: list[str] | None,
) -> None:
    for step, reward in enumerate(rewards, 1):
        write_step(tmp_path, step, reward)
    for step, values in scores.items():
        write_evaluation(tmp_path, step, values)
    found = [
        finding
        for finding in audit_run(read_metrics(tmp_path), load_evaluations(tmp_path))
        if finding.check == CHECKS[0]
    ]
    assert len(found) == (told is not None)
    assert [words for words in told or () if words not in found[0].found] == []


@pytest.mark.parametrize(
    ("check", "answers", "rewards", "told"),
    [
        (one_answer_dominates, ["42"] * 18 + ["1", "2"], (), "18 of 20"),
        (one_answer_dominates, ["yes"] * 22 + ["no"] * 18, (), None),  # 55%: no certainty
        (one_answer_dominates, ["42"] * (DOMINANT_ITEMS - 1), (), None),
        (one_answer_dominates, [""] * 40, (), None),  # empty ones are another check's
        (unearned_rewards, [""] * 5 + ["x"] * 15, [1.0] * 10 + [0.0] * 10, "5 of 10 rewarded"),
        (unearned_rewards, [""] * 2 + ["x"] * 18, [1.0] * 20, None),
        (unearned_rewards, [""] * 5 + ["x"] * 15, [0.05] * 5 + [1.0] * 15, None),
        (unearned_rewards, [""] * 20, [0.0] * 20, None),
    ],
)
def test_equal_answers_and_rewards_for_nothing(
    check: Any, answers: list[str | None], rewards: Sequence[float], told: str | None
) -> None:
    """One rollout an item with these answers and rewards (1.0 where none are given)."""
    records = [
        EvalRecord(
            step=1, taskset=TASKSET, item=item, run=0, score=1.0, answer=answer,
            reward=rewards[item] if rewards else 1.0,
        )
        for item, answer in enumerate(answers)
    ]  # fmt: skip
    found = check(records, "held_out")
    assert (found is not None) == (told is not None)
    assert found is None or (told or "") in found.found


@pytest.mark.parametrize(
    ("mixed", "best", "worst", "told"),
    [(0.05, 0.95, 0.0, "95%"), (0.0, 0.0, 1.0, "100% in none"), (0.2, 0.8, 0.0, None)],
)
def test_groups_without_variance(mixed: float, best: float, worst: float, told: str | None) -> None:
    prefix = "experience_pipeline/group/frac_"
    metrics = {f"{prefix}mixed": mixed, f"{prefix}all_best": best, f"{prefix}all_worst": worst}
    lines = [MetricsLine(0.0, "explorer", step, metrics) for step in range(1, 6)]
    found = groups_without_variance(lines)
    assert (found is not None) == (told is not None)
    assert found is None or (told or "") in found.found
    assert groups_without_variance(lines[1:]) is None


def test_a_healthy_run_passes_and_says_what_was_looked_for(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "run")
    assert "Audit: nothing found" in summary_text(run_dir, write_report(run_dir))
    page = (run_dir / "report.html").read_text()
    assert all(words in page for words in (*CHECKS, "Nothing was found."))
