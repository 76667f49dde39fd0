"""What the doctor says about Ray: none, silent, small, lacking, and a real one with a token."""

from __future__ import annotations

import json
import socket
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
