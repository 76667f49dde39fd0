"""What `aflow-tune doctor` says about Ray: reachable, authenticated, the same everywhere.

Ray is looked at by a child process (`_ray_probe.py`): connecting cannot be interrupted, changes
the process that does it, and can hang. It is killed at the end of its time.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from aflow_tune.config.clashes import WATCHED, hollow, installed_versions
from aflow_tune.contract.import_faults import package_cure
from aflow_tune.doctor.lines import Line, fault, lacking, line_of, ok, size
from aflow_tune.doctor.versions import clash_lines
from aflow_tune.find_ray import check_own

SECONDS = 14.0
_AUTH = re.compile("InvalidAuthToken|RAY_AUTH_TOKEN|Unauthenticated|Authentication|auth.* token")
_SAME = ("ray", "trinity-rft", "torch", "transformers", "vllm", "verl", "agentscope")
"""What has to be the same on every node: actors and tensors travel between them."""


@dataclass(frozen=True)
class Wanted:
    """What the run wants of Ray.

    `cluster`: True, it wants a running one; None, that is not known.
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
    address = wanted.address
    if address in ("", "auto"):
        address = os.environ.get("RAY_ADDRESS", "").strip() or "auto"
    if "@" in address:
        found = "the address of Ray has an @, and is not shown since it may hold a key"
        return [fault("ray", found, "unset RAY_ADDRESS, or export RAY_ADDRESS=HOST:6379")]
    if reason := _silent(address):
        return _not_joined(wanted, {"ending": "unreachable", "address": address, "reason": reason})
    mark = None
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the line about the disk says why
            if wanted.folder is not None:
                folders = (wanted.folder, *wanted.folder.parents)
                there = next(path for path in folders if path.is_dir())
                mark = stack.enter_context(NamedTemporaryFile(prefix=".seen-", dir=there)).name
        answer = _ask({"address": address, "names": list(WATCHED), "mark": mark})
    return lines_of(wanted, {"address": address, **answer}, mark)


def _silent(address: str) -> str | None:
    """Why nothing answers at an address that was given; None where something does, or at auto."""
    if address in ("auto", "local"):
        return None
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    try:
        number = int(port) if colon else 6379
        socket.create_connection(((host or port).strip("[]"), number), 2.0).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _ask(question: dict[str, Any]) -> dict[str, Any]:
    """The probe's answer; one that ends otherwise is an answer too."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "aflow_tune.cluster._ray_probe"],
            input=json.dumps({**question, "seconds": SECONDS - 5}),
            capture_output=True,
            text=True,
            timeout=SECONDS - 1,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    except subprocess.TimeoutExpired:
        return {"ending": "unreachable", "reason": f"no answer within {SECONDS - 1:g} s"}
    try:
        return dict(json.loads(asked.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        last = " ".join(asked.stderr.strip().splitlines()[-2:])[-400:]
        return {"ending": "refused", "reason": f"Ray's own process failed: {last}"}


def lines_of(wanted: Wanted, answer: Mapping[str, Any], mark: str | None = None) -> list[Line]:
    """What the probe's answer means for a run. `mark`: a file that every node should see."""
    if answer["ending"] != "connected":
        return _not_joined(wanted, answer)
    total, free, nodes = answer["resources"], answer["available"], answer["nodes"]
    parts = [f"{len(nodes)} node{'s' * (len(nodes) != 1)}"]
    parts += [f"{free.get(k, 0):g} of {total[k]:g} {k}s free" for k in ("CPU", "GPU") if k in total]
    store = size(total.get("object_store_memory", 0))
    lines = [ok("ray", f"{answer['address']}: {', '.join(parts)}, object store {store}")]
    if wanted.cluster:
        least = max(wanted.gpus_per_node, 1)
        fitting = sum(node["resources"].get("GPU", 0) >= least for node in nodes)
        if fitting < max(wanted.nodes, 1):
            found = f"{fitting} nodes with {least} GPUs or more, the run wants {wanted.nodes or 1}"
            cure = f"ray start --address={answer['address']} on others, or cluster.node_num=0"
            lines.append(fault("ray", found, cure))
    if not wanted.trust_users:
        lines += [fault("ray", f"{where}: {why}", cure) for where, why, cure in answer["open"]]
    return lines + [line for node in nodes for line in _node(node, mark)]


def _not_joined(wanted: Wanted, answer: Mapping[str, Any]) -> list[Line]:
    ending, reason = answer["ending"], " ".join(answer.get("reason", "").split())[:300]
    if ending == "none":
        if wanted.cluster:
            text = "the run wants a cluster, and none is running here"
            return [fault("ray", text, "aflow-tune cluster up  # or cluster.ray_address=HOST:6379")]
        told = ok("ray", "no cluster is running here; a run starts its own")
        return [line_of("ray", problem) for problem in check_own()] or [told]
    text = f"{answer['address']}: {reason}"
    if _AUTH.search(reason):
        found = f"{answer['address']} wants a token, and the one of this machine is none or another"
        cure = "copy ~/.ray/auth_token of its head here"
        if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
            found, cure = f"{answer['address']} wants a token", "unset RAY_AUTH_MODE"
        return [fault("ray", found, cure)]
    if absent := re.search(r"No module named '(\w+)", reason):
        return [fault("ray", f"Ray cannot be imported: {reason}", package_cure(absent[1]))]
    if ending == "refused":
        cure = "ray status  # with the address above; then the same versions on both sides"
        return [fault("ray", f"the cluster does not take us: {text}", cure)]
    cure = "ray start --head there, or name another: cluster.ray_address=HOST:6379"
    if os.environ.get("RAY_ADDRESS", "").strip() == answer["address"]:
        cure = "unset RAY_ADDRESS, or ray start --head there"
    return [fault("ray", f"nothing answers at {text}", cure)]


def _node(node: Mapping[str, Any], mark: str | None) -> list[Line]:
    name = f"node {node['ip']} ({node['host']})"
    if "failed" in node:
        cure = f"ray logs cluster --node-ip {node['ip']}  # then ray stop and ray start there"
        return [fault("ray", f"{name}: {' '.join(node['failed'].split())[:200]}", cure)]
    here, there = installed_versions(), node["versions"]
    lines = []
    ours, theirs = platform.python_version(), node["python"]
    same = f"the same versions on {node['ip']}: python -m pip install ray=={here.get('ray')}"
    if ours.split(".")[:2] != theirs.split(".")[:2]:
        text = f"{name}: Python {theirs}, here {ours}; functions do not travel between them"
        lines.append(fault("ray", text, f"{same} with Python {ours}"))
    pairs = [(key, there.get(key, "none"), here.get(key, "none")) for key in _SAME]
    other = [f"{key} {that} (here {this})" for key, that, this in pairs if that != this]
    if other:
        text = f"{name}: other versions: {', '.join(other)}"
        lines.append(lacking(there.get("ray") != here.get("ray"), "ray", text, same))
    if there != here:  # what is the same is told once
        lines += clash_lines(there, f"{name}: ")
    if mark is not None and not node["sees"]:
        base = Path(mark).parent
        cure = f"mount one shared file system at {base} on every node, or checkpoint_root_dir=..."
        lines.append(fault("ray", f"{name}: does not see {base}, where run folders go", cure))
    sees = "" if mark is None else f", sees {Path(mark).parent}"
    return lines or [ok("ray", f"{name}: Python {theirs}, Ray {there.get('ray')}, as here{sees}")]
