"""Ray's files: nobody else may change them, sockets fit, and a Ray that is open is not used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import write_project

from aflow_tune import process_room
from aflow_tune.cluster.local_ray import local_ray
from aflow_tune.cluster.open_sessions import refuse_open_server
from aflow_tune.errors import BadInput, RunFailed
from aflow_tune.find_ray import running_here
from aflow_tune.process_room import check_process_room
from aflow_tune.ray_folder import make_ray_base, open_to_others, ray_base

OWN = f"ray-{os.getuid()}"
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def as_nobody(script: str) -> int:
    """Run a shell script as another user, which takes root."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can try it as another user")
    return subprocess.run([*NOBODY, "sh", "-c", script], capture_output=True, cwd="/").returncode


@pytest.mark.parametrize(
    ("told", "mode", "expected", "why"),
    [
        ("mine", 0o700, "{told}", ""),
        ("later", None, "{told}", ""),
        ("ours", 0o755, "{told}/" + OWN, ""),
        ("group", 0o750, "{told}/" + OWN, ""),
        ("all", 0o1777, "{told}/" + OWN, ""),
        ("x" * 80, 0o700, "/tmp/" + OWN, "too long"),
        ("é", 0o700, "/tmp/" + OWN, "characters"),
        ("a b", 0o700, "/tmp/" + OWN, "characters"),
        ("a:b", 0o700, "/tmp/" + OWN, "characters"),
    ],
)
@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_where_a_ray_of_ours_keeps_its_files(
    variable: str,
    told: str,
    mode: int | None,
    expected: str,
    why: str,
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = shared / told
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv(variable, str(folder))
    base, moved = ray_base()
    assert str(base) == expected.format(told=folder)
    assert why in moved
    assert bool(moved) == bool(why)
    if why:
        assert f"{variable}={folder}" in moved
    made = make_ray_base()
    assert made == base
    assert open_to_others(made) is None
    assert mode is None or folder.stat().st_mode & 0o7777 == mode  # the user's own stays as it was


def test_a_folder_of_ours_that_was_opened_is_closed_again(shared: Path) -> None:
    base = make_ray_base()
    base.chmod(0o777)
    assert make_ray_base() == base
    assert base.stat().st_mode & 0o777 == 0o700


def test_a_place_that_is_no_folder_of_the_users_is_refused(shared: Path) -> None:
    (shared / OWN).write_text("")
    with pytest.raises(BadInput) as refused:
        make_ray_base()
    (fault,) = refused.value.faults
    assert fault.where == f"RAY_TMPDIR={shared}"
    assert "RAY_TMPDIR=FOLDER" in fault.cure


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


@pytest.mark.parametrize(
    ("limits", "enough"),
    [
        ({}, True),
        ({"": "max"}, True),
        ({"": "5000"}, True),
        ({"": "1390"}, False),
        ({"outer": "1390", "outer/inner": "max"}, False),
        ({"outer": "max", "outer/inner": "1390"}, False),
    ],
)
@pytest.mark.parametrize("version", ["0::/{}", "9:cpu:/other\n8:pids:/{}"])
def test_groups_of_processes_that_are_full(
    limits: dict[str, str], enough: bool, version: str, tmp_path: Path
) -> None:
    group = max(limits, key=len, default="")
    root = tmp_path / "cgroup" / ("pids" if "pids" in version else "")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(version.format(group) + "\n")
    (tmp_path / "self" / "status").write_text("CapEff:\t0000000000200000\n")
    for name, limit in limits.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "pids.max").write_text(f"{limit}\n")
        (root / name / "pids.current").write_text("1000\n")
    faults = list(check_process_room(tmp_path, tmp_path / "cgroup"))
    assert [fault.found.split(":")[0] for fault in faults] == ([] if enough else ["390"])


@pytest.mark.parametrize(
    ("uid", "capabilities", "limit", "enough"),
    [
        (1000, 0, 10_000, True),
        (1000, 0, 1000, False),
        (1000, 1 << 24, 1000, True),
        (0, 0, 1000, True),
        (1000, 0, -1, True),
    ],
)
def test_a_limit_of_the_users_processes(
    uid: int,
    capabilities: int,
    limit: int,
    enough: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_room.os, "getuid", lambda: uid)
    monkeypatch.setattr(process_room.resource, "getrlimit", lambda _: (limit, limit))
    for name, owner, threads in (
        ("self", 1000, 1),
        ("7", 1000, 500),
        ("8", 1000, 200),
        ("9", 5, 9),
    ):
        (tmp_path / name).mkdir()
        told = f"Uid:\t{owner}\t{owner}\nThreads:\t{threads}\nCapEff:\t{capabilities:016x}\n"
        (tmp_path / name / "status").write_text(told)
    faults = list(check_process_room(tmp_path, tmp_path))
    assert [fault.where for fault in faults] == ([] if enough else ["ulimit -u"])
    assert all("700 run" in fault.found for fault in faults)


def test_a_ray_that_does_not_come_up_is_one_clear_error(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    (make_ray_base() / "ray").write_text("in its way")
    with pytest.raises(RunFailed, match=r"Ray did not start: .*File exists"), local_ray("a/b", {}):
        pytest.fail("it started")

    def never(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", never)
    with pytest.raises(RunFailed, match="timed out during startup"), local_ray("a/b", {}):
        pytest.fail("it started")


def test_a_job_server_tells_of_nodes_here_and_elsewhere(shared: Path) -> None:
    sockets = shared / "ray" / "session_1" / "sockets"
    sockets.mkdir(parents=True)

    def node(address: str, state: str = "ALIVE") -> dict[str, object]:
        raylet = {"nodeManagerAddress": address, "rayletSocketName": f"{sockets}/raylet"}
        return {"raylet": {**raylet, "state": state}}

    refuse_open_server([])
    refuse_open_server([{}, node("203.0.113.1"), node("127.0.0.1", "DEAD")])
    with pytest.raises(BadInput, match=r"127\.0\.0\.2: .*/ray"):
        refuse_open_server([node("127.0.0.2")])
    shared.chmod(0o700)
    refuse_open_server([node("127.0.0.2")])


LOOK = """
from aflow_tune.cluster.open_sessions import open_here
from aflow_tune.find_ray import running_here, use_token
use_token()
address = running_here()
assert address is not None
assert open_here(address) == ([], [])
"""


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aflow_tune.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
    )


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
