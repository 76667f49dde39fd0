"""One folder with everything that travels, and the table of where it lay here.

`aflow_tune_shipment_<digest>/` holds `manifest.json` and `files/`, in which every file has its
whole path of this machine: whatever a module finds from its own place on (`parents[1]`, a data
file, a sibling) it finds there too. The digest is that of the content, so that the same code is
uploaded once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.shipping.arrival import FILES, MANIFEST, MARK, PREFIX
from aflow_tune.shipping.origin import import_folders
from aflow_tune.shipping.tracing import Trace


def manifest_of(trace: Trace) -> dict[str, Any]:
    """What a worker has to know: module names with their files, import folders, this folder."""
    roots = {str(folder) for folder in trace.folders}
    for place in trace.modules.values():
        roots |= {str(folder) for folder in place.folders or ()}
    return {
        "modules": {
            name: [
                None if place.file is None else str(place.file),
                None if place.folders is None else [str(folder) for folder in place.folders],
            ]
            for name, place in sorted(trace.modules.items())
        },
        "folders": [str(folder) for folder in [*import_folders(), *trace.folders]],
        "roots": sorted(roots | {str(path.parent) for path in trace.files}),
        "cwd": str(Path.cwd()),
    }


def write_bundle(
    trace: Trace,
    folder: Path,
    extra: Mapping[str, bytes] | None = None,
    secrets: Mapping[str, str] | None = None,
) -> Path:
    """Copy what `trace` found into a new folder of `folder`; returns that folder.

    Args:
        extra: further files beside the manifest, by name.
        secrets: values, by the names of their variables, that no file may hold: clusters keep
            what is uploaded to them on disk.

    Raises:
        BadInput: a file could not be read, or holds a secret.
        OSError: the copy could not be written.
    """
    faults: list[Fault] = []
    never = secrets or {}
    manifest = json.dumps(manifest_of(trace), indent=1, sort_keys=True).encode()
    parts = {MANIFEST: manifest, **(extra or {})}
    digest = hashlib.sha256()
    growing = folder / f".growing-{os.getpid()}"
    (growing / FILES).mkdir(parents=True)
    for name, content in sorted(parts.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
        (growing / name).write_bytes(content)
    for path in sorted(trace.files):
        try:
            content = path.read_bytes()
        except OSError as error:
            cure = "make it readable, or leave it out: `runtime_env: {exclude: [...]}`"
            faults.append(Fault(str(path), "a file that can be read", str(error), cure))
            continue
        faults += secrets_in(content, never, str(path), "take the key out of the file")
        digest.update(f"{path}\0".encode() + hashlib.sha256(content).digest())
        copy = growing / FILES / str(path).lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
        if path.stat().st_mode & 0o100:  # a program that the code starts
            copy.chmod(copy.stat().st_mode | 0o100)
    if faults:
        raise BadInput("The code of this run cannot travel to the workers.", faults)
    # Relative paths of the configuration and the code are from here; archives drop empty folders.
    here = growing / FILES / str(Path.cwd()).lstrip("/")
    here.mkdir(parents=True, exist_ok=True)
    (here / MARK).touch()
    bundle = folder / f"{PREFIX}{digest.hexdigest()[:16]}"
    if not bundle.exists():
        growing.rename(bundle)
    return bundle


def secrets_in(
    content: bytes, secrets: Mapping[str, str], where: str, cure: str
) -> Iterator[Fault]:
    """A fault for every secret whose value is among these bytes; the value is not shown."""
    for name, value in sorted(secrets.items()):
        if value.encode() in content:
            yield Fault(where, "no keys: clusters keep what is sent", f"the value of {name}", cure)
