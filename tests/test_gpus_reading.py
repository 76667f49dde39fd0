"""What `aflow-tune gpus` shows, above the real bindings and a stand-in for the driver."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fake_nvml
import pynvml
import pytest
from fake_nvml import GIB, UNKNOWN, Gpu, Library
from gpu_machine import OTHER_UID, Children, children, machine, needs_root

from aflow_tune.cli import main
from aflow_tune.gpus.devices import snapshot

__all__ = ["children", "machine"]

Machine = Callable[..., Library]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    """The JSON of a command that went well."""
    assert main(["gpus", "--json", *words]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


@needs_root
def test_devices_and_whose_processes(
    machine: Machine, children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = children.start(), children.start(uid=OTHER_UID)
    machine(
        [
            Gpu("NVIDIA A", used=30 * GIB, use=93, compute=[(mine.pid, 20 * GIB)]),
            Gpu("NVIDIA B", compute=[(theirs.pid, UNKNOWN)], graphics=[(theirs.pid, GIB)]),
        ]
    )
    found = shown(capsys)
    assert found["driver"] == "580.00"
    assert found["cuda"] == "13.1"
    first, second = found["devices"]
    assert first["device"] == "0"
    assert first["uuid"] == "GPU-00000000-test"
    assert (first["memory_used"], first["memory_total"], first["use"]) == (30 * GIB, 80 * GIB, 0.93)
    assert (first["temperature_c"], first["power_w"], first["power_limit_w"]) == (41, 123.4, 700.0)
    (own,) = first["processes"]
    assert own["pid"] == mine.pid
    assert (own["uid"], own["own"], own["memory"]) == (0, True, 20 * GIB)
    assert own["kinds"] == ["compute"]
    assert own["command"].startswith(sys.executable)
    assert own["program"] == f"{os.path.basename(sys.executable)} -c"
    assert 0 <= time.time() - own["since"] < 600
    (other,) = second["processes"]
    assert (other["uid"], other["own"], other["memory"]) == (OTHER_UID, False, GIB)
    assert other["kinds"] == ["compute", "graphics"]
    assert main(["gpus"]) == 0
    text = capsys.readouterr().out
    assert "GPU 0  NVIDIA A  GPU-00000000-test\n" in text
    assert "use 93%, memory 30.0 of 80.0 GiB, 41 °C, 123 of 700 W" in text
    assert f"{theirs.pid}  {OTHER_UID} " in text


def test_what_the_driver_will_not_say_is_unknown(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse = dict.fromkeys(
        ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetTemperature", "nvmlDeviceGetUUID"),
        pynvml.NVML_ERROR_NOT_SUPPORTED,
    )
    hidden = {"nvmlDeviceGetComputeRunningProcesses_v3": pynvml.NVML_ERROR_NO_PERMISSION}
    lost = {"nvmlDeviceGetHandleByIndex_v2": pynvml.NVML_ERROR_GPU_IS_LOST}
    machine(
        [Gpu(refuse=refuse, use=None), Gpu(refuse=hidden), Gpu(refuse=lost)],
        ("nvmlSystemGetCudaDriverVersion", "nvmlDeviceGetMigMode"),
    )
    found = shown(capsys)
    assert found["cuda"] is None
    first, second, third = found["devices"]
    assert first["memory_used"] is first["temperature_c"] is first["uuid"] is first["use"] is None
    assert first["processes"] == []
    assert second["processes"] is None
    assert second["processes_unknown"] == "Insufficient Permissions"
    assert third["problem"] == "GPU is lost"
    assert main(["gpus"]) == 0
    text = capsys.readouterr().out
    assert "processes: unknown (Insufficient Permissions)" in text
    assert "not usable: GPU is lost" in text


def test_instances_of_a_divided_gpu(
    machine: Machine, children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = children.start()
    parts = [
        Gpu("NVIDIA 1g", total=10 * GIB, use=None),
        Gpu("NVIDIA 3g", total=40 * GIB, use=None, compute=[(mine.pid, GIB)]),
    ]
    machine([Gpu(instances=parts), Gpu()])
    divided, whole = shown(capsys)["devices"]
    assert divided["divided"]
    assert [part["device"] for part in divided["instances"]] == ["0:0", "0:1"]
    assert divided["instances"][1]["processes"][0]["pid"] == mine.pid
    assert not whole["divided"]
    assert [unit.label for unit in snapshot().units()] == ["0:0", "0:1", "1"]
    found = snapshot().find("MIG-00000000-1")
    assert found is not None
    assert found.label == "0:1"
    assert snapshot().find("GPU-0000000") is None  # two begin so
    assert main(["gpus"]) == 0
    assert capsys.readouterr().out.count(f"{mine.pid}  ") == 1


def test_a_driver_that_does_not_work(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine([], init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert main(["gpus"]) == 1
    assert "nvidia-smi" in capsys.readouterr().err
    assert main(["gpus", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["devices"] == []
    assert main(["gpus", "free", "0", "--yes"]) == 1


def test_no_driver(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.uninstall()

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "CDLL", no_library)
    assert main(["gpus"]) == 1
    assert "libnvidia-ml.so.1 is not found" in capsys.readouterr().err


def test_a_terminal_obeys_nothing_of_a_command_line(
    machine: Machine, children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = children.start("# \x1b[2J\x1b]0;title\x07")
    machine([Gpu("evil \x1b[31m", compute=[(mine.pid, GIB)])])
    assert main(["gpus"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "evil \\x1b[31m" in text


def test_monitor_keeps_lines_without_arguments_until_ctrl_c(
    machine: Machine, children: Children, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = children.start("# --api-key sk-very-secret")
    machine([Gpu(compute=[(mine.pid, GIB)])])
    log = tmp_path / "gpus.jsonl"

    def interrupt() -> None:
        # A look is kept before it is shown: with the fourth line three pictures are there.
        while not log.exists() or log.read_text().count("\n") < 4:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert main(["gpus", "--monitor", "--interval", "0.1", "--log", str(log)]) == 0
    text = log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) >= 3
    assert lines[0]["time"] < lines[1]["time"] < lines[2]["time"]
    assert lines[0]["devices"][0]["processes"][0]["pid"] == mine.pid
    assert lines[0]["devices"][0]["processes"][0]["program"].endswith(" -c")
    assert "sk-very-secret" not in text
    assert capsys.readouterr().out.count("GPU 0") >= 3


def test_one_look_can_be_kept_and_flags_are_checked(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine([Gpu()])
    log = tmp_path / "gpus.jsonl"
    for _ in range(2):
        assert main(["gpus", "--log", str(log)]) == 0
    assert [len(json.loads(line)["devices"]) for line in log.read_text().splitlines()] == [1, 1]
    for place in (str(tmp_path), "/dev/full"):
        assert main(["gpus", "--monitor", "--interval", "0.1", "--log", place]) == 2
        assert f"--log {place}" in capsys.readouterr().err
    for seconds in ("0", "-1", "nan", "1e18"):
        assert main(["gpus", "--monitor", f"--interval={seconds}"]) == 2
