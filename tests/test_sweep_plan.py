"""What is refused before a sweep begins, by the real check of the real configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from project import write_project

from aflow_tune.errors import BadInput
from aflow_tune.sweeps.plan import Plan, Request, make_plan


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
    plan = planned(
        project, "algorithm.optimizer.lr=log:1e-6..1e-4", "local.dtype=fp32,bf16", trials=7
    )
    root = project.parent
    assert plan.folder == root / "runs" / "tests" / "tiny-sweep"
    assert not (root / "runs").exists()
    assert (plan.engine, plan.trials, plan.first_report) == ("local", 7, 2)
    assert plan.settings(3, 1, {"local.dtype": "bf16"}) == [
        "local.dtype=bf16",
        "seed=1",
        "group=tiny-sweep",
        "name=tiny-003-seed1",
        "continue_from_checkpoint=true",
    ]
    assert plan.refusal(0, {"algorithm.optimizer.lr": "2e-05", "local.dtype": "bf16"}) is None
    refused = plan.refusal(0, {"algorithm.optimizer.lr": "2e-05", "local.dtype": "int3"})
    assert refused is not None
    assert "local.dtype" in str(refused)


def test_keys_and_values_that_the_configuration_refuses_are_told_beforehand(project: Path) -> None:
    found = faults_of(
        project,
        "algorithm.optimiser.lr=1e-5,1e-6",
        "local.dtype=fp32,int3",
        "buffer.batch_size=2..3",
    )
    assert {where.partition(" with ")[0] for where in found} == {
        "--space algorithm.optimiser.lr=1e-5,1e-6:",
        "--space buffer.batch_size=2..3:",
        "--space local.dtype=fp32,int3:",
    }
    by_key = {where.split(" with ")[1].partition("=")[0]: text for where, text in found.items()}
    assert "optimizer" in by_key["algorithm.optimiser.lr"]
    assert "int3" in by_key["local.dtype"]
    assert "buffer.batch_size=int:2..3" in by_key["buffer.batch_size"]


def test_keys_that_are_the_sweep_s_own(project: Path) -> None:
    found = faults_of(
        project,
        "name=a,b",
        "seed=1,2",
        "local.dtype=fp32,bf16",
        seeds=(0, 1),
        overrides=("local.dtype=fp32",),
    )
    assert {where.partition("=")[0] for where in found} == {
        "--space name",
        "--space seed",
        "--space local.dtype",
    }


def test_a_configuration_that_is_refused_without_any_sweep(project: Path) -> None:
    with pytest.raises(BadInput, match="refused as it is") as refused:
        planned(project, "seed=1,2", overrides=("local.dtype=int3",))
    assert refused.value.faults[0].where == "command line: local.dtype=int3"


def test_without_held_out_tasks_there_is_nothing_to_compare(project: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(project.read_text())
    del content["buffer"]["explorer_input"]["eval_tasksets"]
    content["report"] = {}
    path = tmp_path / "blind.yaml"
    path.write_text(yaml.safe_dump(content))
    found = faults_of(path, "seed=1,2")
    assert [where for where in found if "eval_tasksets" in where]


def test_a_combination_of_a_small_grid_that_cannot_be(project: Path) -> None:
    """Each value is fine alone; only one of the four combinations is not."""
    space = ("deterministic=false,true", "local.dtype=fp32,bf16")
    found = faults_of(project, *space, sampler="grid")
    assert list(found) == [
        "--space deterministic=true local.dtype=bf16: command line: local.dtype=bf16"
    ]


def test_pruning_with_seeds_that_do_not_run_together_is_doubtful(project: Path) -> None:
    plan = planned(project, "seed=1,2", prune="median")
    assert (plan.warnings, plan.trials) == ([], 20)
    plan = planned(project, "local.dtype=fp32,bf16", prune="median", seeds=(0, 1))
    assert ["--parallel 2" in warning for warning in plan.warnings] == [True]
