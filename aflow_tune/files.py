"""Files that a killed process leaves whole: replaced in one move, or grown line by line.

Several writers may add lines to one file; only one process at a time replaces it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file whole or not at all: temporary name, fsync, rename. Makes the folder. Text
    becomes UTF-8, with a question mark for half of a surrogate pair. OSError: what was there before
    still is."""
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
    """An object as one line of JSON with its line end."""
    text = json.dumps(entry, ensure_ascii=False, default=str)
    # Half of a surrogate pair, which a model can write, becomes JSON's escape of it.
    return text.encode(errors="backslashreplace") + b"\n"


def append_line(path: Path, line: bytes) -> None:
    """Append in one write, so that concurrent writers never mix; makes the folder. OSError: the
    line could not be written whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(descriptor, line)
    finally:
        os.close(descriptor)
    if written < len(line):
        raise OSError(f"only {written} of {len(line)} bytes fitted into {path}")


def drop_torn_line(path: Path) -> None:
    """Cut off a last line that a killed writer left without its end, before more is appended."""
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
