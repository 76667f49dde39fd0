"""Files that survive a killed process: replaced atomically, or appended to line by line.

Several processes may append to one file; only one at a time may replace it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file atomically: temporary name, fsync, rename. Makes the folder. Text is written as
    UTF-8, a lone surrogate as `?`. OSError: the file is unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode(errors="replace"))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1, sort_keys=True))


def as_line(entry: Mapping[str, Any]) -> bytes:
    """`entry` as one line of JSON, newline included. What JSON does not know becomes its `str`."""
    text = json.dumps(entry, ensure_ascii=False, default=str)
    # A model can write a lone surrogate; it becomes its JSON escape.
    return text.encode(errors="backslashreplace") + b"\n"


def append_line(path: Path, line: bytes) -> None:
    """Append in one write, so that lines of concurrent writers never mix; makes the folder.
    OSError: the line could not be written whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(descriptor, line)
    finally:
        os.close(descriptor)
    if written < len(line):
        raise OSError(f"only {written} of {len(line)} bytes fitted into {path}")


def drop_torn_line(path: Path) -> None:
    """Cut off a last line without a newline, which a killed writer left; call before appending."""
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
