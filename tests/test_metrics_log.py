"""What a run logs: metrics, records, and the names they are read by."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import aflow_tune.engines.trinity  # noqa: F401  installs what Trinity's imports need
from aflow_tune.report.metrics import (
    append_metrics,
    read_metrics,
    series,
)
from aflow_tune.report.records import EvalRecord, append_record, read_records, record_path


def test_only_numbers_are_kept_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    numbers = {"int": 3, "numpy": np.float32(0.5), "tensor": torch.tensor(2.0)}
    infinite = {"nan": float("nan"), "inf": np.inf, "huge": 10**400}
    others = {"text": "x", "flag": True, "vector": torch.zeros(2), "none": None}
    append_metrics(tmp_path, "trainer", 1, {**numbers, **infinite, **others})
    raw = json.loads((tmp_path / "metrics.jsonl").read_text())
    kept = {"int": 3.0, "numpy": 0.5, "tensor": 2.0}
    assert raw["metrics"] == {**kept, **dict.fromkeys(infinite)}
    assert read_metrics(tmp_path)[0].metrics == kept


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
    assert [len(line.metrics) for line in read_metrics(tmp_path)] == [20] * 200


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


def test_damaged_records(tmp_path: Path) -> None:
    """A torn last line and newer keys are passed over, other damage is named."""
    path = tmp_path / "step_4.jsonl"
    line = RECORD.to_line()
    path.write_bytes(line + line[:-9])
    assert read_records(path) == [RECORD]
    path.write_bytes(line + line[:-9] + b"\n" + line)
    with pytest.raises(ValueError, match=r"step_4\.jsonl:2"):
        read_records(path)
    newer = line.replace(b'"step": 4', b'"step": 4, "colour": "red"')
    assert EvalRecord.from_line(newer) == RECORD


def _monitor(run_dir: Path):  # type: ignore[no-untyped-def]
    from trinity.utils.monitor import MONITOR

    cache = SimpleNamespace(cache_dir=str(run_dir / "monitor"))
    config = SimpleNamespace(checkpoint_job_dir=str(run_dir), monitor=cache)
    made = MONITOR.get("aflow_tune.engines.trinity.training.monitor.RunMonitor")
    return made(project="p", group="g", name="n", role="trainer", config=config)


def test_a_monitors_numbers_land_in_both_places(tmp_path: Path) -> None:
    run_dir = tmp_path / "made on demand"
    monitor = _monitor(run_dir)
    monitor.log({"a": 1, "b": np.float32(0.5), "text": "x", "v": torch.zeros(3)}, 1)
    monitor.log({"a": 3.0, "gone": float("nan")}, step=2, commit=True)
    assert series(read_metrics(run_dir), "a") == [(1, 1.0), (2, 3.0)]
    events = EventAccumulator(str(run_dir / "monitor" / "tensorboard" / "trainer"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(1, 1.0), (2, 3.0)]
    assert "text" not in events.Tags()["scalars"]
    monitor.close()
    monitor.close()
