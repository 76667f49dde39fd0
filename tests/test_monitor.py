"""The monitor that Trinity's explorer and trainer log to."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import aflow_tune.engines.trinity  # noqa: F401  installs what Trinity's imports need
from aflow_tune.report.metrics import read_metrics, series

NAME = "aflow_tune.engines.trinity.training.monitor.RunMonitor"


def _monitor(run_dir: Path, role: str = "trainer"):  # type: ignore[no-untyped-def]
    from trinity.utils.monitor import MONITOR

    config = SimpleNamespace(
        checkpoint_job_dir=str(run_dir), monitor=SimpleNamespace(cache_dir=str(run_dir / "monitor"))
    )
    monitor_class = MONITOR.get(NAME)
    return monitor_class(project="p", group="g", name="n", role=role, config=config)


def test_numbers_land_in_both_places(tmp_path: Path) -> None:
    run_dir = tmp_path / "made on demand"
    monitor = _monitor(run_dir)
    monitor.log(
        {"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0), "text": "x", "v": torch.zeros(3)}, 1
    )
    monitor.log({"a": 3.0, "gone": float("nan")}, step=2, commit=True)
    lines = read_metrics(run_dir)
    assert [(line.role, line.step) for line in lines] == [("trainer", 1), ("trainer", 2)]
    assert lines[0].metrics == {"a": 1.0, "b": 0.5, "c": 2.0}
    assert series(lines, "a") == [(1, 1.0), (2, 3.0)]
    events = EventAccumulator(str(run_dir / "monitor" / "tensorboard" / "trainer"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(1, 1.0), (2, 3.0)]
    assert [e.value for e in events.Scalars("b")] == [0.5]
    assert "text" not in events.Tags()["scalars"]
    monitor.close()
    monitor.close()


def test_a_full_disk_costs_metrics_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trinity.utils.log as trinity_log

    monkeypatch.setattr(trinity_log, "_ray_logger", logging.getLogger("test_monitor"))
    monitor = _monitor(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    monitor.log({"a": 1.0}, 1)
    monitor.log({"a": 1.0}, 2)
    monitor.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "Metrics cannot be written" in caplog.text
