"""The lines that `doctor` prints, and running its checks concurrently, each with a time limit.

A check that raises or hangs becomes one faulty line; the other checks are still reported. A thread
that hangs is abandoned when the command ends.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from aflow_tune.contract.import_faults import package_fault
from aflow_tune.errors import BadInput, Fault

T = TypeVar("T")
CHECK_THREAD = "doctor-"
"""Name prefix of the checks' threads; one that is still alive at the end hangs."""


class State(StrEnum):
    """The severity of a line. Only a fault stops a run from working."""

    OK = "ok"
    NOTE = "note"
    FAULT = "fault"


@dataclass(frozen=True)
class Line:
    """One finding of a check.

    `cure` is a command or a setting; every fault has one. `given`: the fault is in something that
    the user wrote (configuration, data, a key), not in the machine.
    """

    check: str
    state: State
    found: str
    cure: str = ""
    given: bool = False


@dataclass(frozen=True)
class Check:
    """A check: its name, a function that returns its lines, and its time limit in seconds."""

    name: str
    look: Callable[[], Sequence[Line]]
    seconds: float = 20.0


def ok(check: str, found: str) -> Line:
    return Line(check, State.OK, found)


def note(check: str, found: str, cure: str = "") -> Line:
    return Line(check, State.NOTE, found, cure)


def fault(check: str, found: str, cure: str, *, given: bool = False) -> Line:
    return Line(check, State.FAULT, found, cure, given)


def lacking(needed: bool | None, check: str, found: str, cure: str) -> Line:
    """A fault if this is `needed`, else a note."""
    return fault(check, found, cure) if needed else note(check, found, cure)


def line_of(check: str, found: Fault, *, given: bool = True) -> Line:
    """A fault of an input as a line."""
    text = f"{found.where}: {found.found} (expected: {found.expected})"
    return fault(check, text, found.cure or "correct this", given=given)


def begun(make: Callable[[], T]) -> Future[T]:
    """Call a function in a thread of its own."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=CHECK_THREAD)
    future = pool.submit(make)
    pool.shutdown(wait=False)
    return future


def run_checks(checks: Sequence[Check]) -> Iterator[list[Line]]:
    """Start all checks; yields the lines of each, in the order of the checks."""
    started = time.monotonic()
    answers = [begun(check.look) for check in checks]
    for check, answer in zip(checks, answers, strict=True):
        left = started + check.seconds - time.monotonic()
        try:
            error = answer.exception(max(left, 0.01))
        except TimeoutError:
            cure = "run `aflow-tune doctor` again; if it stays, what this check looks at hangs"
            yield [fault(check.name, f"no answer within {check.seconds:g} s", cure)]
            continue
        yield list(answer.result()) if error is None else _lines_of(check.name, error)


def _lines_of(check: str, error: BaseException) -> list[Line]:
    if isinstance(error, BadInput):
        title = fault(check, error.title, "correct this")
        return [line_of(check, found) for found in error.faults] or [title]
    if (broken := package_fault(error)) is not None:
        return [line_of(check, broken, given=False)]
    place = traceback.extract_tb(error.__traceback__)[-1]
    told = f"{type(error).__name__}: {' '.join(str(error).split())}"
    found = f"the check itself failed: {told} ({Path(place.filename).name}:{place.lineno})"
    return [fault(check, found, "report this line as a defect of aflow-tune")]
