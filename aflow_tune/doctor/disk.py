"""Room on disk: is there some, can it be written, is it as much as the run will write?

A file is really written, synced and removed: free space alone does not tell of quotas, rights
or a full table of files.
"""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import shutil
from pathlib import Path

from aflow_tune.doctor.lines import GIB, Line, fault, note, ok, size

PROBE_BYTES = 1 << 20
_LITTLE = GIB
"""Less free space than this is said, whatever the run writes."""


def check_folder(check: str, folder: Path, needed: float | None, move: str) -> list[Line]:
    """Whether `folder` (or what will hold it) can take `needed` bytes.

    Args:
        needed: None where it is not known what will be written.
        move: how another folder is chosen, as it is typed.
    """
    folder = Path(os.path.abspath(folder.expanduser()))
    there = folder
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            return [fault(check, f"{there}: a file, where a folder is needed", move)]
        free = shutil.disk_usage(there).free
        _write(there)
    except OSError as error:
        return [_unwritable(check, folder, there, error, move)]
    found = f"{folder}: {size(free)} free"
    if needed is not None:
        found += f", about {size(needed)} will be written"
    if needed is not None and needed > free:
        return [fault(check, found, f"free {size(needed - free)} there, or {move}")]
    if free < _LITTLE:
        return [note(check, found, f"free some there, or {move}")]
    return [ok(check, found)]


def _unwritable(check: str, folder: Path, there: Path, error: OSError, move: str) -> Line:
    """`there` is the nearest folder above `folder` that exists, as far as can be seen."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        found = f"{there}: nothing more can be written ({reason})"
        return fault(
            check, found, f"free some room there (`df -h {shlex.quote(str(there))}`), or {move}"
        )
    found = f"{folder}: cannot be written ({there}: {reason})"
    if error.errno not in (errno.EACCES, errno.EPERM):
        return fault(check, found, move)
    name = shlex.quote(str(folder))
    return fault(check, found, f"{move}, or sudo mkdir -p {name} && sudo chown $(id -un) {name}")


def _write(folder: Path) -> None:
    path = folder / f".aflow-tune-doctor-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        block, left = secrets.token_bytes(PROBE_BYTES), PROBE_BYTES
        while left:
            left -= os.write(descriptor, block[-left:])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        path.unlink()
