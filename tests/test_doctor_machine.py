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

from aflow_tune.doctor import machine as gpus
from aflow_tune.doctor.lines import Check, Line, Once, State, fault, ok, run_checks, size
from aflow_tune.doctor.machine import check_folder, check_python, check_sandbox, torch_cuda
from aflow_tune.errors import BadInput, Fault
from aflow_tune.sandbox import _confine, walls

Machine = Callable[[list[Gpu]], Library]
__all__ = ["machine"]


def test_one_check_that_fails_is_one_line() -> None:
    wait = threading.Event()

    def crash() -> list[Line]:
        raise OSError("gone")

    def refuse() -> list[Line]:
        raise BadInput("no", [Fault("here", "this", "that", "do so")])

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


def test_a_fault_has_a_cure() -> None:
    with pytest.raises(ValueError, match="without a cure"):
        fault("x", "broken", "")


def test_what_is_made_once_is_made_once_even_if_it_fails() -> None:
    made: list[int] = []

    def make() -> int:
        made.append(1)
        raise OSError("no")

    value = Once(make)
    for _ in range(3):
        with pytest.raises(OSError, match="no"):
            value()
    assert made == [1]


def test_python_and_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    python, system = check_python()
    assert python.state is State.OK
    assert sys.executable in python.found
    assert system.check == "platform"
    monkeypatch.setattr("platform.python_version", lambda: "3.14.0")
    python = check_python()[0]
    assert python.state is State.FAULT
    assert "3.14.0" in python.found


def test_torch_is_read_without_being_imported() -> None:
    import torch

    assert torch_cuda() == torch.version.cuda


def test_no_gpu_is_fine_for_the_local_engine_only() -> None:
    """A real look in a process that finds no driver, whatever this machine has."""
    code = (
        "import ctypes, json\n"
        "def none(name, *rest): raise OSError(name)\n"
        "ctypes.CDLL = none\n"
        "from aflow_tune.doctor.machine import check_gpus\n"
        "lines = [check_gpus(needed)[0] for needed in (None, False, True)]\n"
        "print(json.dumps([line.to_json() for line in lines]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    unknown, spare, needed = json.loads(result.stdout)
    assert unknown["state"] == spare["state"] == "ok"
    assert "libnvidia-ml.so.1 is not found" in spare["found"]
    assert needed["state"] == "fault"
    assert "engine=local" in needed["cure"]


def test_gpus_of_this_machine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "13.0")
    lost = {"nvmlDeviceGetHandleByIndex_v2": pynvml.NVML_ERROR_GPU_IS_LOST}
    machine([Gpu("H", used=8 * GIB), Gpu("H", used=79 * GIB), Gpu("H", refuse=lost)])
    lines = gpus.check_gpus(True)
    assert [line.state.value for line in lines] == ["ok", "ok", "note", "note"]
    assert "driver 580.00, CUDA up to 13.1" in lines[0].found
    assert lines[1].found == "H: 72.0 of 80.0 GiB free"
    assert "1.0 of 80.0 GiB free; others use it" in lines[2].found
    assert "not usable: GPU is lost" in lines[3].found
    monkeypatch.setattr(gpus, "torch_cuda", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    lines = gpus.check_gpus(True)
    assert lines[1].found == "CUDA_VISIBLE_DEVICES='1' hides the others"
    assert lines[2].state is State.FAULT
    assert "a CPU build of PyTorch beside a GPU" in lines[2].found
    assert gpus.check_gpus(False)[2].state is State.NOTE


def test_a_driver_that_is_too_old_for_pytorch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine([Gpu()])
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "14.0")
    lines = gpus.check_gpus()
    assert [line.state.value for line in lines] == ["ok", "fault", "ok"]
    assert "built for CUDA 14.0, but the driver runs 13.1" in lines[1].found
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "13.9")
    assert [line.state.value for line in gpus.check_gpus()] == ["ok", "ok"]


def test_a_driver_without_devices(machine: Machine) -> None:
    machine([])
    assert gpus.check_gpus(True)[-1].state is State.FAULT
    assert gpus.check_gpus(False)[-1].state is State.NOTE


def test_no_wall_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither bwrap nor Landlock, in a process of its own: the finding is remembered."""
    code = (
        "from aflow_tune.sandbox import walls, _confine\n"
        "walls.find_tool = lambda name: None\n_confine.version = lambda: 0\n"
        "from aflow_tune.doctor.machine import check_sandbox\nimport json\n"
        "lines = [*check_sandbox('auto', True), *check_sandbox('auto', False)]\n"
        "print(json.dumps([line.to_json() for line in lines]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    needed, spare = json.loads(result.stdout)
    assert needed["state"] == "fault"
    assert "bwrap is not installed" in needed["found"]
    assert "Landlock" in needed["found"]
    assert needed["cure"] == walls.INSTALL
    assert spare["state"] == "note"


def test_the_wall_that_is_here() -> None:
    from aflow_tune.sandbox import Level, detect

    (line,) = check_sandbox()
    level = detect().level
    expected = {Level.BUBBLEWRAP: State.OK, Level.LANDLOCK: State.NOTE, None: State.FAULT}
    assert line.state is expected[level]
    (line,) = check_sandbox("unsafe_subprocess")
    assert line.state is State.NOTE
    assert _confine.version() >= 0


def test_room_on_disk(tmp_path: Path) -> None:
    (line,) = check_folder("disk", tmp_path / "not" / "there", 1e6, "move")
    assert line.state is State.OK
    assert "1 MB will be written" in line.found
    (line,) = check_folder("disk", tmp_path, 1e18, "move it")
    assert line.state is State.FAULT
    assert "1e+06 TB will be written" in line.found
    assert line.cure.endswith("or move it")
    assert list(tmp_path.iterdir()) == []
    (line,) = check_folder("disk", Path("/proc/below/here"), None, "move")
    assert line.state is State.FAULT  # whoever asks, nothing can be written there
    assert line.found.startswith("/proc/below/here: cannot be written (/proc: ")
    assert "-R" not in line.cure
    (tmp_path / "file").write_text("")
    (line,) = check_folder("disk", tmp_path / "file" / "below", None, "move")
    assert line.state is State.FAULT
    assert "a file, where a folder is needed" in line.found


def test_a_full_disk(tmp_path: Path) -> None:
    """A real one of 512 kB where we may mount; else a limit that the kernel enforces."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode == 0:
        try:
            (line,) = check_folder("disk", place, None, "move")
        finally:
            subprocess.run(["umount", str(place)], check=True)
    else:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, limits[1]))
        try:
            (line,) = check_folder("disk", place, None, "move")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
    assert line.state is State.FAULT
    assert "nothing more can be written" in line.found
    assert "or move" in line.cure
    assert list(place.iterdir()) == []


def test_sizes_for_people() -> None:
    assert [size(n) for n in (2_500, 3.2e6, 4.56e9, 1.5e12)] == [
        "2.5 kB",
        "3.2 MB",
        "4.56 GB",
        "1.5 TB",
    ]


def test_weights_whose_download_was_cut_off(tmp_path: Path) -> None:
    from aflow_tune.config.file_rules import missing_shards

    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": names[0], "b": names[0], "c": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / names[0]).touch()
    assert missing_shards(tmp_path) == [names[1]]
    (tmp_path / names[1]).touch()
    assert missing_shards(tmp_path) == []


def test_weights_that_were_not_written_whole(tmp_path: Path) -> None:
    from aflow_tune.config.file_rules import check_model
    from aflow_tune.config.load import load_config

    def damages() -> list[str]:
        found = check_model(load_config(None, [f"model.model_path={tmp_path}"]))
        return [item.found for item in found if "whole files" in getattr(item, "expected", "")]

    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100), "b": torch.ones(7)}, str(file), {"format": "pt"})
    whole = file.read_bytes()
    assert damages() == []
    for length in (0, 7, 8, 50, len(whole) - 428, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert len(damages()) == 1
    assert damages() == [f"model.safetensors has {len(whole) - 1:,} of its {len(whole):,} bytes"]
    file.write_bytes(b"\xff" * 500)
    assert damages() == ["model.safetensors has no header that can be read"]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("config.json", "{}", "no model_type"),
        ("config.json", '{"model_type": "no-such"}', "'no-such'"),
        ("tokenizer.json", "[", "tokenizer.json: no JSON object"),
        ("tokenizer.json", None, "none in the folder"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: no JSON object"),
    ],
)
def test_a_damaged_model_folder(
    name: str, content: str | None, found: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    from aflow_tune.config.file_rules import check_model
    from aflow_tune.config.load import load_config

    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    config = load_config(None, [f"model.model_path={folder}"])
    assert list(check_model(config)) == []
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    assert [fault.found for fault in check_model(config)] == [found]


def test_a_pytorch_that_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise FileNotFoundError("version.py")

    monkeypatch.setattr(gpus, "torch_cuda", gone)
    (line,) = gpus.check_gpus()
    assert line.state is State.FAULT
    assert "--force-reinstall --no-deps 'torch==" in line.cure
