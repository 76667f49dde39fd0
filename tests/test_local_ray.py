"""Our own Ray: on loopback, quiet, and gone with the command, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

SCRIPT = """
import os, sys, time
import ray
from aflow_tune.engines.trinity.local_ray import local_ray

with local_ray("test/space", {"GIVEN": "1"}):
    @ray.remote
    class Actor:
        def environment(self):
            return os.environ.get("GIVEN"), os.getpid()
    actor = Actor.remote()
    print(*ray.get(actor.environment.remote()), os.environ["AFLOW_TUNE_RAY_SESSION"], flush=True)
    if sys.argv[1] == "wait":
        time.sleep(120)
"""


def _session_pids(root: int) -> set[int]:
    return {child.pid for child in psutil.Process(root).children(recursive=True)}


def _left(pids: set[int], seconds: float) -> set[int]:
    """Those of the processes that still run after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := {pid for pid in pids if _runs(pid)}) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _listening(pid: int) -> list[str]:
    """The addresses that the process listens on; none if it has ended meanwhile."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, None])
def test_no_ray_process_is_left_behind(ending: signal.Signals | None) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "wait" if ending else "end"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},
    )
    assert process.stdout is not None
    given, actor, _ = process.stdout.readline().split()
    assert given == "1"
    pids = {int(actor)}
    if ending is not None:
        # The watchdog notes the session's processes once a second.
        time.sleep(1.5)
        pids |= _session_pids(process.pid)
        listening = [address for pid in pids for address in _listening(pid)]
        assert listening
        assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        process.send_signal(ending)
    process.wait(60)
    assert _left(pids, 60) == set()
