"""How far an evaluation is: a bar for each column on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

_LINE_SECONDS = 15.0
"""How often a log is told how far a column is."""


class EvalProgress:
    """Says what is measured. Use as a context manager.

    Args:
        console: a rich console; where the result goes elsewhere, that of standard error.
    """

    def __init__(self, console: Any) -> None:
        self.console = console
        self._bars: Any = None

    def __enter__(self) -> EvalProgress:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

            self._bars = Progress(
                "{task.description}",
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def column(self, name: str, total: int, done: int) -> Iterator[Callable[[], None]]:
        """While a column is measured; the function given is called after each run.

        `done` of the `total` runs have a record from an earlier command.
        """
        if done:
            self.say(f"{name}: {done} of {total} runs are there from an earlier command")
        started = said = time.monotonic()
        count = done
        bar = None
        if self._bars is not None and done < total:
            bar = self._bars.add_task(name.replace("[", "\\["), total=total, completed=done)

        def advance() -> None:
            nonlocal count, said
            count += 1
            if bar is not None:
                self._bars.advance(bar)
            elif count < total and time.monotonic() - said > _LINE_SECONDS:
                said = time.monotonic()
                self.say(f"{name}: {count} of {total} runs")

        yield advance
        if done < total:
            self.say(f"{name}: {total - done} runs in {time.monotonic() - started:.1f} s")
