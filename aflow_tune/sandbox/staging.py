"""As root: a view of the machine in which an unprivileged user can reach the interpreter.

A sandbox started by root gives its ids up before it enters the wall, and an interpreter that is
installed in root's home (pyenv, uv, conda) would then be out of reach. So a mount namespace is
made once for a process, in which the closed folder is covered by an empty one that holds nothing
but the installation, read-only and at its own path. The machine itself is not changed, and the
namespace ends with whoever holds its descriptor.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from aflow_tune.sandbox.paths import closed_folder_above, readable_by_others, system_paths

_SCRIPT = """
set -e
mount --bind "$1" "$3"
mount -t tmpfs -o mode=755,size=1m,nosuid,nodev none "$2"
mkdir -p "$1"
mount --move "$3" "$1"
mount -o remount,bind,ro,nosuid,nodev "$1"
mount -o remount,ro,mode=755 "$2"
echo made
read -r _
"""


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
    unshare, shell = shutil.which("unshare"), shutil.which("sh")
    if unshare is None or shell is None or shutil.which("nsenter") is None:
        raise StagingFailed("unshare and nsenter (Debian package util-linux) are not there")
    meanwhile = tempfile.mkdtemp(prefix="aflow-tune-stage-")
    # A separate process enters a namespace of its own; this one stays where it is.
    maker = subprocess.Popen(
        [
            *(unshare, "--mount", "--propagation", "private", shell, "-c", _SCRIPT, "sh"),
            *(os.path.realpath(sys.base_prefix), closed, meanwhile),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
        start_new_session=True,
    )
    try:
        if maker.stdout is None or maker.stdout.readline() != "made\n":
            reason = maker.stderr.read() if maker.stderr else ""
            raise StagingFailed(f"Python lies in {closed}, and {reason.strip()[-300:]}")
        return os.open(f"/proc/{maker.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        maker.communicate()
        Path(meanwhile).rmdir()
