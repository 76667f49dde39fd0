"""The size and SHA-256 of every file of a checkpoint, in its `manifest.json`: the check of it.

Imports no torch: whoever only wants to know whether a checkpoint is whole need not wait for it.
Writing and reading the tensors is left to `checkpoint.py`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from aflow_tune.errors import AflowTuneError

MANIFEST = "manifest.json"
FORMAT = 1


class CheckpointError(AflowTuneError, ValueError):
    """A checkpoint is missing, damaged, or of another model. The message says which file."""


def verify_checkpoint(path: Path) -> list[str]:
    """Check sizes and hashes; returns the file names. Raises CheckpointError."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = {
            str(name): (int(of["bytes"]), str(of["sha256"]))
            for name, of in dict(manifest["files"]).items()
        }
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not a checkpoint, {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path / MANIFEST}: unreadable ({error})") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path / MANIFEST}: format {manifest.get('format')}, expected {FORMAT}"
        )
    for name, (size, digest) in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file}: {file.stat().st_size} bytes, expected {size}")
        try:
            found = sha256_of(file)
        except OSError as error:
            raise CheckpointError(f"{file}: unreadable ({error.strerror})") from error
        if found != digest:
            raise CheckpointError(f"{file}: the content does not match its SHA-256")
    return sorted(files)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
