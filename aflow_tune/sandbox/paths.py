"""What of this machine a sandboxed program may read: a system to run Python on, nothing else.

The interpreter is the one that runs us, without its environment: the base installation's
executable, libraries and standard library, whatever installed packages lie beside them left
out. Nothing of /etc but the linker's cache, nothing of /home, /root, /var, /run or the project.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/bin")
_LINKS = ("/lib", "/lib32", "/lib64", "/bin")
_DATA = ("/usr/share/zoneinfo", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class SystemPaths:
    """Paths of this machine, by what is done with them. All exist; folders count as trees."""

    python: str
    """The base interpreter's executable, with links resolved."""
    trees: tuple[str, ...]
    """Readable: files and folders, none inside another."""
    links: tuple[tuple[str, str], ...]
    """Symbolic links of a merged /usr: path, target as written."""
    packages: tuple[str, ...]
    """Folders of installed packages inside `trees`, to be hidden."""


@functools.cache
def system_paths() -> SystemPaths:
    """Look once; a process keeps its interpreter."""
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    trees = [path for path in (*_SYSTEM, *_DATA) if os.path.exists(path)]
    links = []
    for path in _LINKS:
        if os.path.islink(path):
            links.append((path, os.readlink(path)))
        elif os.path.isdir(path):
            trees.append(path)
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    wanted = [python, *_libraries(library)]
    trees += [path for path in wanted if not any(_inside(path, tree) for tree in trees)]
    folders = {library, library.parent / "python3", Path("/usr/lib/python3"), Path("/usr/lib64")}
    packages = {
        str(folder / name) for folder in folders for name in _PACKAGES if (folder / name).is_dir()
    }
    return SystemPaths(python, tuple(dict.fromkeys(trees)), tuple(links), tuple(sorted(packages)))


def readable_by_others(path: str) -> bool:
    """Whether a user without any rights of its own can reach and read this path."""
    for place in [*Path(path).parents]:
        if not place.stat().st_mode & stat.S_IXOTH:
            return False
    return bool(os.stat(path).st_mode & stat.S_IROTH)


def closed_folder_above(path: str) -> str | None:
    """The outermost folder above a path that others may not enter; None where all may be."""
    for place in reversed(Path(path).parents):
        if not place.stat().st_mode & stat.S_IXOTH:
            return str(place)
    return None


def _libraries(library: Path) -> list[str]:
    """The standard library, and the folder of the shared libraries that came with it."""
    own = library.parent
    system = {"/usr/lib", "/usr/lib64", "/lib", "/lib64"}
    return [str(library)] if str(own) in system else [str(own)]


def _inside(path: str, tree: str) -> bool:
    return path == tree or path.startswith(tree + "/")
