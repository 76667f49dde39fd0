"""What the doctor says about Ray: none, silent, refused, small, different, and a real one."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aflow_tune.config.clashes import WATCHED, installed_versions
from aflow_tune.config.load import load_config
from aflow_tune.doctor import ray_check
from aflow_tune.doctor.lines import State
from aflow_tune.doctor.ray_check import Wanted, check_ray
from aflow_tune.errors import BadInput
from aflow_tune.find_ray import find_ray

HERE = installed_versions(WATCHED)


def _node(**more: Any) -> dict[str, Any]:
    node = {"id": "n1", "host": "box", "ip": "10.0.0.2", "resources": {"CPU": 4.0}}
    return {**node, "python": platform.python_version(), "versions": HERE, "sees": True, **more}


def _cluster(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {
        "ending": "connected",
        "address": "10.0.0.1:6379",
        "resources": {"CPU": 8.0, "GPU": 2.0, "object_store_memory": 4e9},
        "available": {"CPU": 8.0, "GPU": 1.0},
        "open": [],
        "nodes": list(nodes),
    }


def _told(answer: dict[str, Any], wanted: Wanted | None = None) -> list[tuple[str, str, str]]:
    wanted = wanted or Wanted()
    lines = ray_check.lines_of(wanted, {"address": "auto", **answer})
    return [(line.state.value, line.found, line.cure) for line in lines]


@pytest.fixture
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_an_address_that_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    for address, cure in (("auto", "unset RAY_ADDRESS"), ("127.0.0.1:10", "cluster.ray_address=")):
        (line,) = check_ray(Wanted(cluster=True, address=address))
        assert line.state is State.FAULT
        assert "nothing answers at 127.0.0.1:" in line.found
        assert cure in line.cure
    for address in ("nonsense", "127.0.0.1:port", "no.such.host.invalid:6379"):
        (line,) = check_ray(Wanted(cluster=True, address=address))
        assert line.found.startswith(f"nothing answers at {address}")


def test_a_server_that_is_no_ray_is_given_up(
    monkeypatch: pytest.MonkeyPatch, no_address: None
) -> None:
    """It takes the connection and says nothing: the probe is killed."""
    monkeypatch.setattr(ray_check, "SECONDS", 6.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (line,) = check_ray(Wanted(cluster=True, address=address))
    assert line.state is State.FAULT
    assert address in line.found
    assert line.cure


def test_none_is_running() -> None:
    none = {"ending": "none", "reason": "no cluster is running here"}
    assert _told(none)[0][:2] == ("ok", "no cluster is running here; a run starts its own")
    state, _, cure = _told(none, Wanted(cluster=True))[0]
    assert state == "fault"
    assert cure.startswith("aflow-tune cluster up")


def test_a_sound_cluster_that_other_users_can_enter() -> None:
    first, second = _told(_cluster(_node()))
    assert "10.0.0.1:6379: 1 node, 8 of 8 CPUs free, 1 of 2 GPUs free" in first[1]
    assert second[0] == "ok"
    opened = {**_cluster(_node()), "open": [["node 10.0.0.2: /tmp/ray", "others may", "close"]]}
    assert [state for state, _, _ in _told(opened)] == ["ok", "fault", "ok"]
    assert [state for state, _, _ in _told(opened, Wanted(trust_users=True))] == ["ok"] * 2


def test_a_cluster_that_is_too_small() -> None:
    gpus = _node(resources={"GPU": 2.0})
    wanted = Wanted(cluster=True, nodes=2, gpus_per_node=2)
    assert [state for state, _, _ in _told(_cluster(gpus, gpus), wanted)] == ["ok"] * 3
    state, found, cure = _told(_cluster(gpus, _node()), wanted)[1]
    assert state == "fault"
    assert "1 nodes with 2 GPUs or more" in found
    assert "--address=10.0.0.1:6379" in cure
    assert _told(_cluster(_node()), Wanted(cluster=True))[1][0] == "fault"


@pytest.mark.parametrize(
    ("differs", "found"),
    [
        ({"python": "3.12.1"}, [("fault", "Python 3.12.1, here ")]),
        ({"versions": {**HERE, "ray": "2.50.0"}}, [("fault", "ray 2.50.0 (here ")]),
        (
            {"versions": {**HERE, "vllm": "0.20.0"}},
            [("note", "vllm 0.20.0 (here none)"), ("fault", "vllm 0.20.0: Trinity's weight")],
        ),
        ({"failed": "its worker gave no answer"}, [("fault", "its worker gave no answer")]),
    ],
)
def test_nodes_that_differ(differs: dict[str, Any], found: list[tuple[str, str]]) -> None:
    told = _told(_cluster(_node(**differs)))[1:]
    assert [state for state, _, _ in told] == [state for state, _ in found]
    assert all(text in line[1] for (_, text), line in zip(found, told, strict=True))


def test_a_folder_that_a_node_does_not_share() -> None:
    for sees, state in ((True, "ok"), (False, "fault")):
        lines = ray_check.lines_of(Wanted(), _cluster(_node(sees=sees)), "/runs/mark")
        assert lines[-1].state.value == state


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


def _start(**environment: str) -> Iterator[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    # In a folder of its own: it writes down there that it is the Ray of this machine.
    with tempfile.TemporaryDirectory("", "aft-", "/tmp", ignore_cleanup_errors=True) as folder:
        kept |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**kept, **environment},
        )
        try:
            assert process.stdout is not None
            line = next(text for text in process.stdout if text.startswith('"'))
            yield json.loads(line)
        finally:
            process.communicate("")


@pytest.mark.slow
def test_a_real_cluster_of_two_nodes_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_address: None
) -> None:
    """Every node runs the probe; the token is another one, then held back, then the right one.

    It is sent as a run sends it: without RAY_AUTH_MODE, to an address that is named."""
    monkeypatch.setattr(ray_check, "SECONDS", 120.0)  # workers start on a busy machine
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    token, other = tmp_path / "token", tmp_path / "other"
    token.write_text("0" * 32)
    other.write_text("1" * 32)
    runs = tmp_path / "runs"
    runs.mkdir()
    started = _start(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    address = next(started)
    try:
        wanted = Wanted(cluster=None, address=address, folder=runs)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
        (line,) = check_ray(wanted)
        assert line.state is State.FAULT, line
        assert "is none or another" in line.found, line
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        (line,) = check_ray(wanted)
        assert line.state is State.FAULT, line
        assert line.cure == "unset RAY_AUTH_MODE"
        monkeypatch.delenv("RAY_AUTH_MODE")
        lines = check_ray(wanted)
        assert [line.state for line in lines] == [State.OK] * 3, lines
        assert "2 nodes, 2 of 2 CPUs free" in lines[0].found
        for line in lines[1:]:
            assert f"sees {runs}" in line.found
        assert list(runs.iterdir()) == []
    finally:
        started.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("address", ["http://me:hunter2@h:1", "me:hunter2@127.0.0.1:9"])
def test_a_password_in_the_address_is_not_shown(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    (line,) = check_ray(Wanted())
    assert line.state is State.FAULT
    assert "hunter2" not in str(line)
    with pytest.raises(BadInput) as refused:
        find_ray(load_config(None))
    assert "hunter2" not in str(refused.value)
