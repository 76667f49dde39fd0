"""What a person sees while a run goes on: a live panel, or plain lines.

The panel lives in the command's process and only reads: it follows `metrics.jsonl` and the
evaluation records, which explorer and trainer write wherever they are. Nothing that goes
wrong here may harm the run.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from aflow_tune.report.evaluation import load_evaluations
from aflow_tune.report.metrics import read_metrics

_INTERVAL_SECONDS = 0.5


@dataclass
class Progress:
    """The state of a run as its files tell it."""

    step: int = 0
    total: int = 0
    reward: float | None = None
    mixed: float | None = None
    all_best: float | None = None
    all_worst: float | None = None
    tokens_per_second: float | None = None
    failures: dict[str, float] = field(default_factory=dict)
    held_out: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    evaluated_now: int = 0


def read_progress(run_dir: Path, total: int) -> Progress:
    """Read the files of a run."""
    progress = Progress(total=total)
    whole = set()
    for line in read_metrics(run_dir):
        metrics = line.metrics
        for key in metrics:
            if key.startswith("eval/") and key.endswith("/finished_task_count"):
                whole.add((key.split("/")[1], line.step))
        if "actor/grad_norm" in metrics:
            progress.step = max(progress.step, line.step)
        progress.reward = metrics.get("rollout/reward/mean", progress.reward)
        for name in ("mixed", "all_best", "all_worst"):
            key = f"experience_pipeline/group/frac_{name}"
            setattr(progress, name, metrics.get(key, getattr(progress, name)))
        progress.tokens_per_second = metrics.get(
            "rollout/tokens_per_second", progress.tokens_per_second
        )
        for key, value in metrics.items():
            if key.startswith("rollout/failure/"):
                kind = key.split("/")[2]
                progress.failures[kind] = progress.failures.get(kind, 0.0) + value
    for name, steps in load_evaluations(run_dir).items():
        points = []
        for step, evaluation in steps.items():
            interval = evaluation.interval()
            if interval is not None and (name, step) in whole:
                points.append((step, interval.mean))
            elif (name, step) not in whole:
                progress.evaluated_now = evaluation.items
        progress.held_out[name] = points
    return progress


class Panel:
    """`with Panel(run_dir, total_steps) as panel: panel.phase("rolling out")`."""

    def __init__(self, run_dir: Path, total_steps: int, console: Any = None) -> None:
        from rich.console import Console

        self.run_dir = run_dir
        self.total = total_steps
        self.console = console or Console()
        self.live: Any = None
        self._phase = "starting"
        self._started = time.monotonic()
        self._first_step: int | None = None
        self._printed: set[tuple[str, int]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="panel", daemon=True)

    def phase(self, text: str) -> None:
        """Say what is going on now."""
        self._phase = text
        if self.live is None and text not in ("rolling out", "training"):
            self._print(f"[{_clock(time.monotonic() - self._started)}] {text}")

    def __enter__(self) -> Panel:
        from rich.live import Live

        if self.console.is_terminal and not self.console.is_jupyter:
            self.live = Live(console=self.console, refresh_per_second=4, transient=False)
            self.live.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._phase = "done" if error is None else "stopped"
        self._update()
        if self.live is not None:
            self.live.stop()

    def _follow(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            self._update()

    def _update(self) -> None:
        with contextlib.suppress(Exception):
            progress = read_progress(self.run_dir, self.total)
            if self._first_step is None:
                self._first_step = progress.step
            if self.live is not None:
                self.live.update(self._render(progress))
            else:
                self._print_lines(progress)

    def _left(self, progress: Progress) -> str:
        done = progress.step - (self._first_step or 0)
        if done < 1:
            return "-"
        elapsed = time.monotonic() - self._started
        return _clock(elapsed / done * (progress.total - progress.step))

    def _render(self, progress: Progress) -> Any:
        from rich.panel import Panel as Box
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        bar = ProgressBar(total=max(1, progress.total), completed=progress.step, width=30)
        counted = f", {progress.evaluated_now} items evaluated" if progress.evaluated_now else ""
        table.add_row("now", self._phase + counted)
        table.add_row("step", f"{progress.step} of {progress.total}")
        table.add_row("", bar)
        table.add_row("reward", _reward(progress))
        for name, points in progress.held_out.items():
            table.add_row(name, _held_out(points))
        if progress.failures:
            table.add_row("failed runs", _failures(progress.failures), style="yellow")
        if progress.tokens_per_second:
            table.add_row("sampling", f"{progress.tokens_per_second:.0f} tokens/s")
        elapsed = _clock(time.monotonic() - self._started)
        table.add_row("time", f"{elapsed}, about {self._left(progress)} left")
        return Box(table, title="aflow-tune", subtitle=str(self.run_dir), expand=False)

    def _print_lines(self, progress: Progress) -> None:
        for name, points in progress.held_out.items():
            for step, value in points:
                self._once((name, step), f"held-out {name} at step {step}: {value:.3f}")
        if progress.step and progress.step > (self._first_step or 0):
            speed = progress.tokens_per_second
            parts = [f"step {progress.step}/{progress.total}", f"reward {_reward(progress)}"]
            parts += [f"{speed:.0f} tokens/s"] if speed else []
            parts += [f"failed {_failures(progress.failures)}"] if progress.failures else []
            parts += [f"{self._left(progress)} left"]
            self._once(("step", progress.step), ", ".join(parts))

    def _once(self, key: tuple[str, int], text: str) -> None:
        if key not in self._printed:
            self._printed.add(key)
            self._print(f"[{_clock(time.monotonic() - self._started)}] {text}")

    def _print(self, text: str) -> None:
        with contextlib.suppress(Exception):
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
            sys.stdout.flush()


def _reward(progress: Progress) -> str:
    if progress.reward is None:
        return "-"
    text = f"{progress.reward:.3f}"
    if progress.mixed is not None:
        text += (
            f" (groups: {progress.mixed:.0%} mixed, {progress.all_best or 0:.0%} all best, "
            f"{progress.all_worst or 0:.0%} all worst)"
        )
    return text


def _held_out(points: list[tuple[int, float]]) -> str:
    if not points:
        return "-"
    first, last = points[0], points[-1]
    if first == last:
        return f"{first[1]:.3f} at step {first[0]}"
    return f"{first[1]:.3f} at step {first[0]} -> {last[1]:.3f} at step {last[0]}"


def _failures(failures: dict[str, float]) -> str:
    return ", ".join(f"{count:.0f} {kind}" for kind, count in sorted(failures.items()))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
