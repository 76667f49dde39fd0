"""What a person sees while a run goes on: a live panel, or plain lines.

The panel lives in the command's process and only reads (see `progress.py`). On a terminal it
redraws itself in place; in a notebook, a pipe or a log it prints one line for each event. It is
no part of the run: nothing that goes wrong here, a closed terminal included, may harm it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from aflow_tune.report.progress import Progress, RunFollower, StepState, read_progress

__all__ = ["Panel", "read_progress"]

_INTERVAL_SECONDS = 0.5
_SIGN_OF_LIFE_SECONDS = 30.0
"""How often a log is told how far a long evaluation is."""
_CHATTY = ("rolling out", "training")
"""Phases that change twice a step: a log has a line for each step already."""
_BARS = "▁▂▃▄▅▆▇█"


class Panel:
    """`with Panel(run_dir, total_steps) as panel: panel.phase("rolling out")`.

    Args:
        run_dir: the run folder.
        total_steps: the step that the run will end at.
        console: where to draw; None for standard output.
        held_out_items: items of each held-out task set, to show how far the first evaluation is.
    """

    def __init__(
        self,
        run_dir: Path,
        total_steps: int,
        console: Any = None,
        held_out_items: Mapping[str, int] | None = None,
    ) -> None:
        from rich.console import Console

        self.run_dir = run_dir
        self.total = total_steps
        self.console = console or Console()
        self.live: Any = None
        self._follower = RunFollower(
            run_dir, total_steps, since=time.time(), sizes=held_out_items, logs=True
        )
        self._phase = "starting"
        self._own_warning: str | None = None
        self._started = time.monotonic()
        self._steps_began = time.time()
        self._rolled_out = False
        self._last_sign = self._started
        self._first_step: int | None = None
        self._printed: set[tuple[str, int | str]] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="panel", daemon=True)

    def phase(self, text: str) -> None:
        """Say what is going on now."""
        self._phase = text
        if text.startswith("rolling out") and not self._rolled_out:
            self._rolled_out, self._steps_began = True, time.time()
        if self.live is None and text not in _CHATTY:
            self._print(text)

    def warn(self, text: str) -> None:
        """Show a warning until a later one takes its place."""
        self._own_warning = text
        if self.live is None:
            self._print(f"warning: {text}")

    def __enter__(self) -> Panel:
        with _harmless():
            self._remember_the_past()
        with _harmless():
            if (
                self.console.is_terminal
                and not self.console.is_jupyter
                and not self.console.is_dumb_terminal
            ):
                from rich.live import Live

                live = Live(console=self.console, refresh_per_second=4, transient=False)
                live.start()
                self.live = live
        with contextlib.suppress(RuntimeError):  # no more threads: the final state is still shown
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        with contextlib.suppress(RuntimeError):
            self._thread.join(timeout=5)
        self._phase = "done" if error is None else "stopped"
        self._update()
        if self.live is not None:
            with _harmless():
                self.live.stop()
        elif error is None:
            self._print("done")

    def _remember_the_past(self) -> None:
        """What a resumed run logged before is not news."""
        progress = self._follower.update()
        self._first_step = progress.step
        self._printed |= {("step", state.step) for state in progress.steps}
        self._printed |= {
            (name, step) for name, points in progress.held_out.items() for step, _ in points
        }

    def _follow(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            self._update()

    def _update(self) -> None:
        with _harmless(), self._lock:
            progress = self._follower.update()
            if self.live is not None:
                self.live.update(self._render(progress))
            else:
                self._print_lines(progress)

    def _left(self, progress: Progress) -> str | None:
        if progress.step >= progress.total:
            return None
        seconds = progress.seconds_left(time.time(), self._steps_began, self._first_step or 0)
        return None if seconds is None else _clock(seconds)

    def _now(self, progress: Progress) -> str:
        """The phase, with what the files tell beyond it."""
        text = self._phase
        if progress.evaluated_now:
            size = f" of {progress.evaluated_of}" if progress.evaluated_of else ""
            return f"evaluating: {progress.evaluated_now}{size} items"
        if "rolling out and training" in text:
            if progress.rolled_out > progress.step:
                return f"training on step {progress.rolled_out}"
            if progress.step < progress.total:
                return f"rolling out step {progress.step + 1}"
        return text

    def _render(self, progress: Progress) -> Any:
        from rich.panel import Panel as Box
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("now", Text(self._now(progress), style="bold"))
        step = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(1, progress.total), completed=progress.step, width=24)
        step.add_row(f"{progress.step} of {progress.total}", bar)
        table.add_row("step", step)
        losses = {state.step: state.loss for state in progress.steps if state.loss is not None}
        label, number = "reward", _reward(progress.reward, progress.health)
        if progress.reward is None and losses:
            label, number = "loss", f"{losses[max(losses)]:.4g}"
        values = losses if label == "loss" else progress.rewards
        trend = "" if self.console.options.ascii_only else _sparkline(values)
        table.add_row(label, Text(f"{number}  {trend}".rstrip()))
        if progress.valid_graphs is not None:
            table.add_row("valid graphs", f"{progress.valid_graphs:.0%}")
        for name, points in progress.held_out.items():
            table.add_row("held-out", Text(f"{_held_out(points)}  [{name}]"))
        if progress.failures:
            table.add_row("failed runs", Text(_failures(progress.failures), style="yellow"))
        if progress.tokens_per_second:
            table.add_row("sampling", f"{progress.tokens_per_second:.0f} tokens/s")
        left = self._left(progress)
        elapsed = _clock(time.monotonic() - self._started)
        table.add_row("time", elapsed + (f", about {left} left" if left else ""))
        warning = self._own_warning or progress.warning
        if warning:
            table.add_row("warning", Text(_shortened(warning, 200), style="yellow"))
        return Box(table, title="aflow-tune", subtitle=Text(self.run_dir.name), expand=False)

    def _print_lines(self, progress: Progress) -> None:
        for name, points in progress.held_out.items():
            for step, value in points:
                self._once((name, step), f"held-out {value:.3f} at step {step} [{name}]")
        for state in progress.steps:
            if ("step", state.step) not in self._printed:
                self._once(("step", state.step), self._step_line(state, progress))
        quiet = time.monotonic() - self._last_sign
        if progress.evaluated_now and quiet > _SIGN_OF_LIFE_SECONDS:
            self._print(self._now(progress))
        if progress.warning:
            self._once(
                ("warning", progress.warning), f"warning: {_shortened(progress.warning, 200)}"
            )

    def _step_line(self, state: StepState, progress: Progress) -> str:
        parts = [f"step {state.step}/{progress.total}"]
        if state.reward is not None:
            parts.append(f"reward {_reward(state.reward, state.health)}")
        elif state.loss is not None:
            parts.append(f"loss {state.loss:.4g}")
        if state.valid_graphs is not None:
            parts.append(f"valid graphs {state.valid_graphs:.0%}")
        parts += [f"held-out {_held_out(p)}" for p in progress.held_out.values() if p]
        if state.failures:
            parts.append(f"failed {_failures(state.failures)}")
        if state.tokens_per_second:
            parts.append(f"{state.tokens_per_second:.0f} tok/s")
        left = self._left(progress)
        return "  ".join(parts) + (f", {left} left" if left else "")

    def _once(self, key: tuple[str, int | str], text: str) -> None:
        if key not in self._printed:
            self._printed.add(key)
            self._print(text)

    def _print(self, text: str) -> None:
        """One line with the time since the start."""
        self._last_sign = time.monotonic()
        line = f"[{_clock(time.monotonic() - self._started)}] {text}"
        with _harmless():
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
            if self.console.file is sys.stdout:
                sys.stdout.flush()


def _harmless() -> contextlib.suppress:
    """Keeps what goes wrong in showing from the run.

    SystemExit is what rich raises when the reader of a pipe went away (`aflow-tune ... | head`),
    after it sent the rest of standard output to nowhere.
    """
    return contextlib.suppress(Exception, SystemExit)


def _reward(reward: float | None, health: Mapping[str, float]) -> str:
    if reward is None:
        return "-"
    shares = ", ".join(f"{share:.0%} {kind}" for kind, share in health.items())
    return f"{reward:.3f}" + (f" ({shares})" if shares else "")


def _held_out(points: Sequence[tuple[int, float]]) -> str:
    if not points:
        return "-"
    first, last = points[0], points[-1]
    if len(points) == 1:
        return f"{first[1]:.3f}"
    return f"{first[1]:.3f} -> {last[1]:.3f}"


def _failures(failures: Mapping[str, float]) -> str:
    return ", ".join(f"{count:.0f} {kind}" for kind, count in sorted(failures.items()))


def _sparkline(values: Mapping[int, float], width: int = 24) -> str:
    """The latest values as a row of bars from the lowest to the highest."""
    latest = [values[step] for step in sorted(values)][-width:]
    if len(latest) < 2:
        return ""
    low, high = min(latest), max(latest)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in latest)


def _shortened(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
