"""Evaluations compared, and the statistics behind it, by numbers computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from fake_run import TASKSET, write_evaluation

from aflow_tune.report.evaluation import (
    Comparison,
    callers,
    compare_ends,
    cost,
    load_evaluations,
    per_solved,
    usage_of,
)
from aflow_tune.report.records import EvalRecord, answer_key
from aflow_tune.report.statistics import (
    mean_interval,
    paired_difference,
    pass_at_k,
    rise,
    sign_test,
    standard_deviation,
    t_quantile,
    wilson_interval,
)


def test_runs_of_an_item_are_averaged_before_items_are(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, [1.0, 0.0, None])
    write_evaluation(tmp_path, 0, [0.0, None, None], run=1)
    evaluation = load_evaluations(tmp_path)[TASKSET][0]
    assert evaluation.scores() == {0: 0.5, 1: 0.0}
    assert evaluation.scores(failed_as=0.0) == {0: 0.5, 1: 0.0, 2: 0.0}
    assert evaluation.metric("reward") == {0: pytest.approx(0.55), 1: pytest.approx(0.1)}
    assert evaluation.metric("correct") == {0: 0.5, 1: 0.0}
    assert (evaluation.items, evaluation.failed_rollouts) == (3, 3)
    assert evaluation.failures == {"raised": 3}
    interval = evaluation.interval()
    assert interval is not None
    assert (interval.mean, interval.count) == (0.25, 2)


def compared(run_dir: Path, *evaluations: list[float | None]) -> Comparison:
    """The first against the last of these evaluations."""
    for step, scores in enumerate(evaluations):
        write_evaluation(run_dir, step, scores)
    return compare_ends(load_evaluations(run_dir))[TASKSET]


LOW: list[float | None] = [1.0] * 10 + [0.0] * 30
HIGH: list[float | None] = [1.0] * 30 + [0.0] * 10


def test_a_shown_rise_and_a_shown_fall(tmp_path: Path) -> None:
    up, down = compared(tmp_path / "up", LOW, HIGH), compared(tmp_path / "down", HIGH, LOW)
    assert (up.direction, down.direction) == (1, -1)
    assert (up.primary.better, up.primary.worse) == (20, 0)
    # 20 differences of 1 and 20 of 0: s = 0.50637, t(39) = 2.02269, half = 0.16195
    assert up.difference.low == pytest.approx(0.5 - 0.16195, abs=1e-5)
    assert "rose from 0.250 to 0.750 (+0.500, 95% interval +0.338 to +0.662" in up.verdict()
    assert "fell from 0.750 to 0.250 (-0.500" in down.verdict()
    assert up.caveats() == []


def test_few_items_need_the_exact_test_too(tmp_path: Path) -> None:
    few = compared(tmp_path / "few", [0.0, 0.0, 0.1], [1.0, 1.0, 1.0])
    assert few.difference.excludes_zero
    assert few.direction == 0
    assert "p = 0.25" in few.verdict()
    assert compared(tmp_path / "more", [0.0] * 8, [1.0] * 8).direction == 1
    assert "one item is too few" in compared(tmp_path / "one", [0.0], [1.0]).verdict()


def test_failures_are_left_out_counted_as_zero_beside_it_and_said(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [0.0, 0.0, 1.0, None], [1.0, 1.0, 1.0, 1.0])
    assert comparison.primary.mean_before == pytest.approx(1 / 3)
    assert comparison.primary.mean_after == 1.0
    assert (comparison.difference.count, comparison.left_out) == (3, 1)
    assert comparison.failed_as_zero is not None
    assert comparison.failed_as_zero.mean_before == 0.25
    assert comparison.failed_as_zero.difference.mean == 0.75
    first, second = comparison.caveats()
    assert "failed rollouts: 1 before, 0 after" in first
    assert "counted as 0 it went from 0.250 to 1.000" in second


def test_a_model_that_crashes_on_what_it_cannot_do_is_not_praised(tmp_path: Path) -> None:
    # 0.8 instead of 0.4 on the half that it can do, a crash on the other half: the mean over all
    # items is what it was.
    comparison = compared(tmp_path, [0.4] * 40, [0.8] * 20 + [None] * 20)
    assert comparison.primary.difference.mean == pytest.approx(0.4)
    assert comparison.failed_as_zero is not None
    assert comparison.failed_as_zero.difference.mean == pytest.approx(0.0)
    assert comparison.direction == 0
    assert "do not agree" in comparison.caveats()[-1]


def test_an_evaluation_that_was_cut_off_is_not_compared(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 9, [1.0] * 3, finished=False)
    assert compared(tmp_path, LOW, HIGH).after.step == 1
    assert [one.whole for one in load_evaluations(tmp_path)[TASKSET].values()] == [
        True, True, False,
    ]  # fmt: skip


# Critical values of Student's t, as printed in the usual tables.
_TABLE = {
    0.975: {1: 12.706, 2: 4.303, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980, 10**8: 1.960},
    0.995: {1: 63.657, 2: 9.925, 5: 4.032, 10: 3.169, 30: 2.750, 120: 2.617},
}


@pytest.mark.parametrize(
    ("probability", "degrees", "published"),
    [(p, degrees, value) for p, row in _TABLE.items() for degrees, value in row.items()],
)
def test_t_quantiles_match_the_tables(probability: float, degrees: int, published: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(published, abs=6e-4)
    assert t_quantile(1 - probability, degrees) == pytest.approx(-published, abs=6e-4)


def test_a_mean_with_its_interval_by_hand() -> None:
    # mean 3, s = sqrt(2.5), t(4) = 2.7764451, half width = 2.7764451 * sqrt(2.5 / 5)
    interval = mean_interval([1, 2, 3, 4, 5])
    assert interval.mean == 3
    assert standard_deviation([1, 2, 3, 4, 5]) == pytest.approx(math.sqrt(2.5))
    half = 2.7764451 * math.sqrt(0.5)
    assert (interval.low, interval.high) == pytest.approx((3 - half, 3 + half), abs=1e-6)
    assert standard_deviation([1.0]) is None


def test_the_paired_interval_on_students_own_data() -> None:
    # Student (1908), hours of sleep gained under two drugs: mean difference 1.58, s = 1.23,
    # t(9) = 2.262, so the interval is 0.70 to 2.46.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    change = paired_difference(first, second)
    assert change.mean == pytest.approx(1.58)
    assert (change.low, change.high) == pytest.approx((0.7001, 2.4599), abs=1e-4)
    assert change.excludes_zero


def test_the_sign_test_counts_what_changed() -> None:
    assert sign_test([1, 1, 1, 0, 0]) == pytest.approx(0.25)  # 2 * (1/2)**3
    assert sign_test([1] * 9 + [-1]) == pytest.approx(2 * 11 / 1024)
    assert sign_test([0.1, -0.1]) == 1.0
    assert sign_test([0, 0]) == 1.0
    assert sign_test([1] * 3000) == pytest.approx(0.0, abs=1e-300)


def test_wilson_interval_against_the_published_example() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0000, 0.1611), abs=1e-4)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=1e-4)
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(10, 10)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(5, 2, 1) == pytest.approx(2 / 5)
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)  # C(3,2) / C(5,2)
    assert pass_at_k(5, 2, 4) == 1.0
    assert pass_at_k(3, 0, 3) == 0.0
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="no pass@"):
        pass_at_k(3, 1, 4)


def test_pass_at_k_of_an_evaluation(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, [1.0, 0.0, None])
    write_evaluation(tmp_path, 0, [0.0, 0.0, 1.0], run=1)
    evaluation = load_evaluations(tmp_path)[TASKSET][0]
    one, two = evaluation.pass_at(1), evaluation.pass_at(2)
    assert one is not None
    assert two is not None
    assert (one.mean, one.count) == (pytest.approx((0.5 + 0 + 1) / 3), 3)
    assert (two.mean, two.count) == (0.5, 2)  # item 2 has one scored run
    both = evaluation.pass_at(2, failed_as_unsolved=True)
    assert both is not None
    assert (both.mean, both.count) == (pytest.approx(2 / 3), 3)
    assert evaluation.pass_at(3) is None
    assert evaluation.solved_rollouts() == 2
    assert evaluation.solved_rollouts(0.0) == 5


def test_a_rise_by_hand() -> None:
    found = rise([0.0, 2.0, 9.0, 4.0, 6.0])
    assert found is not None
    # halves (0, 2) and (4, 6): both s = sqrt 2, s / sqrt n = 1, together sqrt 2; t(1) = 12.7062
    assert found.mean == 4.0
    assert found.high == pytest.approx(4 + 12.7062 * 2**0.5, abs=1e-3)
    assert rise([1.0, 2.0, 3.0]) is None


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("I think.\n<answer> 4 </answer> or <answer>5</answer>", "5"),
        ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("  two \n words ", "two words"),
        (" \n\t", ""),
    ],
)
def test_the_key_of_an_answer(text: str, key: str) -> None:
    assert answer_key(text) == key


def call(caller: str, prompt: int | None, drawn: int | None, **more: object) -> dict[str, object]:
    return {"caller": caller, "prompt_tokens": prompt, "tokens": drawn, **more}


def record(item: int = 0, run: int = 0, **fields: object) -> EvalRecord:
    return EvalRecord(
        step=0, taskset=TASKSET, item=item, run=run, score=1.0, reward=1.0, **fields
    )  # fmt: skip


TWO = [
    record(calls=[call("plan", 10, 4), call("solve", 20, 12, truncated=True)]),
    record(1, calls=[call("solve", 30, 4), call("plan", None, None, failed=True)]),
]


def test_usage_by_caller() -> None:
    used = usage_of(TWO)
    assert (used.runs, used.calls, used.failed_calls, used.truncated_calls) == (2, 4, 1, 1)
    assert (used.prompt_tokens, used.tokens, used.total_tokens) == (60, 20, 80)
    solve, plan = callers(TWO)
    assert (solve.caller, solve.usage.calls, solve.usage.tokens) == ("solve", 2, 16)
    assert solve.token_share == pytest.approx(0.8)
    assert (plan.usage.failed_calls, plan.usage.tokens) == (1, 4)
    assert per_solved(80, 2) == 40.0
    assert per_solved(80, 0) is None
    assert per_solved(None, 2) is None


def test_outcomes_of_operators_stand_beside_their_callers() -> None:
    uses = [
        {"operator": "Custom", "instance": "solve", "outcome": "ok"},
        {"operator": "Custom", "instance": "solve", "outcome": "unreadable"},
        {"operator": "Test", "instance": "Test", "outcome": "ok"},
    ]
    found = callers([record(calls=[call("g/Custom.solve", 1, 2)], operators=uses)])
    assert [(use.caller, use.outcomes) for use in found] == [
        ("g/Custom.solve", {"ok": 1, "unreadable": 1}),
        ("Test", {"ok": 1}),
    ]


def test_cost_is_known_only_where_every_price_is() -> None:
    judged = [record(metrics={"cost/judge": 0.25}), record(1, metrics={"cost/judge": 0.5})]
    assert cost(judged, None).total == 0.75
    assert cost(TWO, None).total is None
    assert cost(TWO, None).unknown == ("policy",)
    found = cost([*TWO, *judged], lambda prompt, drawn: prompt * 0.001 + drawn * 0.01)
    assert found.by_role == pytest.approx({"judge": 0.75, "policy": 0.06 + 0.2})
    assert found.total == pytest.approx(1.01)
    unpriced = [*judged, record(2, metrics={"unpriced_calls/judge": 1.0, "cost/executor": 1.0})]
    assert (cost(unpriced, None).total, cost(unpriced, None).by_role) == (None, {"executor": 1.0})
    # The policy's own notes are not counted a second time.
    noted = [replace(TWO[0], metrics={"cost/policy": 9.0, "unpriced_calls/policy": 1.0})]
    assert cost(noted, lambda prompt, drawn: 1.0).total == 2.0
