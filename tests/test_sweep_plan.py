"""What a sweep tries: the space, what is refused before it begins, and Optuna's study of it."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml
from project import write_project

from aflow_tune.config.load import load_config
from aflow_tune.errors import BadInput, RunFailed
from aflow_tune.sweeps import Request
from aflow_tune.sweeps.plan import STUDY_FILE, Plan, grid, make_plan, parse_space
from aflow_tune.sweeps.study import SweepStudy, opened

LR = "algorithm.optimizer.lr"


def test_values_stay_the_text_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        f"{LR}: log:1e-6..1e-4   # a comment\n"
        "local.dtype:\n  - fp32\n  - 'bf16'\n"
        "model.lora_configs[0].target_modules: [[q_proj, v_proj], all-linear]\n"
    )
    listed = "model.lora_configs.1.target_modules=[q_proj, v_proj],'all, linear'"
    axes = parse_space([str(path), "algorithm.repeat_times=4, 8,16", listed])
    modules = "model.lora_configs[{}].target_modules"
    assert {axis.key: axis.choices or axis.told() for axis in axes} == {
        LR: "log:1e-06..0.0001",
        "local.dtype": ("fp32", "'bf16'"),
        modules.format(0): ("[q_proj, v_proj]", "all-linear"),
        "algorithm.repeat_times": ("4", "8", "16"),
        modules.format(1): ("[q_proj, v_proj]", "'all, linear'"),
    }


@pytest.mark.parametrize(
    ("text", "told", "probes", "count"),
    [
        ("0.6..1.0", "0.6..1.0", ("0.6", "1.0"), None),
        ("log:1e-6..1e-4", "log:1e-06..0.0001", ("1e-06", "0.0001"), None),
        ("int:2..16", "int:2..16", ("2", "16"), 15),
        ("int:log:1..64", "log:int:1..64", ("1", "64"), 64),
        ("-.5..2.", "-0.5..2.0", ("-0.5", "2.0"), None),
    ],
)
def test_ranges(text: str, told: str, probes: tuple[str, str], count: int | None) -> None:
    (axis,) = parse_space([f"model.temperature={text}"])
    assert (axis.told(), axis.probes) == (told, probes)
    assert (None if axis.values is None else len(axis.values)) == count


def test_every_fault_of_a_space_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("seed: 5\nalgorithm:\n  repeat_times: [1, 2]\nlocal.dtype: [fp32, fp32]\n")
    items = ["a.b=7", "a.c=2..1", "a.d=log:0..1", "a.e=int:1.5..3", "a.f=log:x..y", "=1,2"]
    items += ["a.g=1e-4,0.0001", "a.h=3..3", "a.i=1..2..3"]
    with pytest.raises(BadInput) as refused:
        parse_space([*items, str(path), "a[0].b=1,2", "a.0.b=3,4"])
    of_file = [f"{path}:1: seed", f"{path}:2: algorithm", f"{path}:4: local.dtype"]
    expected = [*(f"--space {item}" for item in items), *of_file, "--space a.0.b=3,4"]
    assert [fault.where for fault in refused.value.faults] == expected
    for nothing in ([], [str(tmp_path / "no.yaml")], ["algorithm.repeat_times"]):
        with pytest.raises(BadInput):
            parse_space(nothing)


def test_a_grid_has_every_combination_once_in_an_order_by_seed() -> None:
    axes = parse_space(["a.b=x,y", "a.c=int:1..3"])
    expected = [{"a.b": b, "a.c": c} for b in ("x", "y") for c in ("1", "2", "3")]
    random.Random(0).shuffle(expected)
    assert grid(axes, 0) == expected
    assert any(grid(axes, seed) != expected for seed in range(1, 5))
    for space in (["a.b=log:1e-6..1e-4", "a.c=1,2"], ["a.b=int:0..100", "a.c=int:0..100"]):
        with pytest.raises(BadInput):
            grid(parse_space(space), 0)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    return write_project(tmp_path_factory.mktemp("sweep"), tiny_model_dir)


def planned(config: Path, *space: str, **changed: Any) -> Plan:
    return make_plan(Request(config, space, **changed), lambda _text: None)


def faults_of(config: Path, *space: str, **changed: Any) -> dict[str, str]:
    with pytest.raises(BadInput) as refused:
        planned(config, *space, **changed)
    return {fault.where: f"{fault.found} -> {fault.cure}" for fault in refused.value.faults}


def test_a_plan_says_where_its_trials_go_and_leaves_nothing_behind(project: Path) -> None:
    plan = planned(project, f"{LR}=log:1e-6..1e-4", "local.dtype=fp32,bf16", trials=7)
    assert plan.folder == project.parent / "runs" / "tests" / "tiny-sweep"
    assert not (project.parent / "runs").exists()
    assert (plan.trials, plan.first_report) == (7, 2)
    own = ["seed=1", "group=tiny-sweep", "name=tiny-003-seed1", "continue_from_checkpoint=true"]
    assert plan.settings(3, 1, {"local.dtype": "bf16"}) == ["local.dtype=bf16", *own]
    assert plan.refusal(0, {LR: "2e-05", "local.dtype": "bf16"}) is None
    assert "local.dtype" in str(plan.refusal(0, {LR: "2e-05", "local.dtype": "int3"}))


def test_values_that_the_configuration_refuses_are_told_beforehand(project: Path) -> None:
    misspelt, wrong = "algorithm.optimiser.lr=1e-5,1e-6", "local.dtype=fp32,int3"
    found = faults_of(project, misspelt, wrong, "buffer.batch_size=2..3")
    by_item = {where.partition(": with ")[0]: text for where, text in found.items()}
    assert "optimizer" in by_item[f"--space {misspelt}"]
    assert "int3" in by_item[f"--space {wrong}"]
    assert "--space buffer.batch_size=2..3" in by_item
    # Each value is fine alone; only one of the four combinations is not.
    space = ("deterministic=false,true", "local.dtype=fp32,bf16")
    (where,) = faults_of(project, *space, sampler="grid")
    assert where.startswith("--space deterministic=true local.dtype=bf16:")


def test_what_a_sweep_cannot_be_of(project: Path, tmp_path: Path) -> None:
    overrides, space = ("local.dtype=fp32",), ("name=a,b", "seed=1,2", "local.dtype=fp32,bf16")
    found = faults_of(project, *space, seeds=(0, 1), overrides=overrides)
    assert list(found) == [f"--space {item}" for item in space]
    with pytest.raises(BadInput, match="refused as it is") as refused:
        planned(project, "seed=1,2", overrides=("local.dtype=int3",))
    assert "local.dtype=int3" in refused.value.faults[0].where
    content = yaml.safe_load(project.read_text())
    del content["buffer"]["explorer_input"]["eval_tasksets"]
    content["report"] = {}
    path = tmp_path / "blind.yaml"
    path.write_text(yaml.safe_dump(content))
    assert [where for where in faults_of(path, "seed=1,2") if "eval_tasksets" in where]


def study_in(
    folder: Path, *space: str, sampler: str = "random", trials: int = 10, **changed: Any
) -> AbstractContextManager[SweepStudy]:
    space = space or (f"{LR}=log:1e-6..1e-4",)
    request = Request(Path("my.yaml"), space, sampler=sampler, **changed)
    plan = Plan(request, load_config(None, []), parse_space(space), trials, folder, 2)
    return opened(plan)


def test_a_record_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / STUDY_FILE).write_bytes(b"no database" * 100)
    with pytest.raises(RunFailed, match=STUDY_FILE), study_in(tmp_path):
        pass


def begun(study: SweepStudy) -> tuple[int, dict[str, str]]:
    record = study.next()
    assert record is not None
    return record.number, record.values


def test_a_grid_is_gone_through_once_over_two_commands(tmp_path: Path) -> None:
    space = ["algorithm.repeat_times=4,8", "buffer.batch_size=int:2..3"]
    with study_in(tmp_path, *space, sampler="grid") as study:
        tried = [begun(study) for _ in range(2)]
        study.end(0, 0.5)
    with study_in(tmp_path, *space, sampler="grid") as study:
        assert [(r.number, r.state) for r in study.records()] == [(0, "complete"), (1, "running")]
        tried += [begun(study) for _ in range(2)]
        study.end(3)
        assert study.next() is None
    assert [number for number, _ in tried] == [0, 1, 2, 3]
    assert [values for _, values in tried] == grid(parse_space(space), 0)


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_what_is_drawn_does_not_begin_again_after_a_resume(tmp_path: Path, sampler: str) -> None:
    """TPE's draws depend on the results as well; here both have the same ones."""

    def draw(study: SweepStudy) -> str:
        number, values = begun(study)
        study.end(number, float(values[LR]))
        return values[LR]

    with study_in(tmp_path / "one", sampler=sampler, trials=6) as study:
        together = [draw(study) for _ in range(6)]
    apart = []
    for _ in range(3):
        with study_in(tmp_path / "two", sampler=sampler, trials=6) as study:
            apart += [draw(study), draw(study)]
    assert apart == together
    assert len(set(together)) == 6
    assert all(1e-6 <= float(text) <= 1e-4 for text in together)
    with study_in(tmp_path / "three", sampler=sampler, trials=6, seed=1) as study:
        assert draw(study) != together[0]


def test_an_unfinished_trial_keeps_its_settings_reports_and_notes(tmp_path: Path) -> None:
    folder = tmp_path / "a?b {c} %20#"  # a folder may be called anything
    with study_in(folder) as study:
        number, values = begun(study)
        assert study.report(number, 2, 0.25) is False
        study.note(number, seconds=12.5, usd=None)
    assert [path.name for path in folder.iterdir()] == ["study.sqlite"]
    with study_in(folder) as study:
        (record,) = study.records()
        assert (record.number, record.state, record.values) == (0, "running", values)
        assert record.reported == {2: 0.25}
        assert record.notes == {"seconds": 12.5, "usd": None}
        study.end(number, 0.75)
        (record,) = study.records()
        assert (record.state, record.value) == ("complete", 0.75)
