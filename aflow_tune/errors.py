"""The errors that a user can meet, and the exit code of the command for each.

Every refusal names the place, what was expected, what was found and what to do; all faults of one
input are reported together. Any other exception is a defect and shows a traceback.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """How the command ended."""

    DONE = 0
    """The trainer reached its target step and the last checkpoint loads."""
    FAILED = 1
    """The run stopped before its target; the reason is printed last."""
    BAD_INPUT = 2
    """A configuration, function, data set or command line was refused; nothing was started."""
    INTERRUPTED = 3
    """Ctrl-C or SIGTERM: the state is saved, the same command resumes."""
    BUDGET = 4
    """A limit of the configuration was reached; the state is saved."""
    ALREADY_FINISHED = 5
    """The run folder holds a finished run of this configuration; nothing was started."""


@dataclass(frozen=True)
class Fault:
    """One fault of an input. `where`: `file:line`, a key path, or both; `cure`: what to do."""

    where: str
    expected: str
    found: str
    cure: str

    def __str__(self) -> str:
        lines = [f"expected: {self.expected}", f"found:    {self.found}", f"do:       {self.cure}"]
        return "\n    ".join([self.where, *lines])


class AflowTuneError(Exception):
    """Base class of all errors of this package."""

    exit_code: ExitCode = ExitCode.FAILED


class BadInput(AflowTuneError, ValueError):
    """An input was refused. Carries every fault found, not just the first."""

    exit_code = ExitCode.BAD_INPUT

    def __init__(self, title: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(title, tuple(faults))
        self.title, self.faults = title, tuple(faults)

    @classmethod
    def of(cls, title: str, where: str, expected: str, found: str, cure: str) -> BadInput:
        """A refusal with one fault; the other arguments are those of `Fault`."""
        return cls(title, [Fault(where, expected, found, cure)])

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"{i}. {one}" for i, one in enumerate(self.faults, 1))])


class RunFailed(AflowTuneError, RuntimeError):
    """Training stopped before its target. The first cause is in the message."""


class Interrupted(AflowTuneError):
    exit_code = ExitCode.INTERRUPTED


class BudgetReached(AflowTuneError):
    exit_code = ExitCode.BUDGET


class AlreadyFinished(AflowTuneError):
    exit_code = ExitCode.ALREADY_FINISHED


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_RUST = re.compile(r"\(os error (\d+)\)|\bOs \{ code: (\d+)")  # how Rust prints errno


def disk_fault(error: BaseException) -> str | None:
    """The system's message for a disk that is full, read-only or broken; None for other errors."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, sqlite3.OperationalError):
        code = getattr(error, "sqlite_errorcode", 0)
        full = code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
        return f"{error} (the run's record of spend)" if full else None
    if type(error).__module__.startswith(("safetensors", "tokenizers")):
        told = _RUST.search(str(error))
        number = number if told is None else int(told[1] or told[2])
    if number not in _NO_ROOM:
        return None
    place = getattr(error, "filename", None)
    return os.strerror(number) + (f": {place}" if place else "")
