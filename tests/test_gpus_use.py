"""The record of how much a run used its GPUs, and what the report makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_nvml import GIB, Gpu, Library
from gpu_machine import children, machine

from aflow_tune.config import engine
from aflow_tune.config.engine import use_recorded
from aflow_tune.config.load import load_config
from aflow_tune.gpus import use
from aflow_tune.gpus.devices import snapshot
from aflow_tune.gpus.use import UseLog
from aflow_tune.report.audit import low_gpu_use as low_use
from aflow_tune.report.html import summary_text, write_report
from aflow_tune.report.metrics import append_metrics, read_metrics
from aflow_tune.report.quantities import gpu_facts as facts
from aflow_tune.report.quantities import mean_gpu_use as mean_use
from aflow_tune.report.quantities import peak_memory, use_by_step

__all__ = ["children", "machine"]

Machine = Callable[..., Library]


def until(true: Callable[[], object]) -> None:
    """Wait for another thread; the test's own time limit ends what never comes."""
    while not true():
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use, "INTERVAL_SECONDS", 0.01)


def test_a_record_for_each_step_with_means_and_peaks(machine: Machine) -> None:
    library = machine([Gpu(use=100, used=10 * GIB), Gpu(use=0, used=GIB)])
    written: list[tuple[int, dict[str, float]]] = []
    steps = [0]
    looks: list[int] = []

    def step() -> int:
        looks.append(steps[0])
        return steps[0]

    with UseLog(snapshot().devices, step, lambda s, n: written.append((s, n)), print):
        until(lambda: len(looks) > 1)  # it has begun at step 0
        steps[0] = 1
        until(lambda: written)
        library.gpus[0].use = library.gpus[1].use = 20
        library.gpus[0].used = 70 * GIB
        steps[0] = 2
        until(lambda: len(written) == 2)
        steps[0] = 3
        until(lambda: len(written) == 3)
    first, third = written[0], written[2]
    assert first[0] == 1
    assert first[1]["gpu/0/use"] == 1.0
    assert first[1]["gpu/1/use"] == 0.0
    assert first[1]["gpu/use"] == pytest.approx(0.5)  # mean of both
    assert first[1]["gpu/0/memory_gib"] == 10.0
    assert first[1]["gpu/seconds"] > 0
    assert third[1]["gpu/use"] == pytest.approx(0.2)
    assert third[1]["gpu/0/memory_gib"] == 70.0


def test_what_goes_wrong_harms_nothing(machine: Machine) -> None:
    library = machine([Gpu()])
    told: list[str] = []

    def full(step: int, numbers: dict[str, float]) -> None:
        raise OSError(28, "No space left on device")

    steps = iter(range(1000))
    with UseLog(snapshot().devices, lambda: next(steps), full, told.append):
        until(lambda: told)
    assert told == ["GPU use cannot be written: [Errno 28] No space left on device"]
    told.clear()
    log = UseLog(snapshot().devices, lambda: 0, lambda s, n: None, told.append)
    library.init = 999
    with log:
        until(lambda: told)
    assert told[0].startswith("GPU use is not recorded any more: ")


def run_folder(folder: Path, *records: tuple[int, float, float]) -> Path:
    """A folder with a trainer's line and a record of use (share, seconds) for each step."""
    for step, share, seconds in records:
        append_metrics(folder, "trainer", step, {"actor/loss": 1.0})
        numbers = {"gpu/use": share, "gpu/seconds": seconds, "gpu/0/use": share}
        append_metrics(folder, "gpus", step, numbers | {"gpu/0/memory_gib": 10.0 * step})
    return folder


def test_means_are_weighted_by_time(tmp_path: Path) -> None:
    lines = read_metrics(run_folder(tmp_path, (1, 0.9, 10.0), (2, 0.3, 30.0), (2, 0.5, 10.0)))
    # (9 + 9 + 5) / 50
    assert mean_use(lines) == (pytest.approx(0.46), 50.0)
    # step 2: (9 + 5) / 40
    assert use_by_step(lines) == [(1, pytest.approx(0.9)), (2, pytest.approx(0.35))]
    assert peak_memory(lines, "0") == 20.0
    assert facts(lines) == [("GPU use", "46%"), ("peak GPU memory", "20.0 GiB on 0")]


def test_below_half_the_report_warns(tmp_path: Path) -> None:
    idle = run_folder(tmp_path, (1, 0.9, 10.0), (2, 0.3, 110.0))
    found = low_use(read_metrics(idle))
    assert str(found).startswith("The GPUs of this run were in use 35% of the time (over 2 min).")
    page = write_report(idle)
    text = page.read_text()
    assert "in use 35% of the time" in text
    assert "GPU use<span>share of the time" in text
    assert "<dt>GPU use</dt><dd>35%</dd>" in text
    assert "Audit: The GPUs of this run were in use 35%" in summary_text(idle, page)


@pytest.mark.parametrize(("text", "labels"), [("engine: local", {"1"}), ("", {"1", "0"})])
def test_a_run_records_the_devices_that_it_sees(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    labels: set[str],
) -> None:
    machine([Gpu(use=10), Gpu(use=30), Gpu(use=99)])
    # PyTorch asks CUDA, which the stand-in for the driver is not.
    monkeypatch.setattr(engine, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    config = tmp_path / "c.yaml"
    config.write_text(f"name: x\n{text}\n")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    append_metrics(run_dir, "trainer", 3, {"actor/loss": 1.0})
    with use_recorded(load_config(config), run_dir):
        append_metrics(run_dir, "explorer", 5, {"rollout/reward/mean": 1.0})
        append_metrics(run_dir, "trainer", 4, {"actor/loss": 1.0})
        time.sleep(0.05)
    lines = [line for line in read_metrics(run_dir) if line.role == "gpus"]
    assert lines[-1].step == 4
    seen = {name.split("/")[1] for line in lines for name in line.metrics if name.count("/") == 2}
    assert seen == labels


@pytest.mark.parametrize(
    ("text", "recorded"),
    [
        ("engine: trinity\ncluster: {ray_address: '10.255.0.1:6379'}", False),
        ("engine: trinity\ncluster: {ray_address: '127.0.0.1:6379'}", True),
        ("engine: local\nlocal: {device: cpu}", False),
        ("no driver: 12", False),
    ],
)
def test_only_devices_of_this_machine_that_the_run_uses_are_watched(
    machine: Machine, tmp_path: Path, text: str, recorded: bool
) -> None:
    machine([Gpu()], init=12 if "driver" in text else 0)
    config = tmp_path / "c.yaml"
    config.write_text("name: x\n" + text.replace("no driver: 12", "") + "\n")
    with use_recorded(load_config(config), tmp_path):
        pass
    assert (tmp_path / "metrics.jsonl").exists() is recorded
