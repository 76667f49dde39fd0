"""Rehearsal of earlier rounds: the buffer that runs share, exact shares, and what rounds forget."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from data_project import pair, trainer_metrics, write_data_project, write_rows
from fake_run import write_evaluation
from run_folders import write_run

from aflow_tune.cli import main
from aflow_tune.config.load import load_config
from aflow_tune.config.stages import parts_of
from aflow_tune.data.replay import eligible, join, old_rows, quotas, read_buffer
from aflow_tune.errors import BadInput, BudgetReached, RunFailed
from aflow_tune.report.rounds import backward_transfer, final_mean, forgetting
from aflow_tune.sections import ReplaySection
from aflow_tune.tuning import run_config


def _rows(name: str, count: int) -> list[dict[str, Any]]:
    return [pair(f"{name} {n}", name * 3) for n in range(count)]


# --- what is drawn, and what is kept ---------------------------------------------------------


def test_shares_are_exact_over_the_batches() -> None:
    def drawn(batches: int, size: int, rows: int, seed: int = 0) -> list[list[int]]:
        return [old_rows(batch, size, 0.3, rows, seed) for batch in range(batches)]

    (ten,) = drawn(1, 10, 40)
    assert len(set(ten)) == 3
    # 0.3 x 4 = 1.2 a batch: 1.2, 2.4, 3.6, 4.8 and 6 rounded down
    assert list(map(len, drawn(5, 4, 40))) == [1, 1, 1, 1, 2]
    # two batches of five are the same three as one of ten
    assert [*chain(*drawn(2, 5, 40))] == ten
    # each of four rows comes once before one comes again, in another order
    four = [*chain(*drawn(40, 10, 4))]
    passes = [tuple(four[at : at + 4]) for at in range(0, 120, 4)]
    assert all(sorted(one) == [0, 1, 2, 3] for one in passes)
    assert len(set(passes)) > 5
    assert drawn(3, 10, 40, seed=1) != drawn(3, 10, 40)
    assert drawn(2, 10, 0) == [[], []]


def test_a_limited_buffer_is_even_and_joining_twice_is_joining_once(tmp_path: Path) -> None:
    assert quotas({"a": 3, "b": 10, "c": 10}, 12) == {"a": 3, "b": 4, "c": 5}
    assert quotas({"a": 5, "b": 5}, 100) == {"a": 5, "b": 5}
    path = tmp_path / "deep" / "buffer.jsonl"
    first, second = _rows("a", 20), _rows("b", 20)
    assert len(join(path, "one", "sft", first, 10)) == 10
    join(path, "two", "sft", second, 10)
    content = path.read_bytes()
    held = read_buffer(path)
    assert Counter(kept.round for kept in held) == {"one": 5, "two": 5}
    rows = [kept.row for kept in held]
    assert all(row in first for row in rows[:5])
    assert all(row in second for row in rows[5:])
    join(path, "two", "sft", second, 10)
    assert path.read_bytes() == content
    # Rows that are there already do not come again under the name of another round.
    join(path, "three", "sft", rows, None)
    assert path.read_bytes() == content


def test_a_run_rehearses_other_rounds_of_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "buffer.jsonl"
    join(path, "me/one", "sft", _rows("a", 3), None)
    join(path, "me/two", "sft", _rows("b", 2), None)
    join(path, "me/pairs", "dpo", [{"chosen": "x"}], None)
    held = read_buffer(path)

    def found(own: list[dict[str, Any]], *rounds: str) -> Counter[str]:
        return Counter(kept.round for kept in eligible(held, "sft", own, rounds))

    assert found([]) == {"me/one": 3, "me/two": 2}
    assert found(_rows("b", 5)) == {"me/one": 3}  # not its own
    assert found([], "two") == found([], "me/two") == {"me/two": 2}
    with pytest.raises(BadInput, match=r"replay\.from"):
        found([], "wo")
    path.write_text(path.read_text() + '{"messages": []}\n')
    with pytest.raises(BadInput, match=rf"{path}:7"):
        join(path, "three", "sft", [], None)


def _join_many(path: Path, name: str) -> None:
    for number in range(20):
        join(path, name, "sft", _rows(f"{name}{number}", 2), None)


def test_two_processes_join_one_buffer(tmp_path: Path) -> None:
    path, context = tmp_path / "buffer.jsonl", multiprocessing.get_context("fork")
    workers = [context.Process(target=_join_many, args=(path, name)) for name in ("a", "b")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert Counter(kept.round for kept in read_buffer(path)) == {"a": 40, "b": 40}


# --- runs ------------------------------------------------------------------------------------


def _round(root: Path, model: Path, name: str, rows: list[dict[str, Any]], *more: str) -> Path:
    """A run on ten rows, two steps of five; returns its folder."""
    config = write_data_project(root, model, rows, steps=2)
    settings = ["buffer.train_batch_size=5", "trainer.save_interval=1", "deterministic=true"]
    buffer = f"replay.buffer={root}/replay.jsonl"
    run_config(config, [*settings, buffer, "replay.ratio=0.3", f"name={name}", *more])
    return root / "runs" / "tests" / name


def _weights(run_dir: Path) -> bytes:
    return (run_dir / "global_step_2" / "weights.safetensors").read_bytes()


def _old(run_dir: Path) -> list[float]:
    metrics = trainer_metrics(run_dir)
    return [metrics[step]["replay/old_rows"] for step in sorted(metrics)]


@pytest.mark.slow
def test_a_second_round_rehearses_and_resumes_to_the_same_weights(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer, new = tmp_path / "replay.jsonl", _rows("b", 10)
    first = _round(tmp_path, tiny_model_dir, "first", _rows("a", 10))
    assert _old(first) == [0, 0]
    assert [kept.row for kept in read_buffer(buffer)] == _rows("a", 10)
    after_one = buffer.read_bytes()

    whole = _round(tmp_path, tiny_model_dir, "second", new)
    assert sum(_old(whole)) == 3  # of the ten rows that it learned
    told = capsys.readouterr().out
    assert f"old rows, drawn from the 10 of 1 earlier round in {buffer}" in told
    assert "0.3 of what is learned are old rows" in (whole / "report.html").read_text()
    assert Counter(k.round for k in read_buffer(buffer)) == {"tests/first": 10, "tests/second": 10}

    # The same seed and buffer: the same rows in the same order.
    buffer.write_bytes(after_one)
    parts = [tmp_path, tiny_model_dir, "third", new]
    with pytest.raises(BudgetReached):
        _round(*parts, "budget.wall_seconds=0")
    assert buffer.read_bytes() == after_one  # a run that did not reach its target adds nothing
    # Stopped after a step, and going on beside a buffer that others have changed.
    _round(*parts, "buffer.total_steps=1")
    join(buffer, "other", "sft", _rows("c", 30), None)
    third = _round(*parts)
    assert _old(third) == _old(whole)
    assert _weights(third) == _weights(whole)
    rounds = {"tests/first": 10, "tests/third": 10, "other": 30}
    assert Counter(kept.round for kept in read_buffer(buffer)) == rounds
    # And what is rehearsed can be chosen.
    fourth = _round(*parts[:2], "fourth", new, "replay.from=[other]", "coreset.size=5")
    assert json.loads((fourth / "replay.json").read_text())["rounds"] == {"other": 30}
    assert _weights(fourth) != _weights(whole)
    assert Counter(kept.round for kept in read_buffer(buffer)) == rounds  # they are there


def test_a_row_that_cannot_be_rehearsed_is_named_in_the_buffer(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    buffer = tmp_path / "replay.jsonl"
    join(buffer, "old", "sft", [*_rows("a", 2), {"messages": [{"role": "user"}]}], None)
    for _ in range(2):  # nothing is left that a second start would take for settled
        with pytest.raises(BadInput, match="cannot be learned from") as caught:
            _round(tmp_path, tiny_model_dir, "run", _rows("b", 10))
        assert [fault.where for fault in caught.value.faults] == [f"{buffer}:3"]
    with pytest.raises(RunFailed, match="cannot be written"):  # before it trains, not after
        _round(tmp_path, tiny_model_dir, "new", _rows("b", 10), f"replay.buffer={buffer}/b.jsonl")
    assert not list((tmp_path / "runs").rglob("global_step_*"))


def test_in_a_chain_it_holds_for_the_stages_that_learn_from_rows(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_data_project(tmp_path, tiny_model_dir, _rows("a", 10))
    stages = """
replay: {buffer: b.jsonl, ratio: 0.2, from: [x]}
stages:
  - {stage_name: one, mode: train}
  - {stage_name: two, mode: train, replay: {ratio: 0.4}, coreset: {size: 5}}
  - {stage_name: three, mode: both}
"""
    config.write_text(config.read_text() + stages)
    parts = parts_of(load_config(config, ["stages[0].replay.from=[y]"]))[0]
    found = [(part.replay.buffer, part.replay.ratio, part.replay.rounds) for _, part in parts]
    assert found[:2] == [("b.jsonl", 0.2, ["y"]), ("b.jsonl", 0.4, ["x"])]
    assert [part.coreset.size for _, part in parts] == [None, 5, None]
    assert parts[2][1].replay == ReplaySection()


# --- what rounds forget ----------------------------------------------------------------------

SCORES = [[0.9, 0.1, 0.2], [0.5, 0.8, 0.1], [0.6, 0.6, 0.7]]


def test_transfer_and_forgetting_by_hand() -> None:
    assert backward_transfer(SCORES) == pytest.approx(((0.6 - 0.9) + (0.6 - 0.8)) / 2)
    assert forgetting(SCORES) == pytest.approx(((0.9 - 0.6) + (0.8 - 0.6)) / 2)
    assert final_mean(SCORES) == pytest.approx((0.6 + 0.6 + 0.7) / 3)
    assert (backward_transfer([[0.4]]), forgetting([[0.4]]), final_mean([[0.4]])) == (
        None,
        None,
        0.4,
    )
    # A later round may be better at an earlier task than its own was: nothing is forgotten of it.
    better = [[0.2, 0.0], [0.5, 0.4]]
    assert backward_transfer(better) == pytest.approx(0.3)
    assert forgetting(better) == pytest.approx(-0.3)


def test_rounds_are_read_from_their_run_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, folders = ["z", "m", "a"], [tmp_path / f"round_{n}" for n in range(3)]
    for folder, row in zip(folders, SCORES, strict=True):
        write_run(folder)
        for name, score in zip(names, row, strict=True):
            right = round(10 * score)
            write_evaluation(folder, 0, [0.0] * 10, taskset=name)
            write_evaluation(folder, 8, [1.0] * right + [0.0] * (10 - right), taskset=name)
    tasks = "".join(f"{{name: {name}}}, " for name in names)
    text = f"buffer: {{explorer_input: {{eval_tasksets: [{tasks}]}}}}\n"
    (folders[-1] / "resolved.yaml").write_text(text)
    words = ["runs", "rounds", *map(str, folders)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tasksets"] == names  # as they are listed, not by the alphabet
    assert found["scores"] == [pytest.approx(row) for row in SCORES]
    assert found["backward_transfer"] == pytest.approx(-0.25)
    assert main(words) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[2].split() == ["round_1", "0.500", "0.800", "0.100"]
    assert table[4].split() == ["backward", "transfer", "-0.250"]
    assert main([*words, "--tasks", "z,m"]) == 2
    write_rows(folders[1] / "evaluations" / "a" / "step_8.jsonl", [])
    (folders[1] / "evaluations" / "a" / "step_0.jsonl").unlink()
    assert main(words) == 2
    assert f"{folders[1]}" in capsys.readouterr().err
