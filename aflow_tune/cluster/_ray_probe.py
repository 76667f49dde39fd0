"""Runs the checks of a Ray that a run makes before it starts, as a child process of `doctor`.

Reads a JSON object from stdin (written by `doctor.ask_ray`); the last line on stdout is a JSON
object too: `faults`, each as (where, expected, found, cure), and if the Ray accepts the connection
`nodes` (the resources of each), `total` and `available`. The parent may kill it at any time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    from aflow_tune.errors import BadInput

    try:
        answer = _look(json.load(sys.stdin))
    except BadInput as error:
        answer = {"faults": [(it.where, it.expected, it.found, it.cure) for it in error.faults]}
    print(f"\n{json.dumps(answer)}", flush=True)
    os._exit(0)  # Ray's exit handlers wait for a cluster that may be gone


def _look(question: dict[str, Any]) -> dict[str, Any]:
    import ray

    from aflow_tune.cluster.ray_for_run import join, lacking_on_nodes, open_sessions
    from aflow_tune.find_ray import FoundRay, greet

    began, seconds = time.monotonic(), question["seconds"]
    found = FoundRay(question["address"], question["source"])
    greet(found)
    faults = [] if question["trust_users"] else open_sessions(found, seconds)
    join(found, namespace="aflow-tune-doctor")
    folder = None if question["folder"] is None else Path(question["folder"])
    left = max(0.1, seconds + began - time.monotonic())
    faults += lacking_on_nodes(question["needs"], folder, question["where"], left)
    return {
        "faults": [(it.where, it.expected, it.found, it.cure) for it in faults],
        "nodes": [node["Resources"] for node in ray.nodes() if node["Alive"]],
        "total": ray.cluster_resources(),
        "available": ray.available_resources(),
    }


if __name__ == "__main__":
    main()
