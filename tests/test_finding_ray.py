"""Which Ray is used, where one of our own keeps its files, and what keeps it from starting."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gcs_stand_in import gcs
from project import write_project

import aflow_tune.engines.trinity  # noqa: F401  (the stand-in for vLLM)
from aflow_tune import find_ray as finding
from aflow_tune.cluster.ray_for_run import refuse_open_server
from aflow_tune.config.engine import check_devices
from aflow_tune.config.load import load_config
from aflow_tune.errors import BadInput
from aflow_tune.find_ray import (
    FoundRay,
    check_address,
    find_ray,
    greet,
    make_ray_base,
    open_to_others,
    ray_base,
    refused_connection,
    running_here,
    uses_ray,
)

OWN = f"ray-{os.getuid()}"
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever answers has the time to do so on a busy machine."""
    monkeypatch.setattr(finding, "_ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(finding, "_GREET_SECONDS", 60.0)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine on which no Ray was started; returns the file that would name one."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory("", "aft-", "/tmp") as folder:  # short, as sockets want it
        monkeypatch.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()
        yield Path(folder, "ray", "ray_current_cluster")


def found(*overrides: str) -> Any:
    return find_ray(load_config(None, overrides))


def test_an_address_wins_then_the_environment_then_what_runs_here(
    no_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found() is None
    with gcs() as (here, _):
        no_ray.write_text(here)
        assert running_here() == here
        for overrides in ((), ("cluster.ray_address=auto",)):
            assert found(*overrides) == FoundRay(here, "it runs on this machine")
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
        assert found() == FoundRay("10.0.0.7:6379", "RAY_ADDRESS")
        assert found("cluster.ray_address=10.0.0.8:6379").address == "10.0.0.8:6379"
        assert found("cluster.ray_address=local") is None
        assert found("inline=true") is None
        config = load_config(None)
        assert find_ray(config) is find_ray(config)  # one command goes by one answer
    monkeypatch.delenv("RAY_ADDRESS")
    assert running_here() is None  # the file is there, but nobody answers
    # `aflow-tune cluster up` has a folder of its own in one that others may use.
    no_ray.parents[1].chmod(0o1777)
    (make_ray_base() / "ray").mkdir()
    with gcs() as (here, _):
        (make_ray_base() / "ray" / no_ray.name).write_text(here)
        assert running_here() == here


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("auto", "aflow-tune cluster up"),
        ("10.0.0.7", "HOST:6379"),
        ("http://me:hunter2@10.0.0.7:8265", "aflow-tune submit CONFIG --address"),
        ("me:hunter2@127.0.0.1:9", "HOST:6379"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(
    address: str, word: str, no_ray: Path
) -> None:
    with pytest.raises(BadInput) as refused:
        found(f"cluster.ray_address={address}")
    (fault,) = refused.value.faults
    assert "cluster.ray_address" in fault.where
    assert word in fault.cure
    assert "hunter2" not in fault.cure + fault.found + fault.expected


def test_a_run_whose_own_ray_cannot_start_here_is_refused_before(
    no_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/proc/no")
    own = load_config(None, ["engine=local"])
    assert [told.where for told in check_address(own)] == ["RAY_TMPDIR=/proc/no"]
    assert list(check_address(load_config(None, ["engine=local", "inline=true"]))) == []
    with gcs() as (here, _):
        joined = load_config(None, ["engine=local", f"cluster.ray_address={here}"])
        assert list(check_address(joined)) == []


def test_what_a_merge_of_environments_holds_is_not_shown() -> None:
    error = ValueError("Failed to merge {'K': 'sk-1'} with")
    told = refused_connection(FoundRay("10.0.0.7:6379", "RAY_ADDRESS"), error)
    assert "RAY_OVERRIDE_JOB_RUNTIME_ENV=1" in told.faults[0].cure
    assert "sk-1" not in str(told)


def test_a_ray_is_greeted_before_it_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    with gcs() as (address, _):
        greet(FoundRay(address, "RAY_ADDRESS"))
    with gcs(wants_token=True) as (address, _), pytest.raises(BadInput) as refused:
        greet(FoundRay(address, "RAY_ADDRESS"))
    assert "RAY_AUTH_TOKEN" in refused.value.faults[0].cure
    # Something else has the port and is silent, or nobody has it: Ray would try for minutes.
    monkeypatch.setattr(finding, "_GREET_SECONDS", 1.0)
    monkeypatch.setattr(finding, "_ANSWER_SECONDS", 0.5)
    for listens in (False, True):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            if listens:
                other.listen()
            with pytest.raises(BadInput, match="no Ray answers there"):
                greet(FoundRay(f"127.0.0.1:{other.getsockname()[1]}", "RAY_ADDRESS"))


def test_what_runs_here_is_used_only_if_it_is_a_ray_of_ones_own(
    no_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef0123456789abcdef")
    with gcs(method="/else/Method") as (address, _):
        no_ray.write_text(address)
        assert running_here() is None
    with gcs(wants_token=True) as (address, metadata):
        no_ray.write_text(address)
        assert running_here() == address
        assert not any("0123456789abcdef" in str(item) for item in metadata)
        uid = os.getuid()
        monkeypatch.setattr(finding.os, "getuid", lambda: uid + 1)
        assert running_here() is None


@pytest.mark.parametrize(
    ("settings", "uses"),
    [
        (["engine=local"], True),
        (["engine=local", "inline=true"], False),
        (["engine=local", "mode=train"], False),
        (["engine=trinity", "mode=train"], True),
        (["engine=trinity", "mode=harvest"], False),
    ],
)
def test_only_runs_that_use_a_ray_ask_for_one(settings: list[str], uses: bool) -> None:
    address = ["cluster.ray_address=nonsense", "physical_gpus=auto"]
    config = load_config(None, [*settings, *address])
    assert uses_ray(config) is uses
    wrong = ["command line: cluster.ray_address=nonsense"] if uses else []
    assert [fault.where for fault in check_address(config)] == wrong
    assert [fault.where for fault in check_devices(config)] == wrong


# -- the folder of its files -------------------------------------------------------------------


def as_nobody(script: str) -> int:
    """Run a shell script as another user, which takes root."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can try it as another user")
    return subprocess.run([*NOBODY, "sh", "-c", script], capture_output=True, cwd="/").returncode


@pytest.mark.parametrize(
    ("variable", "told", "mode", "expected"),
    [
        ("TMPDIR", "later", None, "{told}"),
        ("RAY_TMPDIR", "ours", 0o755, "{told}/" + OWN),
        ("TMPDIR", "all", 0o1777, "{told}/" + OWN),
        ("RAY_TMPDIR", "x" * 80, 0o700, "/tmp/" + OWN),
        ("TMPDIR", "é b", 0o700, "/tmp/" + OWN),
    ],
)
def test_where_a_ray_of_ours_keeps_its_files(
    variable: str,
    told: str,
    mode: int | None,
    expected: str,
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = shared / told
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv(variable, str(folder))
    base = ray_base()
    assert str(base) == expected.format(told=folder)
    made = make_ray_base()
    assert made == base
    assert open_to_others(made) is None
    assert mode is None or folder.stat().st_mode & 0o7777 == mode  # the user's own stays as it was
    if made.parent == folder:
        made.chmod(0o777)  # one of ours that was opened is closed again
        assert make_ray_base().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["mkdir -m 777", "ln -s /tmp"])
def test_what_another_user_put_in_its_place_is_refused(what: str, shared: Path) -> None:
    assert as_nobody(f"{what} {shared / OWN}") == 0
    with pytest.raises(BadInput, match="belongs to another user"):
        make_ray_base()


def test_a_folder_that_others_may_replace_is_open(shared: Path) -> None:
    closed = shared / "closed"
    inside = closed / "ray"
    inside.mkdir(parents=True)
    inside.chmod(0o777)
    assert open_to_others(inside) is not None
    closed.chmod(0o700)
    assert open_to_others(inside) is None
    (shared / "link").symlink_to(inside)
    assert open_to_others(shared / "link") is None
    shared.chmod(0o777)
    assert open_to_others(inside) == f"other users may write into {shared}"


def test_a_job_server_tells_of_nodes_here_and_elsewhere(shared: Path) -> None:
    sockets = shared / "ray" / "session_1" / "sockets"
    sockets.mkdir(parents=True)

    def node(address: str, state: str = "ALIVE") -> dict[str, object]:
        raylet = {"nodeManagerAddress": address, "rayletSocketName": f"{sockets}/raylet"}
        return {"raylet": {**raylet, "state": state}}

    refuse_open_server([{}, node("203.0.113.1"), node("127.0.0.1", "DEAD")])
    with pytest.raises(BadInput, match=r"127\.0\.0\.2: .*/ray"):
        refuse_open_server([node("127.0.0.2")])
    shared.chmod(0o700)
    refuse_open_server([node("127.0.0.2")])


# -- one that runs -----------------------------------------------------------------------------


LOOK = """
from aflow_tune.cluster.ray_for_run import open_here
from aflow_tune.find_ray import running_here, use_token
use_token()
address = running_here()
assert address is not None
assert open_here(address) == ([], [])
"""


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "aflow_tune.cli", *arguments]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # five commands that import everything anew
def test_a_cluster_of_ours_is_found_and_closed_and_refused_when_it_is_opened(
    shared: Path, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("0" * 32)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("AFLOW_TUNE_CACHE", str(tmp_path / "cache"))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    config = str(write_project(tmp_path, tiny_model_dir))
    up = command("cluster", "up", "--num-cpus", "1", cwd=tmp_path)
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        assert subprocess.run([sys.executable, "-c", LOOK]).returncode == 0
        (session,) = (shared / OWN / "ray").glob("session_2*")
        replace = f"touch {session}/runtime_resources/replaced"
        if os.getuid() == 0:
            assert as_nobody(replace) != 0
        (shared / OWN).chmod(0o755)
        if os.getuid() == 0:
            assert as_nobody(replace) == 0
        dashboard = up.stdout.split("dashboard ")[1].split()[0]
        for sent in ((config,), ("submit", config, "--address", dashboard)):
            ran = command(*sent, cwd=tmp_path)
            assert ran.returncode == 2, ran.stdout + ran.stderr
            assert f"other users may write into {shared / OWN / 'ray'}" in ran.stderr
            assert "runtime_env.trust_users=true" in ran.stderr
    finally:
        down = command("cluster", "down", cwd=tmp_path)
    assert down.returncode == 0, down.stdout + down.stderr
    assert running_here() is None
