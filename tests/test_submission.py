"""What is sent to a cluster: the keys, sealed; a submitted run, whole; and what is refused before.

Also what is written for clusters of several hosts.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from gcs_stand_in import gcs
from project import write_project

import aflow_tune.engines.trinity  # noqa: F401  (the stand-in for vLLM)
from aflow_tune.cluster import jobs, keys, machines
from aflow_tune.cluster.jobs import prepare_submission
from aflow_tune.cluster.keys import Receiver, names_of_keys, seal, secrets_of
from aflow_tune.config.changes import fingerprint_of
from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.errors import BadInput, RunFailed
from aflow_tune.shipping import Code

ROOT = Path(__file__).resolve().parents[1]
KEY = "sk-submission-0123456789"
CLOSURE = """
import os
from typing import Dict

from aflow_tune import TrinityChatModel


def make(key):
    async def flow(task: Dict, model: TrinityChatModel) -> float:
        return float(len(key))

    return flow


two_calls = make(os.environ["SUBMISSION_KEY"])
"""


@pytest.fixture(autouse=True)
def no_usual_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in keys._USUAL:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def project(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project on the client, its folder being the current one."""
    client = tmp_path / "client"
    write_project(client, tiny_model_dir)
    monkeypatch.chdir(client)
    return client


def sent(folder: Path, *overrides: str) -> tuple[AflowConfig, dict, list[str], list[str]]:
    folder.mkdir()
    return prepare_submission(Path("config.yaml"), overrides, folder)


def refused(folder: Path, *overrides: str) -> BadInput:
    with pytest.raises(BadInput) as caught:
        sent(folder, *overrides)
    assert KEY not in str(caught.value)
    return caught.value


# -- a submitted run ---------------------------------------------------------------------------


def test_what_means_another_thing_there_is_refused(project: Path, tmp_path: Path) -> None:
    (project / "weights").mkdir()
    settings = ("checkpoint_root_dir=runs", "cluster.ray_address=local", "model.model_path=weights")
    told = refused(tmp_path / "sent", *settings)
    assert [fault.where.partition("=")[0] for fault in told.faults] == [
        f"command line: {setting.partition('=')[0]}" for setting in settings
    ]


def test_the_last_line_of_a_job_is_how_it_ended_even_after_a_defect(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "aflow_tune.commands.run_submitted"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "AFLOW_TUNE_SHIPMENT": "not_there"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.returncode == 1
    assert "FileNotFoundError" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "aflow-tune: ended with exit code 1"


def test_where_no_job_server_answers_nothing_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(jobs, "use_token", lambda: False)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(BadInput, match="no Ray answers there"):
            jobs.Jobs()
        other.listen()  # silent: Ray's own client would wait without end
        with pytest.raises(BadInput, match="timed out"):
            jobs.Jobs(f"http://{address}")


# -- keys --------------------------------------------------------------------------------------


def test_a_key_inside_a_closure_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBMISSION_KEY", KEY)
    (project / "flow.py").write_text(CLOSURE)  # that the code names the variable is enough
    assert "SUBMISSION_KEY" in str(refused(tmp_path / "closure"))
    assert not list(tmp_path.rglob("job.pickle"))


def test_a_key_inside_what_would_be_sent_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBMISSION_KEY", KEY)
    secret = "runtime_env.secrets=[SUBMISSION_KEY]"
    told = refused(tmp_path / "plain", secret, f"runtime_env.env_vars.PLAIN={KEY}")
    assert "SUBMISSION_KEY" in str(told)
    (project / "settings.json").write_text(json.dumps({"key": KEY}))
    told = refused(tmp_path / "file", secret)
    assert [fault.where for fault in told.faults] == [f"{project}/settings.json"]
    key = "monitor.monitor_args.api_key"
    told = refused(tmp_path / "sent", "seed=2", f"{key}={KEY}", "runtime_env.env_vars.A_KEY=x")
    assert sorted(fault.where for fault in told.faults) == [
        f"command line: {key}",
        "command line: runtime_env.env_vars.A_KEY",
    ]


def test_keys_are_those_of_models_of_the_code_and_those_listed_never_the_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OPENAI_API_KEY", "OTHER_KEY", "NAMED", "LISTED", "UNRELATED", "HF_HOME"):
        monkeypatch.setenv(name, "a-value-of-some-length")
    models = "models={judge: {model: a}, executor: {model: b, api_key_env: OTHER_KEY}}"
    config = load_config(None, [models, "runtime_env.secrets=[LISTED, NOT_SET]"])
    code = Code(variables={"NAMED", "PATH", "HOME", "HF_HOME"})
    assert names_of_keys(config, code) == ["LISTED", "NAMED", "OPENAI_API_KEY", "OTHER_KEY"]
    assert list(secrets_of(config, code)) == ["LISTED", "OPENAI_API_KEY", "OTHER_KEY"]
    monkeypatch.setenv("OTHER_KEY", "short")
    assert list(secrets_of(config, code)) == ["LISTED", "OPENAI_API_KEY"]
    external = config.model.external_model
    external.enable, external.api_key_env, external.base_url_env = True, "OTHER_KEY", "LISTED"
    assert not {"OTHER_KEY", "LISTED"} & set(config.get_envs())
    # What clients read by themselves goes along with its address.
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-0123456789")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    assert names_of_keys(load_config(None), Code()) == ["ANTHROPIC_API_KEY", "OPENAI_BASE_URL"]
    assert secrets_of(load_config(None), Code()) == {"ANTHROPIC_API_KEY": "sk-ant-0123456789"}
    # Of what only the code names: what is called a key and has a digit in it.
    for name, value in (("SORT_KEY", "question"), ("APP_TOKEN", "tok-12345")):
        monkeypatch.setenv(name, value)
    read = Code(variables={"SORT_KEY", "APP_TOKEN"})
    assert list(secrets_of(load_config(None), read)) == ["ANTHROPIC_API_KEY", "APP_TOKEN"]


def test_sealed_keys_open_for_their_receiver_alone() -> None:
    receiver, other = Receiver(), Receiver()
    sealed = seal({"KEY": "sk-1", "ü": "ä"}, receiver.public)
    assert receiver.open(sealed) == {"KEY": "sk-1", "ü": "ä"}
    assert b"sk-1" not in sealed
    assert sealed != seal({"KEY": "sk-1", "ü": "ä"}, receiver.public)
    changed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for wrong in (lambda: other.open(sealed), lambda: receiver.open(changed)):
        with pytest.raises(RunFailed):
            wrong()
    # No run answers another whose name begins alike.
    assert not keys._place("p/x/y").startswith(keys._place("p/x").removesuffix("/"))


def test_where_a_run_works_is_not_what_it_learns() -> None:
    settings = [
        "cluster={ray_address: '10.0.0.7:6379', node_num: 2}",
        "runtime_env={pip: [a], include: [b], exclude: [c], env_vars: {D: e}}",
        "ray_namespace=f/g",
    ]
    here, there = (fingerprint_of(load_config(None, given)) for given in ([], settings))
    assert here == there
    assert here != fingerprint_of(load_config(None, ["seed=5"]))


# -- machines ----------------------------------------------------------------------------------


@pytest.fixture
def no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFLOW_TUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_hosts_become_a_cluster_of_rays_own_launcher_without_the_token(
    no_token: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    file = machines.hosts_yaml(["gpu1", "gpu2", "gpu3"], "me", environment="/opt/aflow")
    told = machines.read_cluster_yaml(file)
    validate_config(prepare_config(yaml.safe_load(file.read_text())))
    assert told["provider"] == {"type": "local", "head_ip": "gpu1", "worker_ips": ["gpu2", "gpu3"]}
    assert (told["min_workers"], told["max_workers"]) == (2, 2)
    assert told["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    starts = [told["head_start_ray_commands"][1], told["worker_start_ray_commands"][1]]
    for start in starts:
        assert start.startswith("export PATH=/opt/aflow/bin:$PATH; RAY_AUTH_MODE=token ")
        assert "python -m aflow_tune.find_ray" in start
    assert "--dashboard-host=127.0.0.1" in starts[0]
    with pytest.raises(BadInput, match="twice"):
        machines.hosts_yaml(["gpu1", "gpu1"], "me")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/keys/ray")
    told = yaml.safe_load(machines.hosts_yaml(["gpu1"], "me").read_text())
    assert told["file_mounts"] == {"~/.ray/auth_token": "/keys/ray"}
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret-token")
    with pytest.raises(BadInput, match="a token in a file") as caught:
        machines.hosts_yaml(["gpu1"], "me")
    assert "secret-token" not in str(caught.value)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    told = yaml.safe_load(machines.hosts_yaml(["gpu1"], "me").read_text())
    assert told["file_mounts"] == {}
    assert told["worker_start_ray_commands"][1].startswith("RAY_AUTH_MODE=disabled ")


def test_a_cluster_that_was_not_started_here_is_not_ended(no_token: None, shared: Path) -> None:
    folder = shared / f"ray-{os.getuid()}" / "ray"
    folder.mkdir(parents=True)
    with gcs() as (here, _):
        (folder / "ray_current_cluster").write_text(here)
        with pytest.raises(BadInput, match="the Ray at"):
            machines.down()
        with pytest.raises(BadInput, match="runs on this machine already"):
            machines.up_here()
    assert os.listdir(folder) == ["ray_current_cluster"]
