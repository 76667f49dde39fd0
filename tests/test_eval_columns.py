"""Which columns and pairs a command line means, and what is refused at which place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_run import write_evaluation

from aflow_tune.errors import BadInput
from aflow_tune.evaluation.columns import Plan, Request, make_plan
from aflow_tune.report.evaluation import best_step


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with checkpoints 5, 10 and 20; 10 scores best."""
    folder = tmp_path / "run"
    for step in (5, 10, 20):
        (folder / f"global_step_{step}").mkdir(parents=True)
        (folder / f"global_step_{step}" / "manifest.json").write_text("{}")
    for step, share in ((0, 0.0), (5, 0.4), (10, 0.8), (20, 0.6)):
        write_evaluation(folder, step, [1.0] * int(10 * share) + [0.0] * int(10 - 10 * share))
    return folder


def plan(run_dir: Path, **wanted: Any) -> Plan:
    return make_plan(Request(Path("config.yaml"), **wanted), run_dir)


def names(run_dir: Path, **wanted: Any) -> list[str]:
    return [column.name for column in plan(run_dir, **wanted).columns]


def pairs(run_dir: Path, **wanted: Any) -> list[tuple[str, str]]:
    return [(one.name, two.name) for one, two in plan(run_dir, **wanted).pairs]


def test_the_base_model_comes_first_and_the_newest_checkpoint_joins_it(run_dir: Path) -> None:
    assert names(run_dir / "nothing") == ["base"]
    assert names(run_dir, checkpoints=["base"]) == ["base"]
    assert names(run_dir, checkpoints=["best"]) == ["base", "step 10 (best)"]
    assert pairs(run_dir) == [("base", "step 20 (last)")]


def test_the_best_step_has_a_checkpoint_and_the_highest_score(run_dir: Path) -> None:
    assert [best_step(run_dir, steps) for steps in ([5, 10, 20], [5, 20], [7])] == [10, 20, None]
    for step, score in ((5, 1.0), (10, 0.0), (20, 0.2)):
        write_evaluation(run_dir, step, [score] * 10, taskset="other")
    assert best_step(run_dir, [5, 10, 20]) == 5  # means 0.7, 0.4, 0.4


def test_two_sides_are_compared_with_each_other_and_with_the_base(run_dir: Path) -> None:
    assert pairs(run_dir, compare=("10", "last")) == [
        ("step 10", "step 20 (last)"),
        ("base", "step 10"),
        ("base", "step 20 (last)"),
    ]
    workflow = ("base", "workflow:flows/x.py:solve")
    assert pairs(run_dir, compare=workflow) == [("base", "base, solve")]


def test_settings_make_a_grid_with_pairs_of_equal_settings(run_dir: Path, tmp_path: Path) -> None:
    assert pairs(run_dir, checkpoints=["last"], vary=["temperature=0.2,1"]) == [
        ("base, temperature=0.2", "base, temperature=1"),
        ("base, temperature=0.2", "step 20 (last), temperature=0.2"),
        ("base, temperature=1", "step 20 (last), temperature=1"),
    ]
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        file.write_text("{}")
    assert names(tmp_path, vary=["max_tokens=8,16", "top_p=0.5"], prompts=files) == [
        f"base, {file}, max_tokens={limit}, top_p=0.5"
        for file in ("a.yaml", "b.yaml")
        for limit in (8, 16)
    ]


@pytest.mark.parametrize(
    ("wanted", "where", "found"),
    [
        ({"checkpoints": ["30"]}, "--checkpoint 30", "no such checkpoint"),
        ({"compare": ("base", "x.yaml")}, "--compare x.yaml", "no such file"),
        ({"checkpoints": ["."]}, "--checkpoint .", "without weights"),
        ({"vary": ["heat=1"]}, "--vary heat=1", "heat=1"),
        ({"vary": ["temperature=warm"]}, "--vary temperature=warm", "warm"),
        ({"vary": ["top_p=0"]}, "--vary top_p=0", "0"),
        ({"vary": ["top_p=1", "top_p=0.5"]}, "--vary top_p=0.5", "top_p"),
        ({"prompts": [Path("p.yaml")]}, "--prompts p.yaml", "no such file"),
        ({"checkpoints": ["last"], "served_models": ["m"]}, "--checkpoint last", "weights on disk"),
    ],
)
def test_what_leads_nowhere_is_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, wanted: Any, where: str, found: str
) -> None:
    monkeypatch.chdir(run_dir / "evaluations")
    with pytest.raises(BadInput) as caught:
        plan(run_dir, **wanted)
    (fault,) = caught.value.faults
    assert fault.where == where
    assert found in fault.found


def test_every_fault_is_told_at_once_with_the_checkpoints_that_exist(run_dir: Path) -> None:
    with pytest.raises(BadInput) as caught:
        plan(run_dir, checkpoints=["7", "last", "8"], vary=["x=1"])
    assert ["5, 10, 20" in fault.expected for fault in caught.value.faults] == [True, True, False]


def test_stages_and_runs_are_named_and_bring_their_own_model(tmp_path: Path) -> None:
    """A stage's adapter belongs to what the stage before it left: its merged model is taken."""
    chain = tmp_path / "chain"
    stages = [("sft", "small"), ("dpo", str(chain / "sft/export/merged"))]
    for name, model in stages:
        (chain / name / "global_step_2").mkdir(parents=True)
        (chain / name / "export" / "merged").mkdir(parents=True)
        (chain / name / "export" / "merged" / "config.json").write_text("{}")
        (chain / name / "resolved.yaml").write_text(f"model: {{model_path: {model}}}\n")
    (chain / "chain.json").write_text('{"stages": [{"name": "sft"}, {"name": "dpo"}]}')
    last = chain / "dpo"

    def sides(model: str, *compared: str) -> list[tuple[str, Path | None]]:
        request = Request(Path("config.yaml"), compare=compared)
        columns = make_plan(request, last, model).columns
        return [(column.side.name, column.side.weights) for column in columns]

    newest = last / "global_step_2"
    merged = chain / "sft" / "export" / "merged"
    assert sides("other", "sft", "dpo") == [
        ("base", None), ("sft", merged), ("dpo", chain / "dpo" / "export" / "merged"),
    ]  # fmt: skip
    assert sides("other", str(chain), "base") == [
        ("base", None),
        ("dpo", newest.parent / "export/merged"),
    ]
    # What the last stage began with is what the first one left: the base.
    assert sides(str(merged), "sft", "dpo") == [("base", None), ("dpo, step 2", newest)]
