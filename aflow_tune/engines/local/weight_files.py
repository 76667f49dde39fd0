"""What the headers of safetensors files say, without reading a weight.

A file is eight bytes (the header's length, little-endian), the header in JSON, and the data;
each tensor's `data_offsets` count from the end of the header.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_LONGEST_HEADER = 100 << 20


def header_of(file: Path) -> dict[str, Any] | None:
    """The header of a safetensors file, which names every tensor; None where there is none."""
    found = _read(file)
    return None if found is None else found[0]


def damage_of(file: Path) -> str:
    """What is wrong with a safetensors file, in words; empty where it is as long as it says."""
    found = _read(file)
    if found is None:
        return f"{file.name} has no header that can be read"
    header, length = found
    ends = [item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"]
    wanted, size = 8 + length + max(ends, default=0), file.stat().st_size
    return "" if size >= wanted else f"{file.name} has {size:,} of its {wanted:,} bytes"


def _read(file: Path) -> tuple[dict[str, Any], int] | None:
    """The header and its length in bytes."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _LONGEST_HEADER:
                return None
            header = json.loads(opened.read(length))
    except (OSError, struct.error, ValueError):
        return None
    if not isinstance(header, dict) or not all(_is_tensor(*item) for item in header.items()):
        return None
    return header, length


def _is_tensor(name: str, described: Any) -> bool:
    if name == "__metadata__":
        return True
    ends = described.get("data_offsets") if isinstance(described, dict) else None
    return isinstance(ends, list) and len(ends) == 2 and all(isinstance(it, int) for it in ends)
