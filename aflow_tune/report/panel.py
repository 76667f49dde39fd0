"""Shows the progress of a run: a live panel, or plain lines.

`RunFollower` keeps the state of a run by reading what is new in `metrics.jsonl` and the evaluation
records, so it works for every engine. `Panel` runs in the command's process and only reads: on a
terminal it redraws itself in place; in a notebook, a pipe or a log it prints one line per event.
Errors here, such as a closed terminal, must not affect the run.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aflow_tune.report.evaluation import FOLDER, mean_by_item
from aflow_tune.report.metrics import FILE_NAME, LineTail, MetricsLine, parse_line
from aflow_tune.report.quantities import (
    GROUP_HEALTH,
    LOSS,
    REWARD,
    VALID_GRAPHS,
    failure_counts,
    finished_evaluations,
    is_training,
    sampling_speed,
)
from aflow_tune.report.records import EvalRecord, record_files
from aflow_tune.report.statistics import mean

_RECENT_STEPS = 10
_INTERVAL_SECONDS = 0.5
_SIGN_OF_LIFE_SECONDS = 30.0
"""Time between two lines about the progress of a long evaluation, in a log."""
_CHATTY = ("rolling out", "training")
"""Phases that a log leaves out: they change in every step, which has its own line."""
_SPEED, _LOSS = "speed", "loss"
_SHOWN = (REWARD, VALID_GRAPHS, *GROUP_HEALTH.values())


class RunFollower:
    """The state of a run; each `update()` reads only what is new.

    `now` holds the latest metrics by name; `steps` has for each trained step the time it ended
    (seconds since the epoch), its metrics, and its failures by kind. `held_out` has for each task
    set (step, mean score) of the finished evaluations, `evaluating` the number of items that the
    evaluation under way has records of (0: there is none).

    Args:
        since: unfinished evaluations that were not written to after this time (seconds since the
            epoch) are leftovers of a killed run.
    """

    def __init__(self, run_dir: Path, since: float = 0.0) -> None:
        self.run_dir = run_dir
        self.held_out: dict[str, list[tuple[int, float]]] = {}
        self.evaluating = 0
        self._since = since
        self._metrics = LineTail(run_dir / FILE_NAME)
        self._records: dict[tuple[str, int], tuple[LineTail, dict[Any, float | None]]] = {}
        self._forget_metrics()

    def _forget_metrics(self) -> None:
        self.now: dict[str, float] = {}
        self.steps: dict[int, tuple[float, dict[str, float], dict[str, float]]] = {}
        self.rewards: dict[int, float] = {}
        self._finished: set[tuple[str, int]] = set()
        self._failures: dict[int, dict[str, float]] = {}

    @property
    def step(self) -> int:
        """The last trained step; 0 before the first."""
        return max(self.steps, default=0)

    @property
    def failures(self) -> dict[str, float]:
        """Failed rollouts of training by kind."""
        totals: Counter[str] = Counter()
        for failures in self._failures.values():
            totals.update(failures)
        return dict(totals)

    def update(self) -> RunFollower:
        """Read what is new; returns itself."""
        lines, anew = self._metrics.read()
        if anew:
            self._forget_metrics()
        for line in filter(None, map(parse_line, lines)):
            self._take(line)
        self._read_records()
        return self

    def _take(self, line: MetricsLine) -> None:
        metrics, step = line.metrics, line.step
        self._finished |= {(name, step) for name in finished_evaluations(metrics)}
        if failures := failure_counts(metrics):
            self._failures[step] = failures
        if REWARD in metrics:
            self.rewards[step] = metrics[REWARD]
        self.now |= {name: metrics[name] for name in _SHOWN if name in metrics}
        if (speed := sampling_speed(metrics)) is not None:
            self.now[_SPEED] = speed
        if is_training(line) and step > 0:
            for name in [name for name in LOSS if name in metrics][:1]:
                self.now[_LOSS] = metrics[name]
            # `now` may already hold the reward of the next step.
            of_step = {REWARD: self.rewards[step]} if step in self.rewards else {}
            self.steps[step] = line.time, self.now | of_step, self._failures.get(step, {})

    def _read_records(self) -> None:
        folder = self.run_dir / FOLDER
        for step, path in record_files(folder):
            key = path.parent.relative_to(folder).as_posix(), step
            self._records.setdefault(key, (LineTail(path), {}))
        self.held_out, self.evaluating = {}, 0
        for (name, step), (tail, scores) in sorted(self._records.items(), key=lambda it: it[0]):
            lines, anew = tail.read()
            if anew:
                scores.clear()
            for text in lines:
                with contextlib.suppress(ValueError):
                    record = EvalRecord.from_line(text)
                    scores[record.item, record.run] = record.score
            points = self.held_out.setdefault(name, [])
            if (name, step) in self._finished:
                means = mean_by_item((item, score) for (item, _), score in scores.items())
                if means:
                    points.append((step, mean(list(means.values()))))
            elif scores and tail.path.exists() and tail.path.stat().st_mtime >= self._since:
                self.evaluating = len({item for item, _ in scores})


class Panel:
    """`with Panel(run_dir, total_steps) as panel: panel.phase("rolling out")`.

    Args:
        total_steps: the last step of the run.
        console: a `rich.console.Console`; None: standard output.
    """

    def __init__(self, run_dir: Path, total_steps: int, console: Any = None) -> None:
        from rich.console import Console

        self.run_dir, self.total = run_dir, total_steps
        self.console = console or Console()
        self.live: Any = None
        self._began = time.time()
        self._run = RunFollower(run_dir, since=self._began)
        self._phase = "starting"
        self._last_sign = self._began
        self._printed: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="panel", daemon=True)

    def phase(self, text: str) -> None:
        """Set the current phase, and print it where there is no live panel."""
        self._phase = text
        if self.live is None and text not in _CHATTY:
            self._print(text)

    def __enter__(self) -> Panel:
        with _harmless():  # do not print what a resumed run logged before
            run = self._run.update()
            self._printed |= {("step", step) for step in run.steps}
            self._printed |= {(name, step) for name, of in run.held_out.items() for step, _ in of}
        with _harmless():
            console = self.console
            if console.is_terminal and not console.is_jupyter and not console.is_dumb_terminal:
                from rich.live import Live

                live = Live(console=console, refresh_per_second=4, transient=False)
                live.start()
                self.live = live
        with contextlib.suppress(RuntimeError):  # no thread: the final state is still shown
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop.set()
        with contextlib.suppress(RuntimeError):
            self._thread.join(timeout=5)
        self._phase = "done" if error is None else "stopped"
        self.update()
        if self.live is not None:
            with _harmless():
                self.live.stop()
        elif error is None:
            self._print("done")

    def _follow(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            self.update()

    def update(self) -> None:
        """Read what is new and show it."""
        with _harmless(), self._lock:
            self._run.update()
            if self.live is not None:
                self.live.update(self.render())
            else:
                self._print_lines()

    def _left(self) -> str:
        """A text with the time left; "" if unknown."""
        ended = {step: at for step, (at, *_) in self._run.steps.items() if at >= self._began}
        seconds = seconds_left(ended, self.total, time.time())
        return "" if seconds is None else f", about {clock(seconds)} left"

    def _now(self) -> str:
        """The phase, made more precise from the files."""
        run = self._run
        if run.evaluating:
            return f"evaluating: {run.evaluating} items done"
        rolled_out = max(run.rewards, default=0)
        if "rolling out and training" in self._phase and rolled_out > run.step:
            return f"training on step {rolled_out}"
        return self._phase

    def render(self) -> Any:
        """The live panel as a rich renderable."""
        from rich.panel import Panel as Box
        from rich.table import Table
        from rich.text import Text

        run = self._run
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("now", Text(self._now(), style="bold"))
        table.add_row("step", f"{run.step} of {self.total}")
        for label, told in self._figures(run.now, run.failures):
            table.add_row(label, Text(told, style="yellow" if label == "failed" else ""))
        table.add_row("time", clock(time.time() - self._began) + self._left())
        return Box(table, title="aflow-tune", subtitle=Text(self.run_dir.name), expand=False)

    def _print_lines(self) -> None:
        run = self._run
        for name, points in run.held_out.items():
            for step, value in points:
                self._once((name, step), f"held-out {value:.3f} at step {step} [{name}]")
        for step, (_, metrics, failures) in list(run.steps.items()):
            if ("step", step) not in self._printed:
                told = [f"{label} {text}" for label, text in self._figures(metrics, failures)]
                line = "  ".join([f"step {step}/{self.total}", *told])
                self._once(("step", step), line + self._left())
        if run.evaluating and time.time() - self._last_sign > _SIGN_OF_LIFE_SECONDS:
            self._print(self._now())

    def _figures(
        self, metrics: Mapping[str, float], failures: Mapping[str, float]
    ) -> Iterator[tuple[str, str]]:
        """Labels and texts of the figures of a step; the first is reward or loss."""
        health = {kind: metrics[name] for kind, name in GROUP_HEALTH.items() if name in metrics}
        shares = ", ".join(f"{share:.0%} {kind}" for kind, share in health.items())
        if REWARD not in metrics and _LOSS in metrics:
            yield _LOSS, f"{metrics[_LOSS]:.4g}"
        else:
            reward = f"{metrics[REWARD]:.3f}" if REWARD in metrics else "-"
            yield "reward", reward + (f" ({shares})" if shares else "")
        if VALID_GRAPHS in metrics:
            yield "valid graphs", f"{metrics[VALID_GRAPHS]:.0%}"
        for name, points in self._run.held_out.items():
            ends = points if len(points) < 3 else (points[0], points[-1])
            yield "held-out", f"{' -> '.join(f'{value:.3f}' for _, value in ends) or '-'}  [{name}]"
        if failures:
            told = ", ".join(f"{count:.0f} {kind}" for kind, count in sorted(failures.items()))
            yield "failed", told
        if metrics.get(_SPEED):
            yield "sampling", f"{metrics[_SPEED]:.0f} tokens/s"

    def _once(self, key: tuple[str, int], text: str) -> None:
        if key not in self._printed:
            self._printed.add(key)
            self._print(text)

    def _print(self, text: str) -> None:
        """One line with the time since the start."""
        self._last_sign = time.time()
        line = f"[{clock(time.time() - self._began)}] {text}"
        with _harmless():
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
            if self.console.file is sys.stdout:
                sys.stdout.flush()


def seconds_left(ended: Mapping[int, float], total: int, now: float) -> float | None:
    """The time left, by the mean time of the latest steps, including evaluations between them; None
    before two steps and after the last. `ended`, `now`: seconds since the epoch."""
    done = sorted(ended)[-_RECENT_STEPS - 1 :]
    if len(done) < 2 or done[-1] >= total:
        return None
    pace = (ended[done[-1]] - ended[done[0]]) / (done[-1] - done[0])
    remaining = pace * (total - done[-1])
    return max(0.0, remaining - min(pace, max(0.0, now - ended[done[-1]])))


def clock(seconds: float) -> str:
    """`4:05`, or from an hour on `1:04:05`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _harmless() -> contextlib.suppress:
    """Suppresses errors of the display. rich raises SystemExit if the reader of a pipe is gone
    (`aflow-tune ... | head`)."""
    return contextlib.suppress(Exception, SystemExit)
