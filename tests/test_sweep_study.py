"""Optuna's side of a sweep, with the real Optuna and its SQLite file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aflow_tune.sweeps.space import parse_space
from aflow_tune.sweeps.study import SweepStudy

LR = "algorithm.optimizer.lr"


@contextmanager
def opened(folder: Path, *space: str, **changed: Any) -> Iterator[SweepStudy]:
    settings: dict[str, Any] = {
        "sampler": "random",
        "pruner": "none",
        "seed": 0,
        "trials": 10,
        "first_report": 2,
        "together": False,
    }
    study = SweepStudy(
        folder, parse_space(space or [f"{LR}=log:1e-6..1e-4"]), **{**settings, **changed}
    )
    try:
        yield study
    finally:
        study.close()


def begun(study: SweepStudy) -> tuple[int, dict[str, str]]:
    record = study.next()
    assert record is not None
    return record.number, record.values


def test_a_grid_is_gone_through_once_over_two_commands(tmp_path: Path) -> None:
    space = ["algorithm.repeat_times=4,8", "buffer.batch_size=int:2..3"]
    tried = []
    with opened(tmp_path, *space, sampler="grid") as study:
        for expected in (0, 1):
            number, values = begun(study)
            assert number == expected
            tried.append(tuple(values.values()))
        study.complete(0, 0.5)
    with opened(tmp_path, *space, sampler="grid") as study:
        assert [(r.number, r.state) for r in study.records()] == [(0, "complete"), (1, "running")]
        for expected in (2, 3):
            number, values = begun(study)
            assert number == expected
            tried.append(tuple(values.values()))
        assert study.next() is None
        study.fail(3)
        assert study.next() is None
    assert sorted(tried) == [("4", "2"), ("4", "3"), ("8", "2"), ("8", "3")]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_what_is_drawn_does_not_begin_again_after_a_resume(tmp_path: Path, sampler: str) -> None:
    """TPE's draws depend on the results as well; here both have the same ones."""

    def draw(study: SweepStudy) -> str:
        number, values = begun(study)
        study.complete(number, float(values[LR]))
        return values[LR]

    with opened(tmp_path / "one", sampler=sampler, trials=6) as study:
        together = [draw(study) for _ in range(6)]
    apart = []
    for _ in range(3):
        with opened(tmp_path / "two", sampler=sampler, trials=6) as study:
            apart += [draw(study), draw(study)]
    assert apart == together
    assert len(set(together)) == 6
    assert all(1e-6 <= float(text) <= 1e-4 for text in together)
    with opened(tmp_path / "three", sampler=sampler, trials=6, seed=1) as study:
        assert draw(study) != together[0]


def test_an_unfinished_trial_keeps_its_settings_reports_and_notes(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        number, values = begun(study)
        assert study.report(number, 2, 0.25) is False
        study.note(number, seconds=12.5, usd=None)
    with opened(tmp_path) as study:
        (record,) = study.records()
        assert (record.number, record.state, record.values) == (0, "running", values)
        assert record.reported == {2: 0.25}
        assert record.notes == {"seconds": 12.5, "usd": None}
        study.report(number, 4, 0.5)
        study.complete(number, 0.75)
        (record,) = study.records()
        assert (record.state, record.value) == ("complete", 0.75)
        assert record.reported == {2: 0.25, 4: 0.5}


def test_the_median_prunes_from_the_fourth_trial_on(tmp_path: Path) -> None:
    with opened(tmp_path, pruner="median") as study:
        for score in (0.5, 0.6, 0.7):
            number, _ = begun(study)
            assert study.report(number, 2, score) is False
            study.complete(number, score)
        number, _ = begun(study)
        assert study.report(number, 2, 0.55) is True  # the median is 0.6
        study.prune(number)
        number, _ = begun(study)
        assert study.report(number, 2, 0.65) is False
        assert study.report(number, 4, 0.1) is False  # nobody has been at step 4
        assert [record.state for record in study.records()][3:] == ["pruned", "running"]


def test_halving_keeps_the_better_half_of_those_that_came_as_far(tmp_path: Path) -> None:
    with opened(tmp_path, pruner="halving", first_report=2, trials=4) as study:
        first, _ = begun(study)
        assert study.report(first, 2, 0.8) is False
        second, _ = begun(study)
        assert study.report(second, 2, 0.5) is True
        study.prune(second)
        third, _ = begun(study)
        assert study.report(third, 2, 0.9) is False
        assert study.report(first, 4, 0.8) is False  # alone at four steps
        assert study.report(third, 4, 0.7) is True


def test_lists_are_drawn_from_and_reach_the_run_as_written(tmp_path: Path) -> None:
    space = ["model.lora_configs[0].target_modules=[q_proj],all-linear", "seed=int:1..3"]
    with opened(tmp_path, *space, sampler="tpe", together=True) as study:
        for _ in range(5):
            number, values = begun(study)
            assert values[space[0].partition("=")[0]] in ("[q_proj]", "all-linear")
            assert values["seed"] in ("1", "2", "3")
            study.complete(number, 0.5)


def test_a_folder_may_be_called_anything(tmp_path: Path) -> None:
    folder = tmp_path / "a?b {c} %20#"
    with opened(folder) as study:
        begun(study)
    assert [path.name for path in folder.iterdir()] == ["study.sqlite"]
    with opened(folder) as study:
        assert [record.state for record in study.records()] == ["running"]
