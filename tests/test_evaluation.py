"""Held-out evaluations: what is read, what is paired, and what is claimed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fake_run import TASKSET, write_evaluation, write_fake_run

from aflow_tune.report.evaluation import compare, first_and_last, load_evaluations, pair
from aflow_tune.report.records import record_path


def test_runs_of_an_item_are_averaged_before_items_are(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, [1.0, 0.0, None])
    write_evaluation(tmp_path, 0, [0.0, None, None], run=1)
    evaluation = load_evaluations(tmp_path)[TASKSET][0]
    assert evaluation.scores() == {0: 0.5, 1: 0.0}
    assert evaluation.scores(failed_as=0.0) == {0: 0.5, 1: 0.0, 2: 0.0}
    assert evaluation.metric("reward") == {0: pytest.approx(0.55), 1: pytest.approx(0.1)}
    assert evaluation.metric("correct") == {0: 0.5, 1: 0.0}
    assert (evaluation.items, evaluation.failed_runs) == (3, 3)
    assert evaluation.failures == {"raised": 3}
    interval = evaluation.interval()
    assert interval is not None
    assert (interval.mean, interval.count) == (0.25, 2)


def test_right_or_wrong_scores_get_wilsons_interval(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, [0.0] * 20)
    interval = load_evaluations(tmp_path)[TASKSET][0].interval()
    assert interval is not None
    assert (interval.low, interval.high) == (0.0, pytest.approx(0.1611, abs=1e-4))


def test_nothing_scored_has_no_interval(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, [None, None])
    write_evaluation(tmp_path, 4, [1.0, 1.0])
    steps = load_evaluations(tmp_path)[TASKSET]
    assert steps[0].interval() is None
    assert compare(steps[0], steps[4]) is None
    assert first_and_last(tmp_path) == {}


def test_a_shown_rise_and_a_shown_fall(tmp_path: Path) -> None:
    low, high = [1.0] * 10 + [0.0] * 30, [1.0] * 30 + [0.0] * 10
    write_evaluation(tmp_path / "up", 0, low)
    write_evaluation(tmp_path / "up", 5, high)
    write_evaluation(tmp_path / "down", 0, high)
    write_evaluation(tmp_path / "down", 5, low)
    up, down = (first_and_last(tmp_path / way)[TASKSET] for way in ("up", "down"))
    assert (up.direction, down.direction) == (1, -1)
    assert (up.primary.better, up.primary.worse) == (20, 0)
    # 20 differences of 1 and 20 of 0: s = 0.50637, t(39) = 2.02269, half = 0.16195
    assert up.difference.low == pytest.approx(0.5 - 0.16195, abs=1e-5)
    assert up.verdict() == (
        "Held-out score rose from 0.250 to 0.750 (+0.500, 95% interval +0.338 to +0.662, "
        "40 paired items)."
    )
    assert down.verdict().startswith("Held-out score fell from 0.750 to 0.250 (-0.500")
    assert up.caveats() == []


def test_noise_is_called_noise(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, [0.0, 1.0] * 20)
    write_evaluation(tmp_path, 5, [1.0, 0.0] * 19 + [1.0, 1.0])
    comparison = first_and_last(tmp_path)[TASKSET]
    assert comparison.direction == 0
    assert comparison.verdict().startswith("No change shown")
    assert "includes zero" in comparison.verdict()


def test_few_items_need_the_exact_test_too(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "few", 0, [0.0, 0.0, 0.1])
    write_evaluation(tmp_path / "few", 5, [1.0, 1.0, 1.0])
    few = first_and_last(tmp_path / "few")[TASKSET]
    assert few.difference.excludes_zero
    assert few.direction == 0
    assert "Too few items" in few.verdict()
    assert "p = 0.25" in few.verdict()
    write_evaluation(tmp_path / "more", 0, [0.0] * 8)
    write_evaluation(tmp_path / "more", 5, [1.0] * 8)
    assert first_and_last(tmp_path / "more")[TASKSET].direction == 1
    write_evaluation(tmp_path / "one", 0, [0.0])
    write_evaluation(tmp_path / "one", 5, [1.0])
    assert "one item is too few" in first_and_last(tmp_path / "one")[TASKSET].verdict()


def test_failures_are_left_out_counted_as_zero_beside_it_and_said(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, [0.0, 0.0, 1.0, None])
    write_evaluation(tmp_path, 8, [1.0, 1.0, 1.0, 1.0])
    comparison = first_and_last(tmp_path)[TASKSET]
    assert comparison.mean_before == pytest.approx(1 / 3)
    assert comparison.mean_after == 1.0
    assert (comparison.difference.count, comparison.left_out) == (3, 1)
    assert comparison.failed_as_zero is not None
    assert comparison.failed_as_zero.mean_before == 0.25
    assert comparison.failed_as_zero.difference.mean == 0.75
    first, second = comparison.caveats()
    assert first.startswith("1 item is left out")
    assert "(failed runs: 1 before, 0 after)" in first
    assert "counted as 0 it went from 0.250 to 1.000" in second


def test_a_model_that_crashes_on_what_it_cannot_do_is_not_praised(tmp_path: Path) -> None:
    # 0.8 instead of 0.4 on the half that it can do, a crash on the other half: the mean over all
    # items is what it was.
    write_evaluation(tmp_path, 0, [0.4] * 40)
    write_evaluation(tmp_path, 5, [0.8] * 20 + [None] * 20)
    comparison = first_and_last(tmp_path)[TASKSET]
    assert comparison.primary.difference.mean == pytest.approx(0.4)
    assert comparison.failed_as_zero is not None
    assert comparison.failed_as_zero.difference.mean == pytest.approx(0.0)
    assert comparison.direction == 0
    assert "do not agree" in comparison.caveats()[-1]


def test_an_evaluation_that_was_cut_off_is_not_compared(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, [0.0] * 40)
    write_evaluation(tmp_path, 5, [1.0, 0.0] * 20)
    write_evaluation(tmp_path, 9, [1.0] * 3, finished=False)
    steps = load_evaluations(tmp_path)[TASKSET]
    assert [evaluation.whole for evaluation in steps.values()] == [True, True, False]
    assert first_and_last(tmp_path)[TASKSET].after.step == 5


def test_without_any_word_on_it_evaluations_are_whole(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, [0.0] * 4, finished=False)
    assert load_evaluations(tmp_path)[TASKSET][0].whole


def test_a_record_written_again_replaces_the_first(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, [0.0, None])
    write_evaluation(tmp_path, 0, [1.0, 1.0])
    evaluation = load_evaluations(tmp_path)[TASKSET][0]
    assert evaluation.scores() == {0: 1.0, 1: 1.0}
    assert len(evaluation.records) == 2


def test_task_sets_and_steps_are_in_order_and_odd_files_passed_over(tmp_path: Path) -> None:
    for taskset in ("b", "a"):
        for step in (10, 0, 2):
            write_evaluation(tmp_path, step, [0.0], taskset=taskset)
    (tmp_path / "evaluations" / "a" / "step_last.jsonl").write_text("{}\n")
    (tmp_path / "evaluations" / "a" / "step_3.jsonl").write_text("")
    found = load_evaluations(tmp_path)
    assert {name: list(steps) for name, steps in found.items()} == {
        "a": [0, 2, 10],
        "b": [0, 2, 10],
    }
    assert load_evaluations(tmp_path / "nowhere") == {}


def test_damage_is_named(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, [0.0, 1.0])
    path = record_path(tmp_path / "evaluations", TASKSET, 0)
    path.write_text("not json\n" + path.read_text())
    with pytest.raises(ValueError, match=r"step_0\.jsonl:1 is damaged"):
        load_evaluations(tmp_path)


def test_a_whole_fake_run_learns(tmp_path: Path) -> None:
    assert first_and_last(write_fake_run(tmp_path / "run"))[TASKSET].direction == 1


def test_a_model_that_did_not_change_is_praised_or_blamed_once_in_twenty() -> None:
    draw = random.Random(0)
    claims = 0
    for _ in range(400):
        sides = [{item: float(draw.random() < 0.5) for item in range(60)} for _ in range(2)]
        paired = pair(sides[0], sides[1])
        assert paired is not None
        claims += paired.direction != 0
    assert 0.02 <= claims / 400 <= 0.08
