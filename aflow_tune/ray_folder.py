"""The temporary folder of a Ray, which nobody but its user may enter.

Ray unpacks a run's code there and lets everybody write into the folders that it makes, with every
worker that starts anew: whoever gets there can replace what workers import next. So a Ray of ours
has its folder below one with mode 0700, and a Ray that is joined is looked at before code is sent.

Ray's sockets are in that folder too. Their paths have 107 bytes at most, and Ray takes only ASCII.

As a program it makes the folder and prints what `ray start --temp-dir` is given on a host.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from pathlib import Path

from aflow_tune.errors import BadInput, Fault

_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/dash_TaskEventsHead"
"""The longest of those that Ray opens below its RAY_TMPDIR."""
_PATH_BYTES = 107
_PLAIN = re.compile(r"[\w/.,+=@~-]+", re.ASCII)
"""Nothing that has a meaning in the lists of paths and the command lines that Ray makes."""
_UNMAPPED = 65534
"""Who owns what belongs to users that a container does not know."""
_SYSTEM = "/tmp"


def ray_base() -> tuple[Path, str]:
    """What RAY_TMPDIR is for a Ray of ours, made or not, and why it is elsewhere than that variable
    or TMPDIR says ('' where it is not).

    What they say is taken as it is where nobody else may enter; otherwise it is a folder in there
    that is the user's alone.
    """
    name, told = _told()
    base = Path(os.path.abspath(Path(told).expanduser()))
    own = f"ray-{os.getuid()}"
    closed = not os.path.exists(base) or open_to_others(base) is None
    chosen = base if closed else base / own
    if len(os.fsencode(chosen)) + len(_SOCKET) > _PATH_BYTES:
        why = f"is too long for the paths of sockets ({_PATH_BYTES} bytes)"
    elif not _PLAIN.fullmatch(str(chosen)):
        why = "has a space or other characters that Ray does not take in a path"
    else:
        return chosen, ""
    return Path(_SYSTEM, own), f"{name}={told} {why}"


def make_ray_base() -> Path:
    """The folder of `ray_base`, made where it is missing.

    Raises:
        BadInput: it cannot be made, or others could change what is in it.
    """
    base, _ = ray_base()
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(base)
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if ours and open_to_others(base):  # made by a shell, or by an earlier Ray
            base.chmod(0o700)
        problem = open_to_others(base)
        if problem is None and not os.access(base, os.W_OK | os.X_OK):
            problem = f"nothing can be written into {base}"
    except OSError as error:
        problem = f"{base}: {error.strerror}"
    if problem is None:
        return base
    name, told = _told()
    where = f"{name}={told}" if name else told
    expected = "a folder for Ray's files that no other user can change"
    cure = "export RAY_TMPDIR=FOLDER, a short path of a folder of yours with mode 0700"
    raise BadInput("Ray has no place for its files.", [Fault(where, expected, problem, cure)])


def ray_folders() -> list[str]:
    """Where the Ray that runs here may have written down its address: Ray's own folder, then that
    of `aflow-tune cluster up`."""
    from ray._private.utils import get_ray_address_file

    ours = str(ray_base()[0] / "ray")
    return list(dict.fromkeys([os.path.dirname(get_ray_address_file(None)), ours]))


def open_to_others(folder: str | Path) -> str | None:
    """How another user of this machine could change what is in a folder; None: in no way.

    A folder on the way has to keep others out, and nobody else may be able to put another one in
    its place. What is below it does not matter.
    """
    folder = Path(os.path.abspath(folder))
    for path in (*reversed(folder.parents), folder):
        found = os.lstat(path)
        if found.st_uid not in _trusted():
            return f"{path} belongs to another user"
        if stat.S_ISLNK(found.st_mode):
            return open_to_others(path.parent / os.readlink(path) / folder.relative_to(path))
        if not found.st_mode & 0o011:
            return None
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            return f"other users may write into {path}"
    return f"other users may enter {folder}"


def _trusted() -> set[int]:
    trusted = {0, os.getuid()}
    with contextlib.suppress(OSError), open("/proc/self/uid_map", encoding="ascii") as file:
        if file.read().split() != ["0", "0", str(2**32 - 1)]:
            trusted.add(_UNMAPPED)
    return trusted


def _told() -> tuple[str, str]:
    for name in ("RAY_TMPDIR", "TMPDIR"):
        if told := os.environ.get(name):
            return name, told
    return "", _SYSTEM


if __name__ == "__main__":
    try:
        print(make_ray_base() / "ray")
    except BadInput as refused:
        sys.exit(str(refused))
