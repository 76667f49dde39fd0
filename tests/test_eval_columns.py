"""Which columns and pairs a command line means, and what is refused with what cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_run import write_evaluation

from aflow_tune.errors import BadInput
from aflow_tune.evaluation.columns import Wanted, make_plan
from aflow_tune.report.best import best_step


def make_run(folder: Path, steps: tuple[int, ...] = (5, 10, 20)) -> Path:
    """A run folder with checkpoints; 10 scores best."""
    for step in steps:
        (folder / f"global_step_{step}").mkdir(parents=True)
        (folder / f"global_step_{step}" / "manifest.json").write_text("{}")
    for step, share in ((0, 0.0), (5, 0.4), (10, 0.8), (20, 0.6)):
        write_evaluation(folder, step, [1.0] * int(10 * share) + [0.0] * int(10 - 10 * share))
    return folder


def names(wanted: Wanted, run_dir: Path) -> list[str]:
    return [column.name for column in make_plan(wanted, run_dir).columns]


def pairs(wanted: Wanted, run_dir: Path) -> list[tuple[str, str]]:
    return [(one.name, two.name) for one, two in make_plan(wanted, run_dir).pairs]


def test_the_base_model_comes_first_and_the_newest_checkpoint_joins_it(tmp_path: Path) -> None:
    assert names(Wanted(), tmp_path / "nothing") == ["base"]
    run_dir = make_run(tmp_path / "run")
    assert names(Wanted(), run_dir) == ["base", "step 20 (last)"]
    assert names(Wanted(checkpoints=["base"]), run_dir) == ["base"]
    assert pairs(Wanted(), run_dir) == [("base", "step 20 (last)")]


def test_names_of_one_checkpoint_are_one_column(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    folder = str(run_dir / "global_step_20")
    wanted = Wanted(checkpoints=["best", "last", "20", "10", folder, "base"])
    assert names(wanted, run_dir) == ["base", "step 10 (best)", "step 20 (last)"]
    plan = make_plan(wanted, run_dir)
    assert [column.side.step for column in plan.columns] == [0, 10, 20]
    assert plan.columns[1].side.weights == (run_dir / "global_step_10").resolve()


def test_the_best_step_has_a_checkpoint_and_the_highest_score(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    assert best_step(run_dir, [5, 10, 20]) == 10
    assert best_step(run_dir, [5, 20]) == 20
    assert best_step(run_dir, [7]) is None
    write_evaluation(run_dir, 5, [1.0] * 10, taskset="other")
    write_evaluation(run_dir, 10, [0.0] * 10, taskset="other")
    write_evaluation(run_dir, 20, [0.2] * 10, taskset="other")
    assert best_step(run_dir, [5, 10, 20]) == 5  # means 0.7, 0.4, 0.4


def test_two_sides_are_compared_with_each_other_and_with_the_base(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    assert pairs(Wanted(compare=("10", "last")), run_dir) == [
        ("step 10", "step 20 (last)"),
        ("base", "step 10"),
        ("base", "step 20 (last)"),
    ]
    assert pairs(Wanted(compare=("base", "5")), run_dir) == [("base", "step 5")]
    workflow = Wanted(compare=("base", "workflow:flows/x.py:solve"))
    assert pairs(workflow, run_dir) == [("base", "base, solve")]


def test_settings_make_a_grid_with_pairs_of_equal_settings(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    wanted = Wanted(checkpoints=["last"], vary=["temperature=0.2,1"])
    assert names(wanted, run_dir) == [
        "base, temperature=0.2",
        "base, temperature=1",
        "step 20 (last), temperature=0.2",
        "step 20 (last), temperature=1",
    ]
    assert pairs(wanted, run_dir) == [
        ("base, temperature=0.2", "base, temperature=1"),
        ("base, temperature=0.2", "step 20 (last), temperature=0.2"),
        ("base, temperature=1", "step 20 (last), temperature=1"),
    ]
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        file.write_text("{}")
    grid = Wanted(vary=["max_tokens=8,16", "top_p=0.5"], prompts=files)
    assert names(grid, tmp_path) == [
        f"base, {file}, max_tokens={limit}, top_p=0.5"
        for file in ("a.yaml", "b.yaml")
        for limit in (8, 16)
    ]


def test_models_of_an_endpoint_are_columns(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    wanted = Wanted(served_models=["small", "tuned"])
    plan = make_plan(wanted, run_dir)
    assert [(c.name, c.side.served_model) for c in plan.columns] == [
        ("base", "small"),
        ("tuned", "tuned"),
    ]
    compared = Wanted(served_models=["small", "tuned"], compare=("small", "tuned"))
    assert pairs(compared, run_dir) == [("base", "tuned")]


def test_equal_names_of_different_things_are_numbered(tmp_path: Path) -> None:
    wanted = Wanted(compare=("workflow:a.py:solve", "workflow:b.py:solve"))
    assert names(wanted, tmp_path) == ["base", "base, solve", "base, solve #2"]


@pytest.mark.parametrize(
    ("wanted", "where", "found"),
    [
        (Wanted(checkpoints=["30"]), "--checkpoint 30", "no such checkpoint"),
        (Wanted(checkpoints=["lastt"]), "--checkpoint lastt", "no such checkpoint"),
        (Wanted(compare=("base", "x.yaml")), "--compare x.yaml", "no such file"),
        (Wanted(checkpoints=["."]), "--checkpoint .", "a folder without weights"),
        (Wanted(vary=["heat=1"]), "--vary heat=1", "'heat=1'"),
        (Wanted(vary=["temperature=warm"]), "--vary temperature=warm", "'warm'"),
        (Wanted(vary=["top_p=0"]), "--vary top_p=0", "'0'"),
        (Wanted(vary=["max_tokens=1.5"]), "--vary max_tokens=1.5", "'1.5'"),
        (Wanted(vary=["top_p=1", "top_p=0.5"]), "--vary top_p=1 top_p=0.5", "top_p"),
        (Wanted(prompts=[Path("p.yaml")]), "--prompts p.yaml", "no such file"),
        (Wanted(checkpoints=["last"], served_models=["m"]), "--checkpoint last", "weights on disk"),
    ],
)
def test_what_leads_nowhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Wanted, where: str, found: str
) -> None:
    run_dir = make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run" / "evaluations")
    with pytest.raises(BadInput) as caught:
        make_plan(wanted, run_dir)
    (fault,) = caught.value.faults
    assert fault.where == where
    assert found in fault.found


def test_every_fault_is_told_at_once_with_the_checkpoints_that_exist(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    wanted = Wanted(checkpoints=["7", "last", "8"], vary=["x=1"])
    with pytest.raises(BadInput) as caught:
        make_plan(wanted, run_dir)
    assert len(caught.value.faults) == 3
    assert "a step (5, 10, 20)" in caught.value.faults[0].expected
    with pytest.raises(BadInput, match="no checkpoint is in"):
        make_plan(Wanted(checkpoints=["last"]), tmp_path / "empty")
