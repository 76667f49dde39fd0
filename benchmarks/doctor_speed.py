"""How long `aflow-tune doctor` takes: the machine alone, a configuration with keys, a cluster.

    python benchmarks/doctor_speed.py [--rounds 3] [--cluster]

Each is a process of its own, timed from start to end. `imports` is the time in which the same
interpreter imports Trinity and Ray, which every check of a configuration needs. The keys are for a
local server with the model lists of OpenAI and Anthropic. `--cluster` starts a Ray of two nodes on
this machine and names it in the configuration. Prints seconds of wall clock and of processor time,
medians over rounds, and the load of the machine. The targets are 5 s for the machine and 20 s for
each of the others; exit code 1: one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TARGETS = {"machine": 5.0, "config": 20.0, "cluster": 20.0}
IMPORTS = "import aflow_tune.engines.trinity, trinity.common.config, ray"
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


class _Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "small"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def models() -> Iterator[list[str]]:
    """Settings for models of both protocols on a local server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    key = "api_key_env: DOCTOR_SPEED_KEY"
    yield [
        f"models.judge={{model: small, base_url: {url}/v1, {key}}}",
        f"models.teacher={{provider: anthropic, model: small, base_url: {url}, {key}}}",
    ]
    server.shutdown()


@contextmanager
def cluster() -> Iterator[str]:
    """The address of a Ray of two nodes."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    line = next(text for text in process.stdout if text.startswith("address "))
    try:
        yield line.split()[1]
    finally:
        process.communicate("")


def measure(words: list[str], rounds: int) -> tuple[float, float, str]:
    """(wall seconds, processor seconds, last line of output), medians."""
    walls, processors, last = [], [], ""
    environment = {**os.environ, "DOCTOR_SPEED_KEY": "x" * 20, "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PYTHONPATH"] = str(ROOT)
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.monotonic()
        told = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, env=environment
        )
        walls.append(time.monotonic() - started)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processors.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        last = (told.stdout.strip().splitlines() or [told.stderr.strip()[-200:]])[-1]
    return statistics.median(walls), statistics.median(processors), last


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cluster", action="store_true", help="also with a Ray of two nodes")
    options = parser.parse_args()
    doctor = ["-m", "aflow_tune.cli", "doctor"]
    config = str(ROOT / "configs" / "quickstart.yaml")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder, models() as overrides:
        given = [config, f"checkpoint_root_dir={folder}", *overrides]
        runs = {"imports": ["-c", IMPORTS], "machine": doctor, "config": [*doctor, *given]}
        rows = {name: measure(words, options.rounds) for name, words in runs.items()}
        if options.cluster:
            with cluster() as address:
                words = [*doctor, *given, "engine=trinity", f"cluster.ray_address={address}"]
                rows["cluster"] = measure(words, options.rounds)
    imports = rows["imports"][0]
    for name, (wall, processor, last) in rows.items():
        target = f"  target {TARGETS[name]:g} s" if name in TARGETS else ""
        print(
            f"{name:<8} {wall:6.2f} s wall ({wall / imports:.2f}x imports), {processor:5.2f} s of "
            f"processors{target}  [{last}]"
        )
    print(f"load {os.getloadavg()[0]:.1f}")
    return int(any(rows[name][0] > seconds for name, seconds in TARGETS.items() if name in rows))


if __name__ == "__main__":
    sys.exit(main())
