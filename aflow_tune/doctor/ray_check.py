"""What `aflow-tune doctor` says about Ray: reachable, authenticated, the same everywhere.

Ray is looked at by a child process (`_ray_probe.py`): connecting cannot be interrupted, changes
the process that does it, and can hang. It is killed at the end of its time.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.config.clashes import WATCHED, hollow, installed_versions
from aflow_tune.contract.import_faults import package_cure
from aflow_tune.doctor.lines import Line, fault, line_of, note, ok, size
from aflow_tune.doctor.versions import clash_lines
from aflow_tune.find_ray import check_own

SECONDS = 14.0
CONNECT_SECONDS = 2.0
_RAY_PORT = 6379
_AUTH = re.compile(
    r"InvalidAuthToken|RAY_AUTH_TOKEN|Unauthenticated|AuthenticationError|auth\w* token", re.I
)
_ABSENT = re.compile(r"No module named '(\w+)")
_SAME = ("ray", "trinity-rft", "torch", "transformers", "vllm", "verl", "agentscope")
"""What has to be the same on every node: actors and tensors travel between them."""
_START = "ray start --head"


@dataclass(frozen=True)
class Wanted:
    """What the run wants of Ray.

    `cluster`: False, it starts its own; True, it wants a running one; None, that is not known.
    `folder`: where run folders go, if several nodes must see them.
    `trust_users`: whether other users of the nodes may be able to change the run's code.
    """

    cluster: bool | None = None
    address: str = "auto"
    folder: Path | None = None
    nodes: int = 0
    gpus_per_node: int = 0
    trust_users: bool = False


def check_ray(wanted: Wanted) -> list[Line]:
    """Lines about the cluster that is named, or is running here."""
    here = installed_versions(("ray",))
    if "ray" not in here or hollow(here):
        return [fault("ray", "Ray is not installed", package_cure("ray"))]
    if wanted.cluster is False:
        return [ok("ray", "not looked at: the run starts its own")]
    address = os.environ.get("RAY_ADDRESS", "").strip() or wanted.address or "auto"
    if wanted.address not in ("", "auto"):
        address = wanted.address
    if "@" in address:
        found = "the address of Ray has an @, and is not shown since it may hold a key"
        return [fault("ray", found, "unset RAY_ADDRESS, or export RAY_ADDRESS=HOST:6379")]
    if reason := _silent(address):
        answer = {"ending": "unreachable", "address": address, "reason": reason}
        return _lines(wanted, address, answer, None, "")
    with _shared(wanted.folder) as (folder, nonce):
        question = {"address": address, "names": list(WATCHED), "folder": folder, "nonce": nonce}
        answer = _ask(question)
        if _AUTH.search(answer.get("reason", "")):
            return [_unauthenticated(question, answer)]
        return _lines(wanted, address, answer, folder, nonce)


def _silent(address: str) -> str | None:
    """Why nothing answers at an address that was given; None where something does, or at auto."""
    if address in ("auto", "local"):
        return None
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    try:
        number = int(port) if colon else _RAY_PORT
        socket.create_connection(((host or port).strip("[]"), number), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _ask(question: dict[str, Any], **environment: str) -> dict[str, Any]:
    """The probe's answer; one that ends otherwise is an answer too."""
    read_end, write_end = os.pipe()
    command = [
        sys.executable,
        "-m",
        "aflow_tune.cluster._ray_probe",
        str(write_end),
    ]
    package = str(Path(__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([package, inherited] if inherited else [package])
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(write_end,),
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0", **environment},
    )
    os.close(write_end)
    told: list[str] = []
    reader = threading.Thread(target=lambda: told.append(_read(read_end)), daemon=True)
    reader.start()
    try:
        _, errors = process.communicate(
            json.dumps({**question, "seconds": SECONDS - 5}), timeout=SECONDS - 1
        )
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        known = {"ending": "unreachable", "address": question["address"]}
        return {**known, "reason": f"no answer within {SECONDS - 1:g} s"}
    finally:
        if process.poll() is None:
            process.kill()
    reader.join(5)
    try:
        return dict(json.loads(told[0]))
    except (IndexError, ValueError):
        last = " ".join(errors.strip().splitlines()[-2:])[-400:]
        reason = f"Ray's own process ended with {process.returncode}: {last}"
        return {"ending": "refused", "address": question["address"], "reason": reason}


def _read(descriptor: int) -> str:
    with open(descriptor, encoding="utf-8") as file:
        return file.read()


@contextmanager
def _shared(folder: Path | None) -> Iterator[tuple[str | None, str]]:
    """A folder of ours below the shared one, with a file that only we know; gone at the end."""
    nonce = secrets.token_hex(16)
    if folder is None:
        yield None, nonce
        return
    try:
        there = next(path for path in (folder, *folder.parents) if path.is_dir())
        name = tempfile.mkdtemp(prefix=".aflow-tune-doctor-", dir=there)
    except OSError:  # the line about the disk says why
        yield None, nonce
        return
    try:
        os.chmod(name, 0o777)  # workers may be another user's
        (Path(name) / "driver").write_text(nonce, encoding="utf-8")
        yield name, nonce
    finally:
        shutil.rmtree(name, ignore_errors=True)


def _lines(
    wanted: Wanted, address: str, answer: Mapping[str, Any], folder: str | None, nonce: str
) -> list[Line]:
    ending, reason = answer["ending"], " ".join(answer.get("reason", "").split())[:300]
    if ending == "none":
        if wanted.cluster:
            text = "the run wants a cluster, and none is running here"
            return [fault("ray", text, "aflow-tune cluster up  # or cluster.ray_address=HOST:6379")]
        told = "no cluster is running here; a run starts its own"
        return [line_of("ray", problem) for problem in check_own()] or [ok("ray", told)]
    if ending != "connected":
        text = f"{answer.get('address') or address}: {reason}"
        if ending == "refused":
            cure = "ray status  # with the address above; then the same versions on both sides"
            if "version" in reason.lower():
                cure = _same_versions()
            if absent := _ABSENT.search(reason):
                return [fault("ray", f"Ray cannot be imported: {reason}", package_cure(absent[1]))]
            return [fault("ray", f"the cluster does not take us: {text}", cure)]
        cure = f"{_START} there, or name another: cluster.ray_address=HOST:6379"
        if os.environ.get("RAY_ADDRESS", "").strip() == address:
            cure = f"unset RAY_ADDRESS, or {_START} there"
        return [fault("ray", f"nothing answers at {text}", cure)]
    return [
        _resources(answer),
        *_enough(wanted, answer),
        *(fault("ray", f"{where}: {found}", cure) for where, found, cure in _open(wanted, answer)),
        *(line for node in answer["nodes"] for line in _node(node, folder, nonce)),
    ]


def _open(wanted: Wanted, answer: Mapping[str, Any]) -> list[list[str]]:
    return [] if wanted.trust_users else answer.get("open", [])


def _resources(answer: Mapping[str, Any]) -> Line:
    total, free = answer["resources"], answer["available"]
    parts = [
        f"{free.get(name, 0):g} of {total[name]:g} {name}s free"
        for name in ("CPU", "GPU")
        if name in total
    ]
    store = total.get("object_store_memory", 0)
    count = len(answer["nodes"])
    nodes = "1 node" if count == 1 else f"{count} nodes"
    found = f"{answer['address']}: {nodes}, {', '.join(parts)}, object store {size(store)}"
    return ok("ray", found)


def _enough(wanted: Wanted, answer: Mapping[str, Any]) -> list[Line]:
    """Whether the cluster is as large as the configuration says."""
    if not wanted.cluster:
        return []
    per_node = [int(node["resources"].get("GPU", 0)) for node in answer["nodes"]]
    if not any(per_node):
        cure = "ray start --num-gpus=N on the nodes with GPUs, or engine=local"
        return [fault("ray", "the cluster has no GPU", cure)]
    fitting = sum(count >= max(wanted.gpus_per_node, 1) for count in per_node)
    if fitting < wanted.nodes:
        found = f"{fitting} nodes with {max(wanted.gpus_per_node, 1)} GPUs or more"
        text = f"{found}, cluster.node_num says {wanted.nodes}"
        cure = f"ray start --address={answer['address']} on the others, or cluster.node_num=0"
        return [fault("ray", text, cure)]
    return []


def _node(node: Mapping[str, Any], folder: str | None, nonce: str) -> list[Line]:
    name = f"node {node['ip']} ({node['host']})"
    if "failed" in node:
        reason = " ".join(node["failed"].split())[:200]
        cure = f"ray logs cluster --node-ip {node['ip']}  # then ray stop and ray start there"
        return [fault("ray", f"{name}: {reason}", cure)]
    here, there = installed_versions(), node["versions"]
    lines = []
    ours, theirs = platform.python_version(), node["python"]
    if ours.split(".")[:2] != theirs.split(".")[:2]:
        text = f"{name}: Python {theirs}, here {ours}; functions do not travel between them"
        lines.append(fault("ray", text, f"{_same_versions()} with Python {ours} on {node['ip']}"))
    other = [
        f"{key} {there.get(key, 'none')} (here {here.get(key, 'none')})"
        for key in _SAME
        if there.get(key) != here.get(key)
    ]
    if other:
        text = f"{name}: other versions: {', '.join(other)}"
        if there.get("ray") != here.get("ray"):
            lines.append(fault("ray", text, f"{_same_versions()} on {node['ip']}"))
        else:
            lines.append(note("ray", text, f"{_same_versions()} on {node['ip']}"))
    if there != here:  # what is the same is told once
        lines += clash_lines(there, f"{name}: ")
    lines += _sees_folder(name, node, folder, nonce)
    return lines or [ok("ray", f"{name}: Python {theirs}, Ray {there.get('ray')}, as here")]


def _sees_folder(name: str, node: Mapping[str, Any], folder: str | None, nonce: str) -> list[Line]:
    if folder is None:
        return []
    base = Path(folder).parent
    cure = f"mount one shared file system at {base} on every node, or checkpoint_root_dir=..."
    if "folder" in node:
        return [
            fault("ray", f"{name}: the run folders are out of its reach ({node['folder']})", cure)
        ]
    written = Path(folder) / node["id"]
    if not node.get("sees") or not written.is_file() or written.read_text() != nonce:
        text = f"{name}: what it writes below {base} does not arrive here: another disk"
        return [fault("ray", text, cure)]
    return [ok("ray", f"{name}: reads and writes {base}, Ray {node['versions'].get('ray')}")]


def _same_versions() -> str:
    here = installed_versions(("ray",)).get("ray", "")
    return f"python -m pip install ray=={here}"


def _unauthenticated(question: dict[str, Any], answer: Mapping[str, Any]) -> Line:
    """A cluster that wants a token: is it only not sent, or another one?"""
    address = answer.get("address") or question["address"]
    text = f"{address} wants a token (InvalidAuthToken)"
    mode, cure = os.environ.get("RAY_AUTH_MODE"), "copy ~/.ray/auth_token of its head here"
    if mode is not None and mode.lower() != "token":
        again = _ask({**question, "folder": None}, RAY_AUTH_MODE="token")
        if again["ending"] == "connected":
            found = f"{text}; the one of this machine fits, but RAY_AUTH_MODE={mode} holds it back"
            return fault("ray", found, "unset RAY_AUTH_MODE")
        cure += ", then unset RAY_AUTH_MODE"
    return fault("ray", f"{text}, and the one of this machine is none or another", cure)
