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
from collections.abc import Sequence
from pathlib import Path

from aflow_tune.sandbox.paths import closed_folder_above, readable_by_others, system_paths

_CLONE_NEWNS = 0x0002_0000
_RDONLY, _NOSUID, _NODEV, _REMOUNT = 1, 2, 4, 32
_BIND, _MOVE, _REC, _PRIVATE = 4096, 8192, 16384, 1 << 18


class StagingFailed(Exception):
    """The view cannot be made; the text says why."""


def needs_staging(folders: Sequence[str] = ()) -> bool:
    """Whether an unprivileged user could not read the interpreter, or one of these, where it is."""
    wanted = (system_paths().python, *folders)
    return os.geteuid() == 0 and not all(map(readable_by_others, wanted))


def stage(folders: Sequence[str] = ()) -> int:
    """Make the view.

    Args:
        folders: to be in it beside the interpreter.

    Returns:
        A descriptor of its mount namespace, for `nsenter --mount=/proc/self/fd/N`.

    Raises:
        StagingFailed: this root may not mount, or a tool is missing.
    """
    prefix = os.path.realpath(sys.base_prefix)
    hidden = [path for path in (system_paths().python, *folders) if not readable_by_others(path)]
    tops = {closed_folder_above(path) for path in hidden}
    closed = tops.pop()
    if closed is None:
        raise StagingFailed(f"{hidden[0]} is not readable by other users")
    if tops:
        raise StagingFailed(f"{', '.join(hidden)} lie in different folders that are closed")
    shown = [prefix] if system_paths().python in hidden else []
    shown += [path for path in folders if path in hidden and not path.startswith(f"{prefix}/")]
    if shutil.which("nsenter") is None:
        raise StagingFailed("nsenter (Debian package util-linux) is not there")
    made: list[int] = []
    errors: list[OSError] = []

    def make() -> None:
        try:
            made.append(_make(shown, closed))
        except OSError as error:
            errors.append(error)

    # A mount namespace is a thread's own; this one enters it and ends.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if errors:
        raise StagingFailed(f"it lies in {closed}, which others may not enter: {errors[0]}")
    return made[0]


def _make(shown: Sequence[str], closed: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        words = [word.encode() for word in (source, target, kind)]
        if libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None) != 0:
            raise OSError(ctypes.get_errno(), f"mount on {target} is refused")

    kept = [(path, tempfile.mkdtemp(prefix="aflow-tune-stage-")) for path in shown]
    try:
        if libc.unshare(_CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "a mount namespace is refused")
        mount("none", "/", "", _REC | _PRIVATE)
        for path, meanwhile in kept:
            mount(path, meanwhile, "", _BIND)
        mount("none", closed, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")
        for path, meanwhile in kept:
            place = Path(closed)
            for part in Path(path).relative_to(closed).parts:
                place /= part
                place.mkdir(exist_ok=True)
                place.chmod(0o755)
            mount(meanwhile, path, "", _MOVE)
            mount("none", path, "", _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
        mount("none", closed, "", _REMOUNT | _RDONLY | _NOSUID | _NODEV, "mode=755")
        return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for _, meanwhile in kept:
            Path(meanwhile).rmdir()
