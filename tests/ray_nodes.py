"""A Ray cluster of several nodes on one machine, whose processes cannot see one folder.

Each node is `ray start` behind bubblewrap with an empty file system over that folder: what a
driver keeps there is not to be opened by any worker, as on machines of their own. Works for
ordinary users wherever bubblewrap does. The nodes have loopback addresses of their own, so that
nothing is reached by being on the same machine. A token guards the cluster.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
START_SECONDS = 240.0


@dataclass(frozen=True)
class Nodes:
    """A running cluster. `environment` is that of a driver that may join it."""

    address: str
    dashboard: str
    environment: dict[str, str]
    temp: Path
    """Where Ray keeps its sessions: logs among them."""
    elsewhere: Path
    """That of the last node, which has it under a path that is nothing on this machine."""

    def files_with(self, text: str) -> list[str]:
        """Files of Ray's that hold a text."""
        found = []
        for path in (*self.temp.rglob("*"), *self.elsewhere.rglob("*")):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink() and text.encode() in path.read_bytes():
                    found.append(str(path))
        return found


@contextlib.contextmanager
def ray_nodes(hidden: Path, workers: int = 2) -> Iterator[Nodes]:
    """A head without processors and `workers` nodes with four each; `hidden` is hidden there."""
    temp = Path(tempfile.mkdtemp(prefix="aft-", dir="/tmp"))  # sockets want short paths
    ports = _free_ports()
    port, dashboard = next(ports), next(ports)
    (temp / "token").write_text(secrets.token_hex(16))
    environment = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("AFLOW_TUNE", "RAY_")) and name != "PYTHONPATH"
    }
    environment |= {
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(temp / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
    }
    head = ["--head", f"--port={port}", "--num-cpus=0", f"--temp-dir={temp}/ray"]
    head += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    head += ["--include-dashboard=true", f"--ray-client-server-port={next(ports)}"]
    joined = [f"--address=127.0.0.1:{port}", "--num-cpus=4"]
    other = Path(tempfile.mkdtemp(prefix="aft-", dir="/tmp"))
    other.chmod(0o755)
    disk, mounted = other / "disk", other / "there"
    for folder in (disk, mounted):
        folder.mkdir(mode=0o700)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(workers + 1):
            own = [*(joined if number else head), f"--node-ip-address=127.0.0.{number + 1}"]
            own += [f"--dashboard-agent-listen-port={next(ports)}"]
            own += ["--object-store-memory=100000000", "--block", "--disable-usage-stats"]
            wall = ["bwrap", "--dev-bind", "/", "/", "--tmpfs", str(hidden), "--chdir", "/"]
            if number == workers:
                wall += ["--dev-bind", str(disk), str(mounted)]
                own += [f"--temp-dir={mounted}/ray"]
            with (temp / f"node{number}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [*wall, "--", *RAY, "start", *own],
                        env=environment,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            # One after the other: two that start at once take the same names for sockets.
            _wait_for(_has_started(temp / f"node{number}.log"), processes, temp)
        _wait_for(_accepts(dashboard), processes, temp)
        (temp / "own").mkdir()  # so that a command looks for no other Ray of this machine
        path = f"{ROOT}:{ROOT / 'tests'}"
        yield Nodes(
            f"127.0.0.1:{port}",
            f"http://127.0.0.1:{dashboard}",
            {**environment, "PYTHONPATH": path, "RAY_TMPDIR": f"{temp}/own"},
            temp / "ray",
            disk,
        )
    finally:
        for process in reversed(processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in reversed(processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            _end_children(environment["RAY_AUTH_TOKEN_PATH"])
        for folder in (temp, other):
            shutil.rmtree(folder, ignore_errors=True)


def _end_children(token: str) -> None:
    """End what is left of this cluster: its processes have the token's path around them."""
    needle = f"RAY_AUTH_TOKEN_PATH={token}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def _accepts(port: int) -> Callable[[], bool]:
    def connects() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    return connects


def _has_started(log: Path) -> Callable[[], bool]:
    return lambda: b"Ray runtime started" in log.read_bytes()


def _wait_for(
    ready: Callable[[], bool], processes: list[subprocess.Popen[bytes]], temp: Path
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if ready():
            return
        if any(process.poll() is not None for process in processes):
            break
        time.sleep(0.2)
    logs = "".join(path.read_text()[-2000:] for path in temp.glob("node*.log"))
    raise RuntimeError(f"the test cluster did not start:\n{logs}")


def _free_ports() -> Iterator[int]:
    """Ports that nobody has, each once: above those of Ray's workers, and below those that the
    system gives to anybody's connections before a node gets as far as listening."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4  # each has ports of its own
    first = 20_000 + 3_000 * worker
    for port in secrets.SystemRandom().sample(range(first, first + 3_000), 1000):
        try:
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            continue
        yield port
