"""Looks at a Ray cluster from a process of its own, which `ray_check.py` starts and may kill.

Reads a JSON object from stdin: `address` ('' or 'auto': the one that is found), `seconds`, `names`
(distributions whose versions are asked of every node) and `mark` (a file that every node should
see, or null). The last line that it prints is one, too; its `ending` is

- `none`: no cluster was named and none is running here
- `unreachable`, `refused`: with `reason`
- `connected`: with `resources`, `available`, `nodes`, and as `open` the nodes of this machine whose
  folders other users can change, each with place, reason and cure

Which Ray runs here, and whether a token is sent, is decided as for a run (`find_ray.py`). What runs
on the nodes is sent by value (it stands in `__main__`), so that nodes need Ray alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Read the question, write the answer."""
    question = json.load(sys.stdin)
    deadline = time.monotonic() + question["seconds"]
    known: dict[str, Any] = {}
    try:
        answer = _look(question, deadline, known)
    except Exception as error:
        absent = isinstance(error, ConnectionError) and not known
        answer = {**known, "ending": "none" if absent else "refused", "reason": _told(error)}
    print(f"\n{json.dumps(answer)}", flush=True)
    os._exit(0)  # Ray's own way out waits for a cluster that may be gone


def _look(question: dict[str, Any], deadline: float, known: dict[str, Any]) -> dict[str, Any]:
    """`known`: takes the address, also where it goes wrong afterwards."""
    import ray
    from ray._private import services

    from aflow_tune.cluster.ray_for_run import open_here
    from aflow_tune.find_ray import FoundRay, greet, running_here

    address = question["address"]
    if address in ("", "auto"):
        address = running_here()
    elif not address.startswith("ray://"):
        address = services.canonicalize_bootstrap_address(address)
    if address is None:
        raise ConnectionError("no cluster is running here")
    known["address"] = address
    greet(FoundRay(address, "probed"))
    faults = [(told.where, told.found, told.cure) for told in open_here(address)[0]]
    ray.init(
        address=address,
        namespace="aflow-tune-doctor",
        logging_level="ERROR",
        log_to_driver=False,
        configure_logging=True,
    )
    return {
        **known,
        "ending": "connected",
        "open": faults,
        "resources": ray.cluster_resources(),
        "available": ray.available_resources(),
        "nodes": _ask_nodes(question, deadline),
    }


def _told(error: BaseException) -> str:
    """The messages of an exception and of what caused it, in one text."""
    from aflow_tune.errors import BadInput

    texts: list[str] = []
    at: BaseException | None = error
    while at is not None and len(texts) < 5:
        if isinstance(at, BadInput):  # what caused it may hold the values of an environment
            return " <- ".join([*texts, at.faults[0].found])
        texts.append(f"{type(at).__name__}: {at}")
        at = at.__cause__ or at.__context__
    return " <- ".join(texts)[:4000]


def _ask_nodes(question: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
    import ray

    from aflow_tune.cluster.ray_for_run import on_nodes

    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    asked = dict.fromkeys(nodes, (question["names"], question["mark"]))
    answers = on_nodes(_on_node, asked, max(deadline - time.monotonic(), 0.1))
    return [
        {
            "host": node["NodeManagerHostname"],
            "ip": node["NodeManagerAddress"],
            "resources": node["Resources"],
            **(told if isinstance(told := answers[number], dict) else {"failed": _told(told)}),
        }
        for number, node in nodes.items()
    ]


def _on_node(names: list[str], mark: str | None) -> dict[str, Any]:
    """Runs on a node: what is installed there, and whether it sees a file."""
    import importlib.metadata
    import os
    import platform

    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        except (OSError, UnicodeDecodeError):
            versions[name] = "unreadable"  # the word of clashes.py, which nodes may lack
    sees = mark is None or os.path.exists(mark)
    return {"python": platform.python_version(), "versions": versions, "sees": sees}


if __name__ == "__main__":
    main()
