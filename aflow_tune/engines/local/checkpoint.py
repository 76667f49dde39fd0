"""Checkpoints that are there whole or not at all.

A checkpoint is a folder of safetensors files, a `state.json`, and a manifest with the size and the
SHA-256 of every file. It is written beside its place under a temporary name, every file and folder
is fsynced, and one rename makes it appear. Reading checks every hash first. What the tensors mean
is left to the trainer. torch is imported only by what reads or writes tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.errors import AflowTuneError, disk_fault

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
STATE = "state.json"
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
        try:
            found = file.stat().st_size
            if found != size:
                raise CheckpointError(f"{file}: {found} bytes, expected {size}")
            if sha256_of(file) != digest:
                raise CheckpointError(f"{file}: the content does not match its SHA-256")
        except OSError as error:
            raise CheckpointError(f"{file}: missing or unreadable ({error.strerror})") from error
    return list(files)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(target: Path, write: Callable[[Path], None]) -> None:
    """Create the folder `target` by `write(temporary folder)`, or leave things as they were.

    An existing `target` is replaced; a crash between the two renames leaves the old one
    under a name that starts with a dot. Left-overs of earlier crashes are removed.

    Raises:
        CheckpointError: the disk is full, read-only or broken.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left_over in target.parent.glob(f".{target.name}.tmp-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    temporary = target.parent / f".{target.name}.tmp-{os.getpid()}"
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    try:
        temporary.mkdir()
        write(temporary)
        for path in (*temporary.rglob("*"), temporary):
            _fsync(path)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old, ignore_errors=True)
        _fsync(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        problem = disk_fault(error)
        if problem is None:
            raise
        free = shutil.disk_usage(target.parent).free
        raise CheckpointError(
            f"{target} could not be written: {problem}. {free:,} bytes are free there now."
        ) from error


def write_checkpoint(
    target: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> None:
    """Write `tensors` (one file a group) and the JSON `state` as the checkpoint `target`."""
    from safetensors.torch import save_file

    def write(folder: Path) -> None:
        for name, group in tensors.items():
            flat = {key: t.detach().to("cpu").contiguous() for key, t in group.items()}
            save_file(flat, str(folder / f"{name}.safetensors"))
        (folder / STATE).write_text(json.dumps(state, indent=1, sort_keys=True))
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in sorted(folder.iterdir())
        }
        manifest = {"format": FORMAT, "files": files}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))

    write_atomically(target, write)


def read_checkpoint(
    path: Path, *, expected_weights: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors by group and the state of a verified checkpoint.

    With `expected_weights`, names and shapes of the group 'weights' must match. Raises
    CheckpointError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    names = verify_checkpoint(path)
    try:
        tensors = {
            name.removesuffix(".safetensors"): load_file(str(path / name))
            for name in names
            if name.endswith(".safetensors")
        }
        state = json.loads((path / STATE).read_text())
    except (OSError, SafetensorError) as error:  # taken away since it was checked
        raise CheckpointError(f"{path}: {error}") from error
    if expected_weights is not None:
        found = {name: tuple(tensor.shape) for name, tensor in tensors["weights"].items()}
        expected = {name: tuple(tensor.shape) for name, tensor in expected_weights.items()}
        odd = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
        if odd:
            raise CheckpointError(
                f"{path}: holds other weights than this model and adapter have: {len(odd)} differ, "
                f"first {odd[0]!r}: {found.get(odd[0])}, expected {expected.get(odd[0])}"
            )
    return tensors, state


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
