"""The files of this machine that a confined program may read: what Python needs to run.

The interpreter is the one that runs us, without its virtual environment and site-packages. Of /etc
only the linker's cache is readable; of /home, /root, /var and /run at most the interpreter.

A sandbox started by root drops its ids before it is confined, and could then not reach an
interpreter in root's home (pyenv, uv, conda). So a mount namespace is made, once for each set of
packages, in which the closed folder is covered by an empty one that holds only the installation,
read-only and at its own path. It lasts while its descriptor is open.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from aflow_tune.sandbox.types import BackendFailed

_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/bin")
_LINKS = ("/lib", "/lib32", "/lib64", "/bin")
_DATA = ("/usr/share/zoneinfo", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class SystemPaths:
    """Existing paths of this machine that a confined program may read."""

    python: str  # the base interpreter's executable, with links resolved
    trees: tuple[str, ...]  # readable files and folders, none inside another
    links: tuple[tuple[str, str], ...]  # of a merged /usr: path, target as written
    packages: tuple[str, ...]  # folders of installed packages inside `trees`, to be hidden


@functools.cache
def system_paths() -> SystemPaths:
    """The paths for the interpreter that runs us."""
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    trees = [path for path in (*_SYSTEM, *_DATA) if os.path.exists(path)]
    links = []
    for path in _LINKS:
        if os.path.islink(path):
            links.append((path, os.readlink(path)))
        elif os.path.isdir(path):
            trees.append(path)
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    # An installation of its own keeps shared libraries beside the standard library.
    system = str(library.parent) in ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
    for path in (python, str(library if system else library.parent)):
        if not any(path == tree or path.startswith(tree + "/") for tree in trees):
            trees.append(path)
    folders = {library, library.parent / "python3", Path("/usr/lib/python3"), Path("/usr/lib64")}
    packages = {
        str(folder / name) for folder in folders for name in _PACKAGES if (folder / name).is_dir()
    }
    return SystemPaths(python, tuple(dict.fromkeys(trees)), tuple(links), tuple(sorted(packages)))


def _closed_above(path: str) -> str | None:
    """The outermost folder above a path that other users may not enter, or None."""
    above = reversed(Path(path).parents)
    return next((str(place) for place in above if not place.stat().st_mode & stat.S_IXOTH), None)


def _hidden(folders: Sequence[str]) -> list[str]:
    """Those of the interpreter and `folders` that an unprivileged user cannot reach or read."""
    return [
        path
        for path in (system_paths().python, *folders)
        if _closed_above(path) is not None or not os.stat(path).st_mode & stat.S_IROTH
    ]


_CLONE_NEWNS = 0x0002_0000
_RDONLY, _NOSUID, _NODEV, _REMOUNT = 1, 2, 4, 32
_BIND, _MOVE, _REC, _PRIVATE = 4096, 8192, 16384, 1 << 18


@functools.cache
def stage(folders: tuple[str, ...] = ()) -> int | None:
    """A mount namespace in which the program's user can reach the interpreter and `folders`, as a
    descriptor for `nsenter`; None if it can reach them anyway. Raises BackendFailed: mounting is
    refused, `nsenter` is missing, or no one folder covers what is closed."""
    if os.geteuid() != 0 or not _hidden(folders):
        return None
    prefix = os.path.realpath(sys.base_prefix)
    hidden = _hidden(folders)
    tops = {_closed_above(path) for path in hidden}
    closed = tops.pop()
    if closed is None or tops:
        told = "not readable by another user than root, or in different folders"
        raise BackendFailed(f"{', '.join(hidden)}: {told}")
    shown = [prefix] if system_paths().python in hidden else []
    shown += [path for path in folders if path in hidden and not path.startswith(f"{prefix}/")]
    if shutil.which("nsenter") is None:
        raise BackendFailed("nsenter (Debian package util-linux) is not there")
    # A mount namespace belongs to a thread; this thread enters it and ends.
    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(_make, shown, closed).result()
        except OSError as error:
            raise BackendFailed(f"others may not enter {closed}: {error}") from error


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
