"""Free devices for a run: which, how many, and never the same for two."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from fake_nvml import GIB, Gpu, Library
from gpu_machine import Children, children, machine

from aflow_tune.config.engine import own_devices
from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.errors import BadInput
from aflow_tune.gpus import claims as claims_module
from aflow_tune.gpus.choosing import Chosen, choose, isolated, visible
from aflow_tune.gpus.claims import Claims, holder_of, protected_by_runs
from aflow_tune.gpus.devices import snapshot

__all__ = ["children", "machine"]

Machine = Callable[..., Library]


@pytest.fixture
def take(machine: Machine) -> Iterator[Callable[..., Chosen]]:
    held: list[Claims] = []

    def chosen(value: object = "auto", count: int | None = 1) -> Chosen:
        held.append(Claims("project/run"))
        return choose(value, count, held[-1], "c.yaml:3: physical_gpus")

    yield chosen
    for claims in held:
        claims.release()


def labels(chosen: Chosen) -> list[str]:
    return [device.label for device in chosen.devices]


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(BadInput) as raised:
        call()
    assert all(fault.where.startswith("c.yaml:3") for fault in raised.value.faults)
    return " | ".join(f"{fault.expected}: {fault.found}" for fault in raised.value.faults)


def test_only_free_devices_are_chosen(
    machine: Machine, take: Callable[..., Chosen], children: Children
) -> None:
    busy = children.start()
    machine(
        [
            Gpu(compute=[(busy.pid, GIB)]),
            Gpu(graphics=[(busy.pid, 2**20)]),
            Gpu(used=5 * GIB),  # by somebody who cannot be seen
            Gpu(used=2 * GIB),  # below 3% of 80 GiB
            Gpu(),
        ]
    )
    assert labels(take("auto", None)) == ["3", "4"]
    told = refused(lambda: take("auto", 1))
    assert f"GPU 0: used by process {busy.pid} of " in told
    assert "GPU 2: 5.0 GiB of it are used by processes unseen" in told
    assert "GPU 3: claimed by run project/run of " in told


@pytest.mark.parametrize(
    "text", ['{"pid": 1, "uid": 0, "run": "x", "protected": [1e400]}', "[" * 60000]
)
def test_a_held_file_that_anybody_wrote_is_a_claim_of_somebody(machine: Machine, text: str) -> None:
    machine([Gpu()])
    path = claims_module.FOLDER / "aflow-tune-gpu-GPU-00000000-test.lock"
    path.write_text(text)
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        holder = holder_of("GPU-00000000-test")
    assert holder is not None
    assert (holder.run, holder.protected) == ("unknown", [])


def test_named_devices(machine: Machine, take: Callable[..., Chosen], children: Children) -> None:
    busy = children.start()
    machine(
        [
            Gpu(),
            Gpu(graphics=[(busy.pid, 3 * GIB)], used=4 * GIB),  # a desktop's
            Gpu(compute=[(busy.pid, GIB)]),
            Gpu(instances=[Gpu(), Gpu()]),
        ]
    )
    assert labels(take([1], None)) == ["1"]
    assert labels(take("GPU-00000000-test", 1)) == ["0"]
    told = refused(lambda: take([0, 2, 7, 3], None))
    for found in ("GPU 0: claimed", f"GPU 2: used by process {busy.pid}", "GPU 7: not there"):
        assert found in told
    assert "GPU 3: divided (MIG)" in told


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([0, 1], "1 of this machine: 2"),
        ([0, "GPU-00000000-test"], "named twice"),
        (["2:0", "1"], "one instance (MIG) alone"),
    ],
)
def test_as_many_as_the_run_needs_and_each_once(
    machine: Machine, take: Callable[..., Chosen], value: object, found: str
) -> None:
    machine([Gpu(), Gpu(), Gpu(instances=[Gpu()])])
    assert found in refused(lambda: take(value, 1))


@pytest.mark.parametrize(
    ("value", "uuid"),
    [("0:1", "MIG-00000000-1-test"), ([1], "GPU-00000001-test")],
)
def test_beside_a_divided_gpu_uuids_are_given(machine: Machine, value: object, uuid: str) -> None:
    machine([Gpu(instances=[Gpu(), Gpu()]), Gpu()])
    with isolated(value, 1, run="p/a", protected=(), where="physical_gpus"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == uuid


def test_a_run_sees_only_its_devices_and_gives_them_back_when_it_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine([Gpu(), Gpu(), Gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")

    def fail() -> None:
        with isolated([2], 1, run="p/a", protected=(), where="physical_gpus"):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
            assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
            assert holder_of("GPU-00000002-test") is not None
            raise RuntimeError("the run failed")

    with pytest.raises(RuntimeError):
        fail()
    assert holder_of("GPU-00000002-test") is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,1"
    assert "CUDA_DEVICE_ORDER" not in os.environ


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1,0", ["1", "0"]), ("", []), ("-1", []), ("1,9,0", ["1"]), ("GPU-00000001", ["1"])],
)
def test_cudas_own_reading_of_the_variable(
    machine: Machine, text: str, expected: list[str]
) -> None:
    machine([Gpu(), Gpu()])
    found = visible(snapshot(), {"CUDA_VISIBLE_DEVICES": text})
    assert [device.label for device in found] == expected
    machine([Gpu("A"), Gpu("B")])  # of several kinds: numbers need an order
    with pytest.raises(BadInput, match="CUDA_DEVICE_ORDER"):
        visible(snapshot(), {"CUDA_VISIBLE_DEVICES": "1"})


def test_after_cuda_was_used_it_is_too_late(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine([Gpu()])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with (
        pytest.raises(BadInput, match="CUDA was used in this process"),
        isolated("auto", 1, run="p/a", protected=(), where="physical_gpus"),
    ):
        pass


RUNNER = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import fake_nvml
from aflow_tune.gpus import claims
from aflow_tune.gpus.choosing import isolated
from aflow_tune.errors import BadInput
claims.FOLDER = Path({folder!r})
fake_nvml.install([fake_nvml.Gpu() for _ in range({gpus})])
try:
    with isolated("auto", {count}, run="p/a", protected=[{protected}], where="here") as chosen:
        print(*(device.label for device in chosen.devices), flush=True)
        sys.stdin.readline()
except BadInput as error:
    print("refused", flush=True)
"""


def runners(number: int, gpus: int, count: int, protected: str = "") -> list[subprocess.Popen[str]]:
    here = Path(__file__).parent
    code = RUNNER.format(
        path=[str(here), str(here.parent)],
        folder=str(claims_module.FOLDER),
        gpus=gpus,
        count=count,
        protected=protected,
    )
    return [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(number)
    ]


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_runs_that_start_at_once_never_share(machine: Machine) -> None:
    machine([])
    started = runners(4, gpus=6, count=2)
    try:
        told = [first_line(process) for process in started]
        got = sorted(label for line in told if line != "refused" for label in line.split())
        assert got == ["0", "1", "2", "3", "4", "5"]  # three got two each, none got one
        assert told.count("refused") == 1
    finally:
        for process in started:
            process.communicate("\n")


def test_a_killed_runs_claim_is_gone_and_what_it_protects_counts_before(machine: Machine) -> None:
    machine([Gpu()])
    (run,) = runners(1, gpus=1, count=1, protected="4711")
    assert first_line(run) == "0"
    uuid = "GPU-00000000-test"
    holder = holder_of(uuid)
    assert holder is not None
    assert holder.pid == run.pid
    assert protected_by_runs() == {4711}
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert holder_of(uuid) is None
    assert protected_by_runs() == set()
    again = Claims("p/b")
    assert again.take(uuid)
    again.release()


def test_a_link_or_pipe_in_place_of_the_lock_file(
    machine: Machine, take: Callable[..., Chosen], tmp_path: Path
) -> None:
    machine([Gpu()])
    place = claims_module.FOLDER / "aflow-tune-gpu-GPU-00000000-test.lock"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    place.symlink_to(victim)
    assert "lock files to claim GPUs with" in refused(lambda: take())
    assert victim.read_text() == "precious"
    place.unlink()
    os.mkfifo(place)
    assert "is no plain file" in refused(lambda: take())


@pytest.mark.parametrize("value", ["", "all", [], [-1], [0, 0], [True], [1.5], {"a": 1}, ["x"]])
def test_settings_that_cannot(value: object, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "physical_gpus": value}))
    with pytest.raises(BadInput, match="physical_gpus"), own_devices(load_config(path)):
        pass


def config_of(tmp_path: Path, text: str) -> AflowConfig:
    path = tmp_path / "c.yaml"
    path.write_text("name: x\n" + text)
    return load_config(path)


def test_a_run_says_which_device_is_which(machine: Machine, tmp_path: Path) -> None:
    machine([Gpu(used=9 * GIB), Gpu()])
    said: list[str] = []
    gone = 2**22 + 17
    text = f"engine: local\nphysical_gpus: auto\nprotected_pids: [{os.getpid()}, {gone}]\n"
    with own_devices(config_of(tmp_path, text), said.append):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
        assert protected_by_runs() == {os.getpid(), gone}
    assert said == [
        f"warning: protected_pids: there is no process {gone} (any more)",
        "GPU 1 (NVIDIA Test 80GB, GPU-00000001-test) is cuda:0 of this run",
    ]
    assert holder_of("GPU-00000001-test") is None


@pytest.mark.parametrize(
    ("text", "address", "found"),
    [
        ("engine: local", None, "no NVIDIA driver"),
        ("cluster: {ray_address: '10.0.0.1:6379'}", None, r"the Ray at 10\.0\.0\.1:6379"),
        ("engine: trinity", "10.0.0.2:6379", r"the Ray at 10\.0\.0\.2:6379"),
    ],
)
def test_devices_that_cannot_be_had(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    address: str | None,
    found: str,
) -> None:
    """No driver; or a Ray of somebody else's, whose devices were fixed when it was started."""
    machine([], init=12)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    engine = "" if "engine" in text else "engine: trinity\n"
    config = config_of(tmp_path, f"{engine}{text}\nphysical_gpus: auto\n")
    with pytest.raises(BadInput, match=found), own_devices(config):
        pass


def test_vllm_cannot_be_given_uuids(machine: Machine, tmp_path: Path) -> None:
    machine([Gpu(instances=[Gpu()])])
    with (
        pytest.raises(BadInput, match="vLLM takes numbers only"),
        own_devices(config_of(tmp_path, "engine: trinity\nphysical_gpus: '0:0'\n")),
    ):
        pass
    assert holder_of("MIG-00000000-0-test") is None
