"""What `--space` says: lists, ranges, files, and everything that it may not say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from aflow_tune.errors import BadInput
from aflow_tune.sweeps.space import combination, combinations, grid_order, parse_space, settings_of


def faults_of(*items: str) -> list[tuple[str, str, str]]:
    with pytest.raises(BadInput) as refused:
        parse_space(items)
    return [(fault.where, fault.expected, fault.found) for fault in refused.value.faults]


def test_values_stay_the_text_that_was_written() -> None:
    (axis,) = parse_space(["algorithm.repeat_times=4, 8,16"])
    assert axis.key == "algorithm.repeat_times"
    assert axis.choices == axis.values == axis.probes == ("4", "8", "16")
    assert axis.told() == "4,8,16"
    (axis,) = parse_space(["model.lora_configs.0.target_modules=[q_proj, v_proj],'all, linear'"])
    assert axis.key == "model.lora_configs[0].target_modules"
    assert axis.choices == ("[q_proj, v_proj]", "'all, linear'")
    assert settings_of({axis.key: axis.choices[0]}) == [
        "model.lora_configs[0].target_modules=[q_proj, v_proj]"
    ]


@pytest.mark.parametrize(
    ("text", "told", "probes", "count"),
    [
        ("0.6..1.0", "0.6..1.0", ("0.6", "1.0"), None),
        ("log:1e-6..1e-4", "log:1e-06..0.0001", ("1e-06", "0.0001"), None),
        ("int:2..16", "int:2..16", ("2", "16"), 15),
        ("log:int:1..64", "log:int:1..64", ("1", "64"), 64),
        ("int:log:1..64", "log:int:1..64", ("1", "64"), 64),
        ("-.5..2.", "-0.5..2.0", ("-0.5", "2.0"), None),
    ],
)
def test_ranges(text: str, told: str, probes: tuple[str, str], count: int | None) -> None:
    (axis,) = parse_space([f"model.temperature={text}"])
    assert (axis.told(), axis.probes, axis.count) == (told, probes, count)
    assert (axis.values is None) == (count is None)
    if axis.values is not None:
        assert len(axis.values) == count
        assert (axis.values[0], axis.values[-1]) == probes


@pytest.mark.parametrize(
    ("text", "found", "cure"),
    [
        ("1e-4,0.0001", "0.0001 again, as 1e-4", "remove it"),
        ("4,8,4.0", "4.0 again, as 4", "remove it"),
        ("3..3", "3..3", "give a fixed value as a setting: a.b=3"),
        ("16..2", "16..2", "2..16"),
        ("1..2..3", "1..2..3", "--space algorithm.optimizer.lr=log:1e-6..1e-4"),
        ("int:1..1e16", "1..1e16", "list some of them"),
        ("1..1e999", "1..1e999", "choose a smaller number"),
    ],
)
def test_what_nobody_means_is_refused(text: str, found: str, cure: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_space([f"a.b={text}"])
    (fault,) = refused.value.faults
    assert (fault.where, fault.found) == (f"--space a.b={text}", found)
    assert fault.cure.startswith(cure)


def test_a_value_of_the_study_becomes_text_again() -> None:
    real, whole, words = parse_space(["a.b=log:1e-6..1e-4", "a.c=int:2..16", "a.d=x,y"])
    assert real.text(2.5e-05) == "2.5e-05"
    assert whole.text(4) == whole.text(4.0) == "4"
    assert (whole.value("4"), words.value("x"), words.text("x")) == (4, "x", "x")


def test_a_file_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "algorithm.optimizer.lr: log:1e-6..1e-4   # a comment\n"
        "algorithm.repeat_times: [4, 8]\n"
        "local.dtype:\n  - fp32\n  - 'bf16'\n"
        "model.lora_configs[0].target_modules: [[q_proj, v_proj], all-linear]\n"
    )
    axes = parse_space([str(path), "seed=1,2"])
    assert [(axis.key, axis.told()) for axis in axes] == [
        ("algorithm.optimizer.lr", "log:1e-06..0.0001"),
        ("algorithm.repeat_times", "4,8"),
        ("local.dtype", "fp32,'bf16'"),
        ("model.lora_configs[0].target_modules", "[q_proj, v_proj],all-linear"),
        ("seed", "1,2"),
    ]


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("seed: 5\nalgorithm:\n  repeat_times: [1, 2]\nlocal.dtype: [fp32, fp32]\n")
    found = faults_of(
        "a.b=7", "a.c=2..1", "a.d=log:0..1", "a.e=int:1.5..3", "a.f=log:x..y", "=1,2", str(path)
    )
    assert [where for where, _, _ in found] == [
        "--space a.b=7",
        "--space a.c=2..1",
        "--space a.d=log:0..1",
        "--space a.e=int:1.5..3",
        "--space a.f=log:x..y",
        "--space =1,2",
        f"{path}:1: seed",
        f"{path}:2: algorithm",
        f"{path}:4: local.dtype",
    ]
    assert found[0][1:] == ("two values or more, or a range LOW..HIGH", "one value: 7")
    assert found[8][1:] == ("every value once", "fp32 again")


def test_a_key_twice_nothing_and_no_file(tmp_path: Path) -> None:
    ((where, _, found),) = faults_of("a[0].b=1,2", "a.0.b=3,4")
    assert (where, found) == ("--space a.0.b=3,4", "also --space a[0].b=1,2")
    ((where, _, found),) = faults_of()
    assert (where, found) == ("--space", "nothing")
    ((where, _, found),) = faults_of(str(tmp_path / "no.yaml"))
    assert found == "No such file or directory"
    ((_, expected, found),) = faults_of("algorithm.repeat_times")
    assert "key=values" in expected
    assert found == "algorithm.repeat_times"


def test_a_grid_has_every_combination_once_in_an_order_by_seed() -> None:
    axes = parse_space(["a.b=x,y", "a.c=int:1..3"])
    assert combinations(axes) == 6
    assert [tuple(combination(axes, n).values()) for n in range(6)] == [
        ("x", "1"),
        ("x", "2"),
        ("x", "3"),
        ("y", "1"),
        ("y", "2"),
        ("y", "3"),
    ]
    order = grid_order(axes, 0)
    assert sorted(order) == list(range(6))
    assert grid_order(axes, 0) == order
    assert any(grid_order(axes, seed) != order for seed in range(1, 5))
    expected = list(range(6))
    random.Random(0).shuffle(expected)
    assert order == expected


def test_no_grid_of_a_range_of_numbers_or_of_too_many() -> None:
    axes = parse_space(["a.b=log:1e-6..1e-4", "a.c=1,2"])
    assert combinations(axes) is None
    with pytest.raises(BadInput) as refused:
        grid_order(axes, 0)
    (fault,) = refused.value.faults
    assert fault.cure.startswith("list them: a.b=1e-06,1e-05,0.0001")
    with pytest.raises(BadInput, match="10201"):
        grid_order(parse_space(["a.b=int:0..100", "a.c=int:0..100"]), 0)
