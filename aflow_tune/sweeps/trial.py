"""A trial under way, its runs, and what starts one.

What the exit code of a run means is said here; what to do about it is `sweep.py`'s matter, and
what its folder holds is read by `scores.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from aflow_tune.errors import BadInput, ExitCode
from aflow_tune.runs.folder import read_state
from aflow_tune.runs.process import RunProcess, last_words, own_program
from aflow_tune.sweeps.study import TrialRecord

_WELL = (ExitCode.DONE, ExitCode.ALREADY_FINISHED, ExitCode.BUDGET)
"""A run that reached a limit of its `budget` counts with what it came to within it."""
_NO_FAILURE = (*_WELL, ExitCode.INTERRUPTED)


class Process(Protocol):
    """A run that was started."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def stop(self) -> None:
        """Ask it to save and stop; a second time: to stop at once."""


class Starter(Protocol):
    """Starts runs: `aflow-tune` with these arguments, what it prints appended to a file."""

    def start(self, arguments: Sequence[str], output: Path) -> Process:
        """Start one."""


class LocalStarter:
    """Runs as processes of this machine.

    Args:
        program: what stands for `aflow-tune`.
    """

    def __init__(self, program: Sequence[str] | None = None) -> None:
        self.program = list(program or own_program())

    def start(self, arguments: Sequence[str], output: Path) -> Process:
        """Start one."""
        return RunProcess([*self.program, *arguments], output)


@dataclass(eq=False)
class Run:
    """One run of a trial.

    `code` is None until it has ended; `asked`: it was told to stop; `held`: an earlier process is
    still at work in its folder. `scores`: by step, as last read when its metrics were as `seen`.
    """

    folder: Path
    arguments: list[str]
    output: Path
    process: Process | None = None
    code: int | None = None
    asked: bool = False
    held: bool = False
    started: float = 0.0
    seen: tuple[int, int] = (0, 0)
    scores: dict[int, float] = field(default_factory=dict)

    @property
    def going(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.code is None

    @property
    def waiting(self) -> bool:
        """Whether it may be started."""
        return self.process is None and self.code is None and not self.held

    @property
    def well(self) -> bool:
        """Whether it has ended with what it was to do."""
        return self.code in _WELL

    @property
    def failed(self) -> bool:
        """Whether it failed by itself; killed by a signal is not failed."""
        ended = self.code is not None and self.code > 0 and self.code not in _NO_FAILURE
        return ended and not self.asked

    def start(self, starter: Starter) -> None:
        """Start its process."""
        self.process = starter.start(self.arguments, self.output)
        self.started = time.monotonic()

    def look(self) -> float:
        """Notice its end; the seconds that it took if it is noticed now, else 0."""
        if self.process is None or self.code is not None:
            return 0.0
        self.code = self.process.poll()
        return 0.0 if self.code is None else time.monotonic() - self.started

    def ask(self, *, again: bool = False) -> None:
        """Ask it to save and stop; `again`: to stop at once."""
        if self.going and self.process is not None and (again or not self.asked):
            self.asked = True
            self.process.stop()

    def reason(self) -> str:
        """Why it failed: in its own words, or the last that it printed."""
        try:
            state = read_state(self.folder)
        except BadInput:
            state = None
        said = state.error if state is not None and state.status == "failed" else None
        said = said or last_words(self.output) or f"exit code {self.code}"
        return f"{said} ({self.output})"

    def note_earlier_end(self) -> None:
        """Take a run that reached its target in an earlier command as ended; a chain of stages
        is left to its own command to say so."""
        try:
            state = read_state(self.folder)
        except BadInput:
            return
        if state is not None and state.status == "finished":
            self.code = int(ExitCode.DONE)


@dataclass(eq=False)
class Trial:
    """A trial under way. `seconds`: of its runs together, in earlier commands too."""

    record: TrialRecord
    runs: list[Run]
    reported: set[int]
    seconds: float = 0.0
    pruned: bool = False
    failed: str | None = None

    @property
    def number(self) -> int:
        """Its number in the study."""
        return self.record.number

    @property
    def ending(self) -> bool:
        """Whether nothing more of it is to be begun."""
        return self.pruned or self.failed is not None

    @property
    def over(self) -> bool:
        """Whether nothing of it is going on, and nothing more will be begun."""
        if any(run.going or run.held for run in self.runs):
            return False
        return self.ending or all(run.code is not None for run in self.runs)

    def look(self) -> None:
        """Notice the ends of its runs."""
        for run in self.runs:
            self.seconds += run.look()

    def ask(self, *, again: bool = False) -> None:
        """Ask its runs to save and stop."""
        for run in self.runs:
            run.ask(again=again)
