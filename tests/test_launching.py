"""Runs on a Ray of several nodes whose processes cannot see the driver's folder.

One cluster serves all tests of this module: starting it takes most of their time.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from project import WORKFLOW, run_dir, write_project
from ray_nodes import Nodes, ray_nodes
from user_packages import ENVIRONMENT, SPECS, write_files

from aflow_tune.engines.local.checkpoint import verify_checkpoint

pytestmark = pytest.mark.timeout(1800)  # a cluster, and commands that import everything anew
KEY = f"sk-launching-{secrets.token_hex(8)}"
WRAPPED = WORKFLOW.replace(
    "async def two_calls(",
    "import os\n\nfrom beside import scale\n\nKEY = os.environ['LAUNCHING_KEY']\n\n\n"
    "async def two_calls(",
).replace(
    "    return share",
    "    assert KEY.startswith('sk-launching')\n"
    "    assert not os.path.exists(HIDDEN + '/flow.py'), 'the worker sees the driver folder'\n"
    "    return scale(share)",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The driver's own folder, and one that all nodes see."""
    return tmp_path_factory.mktemp("driver"), tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def nodes(folders: tuple[Path, Path]) -> Iterator[Nodes]:
    if shutil.which("bwrap") is None:
        pytest.fail("bubblewrap is needed for a folder that workers cannot see: see the README")
    with ray_nodes(folders[0]) as running:
        yield running


@pytest.fixture(scope="module")
def project(folders: tuple[Path, Path], tiny_model_dir: Path) -> Path:
    """The configuration of a run whose code and data only the driver sees."""
    driver, shared = folders
    text = WRAPPED.replace("KEY = os", f"HIDDEN = {str(driver)!r}\nKEY = os")
    # More steps than a run can make before the command that stops it has started.
    config = write_project(driver, shared / "model", steps=1000, workflow=text)
    (driver / "beside.py").write_text("def scale(x):\n    return x\n")
    shutil.copytree(tiny_model_dir, shared / "model")
    config.write_text(config.read_text().replace(f"{driver}/runs", f"{shared}/runs"))
    return config


def _aflow_tune(
    *arguments: str, nodes: Nodes, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aflow_tune.cli", *arguments],
        cwd=cwd,
        env={**nodes.environment, "LAUNCHING_KEY": KEY, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_every_kind_of_code_arrives_on_every_node(nodes: Nodes, folders: tuple[Path, Path]) -> None:
    driver = write_files(folders[0] / "all")
    ran = subprocess.run(
        [sys.executable, "train.py", "cluster_driver"],
        cwd=driver,
        env={
            **nodes.environment,
            **ENVIRONMENT,
            "RAY_ADDRESS": nodes.address,
            "SHARED": str(folders[1] / "runs_of_cases"),
        },
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results: dict[str, dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    assert len(results) == 3
    assert {"127.0.0.2", "127.0.0.3"} < set(results)  # the head has the machine's own address
    for told in results.values():
        assert {name: found["result"] for name, found in told.items()} == dict.fromkeys(told, 1.0)
        assert not any(found["seen"] for found in told.values())
        assert told.keys() == {*SPECS, "script", "closure", "partial"}


@pytest.mark.slow
def test_a_job_trains_is_stopped_and_goes_on_from_a_plain_command(
    nodes: Nodes, project: Path, folders: tuple[Path, Path]
) -> None:
    driver, shared = folders
    at = ("--address", nodes.dashboard)
    sent = _aflow_tune("submit", project.name, "--detach", *at, nodes=nodes, cwd=driver)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    job = next(word for word in sent.stdout.split() if word.startswith("raysubmit_")).strip(";")
    run = run_dir(shared)
    follower = subprocess.Popen(
        [sys.executable, "-m", "aflow_tune.cli", "submit", "--follow", job, *at],
        cwd=driver,
        env=nodes.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    while not list(run.glob("global_step_*")) and follower.poll() is None:
        try:
            follower.wait(1)
        except subprocess.TimeoutExpired:
            continue
    stopped = _aflow_tune("submit", "--stop", job, *at, nodes=nodes, cwd=driver)
    log, _ = follower.communicate()
    assert stopped.returncode == 0, stopped.stderr
    assert follower.returncode == 3, log
    assert "step" in log
    listed = _aflow_tune("submit", "--list", "--json", *at, nodes=nodes, cwd=driver)
    assert [row["job"] for row in json.loads(listed.stdout.splitlines()[-1])] == [job]
    steps = sorted(int(path.name.rpartition("_")[2]) for path in run.glob("global_step_*"))
    verify_checkpoint(run / f"global_step_{steps[-1]}")

    target = f"buffer.total_steps={steps[-1] + 1}"
    ran = _aflow_tune(project.name, target, nodes=nodes, cwd=driver, RAY_ADDRESS=nodes.address)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"resuming {run} from step {steps[-1]} of {steps[-1] + 1}" in ran.stdout
    verify_checkpoint(run / f"global_step_{steps[-1] + 1}")
    assert nodes.files_with(KEY) == []


@pytest.mark.slow
def test_what_nodes_lack_is_refused_before_anything_runs(
    nodes: Nodes, project: Path, folders: tuple[Path, Path]
) -> None:
    driver, _ = folders
    place = f"checkpoint_root_dir={driver}/runs"
    ran = _aflow_tune(project.name, place, nodes=nodes, cwd=driver, RAY_ADDRESS=nodes.address)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert ran.stderr.count("a folder that every node sees") == 3

    # The doctor asks the same, with more time on a busy machine.
    script = "import sys\nfrom aflow_tune.cli import main\nfrom aflow_tune.doctor import doctor\n"
    script += "doctor.RAY_SECONDS = doctor.CONFIG_SECONDS = 300.0\nsys.exit(main(sys.argv[1:]))"
    asked = subprocess.run(
        [sys.executable, "-c", script, "doctor", project.name, place, "--offline", "--json"],
        cwd=driver,
        env={**nodes.environment, "LAUNCHING_KEY": KEY, "RAY_ADDRESS": nodes.address},
        capture_output=True,
        text=True,
    )
    told = [line for line in json.loads(asked.stdout)["lines"] if line["check"] == "ray"]
    assert [line["state"] for line in told] == ["ok", *["fault"] * 3], told
    assert "3 nodes" in told[0]["found"]

    wrong = {"RAY_AUTH_TOKEN_PATH": "", "RAY_AUTH_TOKEN": "0" * 32, "RAY_ADDRESS": nodes.address}
    ran = _aflow_tune(project.name, nodes=nodes, cwd=driver, **wrong)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "RAY_AUTH_TOKEN" in ran.stderr
    assert "0" * 32 not in ran.stderr


@pytest.mark.slow
def test_nodes_that_other_users_can_enter_are_refused_before_code_is_sent(
    nodes: Nodes, project: Path, folders: tuple[Path, Path]
) -> None:
    for closed, address in ((nodes.temp.parent, "127.0.0.2"), (nodes.elsewhere, "127.0.0.3")):
        closed.chmod(0o755)
        ran = _aflow_tune(project.name, nodes=nodes, cwd=folders[0], RAY_ADDRESS=nodes.address)
        # What is refused then comes after.
        further = ("runtime_env.trust_users=true", f"checkpoint_root_dir={folders[0]}/runs")
        trusting = _aflow_tune(
            project.name, *further, nodes=nodes, cwd=folders[0], RAY_ADDRESS=nodes.address
        )
        closed.chmod(0o700)
        assert "a folder that every node sees" in trusting.stderr, trusting.stderr
        assert ran.returncode == 2, ran.stdout + ran.stderr
        assert f"node {address}: " in ran.stderr
        assert "runtime_env.trust_users=true" in ran.stderr
