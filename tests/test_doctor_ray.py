"""What the doctor says about Ray: none, silent, small, lacking, and a real one with a token."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aflow_tune import find_ray as finding
from aflow_tune.config.load import load_config
from aflow_tune.doctor import doctor
from aflow_tune.doctor.doctor import Settings, ask_ray
from aflow_tune.doctor.lines import State
from aflow_tune.find_ray import FoundRay

HERE = FoundRay("10.0.0.1:6379", "RAY_ADDRESS")


def found(*overrides: str) -> Settings:
    """A configuration without functions, as if it had been examined."""
    config = load_config(None, overrides)
    fault = SimpleNamespace(where="x", found="y", expected="z", cure="c")
    report = SimpleNamespace(engine=(config.engine, "named"), faults=[fault])
    return Settings(report, config, (config,))  # type: ignore[arg-type]


def told(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], settings: Settings | None = None
) -> list[tuple[str, str]]:
    """What the lines say where the process that asks answers so."""
    monkeypatch.setattr(doctor, "answers", lambda address: True)
    ran = SimpleNamespace(stdout=f"noise\n{json.dumps(answer)}\n", stderr="")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: ran)
    return [(line.state.value, line.found) for line in ask_ray(HERE, settings)]


def test_a_port_that_nobody_has_or_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "_ANSWER_SECONDS", 0.5)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        for _ in range(2):
            (line,) = ask_ray(FoundRay(address, "RAY_ADDRESS"))
            assert line.state is State.FAULT
            assert f"nothing answers at {address}" in line.found
            assert not line.given
            other.listen()


def test_a_cluster_that_fits_is_too_small_or_lacks_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound = {
        "faults": [],
        "nodes": [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0}],
        "total": {"CPU": 8.0, "GPU": 2.0},
        "available": {"CPU": 8.0, "GPU": 1.0},
    }
    (line,) = told(monkeypatch, sound)
    assert line == ("ok", "10.0.0.1:6379: 2 nodes, 8 of 8 CPUs free, 1 of 2 GPUs free")
    cluster = ("engine=trinity", "cluster.gpu_per_node=2")
    assert len(told(monkeypatch, sound, found(*cluster, "cluster.node_num=1"))) == 1
    _, small = told(monkeypatch, sound, found(*cluster, "cluster.node_num=2"))
    assert small == ("fault", "1 nodes with 2 GPUs or more, the run wants 2")
    lacking = {**sound, "faults": [("node 10.0.0.2", "aflow-tune", "none", "install it")]}
    assert told(monkeypatch, lacking)[1] == ("fault", "node 10.0.0.2: none (expected: aflow-tune)")
    refused = {"faults": [("RAY_ADDRESS", "a token", "none", "copy it")]}
    assert [state for state, _ in told(monkeypatch, refused)] == ["fault"]


CLUSTER = """
import json, sys, time
from ray.cluster_utils import Cluster
head = {"num_cpus": 1, "include_dashboard": False, "wait": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.wait_for_nodes(timeout=120)
cluster.add_node(num_cpus=1, wait=False)
cluster.wait_for_nodes(timeout=120)
while cluster.global_state.available_resources().get("CPU") != 2:
    time.sleep(0.1)
print(json.dumps(cluster.address), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The address of two nodes that want the token in `tmp_path`."""
    (tmp_path / "token").write_text("0" * 32)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    kept |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    # In a folder of its own: it writes down there that it is the Ray of this machine.
    with tempfile.TemporaryDirectory("", "aft-", "/tmp", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**kept, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"},
        )
        try:
            assert process.stdout is not None
            yield json.loads(next(text for text in process.stdout if text.startswith('"')))
        finally:
            process.communicate("")


@pytest.mark.slow
def test_a_real_cluster_of_two_nodes_with_a_token(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node is asked; the token is another one, then held back, then the right one."""
    monkeypatch.setattr(doctor, "RAY_SECONDS", 200.0)  # workers start on a busy machine
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "other").write_text("1" * 32)
    runs = tmp_path / "runs"
    runs.mkdir()
    joined, settings = FoundRay(cluster, "named"), found(f"checkpoint_root_dir={runs}")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "other"))
    (line,) = ask_ray(joined, settings)
    assert line.state is State.FAULT, line
    assert "token" in line.found, line
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (line,) = ask_ray(joined, settings)
    assert line.state is State.FAULT, line
    monkeypatch.delenv("RAY_AUTH_MODE")
    (line,) = ask_ray(joined, settings)
    assert line.state is State.OK, line
    assert "2 nodes, 2 of 2 CPUs free" in line.found
    assert list(runs.iterdir()) == []
