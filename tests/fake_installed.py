"""Folders for Python's path that make other versions look installed: real metadata, no code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def install(folder: Path, requires: Sequence[str] = (), /, **versions: str) -> Path:
    """`folder` with a dist-info for each; an underscore stands for a hyphen.

    `requires` becomes the requirements of each.
    """
    for key, version in versions.items():
        name = key.replace("_", "-")
        place = folder / f"{key}-{version}.dist-info"
        place.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (place / "METADATA").write_text("\n".join(lines) + "\n")
    return folder
