"""`aflow-tune cluster up|status|down`: a Ray that outlives commands, on one machine or several.

On one machine it is `ray start`, on loopback and with a token, and `down` ends the processes of
that Ray alone (`ray stop` would end every Ray of the user). Several machines use Ray's own launcher
(`ray up`, `ray down`) with a Ray cluster YAML, which `hosts_yaml` writes from host names.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from aflow_tune import find_ray
from aflow_tune.cluster._watchdog import alive, end_session, session_processes
from aflow_tune.cluster.local_ray import did_not_start
from aflow_tune.engines.local.models import cache_dir
from aflow_tune.errors import BadInput, RunFailed
from aflow_tune.files import write_json
from aflow_tune.find_ray import make_ray_base, running_here, use_token

PYTHON_VARIABLE = "AFLOW_TUNE_PYTHON"  # of a node: the interpreter that jobs use
GCS_PORT = 6379
_TOKEN = "~/.ray/auth_token"
Note = dict[str, str]
"""The cluster that `up` started last. On this machine: `address`, `dashboard` and `session` (the
marker in its processes' environment). On several: `config` (the YAML), `address` (may be empty) and
`prefix` (put before commands on a host)."""


def up_here(options: Sequence[str] = ()) -> Note:
    """Start a Ray on this machine that later commands find by themselves. `options`: further
    arguments of `ray start`. BadInput: one runs already, or no folder for its files is safe.
    RunFailed: it did not start."""
    running = running_here()
    if running is not None:
        cure = "use it (`aflow-tune cluster status`), or end it first: `aflow-tune cluster down`"
        title = "A Ray runs on this machine already."
        raise BadInput.of(title, running, "no running Ray", "one that answers", cure)
    base = make_ray_base()
    make_token()
    session = f"cluster-{os.getpid()}-{time.time_ns()}"
    environment = {
        **os.environ,
        "AFLOW_TUNE_RAY_SESSION": session,
        "RAY_TMPDIR": str(base),
        PYTHON_VARIABLE: sys.executable,
        # With clusters off the node's address is loopback, and Ray's servers listen there only.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    dashboard = _free_port(8265)
    command = ["start", "--head", f"--port={_free_port(GCS_PORT)}", "--dashboard-host=127.0.0.1"]
    command += [f"--dashboard-port={dashboard}", "--include-dashboard=true"]
    command += [f"--dashboard-agent-listen-port={_free_port(52365)}", *options]
    started = subprocess.run(
        _ray(*command), env=environment, capture_output=True, text=True, check=False
    )
    address = running_here()
    if started.returncode != 0 or address is None:
        end_session(session)
        raise did_not_start(started.stderr or started.stdout, base)
    url = f"http://127.0.0.1:{dashboard}"
    return _keep({"address": address, "dashboard": url, "session": session})


def up_several(config: Path, environment: str | None = None) -> Note:
    """Start the cluster of a Ray cluster YAML with `ray up`, showing its output. `environment`: the
    virtual environment on every host, for a YAML that `hosts_yaml` wrote. BadInput: the YAML cannot
    be read. RunFailed: `ray up` failed."""
    provider = read_cluster_yaml(config)["provider"] or {}
    make_token()
    print(f"ray up {config}", flush=True)
    _run(["up", "-y", "--no-config-cache", str(config)])
    address = f"{provider['head_ip']}:{GCS_PORT}" if "head_ip" in provider else ""
    prefix = _prefix(environment) if config == _hosts_file() else ""
    return _keep({"address": address, "config": str(config.absolute()), "prefix": prefix})


def hosts_yaml(
    hosts: Sequence[str], user: str, key: str | None = None, environment: str | None = None
) -> Path:
    """Write the cluster YAML for hosts reached by ssh, the first of them the head; Ray copies the
    token's file to each. BadInput: a host is named twice, or the token is only in the environment.

    Args:
        user: the ssh user on all hosts.
        key: the private key's file; None: ssh's default.
        environment: the virtual environment with aflow-tune on every host.
    """
    if len(set(hosts)) < len(hosts):
        title, given = "A host is named twice.", " ".join(hosts)
        raise BadInput.of(title, "hosts", "each host once", given, "name each once")
    with_token = _auth_mode() == "token"
    if with_token and os.environ.get("RAY_AUTH_TOKEN"):
        expected = "a token in a file, which is copied to the hosts by ssh"
        cure = f"unset it, and one in {_TOKEN} is used or made; or set RAY_AUTH_TOKEN_PATH"
        title, found = "The hosts cannot be given the token.", "a token in the environment"
        raise BadInput.of(title, "RAY_AUTH_TOKEN", expected, found, cure)
    token = os.environ.get("RAY_AUTH_TOKEN_PATH") or _TOKEN
    path = _path(environment)
    # By default a worker uses the head's path, which may belong to another user there.
    folder = f"python -m {find_ray.__name__}"
    ray_start = f"{_prefix(environment)}RAY_USAGE_STATS_ENABLED=0 ray start --temp-dir=$({folder})"
    workers = list(hosts[1:])
    told = {
        "cluster_name": "aflow-tune",
        "provider": {"type": "local", "head_ip": hosts[0], "worker_ips": workers},
        "auth": {"ssh_user": user} | ({} if key is None else {"ssh_private_key": key}),
        "min_workers": len(workers),
        "max_workers": len(workers),
        "file_mounts": {_TOKEN: token if token == _TOKEN else os.path.abspath(token)}
        if with_token
        else {},
        "setup_commands": [f"{path}{folder}"],  # fails without aflow-tune or a safe folder
        "head_start_ray_commands": [
            f"{path}ray stop",
            f"{ray_start} --head --port={GCS_PORT} --dashboard-host=127.0.0.1 "
            "--autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": [
            f"{path}ray stop",
            f"{ray_start} --address=$RAY_HEAD_IP:{GCS_PORT}",
        ],
    }
    file = _hosts_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(told, sort_keys=False), encoding="utf-8")
    return file


def status(config: Path | None = None) -> str:
    """What Ray says about the cluster: nodes, resources, pending demands. BadInput: no Ray runs
    here, and no other cluster is known. RunFailed: it does not answer."""
    known, address = _known(), running_here()
    if config is None and address is None and known.get("config"):
        config = Path(known["config"])
    if config is not None:
        read_cluster_yaml(config)
        prefix = known.get("prefix", "") if known.get("config") == str(config.absolute()) else ""
        return _run(["exec", str(config), f"{prefix}ray status"], shown=False)
    if address is None:
        cure = "aflow-tune cluster up, or name the YAML of a cluster elsewhere"
        title = "There is no cluster."
        raise BadInput.of(title, "this machine", "a Ray that answers", "none", cure)
    ours = known.get("address") == address
    dashboard = known.get("dashboard", "unknown") if ours else "unknown"
    lines = [f"address:   {address}", f"dashboard: {dashboard}"]
    lines.append(f"token:     {'used' if use_token() else 'none'}")
    return "\n".join([*lines, _run(["status", f"--address={address}"], shown=False).strip()])


def down(config: Path | None = None) -> str:
    """End the cluster of `config`, else the one that `up` started; returns a message. BadInput:
    there is neither. RunFailed: `ray down` failed, or processes are still there."""
    known = _known()
    if config is None and known.get("config"):
        config = Path(known["config"])
    if config is not None:
        read_cluster_yaml(config)
        _run(["down", "-y", str(config)])
        _note().unlink(missing_ok=True)
        return f"ended the cluster of {config}"
    if not known:
        found = f"the Ray at {running}" if (running := running_here()) else "none"
        expected = "a Ray that `aflow-tune cluster up` started"
        cure = "`ray stop` ends every Ray of yours on this machine"
        raise BadInput.of("There is no cluster to end.", "this machine", expected, found, cure)
    processes = session_processes(known["session"])
    end_session(known["session"], processes)
    _note().unlink(missing_ok=True)
    if left := [each.pid for each in alive(processes)]:
        raise RunFailed(f"processes of the Ray at {known['address']} are still there: {left}")
    return f"ended the Ray at {known['address']}: {len(processes)} processes"


def make_token() -> None:
    """Make the token that the Ray started next asks for, unless RAY_AUTH_MODE is not `token`."""
    if _auth_mode() != "token":
        return
    # Its output contains the token, so it is never shown.
    told = subprocess.run(_ray("get-auth-token", "--generate"), capture_output=True, check=False)
    if told.returncode != 0:
        raise RunFailed("Ray could not make a token; try `ray get-auth-token --generate`")
    os.environ["RAY_AUTH_MODE"] = "token"
    use_token()


def read_cluster_yaml(path: Path) -> Mapping[str, Any]:
    """Read a Ray cluster YAML. BadInput: it is missing, or not a cluster YAML."""
    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(told, dict) and {"cluster_name", "provider"} <= told.keys():
            return told
        found = "another YAML"
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        found = " ".join(str(error).split())[:300]
    expected = "a Ray cluster YAML, with `cluster_name` and `provider`"
    cure = "see Ray's cluster YAML reference; `aflow-tune cluster up HOST HOST` writes one"
    raise BadInput.of("The cluster cannot be read.", str(path), expected, found, cure)


def _prefix(environment: str | None) -> str:
    return f"{_path(environment)}RAY_AUTH_MODE={_auth_mode()} "


def _path(environment: str | None) -> str:
    return f"export PATH={environment}/bin:$PATH; " if environment else ""


def _auth_mode() -> str:
    return os.environ.get("RAY_AUTH_MODE", "token").lower()


def _ray(*arguments: str) -> list[str]:
    """Ray's command line in this interpreter, not the `ray` on the path."""
    return [sys.executable, "-m", "ray.scripts.scripts", *arguments]


def _run(arguments: list[str], shown: bool = True) -> str:
    output = None if shown else subprocess.PIPE
    ran = subprocess.run(_ray(*arguments), stdout=output, text=True, check=False)
    if ran.returncode != 0:
        raise RunFailed(f"`ray {' '.join(arguments)}` failed with {ran.returncode}")
    return ran.stdout or ""


def _free_port(wanted: int) -> int:
    """`wanted` if it is free on loopback, else any free port."""
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise RunFailed("no port of this machine is free")


def _hosts_file() -> Path:
    return cache_dir() / "cluster.yaml"


def _note() -> Path:
    return cache_dir() / "cluster.json"


def _known() -> Note:
    """What `up` noted; {} if nothing, or `down` has removed it."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(_note().read_text(encoding="utf-8")))
    return {}


def _keep(note: Note) -> Note:
    write_json(_note(), note)
    return note
