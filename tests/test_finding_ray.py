"""Which Ray is used, whose keys go where, and what is written for clusters (without a Ray)."""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from gcs_stand_in import gcs

import aflow_tune.engines.trinity  # noqa: F401  (the stand-in for vLLM)
from aflow_tune import find_ray as finding
from aflow_tune.cluster import jobs, keys, machines, worker_setup
from aflow_tune.cluster.attached_ray import runtime_env_of
from aflow_tune.cluster.keys import names_of_keys, secrets_of
from aflow_tune.cluster.ray_for_run import ray_for_run
from aflow_tune.cluster.sealed import Receiver, seal
from aflow_tune.config.changes import fingerprint_of
from aflow_tune.config.engine import check_devices
from aflow_tune.config.load import load_config
from aflow_tune.config.validate import validate
from aflow_tune.errors import BadInput, Fault, RunFailed
from aflow_tune.find_ray import (
    FoundRay,
    check_address,
    find_ray,
    greet,
    refused_connection,
    running_here,
    uses_ray,
)
from aflow_tune.ray_folder import make_ray_base
from aflow_tune.shipping import arrival
from aflow_tune.shipping.tracing import Trace


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


def test_an_address_wins_then_the_environment_then_what_runs_here(
    no_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_ray(load_config(None)) is None
    with gcs() as (here, _):
        no_ray.write_text(here)
        assert running_here() == here
        assert find_ray(load_config(None)) == FoundRay(here, "it runs on this machine")
        assert find_ray(load_config(None, ["cluster.ray_address=auto"])) == FoundRay(
            here, "it runs on this machine"
        )
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
        assert find_ray(load_config(None)) == FoundRay("10.0.0.7:6379", "RAY_ADDRESS")
        given = find_ray(load_config(None, ["cluster.ray_address=10.0.0.8:6379"]))
        assert given is not None
        assert given.address == "10.0.0.8:6379"
        assert find_ray(load_config(None, ["cluster.ray_address=local"])) is None
        assert find_ray(load_config(None, ["inline=true"])) is None
    monkeypatch.delenv("RAY_ADDRESS")
    assert running_here() is None  # the file is there, but nobody answers
    assert find_ray(load_config(None)) is None


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("auto", "aflow-tune cluster up"),
        ("http://10.0.0.7:8265", "aflow-tune submit CONFIG --address http://10.0.0.7:8265"),
        ("ray://10.0.0.7:10001", "without `ray://`"),
        ("10.0.0.7", "HOST:6379"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(
    address: str, word: str, no_ray: Path
) -> None:
    with pytest.raises(BadInput) as refused:
        find_ray(load_config(None, [f"cluster.ray_address={address}"]))
    (fault,) = refused.value.faults
    assert fault.where == f"command line: cluster.ray_address={address}"
    assert word in fault.cure


def test_what_runs_here_is_found_in_rays_own_folder_and_in_that_of_cluster_up(
    no_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = no_ray.parents[1]
    shared.chmod(0o1777)
    ours = make_ray_base() / "ray"
    ours.mkdir()
    with gcs() as (here, _):
        for folder in (no_ray.parent, ours):
            assert running_here() is None
            (folder / no_ray.name).write_text(here)
            assert running_here() == here
            (folder / no_ray.name).unlink()


def test_a_run_whose_own_ray_cannot_start_here_is_refused_before(
    no_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault("ulimit -u", "400", "7", "more")
    monkeypatch.setattr(finding, "check_process_room", lambda: iter([fault]))
    monkeypatch.setenv("RAY_TMPDIR", "/proc/no")
    own = load_config(None, ["engine=local"])
    assert [told.where for told in check_address(own)] == ["RAY_TMPDIR=/proc/no", "ulimit -u"]
    assert list(check_address(load_config(None, ["engine=local", "inline=true"]))) == []
    with gcs() as (here, _):
        joined = load_config(None, ["engine=local", f"cluster.ray_address={here}"])
        assert list(check_address(joined)) == []


def test_a_token_that_is_missing_is_told_apart() -> None:
    found = FoundRay("10.0.0.7:6379", "RAY_ADDRESS")
    told = refused_connection(found, RuntimeError("InvalidAuthToken: Unauthenticated"))
    assert "ray get-auth-token" in told.faults[0].cure
    told = refused_connection(found, ConnectionError("Failed to connect"))
    assert "aflow-tune cluster up" in told.faults[0].cure


def test_a_ray_that_takes_another_token_is_refused_before_it_is_joined() -> None:
    with gcs(wants_token=True) as (address, _), pytest.raises(BadInput) as refused:
        greet(FoundRay(address, "RAY_ADDRESS"))
    assert "ray get-auth-token" in refused.value.faults[0].cure
    with gcs() as (address, _):
        greet(FoundRay(address, "RAY_ADDRESS"))


@pytest.mark.parametrize("listens", [True, False])
def test_where_no_ray_answers_a_run_ends(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else has the port and is silent, or nobody has it: Ray would try for minutes."""
    monkeypatch.setattr(finding, "_GREET_SECONDS", 1.0)
    monkeypatch.setattr(finding, "_ANSWER_SECONDS", 0.5)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(BadInput) as refused:
            greet(FoundRay(address, "RAY_ADDRESS"))
    (fault,) = refused.value.faults
    assert fault.where == "RAY_ADDRESS"
    assert "no Ray answers there within 1 s" in fault.found
    assert "aflow-tune cluster up" in fault.cure


def test_a_job_server_that_is_silent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(jobs, "use_token", lambda: False)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(BadInput) as refused:
            jobs.Jobs(f"http://127.0.0.1:{other.getsockname()[1]}")
    assert "timed out" in refused.value.faults[0].found


def test_nothing_is_submitted_where_no_head_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "use_token", lambda: False)
    monkeypatch.setattr(jobs, "JobSubmissionClient", None)  # it would ask for a long time
    with socket.socket() as other:  # nobody else can listen at the port meanwhile
        other.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", closed)
        with pytest.raises(BadInput) as refused:
            jobs.Jobs()
    (fault,) = refused.value.faults
    assert (fault.where, fault.found) == (closed, "no Ray answers there")
    assert "http://HOST:8265" in fault.cure


def test_keys_are_those_of_models_of_the_code_and_those_listed_never_the_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in keys._USUAL:
        monkeypatch.delenv(name, raising=False)
    for name in ("OPENAI_API_KEY", "OTHER_KEY", "READ_BY_CODE", "LISTED", "UNRELATED", "HF_HOME"):
        monkeypatch.setenv(name, "a-value-of-some-length")
    config = load_config(
        None,
        [
            "models={judge: {model: a}, executor: {model: b, api_key_env: OTHER_KEY}}",
            "runtime_env.secrets=[LISTED, NOT_SET]",
        ],
    )
    code = Trace(variables=dict.fromkeys(("READ_BY_CODE", "PATH", "HOME", "HF_HOME"), "flow.py:1"))
    assert names_of_keys(config, code) == ["LISTED", "OPENAI_API_KEY", "OTHER_KEY", "READ_BY_CODE"]
    assert list(secrets_of(config, code)) == ["LISTED", "OPENAI_API_KEY", "OTHER_KEY"]
    for name, value in (("SORT_KEY", "question"), ("APP_TOKEN", "tok-12345")):
        monkeypatch.setenv(name, value)
    read = Trace(variables={"SORT_KEY": "flow.py:1", "APP_TOKEN": "flow.py:2"})
    assert list(secrets_of(load_config(None), read)) == ["APP_TOKEN"]
    monkeypatch.setenv("OTHER_KEY", "short")
    assert list(secrets_of(config, code)) == ["LISTED", "OPENAI_API_KEY"]
    external = config.model.external_model
    external.enable, external.api_key_env, external.base_url_env = True, "OTHER_KEY", "LISTED"
    assert not {"OTHER_KEY", "LISTED"} & set(config.get_envs())


def test_keys_that_clients_read_by_themselves_go_along_with_their_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in keys._USUAL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-0123456789")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    config = load_config(None)
    assert names_of_keys(config, Trace()) == ["ANTHROPIC_API_KEY", "OPENAI_BASE_URL"]
    assert secrets_of(config, Trace()) == {"ANTHROPIC_API_KEY": "sk-ant-0123456789"}


def test_no_run_answers_another_whose_name_begins_alike() -> None:
    assert not keys._place("p/x/y").startswith(keys._place("p/x").removesuffix("/"))


def test_sealed_keys_open_for_their_receiver_alone() -> None:
    receiver, other = Receiver(), Receiver()
    sealed = seal({"KEY": "sk-1", "ü": "ä"}, receiver.public)
    assert receiver.open(sealed) == {"KEY": "sk-1", "ü": "ä"}
    assert b"sk-1" not in sealed
    assert sealed != seal({"KEY": "sk-1", "ü": "ä"}, receiver.public)
    for wrong in (lambda: other.open(sealed), lambda: receiver.open(sealed[:-1] + b"\0")):
        with pytest.raises(RunFailed, match="not sealed for this job"):
            wrong()


def test_hosts_become_a_cluster_of_rays_own_launcher_without_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFLOW_TUNE_CACHE", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    file = machines.hosts_yaml(["gpu1", "gpu2", "gpu3"], "me", environment="/opt/aflow")
    told = machines.read_cluster_yaml(file)
    assert told["provider"] == {"type": "local", "head_ip": "gpu1", "worker_ips": ["gpu2", "gpu3"]}
    assert (told["min_workers"], told["max_workers"]) == (2, 2)
    assert told["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    starts = [told["head_start_ray_commands"][1], told["worker_start_ray_commands"][1]]
    for start in starts:
        assert start.startswith("export PATH=/opt/aflow/bin:$PATH; RAY_AUTH_MODE=token ")
    assert "--dashboard-host=127.0.0.1" in starts[0]
    with pytest.raises(BadInput, match="twice"):
        machines.hosts_yaml(["gpu1", "gpu1"], "me")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/keys/ray")
    told = yaml.safe_load(machines.hosts_yaml(["gpu1"], "me").read_text())
    assert told["file_mounts"] == {"~/.ray/auth_token": "/keys/ray"}
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret-token")
    with pytest.raises(BadInput, match="a token in a file") as refused:
        machines.hosts_yaml(["gpu1"], "me")
    assert "secret-token" not in str(refused.value)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    told = yaml.safe_load(machines.hosts_yaml(["gpu1"], "me").read_text())
    assert told["file_mounts"] == {}
    assert told["worker_start_ray_commands"][1].startswith("RAY_AUTH_MODE=disabled ")


def test_the_status_of_hosts_is_asked_in_their_environment_with_the_token(
    no_ray: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setenv("AFLOW_TUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(machines, "make_token", lambda: None)
    monkeypatch.setattr(machines, "_run", lambda words, *_, **__: asked.append(words) or "told")
    file = machines.hosts_yaml(["gpu1", "gpu2"], "me", environment="/opt/aflow")
    machines.up_several(file, lambda _: None, "/opt/aflow")
    assert machines.status() == "told"
    assert asked == [
        ["up", "-y", "--no-config-cache", str(file)],
        ["exec", str(file), "export PATH=/opt/aflow/bin:$PATH; RAY_AUTH_MODE=token ray status"],
    ]


def test_what_rays_launcher_checks_takes_the_cluster_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    monkeypatch.setenv("AFLOW_TUNE_CACHE", str(tmp_path))
    told = yaml.safe_load(machines.hosts_yaml(["gpu1", "gpu2"], "me").read_text())
    validate_config(prepare_config(told))


@pytest.mark.parametrize("content", [b"", b"a: [", b"cluster_name: x", b"cluster_name: \xe9"])
def test_what_is_no_cluster_yaml_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(content)
    with pytest.raises(BadInput, match="cannot be read") as refused:
        machines.read_cluster_yaml(path)
    assert refused.value.faults[0].where == str(path)


def test_a_cluster_that_was_not_started_here_is_not_ended(
    no_ray: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFLOW_TUNE_CACHE", str(tmp_path / "cache"))
    with gcs() as (here, _):
        no_ray.write_text(here)
        with pytest.raises(BadInput) as refused:
            machines.down()
        assert "which something else started" in refused.value.faults[0].found
        with pytest.raises(BadInput, match="runs on this machine already"):
            machines.up_here()
    assert os.listdir(no_ray.parent) == ["ray_current_cluster"]


def test_what_runs_here_is_used_only_if_it_is_a_ray_of_ones_own(
    no_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef0123456789abcdef")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,  # takes the connection, says nothing
        monkeypatch.context() as silent,
    ):
        silent.setattr(finding, "_ANSWER_SECONDS", 1.0)
        no_ray.write_text(f"127.0.0.1:{server.getsockname()[1]}")
        assert running_here() is None
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


def test_one_command_goes_by_one_answer_which_does_not_travel(
    no_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(None)
    with gcs() as (here, _):
        no_ray.write_text(here)
        found = find_ray(config)
    assert found == FoundRay(here, "it runs on this machine")
    assert find_ray(config) is found
    assert config.prepared.ray is found
    assert copy.deepcopy(config).prepared.ray is None


@pytest.mark.parametrize(
    ("settings", "uses"),
    [
        (["engine=local"], True),
        (["engine=local", "inline=true"], False),
        (["engine=local", "mode=train"], False),
        (["engine=local", "mode=bench"], False),
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


def test_validate_tells_an_address_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("engine: local\ncluster: {ray_address: nonsense}\n")
    faults = [fault for fault in validate(path).faults if "ray_address" in fault.where]
    assert [(fault.where, fault.found) for fault in faults] == [
        (f"{path}:2: cluster.ray_address", "'nonsense'")
    ]


def test_where_a_run_works_is_not_what_it_learns() -> None:
    here = fingerprint_of(load_config(None))
    there = fingerprint_of(
        load_config(
            None,
            [
                "cluster={ray_address: '10.0.0.7:6379', node_num: 2}",
                "runtime_env={pip: [a], include: [b], exclude: [c], env_vars: {D: e}}",
                "ray_namespace=f/g",
            ],
        )
    )
    assert here == there
    assert here != fingerprint_of(load_config(None, ["seed=5"]))


def test_secrets_are_no_part_of_what_is_saved() -> None:
    def kept(password: str) -> str:
        url = f"buffer.trainer_input.experience_buffer.path=postgresql://me:{password}@host/db"
        return json.dumps(
            fingerprint_of(load_config(None, [f"explorer.env_vars.A_TOKEN={password}", url]))
        )

    assert "hunter22" not in kept("hunter22")
    assert kept("hunter22") == kept("another")


def test_a_worker_tells_which_names_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    came = arrival.Arrival(None, {}, [], [], "/", conflicts=["`utils`, imported from /node before"])
    monkeypatch.setattr(arrival, "_arrived", came)
    assert worker_setup.tell([], "/")["conflicts"] == ["`utils`, imported from /node before"]


def test_a_process_that_joined_ray_before_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with (
        pytest.raises(BadInput, match="on a Ray already") as refused,
        ray_for_run(load_config(None), [], {}, print),
    ):
        pass
    assert "ray.shutdown()" in refused.value.faults[0].cure


def test_only_a_job_of_ours_has_its_environment_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")  # as in any job of Ray's
    code, config = Trace(), load_config(None, ["ray_namespace=p/x"])
    given = runtime_env_of(config, code, tmp_path, {"A": "b"}, True)
    (bundle,) = given["py_modules"]
    assert given["worker_process_setup_hook"] == worker_setup.HOOK
    assert given["env_vars"] == {
        "A": "b",
        "AFLOW_TUNE_KEYS": "p/x",
        "AFLOW_TUNE_SHIPMENT": Path(bundle).name,
    }
    ours = arrival.Arrival(tmp_path, {}, [], [], "/")
    monkeypatch.setattr(arrival, "_arrived", ours)
    assert runtime_env_of(config, code, tmp_path, {"A": "b"}, True) == {
        "env_vars": {"A": "b", "AFLOW_TUNE_KEYS": "p/x"}
    }


def test_a_job_that_leaves_the_run_no_room_is_told_without_its_values() -> None:
    error = ValueError("Failed to merge the Job's runtime env {'env_vars': {'K': 'sk-1'}} with ...")
    told = refused_connection(FoundRay("10.0.0.7:6379", "RAY_ADDRESS"), error)
    assert "RAY_OVERRIDE_JOB_RUNTIME_ENV=1" in told.faults[0].cure
    assert "sk-1" not in str(told)


def test_trinitys_runner_neither_joins_ray_again_nor_leaves_it() -> None:
    import ray

    from aflow_tune.engines.trinity.launcher import connection_kept

    init, shutdown = ray.init, ray.shutdown
    with connection_kept():
        assert ray.init(address="10.0.0.1:1", ignore_reinit_error=True) is None
        ray.shutdown()
    assert (ray.init, ray.shutdown) == (init, shutdown)


def test_what_a_library_makes_of_signals_is_undone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with finding.handlers_kept():
        signal.signal(signal.SIGTERM, lambda *_: None)
    assert signal.getsignal(signal.SIGTERM) is before
