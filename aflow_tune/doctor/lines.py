"""Lines, and checks that are run side by side, each within its time.

A check that raises or does not end is one faulty line and never keeps the others from being
told. Checks run in daemon threads: what hangs is left behind when the command ends.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from aflow_tune.contract.import_faults import package_fault
from aflow_tune.errors import BadInput, Fault

T = TypeVar("T")
GIB = 2**30
CHECK_THREAD = "doctor-"
"""How the names of the threads that look begin; one that is alive at the end hangs."""


class State(StrEnum):
    """How a line counts. Only a fault keeps a run from going well."""

    OK = "ok"
    NOTE = "note"
    FAULT = "fault"


@dataclass(frozen=True)
class Line:
    """One thing that was looked at.

    `cure` is a command or a setting; every fault has one. `given`: what is wrong is something
    that the user wrote (configuration, data, a key), not the machine.
    """

    check: str
    state: State
    found: str
    cure: str = ""
    given: bool = False

    def __post_init__(self) -> None:
        if self.state is State.FAULT and not self.cure:
            raise ValueError(f"a fault without a cure: {self.check}: {self.found}")

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "check": self.check,
            "state": self.state.value,
            "found": self.found,
            "cure": self.cure,
            "given": self.given,
        }


@dataclass(frozen=True)
class Check:
    """A name, what to do, and the seconds that it may take."""

    name: str
    look: Callable[[], Sequence[Line]]
    seconds: float = 20.0


class Once(Generic[T]):
    """A value that is made by the first who asks, while the others wait for it.

    If it could not be made, everybody gets the same exception.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: list[T] = []
        self._error: Exception | None = None

    def __call__(self) -> T:
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._made:
                try:
                    self._made.append(self._make())
                except Exception as error:
                    self._error = error
                    raise
            return self._made[0]


def ok(check: str, found: str) -> Line:
    """A line that is fine."""
    return Line(check, State.OK, found)


def note(check: str, found: str, cure: str = "") -> Line:
    """A line worth knowing."""
    return Line(check, State.NOTE, found, cure)


def fault(check: str, found: str, cure: str, *, given: bool = False) -> Line:
    """A line that keeps a run from going well."""
    return Line(check, State.FAULT, found, cure, given)


def line_of(check: str, found: Fault) -> Line:
    """The fault of an input as a line."""
    text = f"{found.where}: {found.found} (expected: {found.expected})"
    return fault(check, text, found.cure or "correct this", given=True)


def run_checks(checks: Sequence[Check]) -> Iterator[list[Line]]:
    """The lines of each check, in the order of the checks, as soon as they are there."""
    answers: list[queue.SimpleQueue[list[Line]]] = []
    started = time.monotonic()
    for check in checks:
        answer: queue.SimpleQueue[list[Line]] = queue.SimpleQueue()
        answers.append(answer)
        name = CHECK_THREAD + check.name
        threading.Thread(target=_run, args=(check, answer), name=name, daemon=True).start()
    for check, answer in zip(checks, answers, strict=True):
        left = started + check.seconds - time.monotonic()
        try:
            yield answer.get(timeout=max(left, 0.01))
        except queue.Empty:
            yield [
                fault(
                    check.name,
                    f"no answer within {check.seconds:g} s",
                    "run `aflow-tune doctor` again when the machine is less busy; if it stays, "
                    "what this check looks at hangs",
                )
            ]


def _run(check: Check, answer: queue.SimpleQueue[list[Line]]) -> None:
    try:
        lines = list(check.look())
    except BadInput as error:
        lines = [line_of(check.name, found) for found in error.faults]
        lines = lines or [fault(check.name, error.title, "correct this", given=True)]
    except BaseException as error:
        answer.put(_crashed(check, error))
        return
    answer.put(lines)


def _crashed(check: Check, error: BaseException) -> list[Line]:
    broken = package_fault(error)
    if broken is not None:
        return [fault(check.name, f"{broken.where}: {broken.found}", broken.cure)]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return [
        fault(
            check.name,
            f"the check itself failed: {type(error).__name__}: {' '.join(str(error).split())} "
            f"({Path(place.filename).name}:{place.lineno})",
            "report this line as a defect of aflow-tune; the other lines stand",
        )
    ]


def size(count: float) -> str:
    """Bytes for people."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
