"""The vocabulary of the sandbox: which backend, which limits, how a program ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from aflow_tune.errors import AflowTuneError


class Level(StrEnum):
    """The backends, strongest first."""

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"
    UNSAFE_SUBPROCESS = "unsafe_subprocess"
    """A plain subprocess: only time and memory are limited. Used only if configured."""


class Ending(StrEnum):
    """How a program ended. The value is its word in traces and metrics."""

    FINISHED = "finished"  # by itself, with exit status 0
    FAILED = "failed"  # by itself otherwise, or by a signal of its own making
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    TOO_MUCH_OUTPUT = "too_much_output"


class BackendFailed(Exception):
    """A sandbox cannot be built or does not hold, so no program was run in it."""


class SandboxUnavailable(AflowTuneError, RuntimeError):
    """No sandbox can be built here, so the program was not run. Says how to get one."""


@dataclass(frozen=True)
class Limits:
    """What one program may use. Times in seconds, sizes in MB or KB as named."""

    seconds: float = 15.0
    """Wall-clock time, after which the whole tree of processes is killed."""
    cpu_seconds: float | None = None
    """Processor time of each process, rounded up. None: a second more than `seconds`."""
    memory_mb: int = 512
    """Of all its processes together, what they share counted once; and what each may map."""
    disk_mb: int = 64
    """What it may write to its private folder, its own text included."""
    output_kb: int = 1024
    """Of stdout, of stderr and of a channel's message, each."""
    processes: int = 32
    """Processes and threads at once, its first included."""
    open_files: int = 64


@dataclass(frozen=True)
class Execution:
    """One program that was run. Output is decoded as UTF-8, what cannot be is replaced."""

    ending: Ending
    exit_code: int | None
    """None where it was killed; a negative number is a signal's."""
    stdout: str
    stderr: str
    level: Level
    seconds: float
    """From the moment that the sandbox got the program until it ended."""
    limits_hit: tuple[str, ...] = ()
    """Names of fields of `Limits`."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit status 0. Not whether its output is right."""
        return self.ending is Ending.FINISHED

    def to_json(self) -> dict[str, Any]:
        """For `--json` and traces."""
        told = {"outcome": self.ending.value, **vars(self), "level": self.level.value}
        del told["ending"]
        return told | {"limits_hit": list(self.limits_hit), "seconds": round(self.seconds, 4)}
