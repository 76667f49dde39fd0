"""Runs of a sweep through Ray: what they hold, what they are told, and a cluster of two nodes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import WORKFLOW, write_project
from ray_nodes import ray_nodes

from aflow_tune.cluster.sweep_ray import cluster_for, needs_of, no_room
from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.errors import BadInput
from aflow_tune.find_ray import FoundRay

KEY = "sk-sweep-5b1f0c77aa"


def configured(*overrides: str) -> AflowConfig:
    return load_config(None, overrides)


def test_which_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cluster_for(configured()) is None
    named = "cluster.ray_address=10.0.0.1:6379"
    found = FoundRay("10.0.0.1:6379", f"command line: {named}")
    assert cluster_for(configured(named)) == found
    config = configured(named, "inline=true")
    assert cluster_for(config) == found
    assert config.inline
    assert cluster_for(configured("cluster.ray_address=local")) is None
    with pytest.raises(BadInput, match="no Ray to use"):
        cluster_for(configured("cluster.ray_address=auto"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert cluster_for(configured()) == FoundRay("10.0.0.2:6379", "RAY_ADDRESS")


def test_what_a_run_holds() -> None:
    cpu, gpu = {"CPU": 8.0}, {"CPU": 16.0, "GPU": 4.0}
    local = configured("engine=local", "local.threads=3")
    assert needs_of(local, [cpu]) == {"num_cpus": 3, "num_gpus": 0}
    assert needs_of(local, [cpu, gpu]) == {"num_cpus": 3, "num_gpus": 1}
    on_cpu = configured("engine=local", "local.device=cpu")
    assert needs_of(on_cpu, [gpu]) == {"num_cpus": 1, "num_gpus": 0}
    # It reserves its GPUs itself: an actor that held them would wait for its own run.
    assert needs_of(configured("engine=trinity"), [gpu]) == {"num_cpus": 1, "num_gpus": 0}


def test_runs_that_would_wait_for_ever_are_refused() -> None:
    nodes = [{"CPU": 8.0}, {"CPU": 2.0, "GPU": 4.0}]
    local = configured("engine=local", "local.threads=3")
    (fault,) = no_room(local, {"num_cpus": 3, "num_gpus": 1}, nodes, 1)  # on different nodes
    assert fault.expected == "a node with 3 CPUs and 1 GPUs"
    assert no_room(local, {"num_cpus": 2, "num_gpus": 1}, nodes, 9) == []
    trinity = configured("engine=trinity", "cluster.node_num=1", "cluster.gpu_per_node=2")
    assert no_room(trinity, {}, nodes, 2) == []
    (fault,) = no_room(trinity, {}, nodes, 3)
    assert (fault.found, fault.cure[:12]) == ("4 GPUs in the cluster", "--parallel 2")
    whole = configured("engine=trinity", "cluster.node_num=0", "cluster.gpu_per_node=0")
    (fault,) = no_room(whole, {}, nodes, 2)
    assert "the whole cluster" in fault.found


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a cluster, and three commands that import everything anew
def test_a_sweep_on_a_cluster_that_wants_a_token(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Real runs on the nodes of a cluster, with a key that the nodes have only from the command
    and that Ray has written nowhere."""
    if shutil.which("bwrap") is None:
        pytest.fail("bubblewrap is needed for the test cluster: see the README")
    text = WORKFLOW.replace(
        "async def two_calls(",
        "import os\n\nKEY = os.environ['SWEEP_KEY']\n\n\nasync def two_calls(",
    )
    config = write_project(tmp_path / "shared", tiny_model_dir, workflow=text)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    with ray_nodes(hidden, workers=1) as nodes:
        command = [sys.executable, "-m", "aflow_tune.cli", "sweep", str(config), "engine=local"]
        command += ["inline=true", "--space", "algorithm.optimizer.lr=0.003,0.0003", "--json"]
        command += ["--sampler", "grid", "--parallel", "2", "--ray", nodes.address]
        swept = subprocess.run(
            command,
            cwd=tmp_path,
            env={**nodes.environment, "SWEEP_KEY": KEY},
            capture_output=True,
            text=True,
        )
        assert swept.returncode == 0, swept.stdout + swept.stderr
        written = nodes.files_with(KEY)
    trials = json.loads(swept.stdout)["trials"]
    assert [trial["state"] for trial in trials] == ["complete", "complete"]
    for trial in trials:
        (folder,) = map(Path, trial["runs"])
        command = json.loads((folder / "run.json").read_text())["command"]
        assert command["overrides"][-1] == "cluster.ray_address=local"
    assert written == []
