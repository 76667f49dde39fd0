"""Types of the sandbox: its backends, the limits of a program, and how a program ended."""

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
    """A plain subprocess under the limits alone, not confined. Used only if configured."""


class Ending(StrEnum):
    """How a program ended. The value is what traces and metrics hold."""

    FINISHED = "finished"  # by itself, with exit status 0
    FAILED = "failed"  # any other way: exit status, signal, killed for disk, processes or messages
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    TOO_MUCH_OUTPUT = "too_much_output"


class BackendFailed(Exception):
    """A sandbox could not be built or failed its check, so no program was run in it."""


class SandboxUnavailable(AflowTuneError, RuntimeError):
    """No sandbox could be built here, so the program was not run. The message says why."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program. Times are in seconds; MB are 2**20 bytes, KB are 2**10."""

    seconds: float = 15.0
    """Wall-clock time; then the whole process tree is killed."""
    cpu_seconds: float | None = None
    """Processor time of each process, rounded up. None: `seconds` + 1."""
    memory_mb: int = 512
    """Resident memory of all processes, shared pages counted once. Each may map 64 MB more."""
    disk_mb: int = 64
    """Size of its private folder, which also holds the program itself."""
    output_kb: int = 1024
    """Of stdout, of stderr, and of each message on a channel."""
    processes: int = 32
    """Processes and threads at once, including the first."""
    open_files: int = 64


@dataclass(frozen=True)
class Execution:
    """The result of one program. Output is decoded as UTF-8; undecodable bytes are replaced."""

    ending: Ending
    exit_code: int | None
    """None if the sandbox killed it; -N if signal N ended it."""
    stdout: str
    stderr: str
    level: Level
    seconds: float
    """From sending the program to the sandbox until it ended."""
    limits_hit: tuple[str, ...] = ()
    """The limits that were reached, as names of fields of `Limits`."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit status 0."""
        return self.ending is Ending.FINISHED

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, for `--json`."""
        told = {"outcome": self.ending.value, **vars(self), "level": self.level.value}
        del told["ending"]
        return told | {"limits_hit": list(self.limits_hit), "seconds": round(self.seconds, 4)}
