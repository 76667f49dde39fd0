"""What a run logs: metrics, records, and the names they are read by."""

from __future__ import annotations

import json
import math
import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_run import write_step

from aflow_tune.report.metrics import (
    LineTail,
    append_metrics,
    read_metrics,
    rewind_metrics,
    scalar,
    series,
)
from aflow_tune.report.quantities import (
    derived,
    failure_counts,
    finished_evaluations,
    is_training,
    sampling_speed,
    training_speed,
    workflow_metrics,
)
from aflow_tune.report.records import EvalRecord, append_record, read_records, record_path


def test_only_numbers_are_kept_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    values = {
        "int": 3,
        "numpy": np.float32(0.5),
        "tensor": torch.tensor(2.0),
        "nan": float("nan"),
        "inf": np.inf,
        "huge": 10**400,
        "text": "x",
        "flag": True,
        "vector": torch.zeros(2),
        "none": None,
    }
    append_metrics(tmp_path, "trainer", 1, values)
    raw = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert raw["metrics"] == {
        "int": 3.0,
        "numpy": 0.5,
        "tensor": 2.0,
        "nan": None,
        "inf": None,
        "huge": None,
    }
    assert read_metrics(tmp_path)[0].metrics == {"int": 3.0, "numpy": 0.5, "tensor": 2.0}
    assert math.isnan(scalar(float("nan")) or 0.0)


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    append_metrics(tmp_path, "trainer", 1, {"a": 1})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"time": 1.0, "role": "trai')
    assert [line.step for line in read_metrics(tmp_path)] == [1]
    append_metrics(tmp_path, "trainer", 2, {"a": 2})
    assert series(read_metrics(tmp_path), "a") == [(1, 1.0), (2, 2.0)]


def _append_many(arguments: tuple[Path, str]) -> None:
    run_dir, role = arguments
    for step in range(100):
        append_metrics(run_dir, role, step, {f"{role}/{name}": 0.123 for name in range(20)})


def test_two_processes_never_mix_their_lines(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(_append_many, [(tmp_path, "explorer"), (tmp_path, "trainer")])
    lines = read_metrics(tmp_path)
    assert len(lines) == 200
    assert all(len(line.metrics) == 20 for line in lines)


def test_rewinding_forgets_later_steps(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        append_metrics(tmp_path, "trainer", step, {"a": step})
    rewind_metrics(tmp_path, 2)
    append_metrics(tmp_path, "trainer", 3, {"a": 30})
    assert series(read_metrics(tmp_path), "a") == [(1, 1.0), (2, 2.0), (3, 30.0)]
    rewind_metrics(tmp_path / "nowhere", 0)
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_tail_gives_whole_new_lines_and_notices_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tail = LineTail(path)
    assert tail.read() == ([], False)
    path.write_bytes(b"one\ntw")
    assert tail.read() == ([b"one"], False)
    with path.open("ab") as file:
        file.write(b"o\n\nthree\n")
    assert tail.read() == ([b"two", b"three"], False)
    assert tail.read() == ([], False)
    path.write_bytes(b"cut\n")
    assert tail.read() == ([b"cut"], True)
    other = tmp_path / "other"
    other.write_bytes(b"put in its place\n")
    other.rename(path)
    assert tail.read() == ([b"put in its place"], True)
    path.unlink()
    assert tail.read() == ([], True)


def test_speeds_are_taken_as_logged_or_computed(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    lines = read_metrics(tmp_path)
    # 20 tokens a run / 2 calls a run x 128 calls / 4 s = 320; 14,000 tokens / 2 s = 7,000.
    assert derived(lines, sampling_speed) == [(1, 320.0)]
    assert derived(lines, training_speed) == [(1, 7000.0)]
    assert sampling_speed({"rollout/tokens_per_second": 5.0}) == 5.0
    assert training_speed({"trainer/tokens_per_second": 6.0}) == 6.0
    assert sampling_speed({}) is None
    assert training_speed({"perf/total_num_tokens": 3.0, "time/train_step": 0.0}) is None


def test_names_are_read_as_trinity_writes_them(tmp_path: Path) -> None:
    write_step(tmp_path, 1, raised=2.0)
    explorer, trainer = read_metrics(tmp_path)
    assert failure_counts(explorer.metrics) == {"raised": 2.0}
    assert failure_counts({"rollout/failure/timed_out/sum": 0.0}) == {}
    assert (is_training(explorer), is_training(trainer)) == (False, True)
    assert workflow_metrics([explorer, trainer]) == ["correct"]
    assert finished_evaluations({"eval/a/b/finished_task_count": 3.0, "eval/a/x/mean@1": 1.0}) == {
        "a/b": 3
    }


RECORD = EvalRecord(
    step=4, taskset="held_out", item=7, run=1, score=1.0, reward=0.5, metrics={"right": 1.0}
)


@pytest.mark.parametrize("text", ["two\nlines", "\u2028 \x85 \x1c", "\ud83d alone", "\x00", "数学"])
def test_a_record_is_one_line_whatever_it_holds(tmp_path: Path, text: str) -> None:
    call = {"caller": "a", "messages": [], "response": text, "tokens": 1}
    record = replace(RECORD, transcript=[call])
    append_record(tmp_path, record)
    append_record(tmp_path, RECORD)
    path = record_path(tmp_path, "held_out", 4)
    assert path.read_bytes().count(b"\n") == 2
    assert read_records(path) == [record, RECORD]


def test_a_torn_last_line_is_passed_over_and_another_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step_4.jsonl"
    line = RECORD.to_line()
    path.write_bytes(line + line[:-9])
    assert read_records(path) == [RECORD]
    path.write_bytes(line + line[:-9] + b"\n" + line)
    with pytest.raises(ValueError, match=r"step_4\.jsonl:2 is damaged"):
        read_records(path)
    path.write_bytes(b"")
    assert read_records(path) == []


def test_newer_keys_are_passed_over_and_missing_ones_are_an_error() -> None:
    line = RECORD.to_line().replace(b'"step": 4', b'"step": 4, "colour": "red"')
    assert EvalRecord.from_line(line) == RECORD
    with pytest.raises(ValueError, match="taskset"):
        EvalRecord.from_line(b'{"step": 4}')
    with pytest.raises(ValueError, match="object"):
        EvalRecord.from_line(b"[]")
