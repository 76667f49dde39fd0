"""What is sent into a sandbox: the code of its inside, a module to be loaded in advance, and one
program with its limits."""

from __future__ import annotations

import functools
import importlib.util
import marshal
import math
from dataclasses import dataclass
from types import CodeType
from typing import Any

from aflow_tune.sandbox.types import Limits


class WallFailed(Exception):
    """The wall does not stand, so no program was run. The text says why."""


@functools.cache
def code_of(name: str) -> CodeType:
    """The compiled code of a module, from its cache where there is one. `name` may leave out
    this package."""
    try:
        spec = importlib.util.find_spec(name if "." in name else f"aflow_tune.sandbox.{name}")
    except ModuleNotFoundError:
        spec = None
    code = spec.loader.get_code(spec.name) if spec and spec.loader else None  # type: ignore[attr-defined]
    if not isinstance(code, CodeType):
        raise WallFailed(f"the code of {name} is missing from this installation")
    return code


@functools.cache
def inside_code() -> bytes:
    """What a new sandbox runs first, for an interpreter of our version."""
    return marshal.dumps((code_of("_watch"), code_of("_inside")))


@dataclass
class Job:
    """One program and what it may use."""

    source: str
    stdin: str
    limits: Limits
    files: dict[str, str]
    channel: bool

    def message(self) -> dict[str, Any]:
        """What the inside is told."""
        limits = self.limits
        # By default the clock ends it first, as its limit is the one that was set.
        cpu = limits.seconds + 1 if limits.cpu_seconds is None else limits.cpu_seconds
        files = {**self.files, "main.py": self.source}
        return {
            "files": {name: _bytes(text) for name, text in files.items()},
            "stdin": _bytes(self.stdin),
            "channel": code_of("_channel_inside") if self.channel else None,
            "limits": {
                "seconds": limits.seconds,
                "cpu_seconds": math.ceil(cpu),
                "memory_mb": limits.memory_mb,
                "disk_mb": limits.disk_mb,
                "processes": limits.processes,
                "open_files": limits.open_files,
            },
        }


def _bytes(text: str) -> bytes:
    # A model's text may hold half a surrogate pair; the program's reader is to complain.
    return text.encode("utf-8", "surrogatepass")


def framed(message: dict[str, Any]) -> bytes:
    """A message as `_inside.receive` takes it."""
    body = marshal.dumps(message)
    return len(body).to_bytes(4, "big") + body
