"""Whether other users of its machines could change what a Ray that is joined unpacks there.

Asked before any code is sent. Ray's own table tells every node's folder; what is on this machine is
looked at here, and the nodes of other machines are asked on a connection that brings no code.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from aflow_tune.errors import BadInput, Fault
from aflow_tune.find_ray import (
    FoundRay,
    handlers_kept,
    refused_connection,
)
from aflow_tune.ray_folder import open_to_others

_ASK_SECONDS = 120.0


def refuse_open_sessions(found: FoundRay) -> None:
    """Refuse a Ray, which has been greeted, where others could change the code of a run.

    Raises:
        BadInput: on these nodes they could; or a node does not tell.
    """
    faults, elsewhere = open_here(found.address)
    if elsewhere and not faults:
        faults = _asked(found, elsewhere)
    _refuse(faults)


def open_here(address: str) -> tuple[list[Fault], list[Any]]:
    """What is open of a Ray's nodes on this machine, and its other nodes as Ray tells of them."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # made in Cython

    faults, elsewhere = [], []
    for node in GcsClient(address=address).get_all_node_info().values():
        if node.state != node.ALIVE:
            continue
        if not _is_here(node.node_manager_address, node.session_dir):
            elsewhere.append(node)
        elif reason := open_to_others(node.temp_dir):
            faults.append(_fault(node.node_manager_address, node.temp_dir, reason))
    return faults, elsewhere


def refuse_open_server(nodes: Iterable[dict[str, Any]]) -> None:
    """The same for those nodes of a job server that are on this machine; nothing else of a node
    can be asked without a job.

    Args:
        nodes: the server's summaries.

    Raises:
        BadInput: on one of them others could change the code of a job.
    """
    faults = []
    for node in nodes:
        raylet = node.get("raylet", {})
        address, socket_file = raylet.get("nodeManagerAddress"), raylet.get("rayletSocketName")
        if address and socket_file and raylet.get("state") == "ALIVE":
            session = Path(socket_file).parents[1]
            if _is_here(address, str(session)) and (reason := open_to_others(session.parent)):
                faults.append(_fault(address, str(session.parent), reason))
    _refuse(faults)


def _refuse(faults: list[Fault]) -> None:
    if faults:
        raise BadInput("Other users could change the code of this run.", faults)


def _fault(address: str, temp_dir: str, reason: str) -> Fault:
    above = Path(temp_dir).parent
    cure = (
        "end it and start it below a folder of yours: `ray stop`, then `aflow-tune cluster up`, or "
        "`mkdir -m 700 DIR && ray start --temp-dir=DIR/ray ...`"
    )
    with contextlib.suppress(OSError):  # as root it might be one that the system needs open
        if os.getuid() and os.stat(above).st_uid == os.getuid():
            cure = f"chmod 700 {above}"
    return Fault(
        f"node {address}: {temp_dir}",
        "a temporary folder of Ray below one that only its user may enter",
        reason,
        f"{cure}; or `runtime_env.trust_users=true`, where you trust every user of the nodes, such "
        "as in a container of your own",
    )


def _is_here(address: str, session: str) -> bool:
    """Whether a node is on this machine, as this process sees it: nodes of one Ray have the same
    paths."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return os.path.lexists(session)


def _asked(found: FoundRay, nodes: Iterable[Any]) -> list[Fault]:
    with handlers_kept():
        try:
            ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise refused_connection(found, error) from error
        try:
            looking = ray.remote(open_to_others)
            asked = {
                looking.options(
                    num_cpus=0,
                    max_retries=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(
                        node.node_id.hex(), soft=False
                    ),
                ).remote(node.temp_dir): node
                for node in nodes
            }
            ray.wait(list(asked), num_returns=len(asked), timeout=_ASK_SECONDS)
            return [
                _fault(node.node_manager_address, node.temp_dir, reason)
                for reference, node in asked.items()
                if (reason := _told(reference))
            ]
        finally:
            ray.shutdown()


def _told(reference: Any) -> str | None:
    try:
        reason: str | None = ray.get(reference, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return f"the node did not tell within {_ASK_SECONDS:g} s"
    except ray.exceptions.RayError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"the node cannot tell: {lines[-1].strip() if lines else type(error).__name__}"[:600]
    return reason
