"""Our own Ray: on loopback, quiet, and gone with the command, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sandbox_outside import alive

from aflow_tune.find_ray import open_to_others

SCRIPT = """
import os, sys, time
import ray
from aflow_tune.cluster.local_ray import local_ray

with local_ray("test/space", {"GIVEN": "1"}):
    @ray.remote
    class Actor:
        def environment(self):
            return os.environ.get("GIVEN"), os.getpid()
    actor = Actor.remote()
    folder = ray._private.worker.global_worker.node.get_temp_dir_path()
    print(*ray.get(actor.environment.remote()), folder, flush=True)
    if sys.argv[1] == "wait":
        time.sleep(120)
"""


def _process(pid: int) -> set[psutil.Process]:
    """The process, unless it has ended; known by its start too, as numbers are given again."""
    try:
        return {psutil.Process(pid)}
    except psutil.NoSuchProcess:
        return set()


def _left(processes: set[psutil.Process], seconds: float) -> set[psutil.Process]:
    """Those of the processes that still run after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := {each for each in processes if alive(each)}) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _listening(process: psutil.Process) -> list[str]:
    """The addresses that the process listens on; none if it has ended meanwhile."""
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, None])
def test_a_ray_of_ours_is_closed_to_others_and_leaves_no_process_behind(
    ending: signal.Signals | None, shared: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "wait" if ending else "end"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},
    )
    assert process.stdout is not None
    given, actor, folder = process.stdout.readline().split()
    assert given == "1"
    assert Path(folder).is_relative_to(shared)
    assert open_to_others(folder) is None
    processes = _process(int(actor))
    if ending is not None:
        # The watchdog notes the session's processes once a second, and later on a busy machine.
        time.sleep(5)
        processes |= set(psutil.Process(process.pid).children(recursive=True))
        listening = [address for each in processes for address in _listening(each)]
        assert listening
        assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        process.send_signal(ending)
    process.wait(120)
    assert _left(processes, 60) == set()
