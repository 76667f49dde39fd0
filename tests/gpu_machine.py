"""Fixtures of a machine with GPUs: the stand-in driver, lock files of its own, real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_nvml
import pytest

from aflow_tune.gpus import claims, processes

OTHER_UID = 54321
"""A user that no process here has."""


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., fake_nvml.Library]]:
    """`machine([Gpu(...), ...])` gives this process these GPUs."""
    locks = tmp_path / "locks"
    locks.mkdir()
    monkeypatch.setattr(claims, "FOLDER", locks)
    # Of a real GPU's device files the test's processes hold none.
    monkeypatch.setattr(processes, "_CONTROL_NODE", tmp_path / "nvidiactl")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "SUDO_UID", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    yield fake_nvml.install
    fake_nvml.uninstall()


class Children:
    """Real processes: each says when it is ready, and all are gone at the end."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[str]] = []

    def start(
        self, code: str = "", *, uid: int | None = None, sleep: bool = True
    ) -> subprocess.Popen[str]:
        """A Python that runs `code`, becomes user `uid`, says that it is ready, and sleeps."""
        text = f"import os, signal, time\n{code}\n"
        text += "" if uid is None else f"os.setresuid(*[{uid}] * 3)\n"
        text += "print('ready', flush=True)\n" + ("time.sleep(600)\n" if sleep else "")
        words = [sys.executable, "-I", "-S", "-c", text]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.all.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    def end(self) -> None:
        for child in self.all:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


@pytest.fixture
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.end()


def alive(child: subprocess.Popen[str]) -> bool:
    """Whether it runs, a moment after a signal would have arrived."""
    time.sleep(0.05)
    return child.poll() is None


COUNTING = """
log = open({path!r}, 'ab', buffering=0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda n, f: log.write(b'%d\\n' % n))
"""
"""Writes down every signal instead of dying of it; unbuffered, since a handler that meets its
own file's buffer in use raises."""

ignoring_sigterm = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be several users")


def was_killed(child: subprocess.Popen[str], number: signal.Signals) -> bool:
    return child.wait(timeout=60) == -number
