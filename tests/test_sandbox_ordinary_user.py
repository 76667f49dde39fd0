"""The attacks again, with an ordinary user as the parent: no step may need root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aflow_tune.sandbox import view

HERE = Path(__file__).parent
USER = "64999"


@pytest.mark.slow
def test_the_sandbox_holds_for_an_ordinary_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("not root: test_sandbox_attacks.py has done it")
    nsenter, setpriv = shutil.which("nsenter"), shutil.which("setpriv")
    if nsenter is None or setpriv is None:
        pytest.skip("nsenter and setpriv (Debian package util-linux) are not there")
    prefix = [setpriv, f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"]
    passed: tuple[int, ...] = ()
    if view.needs_staging():
        try:
            passed = (view.stage(),)
        except view.StagingFailed as error:
            pytest.skip(f"another user cannot reach the interpreter: {error}")
        prefix = [nsenter, f"--mount=/proc/self/fd/{passed[0]}", "--", *prefix]

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, sys.executable, "-B", *words],
            pass_fds=passed,
            env={"PATH": os.defpath, "HOME": "/nonexistent"},
            cwd=HERE.parent,
            capture_output=True,
            text=True,
            check=False,
        )

    reachable = python("-c", "import aflow_tune.sandbox, psutil, pytest")
    if reachable.returncode != 0:
        pytest.skip(f"another user cannot run this checkout: {reachable.stderr.strip()[-300:]}")
    settings = ("-p", "no:cacheprovider", "-o", "addopts=--strict-markers", "-rs")
    ended = python("-m", "pytest", *settings, str(HERE / "test_sandbox_attacks.py"))
    assert ended.returncode == 0, ended.stdout[-6000:]
    assert " passed" in ended.stdout
    if " here: " in ended.stdout:
        pytest.skip(f"an ordinary user lacks a backend here: {ended.stdout[-600:]}")
