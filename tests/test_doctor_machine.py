"""Checks of the machine, in environments that are broken on purpose."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
import torch
from fake_nvml import GIB, Gpu, Library
from gpu_machine import machine
from safetensors.torch import save_file

from aflow_tune.config.file_rules import check_model, missing_shards
from aflow_tune.config.load import load_config
from aflow_tune.doctor import machine as gpus
from aflow_tune.doctor.lines import Check, Line, State, ok, run_checks
from aflow_tune.doctor.machine import check_folder, check_python, torch_cuda
from aflow_tune.errors import BadInput

Machine = Callable[[list[Gpu]], Library]
__all__ = ["machine"]


def test_one_check_that_fails_is_one_line() -> None:
    wait = threading.Event()

    def crash() -> list[Line]:
        raise OSError("gone")

    def refuse() -> list[Line]:
        raise BadInput.of("no", "here", "this", "that", "do so")

    checks = [
        Check("crash", crash),
        Check("hang", lambda: wait.wait() and [], 0.2),
        Check("refuse", refuse),
        Check("end", lambda: sys.exit(3)),
        Check("good", lambda: [ok("good", "fine")]),
    ]
    told = [line for lines in run_checks(checks) for line in lines]
    wait.set()
    assert [line.check for line in told] == ["crash", "hang", "refuse", "end", "good"]
    assert [line.state.value for line in told] == ["fault"] * 4 + ["ok"]
    assert "OSError: gone (test_doctor_machine.py:" in told[0].found
    assert told[1].found == "no answer within 0.2 s"
    assert told[2].found == "here: that (expected: this)"
    assert told[2].given
    assert "SystemExit" in told[3].found
    assert all(line.cure for line in told[:4])


def test_python_platform_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    python, system = check_python()
    assert python.state is State.OK
    assert sys.executable in python.found
    assert system.check == "platform"
    monkeypatch.setattr("platform.python_version", lambda: "3.14.0")
    assert check_python()[0].state is State.FAULT
    assert torch_cuda() == torch.version.cuda  # read, not imported


def test_no_gpu_is_fine_for_the_local_engine_only(machine: Machine) -> None:
    machine([], init=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)  # type: ignore[call-arg]
    unknown, spare, needed = (gpus.check_gpus(needed)[0] for needed in (None, False, True))
    assert unknown.state is spare.state is State.OK
    assert "libnvidia-ml.so.1 is not found" in spare.found
    assert needed.state is State.FAULT
    assert "engine=local" in needed.cure


def test_gpus_of_this_machine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def states(needed: bool | None = None) -> list[str]:
        return [line.state.value for line in gpus.check_gpus(needed)]

    monkeypatch.setattr(gpus, "torch_cuda", lambda: "13.0")
    lost = {"nvmlDeviceGetHandleByIndex_v2": pynvml.NVML_ERROR_GPU_IS_LOST}
    machine([Gpu("H", used=8 * GIB), Gpu("H", used=79 * GIB), Gpu("H", refuse=lost)])
    lines = gpus.check_gpus(True)
    assert states(True) == ["ok", "ok", "note", "note"]
    assert "driver 580.00, CUDA up to 13.1" in lines[0].found
    assert lines[1].found == "H: 72.0 of 80.0 GiB free"
    assert "GPU is lost" in lines[3].found
    for built, found in (("14.0", "the driver runs 13.1"), (None, "CPU build of PyTorch")):
        monkeypatch.setattr(gpus, "torch_cuda", lambda built=built: built)
        assert states(True)[1] == "fault"
        assert found in gpus.check_gpus(True)[1].found
    assert states(False)[1] == "note"
    machine([])
    assert (states(True)[-1], states(False)[-1]) == ("fault", "note")


def test_no_sandbox_for_programs() -> None:
    """Neither bwrap nor Landlock, in a process of its own: the finding is remembered."""
    code = (
        "from aflow_tune.sandbox import backends, _confine\n"
        "backends.find_tool = lambda name: None\n_confine.version = lambda: 0\n"
        "from aflow_tune.doctor.machine import check_sandbox\nimport json\n"
        "lines = [*check_sandbox('auto', True), *check_sandbox('auto', False)]\n"
        "print(json.dumps([vars(line) for line in lines]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    needed, spare = json.loads(result.stdout)
    assert (needed["state"], spare["state"]) == ("fault", "note")
    assert "bwrap is not installed" in needed["found"]
    assert "bubblewrap" in needed["cure"]


def test_folders_that_are_written_to(tmp_path: Path) -> None:
    def told(folder: Path) -> tuple[State, str]:
        (line,) = check_folder(folder, "move it")
        assert line.state is State.OK or line.cure.endswith("move it")
        return line.state, line.found

    assert told(tmp_path / "not" / "there")[0] is State.OK
    assert list(tmp_path.iterdir()) == []
    state, found = told(Path("/proc/below/here"))  # whoever asks, nothing can be written there
    assert (state, "/proc/below/here: cannot be written" in found) == (State.FAULT, True)
    (tmp_path / "file").write_text("")
    assert "a file, where a folder is needed" in told(tmp_path / "file" / "below")[1]
    # A full disk: a limit that the kernel enforces.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, limits[1]))
    try:
        assert told(tmp_path)[0] is State.FAULT
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_weights_that_are_not_whole(tmp_path: Path) -> None:
    def damages() -> list[str]:
        found = check_model(load_config(None, [f"model.model_path={tmp_path}"]))
        return [item.found for item in found if "whole files" in getattr(item, "expected", "")]

    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": names[0], "c": names[1]}}))
    (tmp_path / names[0]).touch()
    assert missing_shards(tmp_path) == [names[1]]
    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100), "b": torch.ones(7)}, str(file), {"format": "pt"})
    whole = file.read_bytes()
    assert damages() == []
    for length in (0, 7, 50, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert len(damages()) == 1


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("config.json", '{"model_type": "no-such"}', "'no-such'"),
        ("tokenizer.json", "[", "tokenizer.json: no JSON object"),
        ("tokenizer.json", None, "none in the folder"),
    ],
)
def test_a_damaged_model_folder(
    name: str, content: str | None, found: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    faults = check_model(load_config(None, [f"model.model_path={folder}"]))
    assert [fault.found for fault in faults] == [found]
