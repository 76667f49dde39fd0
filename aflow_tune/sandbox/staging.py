"""As root: a view of the machine in which an unprivileged user can reach the interpreter.

A sandbox started by root gives its ids up before it enters the wall, and an interpreter that is
installed in root's home (pyenv, uv, conda) would then be out of reach. So a mount namespace is
made once for a process, in which the closed folder is covered by an empty one that holds nothing
but the installation, read-only and at its own path. The machine itself is not changed, and the
namespace ends with whoever holds its descriptor.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from aflow_tune.sandbox.paths import closed_folder_above, readable_by_others, system_paths

_CLONE_NEWNS = 0x0002_0000
_RDONLY, _NOSUID, _NODEV, _REMOUNT = 1, 2, 4, 32
_BIND, _MOVE, _REC, _PRIVATE = 4096, 8192, 16384, 1 << 18


class StagingFailed(Exception):
    """The view cannot be made; the text says why."""


def needs_staging() -> bool:
    """Whether an unprivileged user could not read the interpreter where it is."""
    return os.geteuid() == 0 and not readable_by_others(system_paths().python)


def stage() -> int:
    """Make the view.

    Returns:
        A descriptor of its mount namespace, for `nsenter --mount=/proc/self/fd/N`.

    Raises:
        StagingFailed: this root may not mount, or a tool is missing.
    """
    closed = closed_folder_above(system_paths().python)
    if closed is None:
        raise StagingFailed(f"{system_paths().python} is not readable by other users")
    if shutil.which("nsenter") is None:
        raise StagingFailed("nsenter (Debian package util-linux) is not there")
    made: list[int] = []
    errors: list[OSError] = []

    def make() -> None:
        try:
            made.append(_make(os.path.realpath(sys.base_prefix), closed))
        except OSError as error:
            errors.append(error)

    # A mount namespace is a thread's own; this one enters it and ends.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if errors:
        raise StagingFailed(f"Python lies in {closed}, which others may not enter: {errors[0]}")
    return made[0]


def _make(prefix: str, closed: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        words = [word.encode() for word in (source, target, kind)]
        if libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None) != 0:
            raise OSError(ctypes.get_errno(), f"mount on {target} is refused")

    meanwhile = tempfile.mkdtemp(prefix="aflow-tune-stage-")
    try:
        if libc.unshare(_CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "a mount namespace is refused")
        mount("none", "/", "", _REC | _PRIVATE)
        mount(prefix, meanwhile, "", _BIND)
        mount("none", closed, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")
        place = Path(closed)
        for part in Path(prefix).relative_to(closed).parts:
            place /= part
            place.mkdir()
            place.chmod(0o755)
        mount(meanwhile, prefix, "", _MOVE)
        mount("none", prefix, "", _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
        mount("none", closed, "", _REMOUNT | _RDONLY | _NOSUID | _NODEV, "mode=755")
        return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        Path(meanwhile).rmdir()
