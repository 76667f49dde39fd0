"""What a person sees while a run goes on: a live panel, or plain lines.

`RunFollower` keeps the state of a run by reading what is new in `metrics.jsonl`, the evaluation
records and the logs, so it works for every engine. `Panel` lives in the command's process and
only reads: on a terminal it redraws itself in place; in a notebook, a pipe or a log it prints one
line for each event. Nothing that goes wrong here, a closed terminal included, may harm the run.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from aflow_tune.report.records import EvalRecord, record_files, record_path
from aflow_tune.report.statistics import mean

_RECENT_STEPS = 10
_WARNING = re.compile(rb"\b(?:WARNING|ERROR|CRITICAL) .*?\.py:\d+\]? (.*)")
"""A line of Trinity's logs or of `driver.log`; the message follows the place in the source."""
_NOT_NEWS = b"Save experiences in"
_INTERVAL_SECONDS = 0.5
_SIGN_OF_LIFE_SECONDS = 30.0
"""How often a log says how far a long evaluation is."""
_CHATTY = ("rolling out", "training")
"""Phases that change twice a step: a log has a line for each step already."""
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class StepState:
    """What was known when the trainer finished a step. `time`: seconds since the epoch; `loss`,
    of the step's batch from a data set, where there were no rewards."""

    step: int
    time: float
    reward: float | None
    health: dict[str, float]
    tokens_per_second: float | None
    failures: dict[str, float]
    valid_graphs: float | None = None
    loss: float | None = None


@dataclass
class Progress:
    """The state of a run.

    `health` holds the shares of groups of the last rollout, `valid_graphs` the share of its
    rollouts with a valid graph (None where none are written), `failures` the rollouts that failed
    in training by kind, `held_out` the mean score of each finished evaluation by task set,
    `evaluated_at` when that of a step was finished. `evaluated_now` of `evaluated_of` items are
    done of the evaluation under way (0 of None: none is; of None: its size is not known).
    """

    step: int = 0
    total: int = 0
    rolled_out: int = 0
    reward: float | None = None
    rewards: dict[int, float] = field(default_factory=dict)
    health: dict[str, float] = field(default_factory=dict)
    valid_graphs: float | None = None
    tokens_per_second: float | None = None
    failures: dict[str, float] = field(default_factory=dict)
    held_out: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    evaluated_now: int = 0
    evaluated_of: int | None = None
    warning: str | None = None
    steps: list[StepState] = field(default_factory=list)
    evaluated_at: dict[int, float] = field(default_factory=dict)

    def seconds_left(self, now: float, since: float, start: int = 0) -> float | None:
        """From the mean time of the latest steps, evaluations between them included.

        Args:
            now: seconds since the epoch.
            since: when the run set out from step `start`; what was logged before does not count.
        """
        times = {start: max(since, self.evaluated_at.get(start, since))}
        times.update({s.step: s.time for s in self.steps if s.step > start and s.time >= since})
        done = sorted(times)[-_RECENT_STEPS - 1 :]
        if len(done) < 2 or done[-1] <= done[0]:
            return None
        pace = (times[done[-1]] - times[done[0]]) / (done[-1] - done[0])
        remaining = pace * (self.total - done[-1])
        return max(0.0, remaining - min(pace, max(0.0, now - times[done[-1]])))


class RunFollower:
    """Keeps a `Progress` up to date: each `update()` reads only what is new.

    Args:
        run_dir: the run folder.
        total: the step that the run will end at.
        since: evaluations not written to after this time (seconds since the epoch) are not
            under way, only left over from a run that was killed.
        sizes: items of each held-out task set, where known.
        logs: whether to follow the logs for warnings, from now on.
    """

    def __init__(
        self,
        run_dir: Path,
        total: int,
        *,
        since: float = 0.0,
        sizes: Mapping[str, int] | None = None,
        logs: bool = False,
    ) -> None:
        self.run_dir, self.total = run_dir, total
        self._since = since
        self._given_sizes = dict(sizes or {})
        self._metrics = LineTail(run_dir / FILE_NAME)
        self._scores: dict[tuple[str, int], dict[tuple[int, int], float | None]] = {}
        self._records: dict[tuple[str, int], LineTail] = {}
        self._follows_logs = logs
        self._warning: str | None = None
        self._log_tails = {path: LineTail(path, at_end=True) for path in self._logs()}
        self._forget_metrics()

    def update(self) -> Progress:
        """Read what is new and give the state."""
        lines, anew = self._metrics.read()
        if anew:
            self._forget_metrics()
        for text in lines:
            line = parse_line(text)
            if line is not None:
                self._take(line)
        self._read_records()
        for path in self._logs():
            for text in self._log_tails.setdefault(path, LineTail(path)).read()[0]:
                found = _WARNING.search(text)
                if found and _NOT_NEWS not in text:
                    self._warning = found[1].decode(errors="replace").strip() or self._warning
        return self._progress()

    def _forget_metrics(self) -> None:
        self._state = Progress(total=self.total)
        self._finished: set[tuple[str, int]] = set()
        self._sizes = dict(self._given_sizes)
        self._failures: dict[int, dict[str, float]] = {}

    def _take(self, line: MetricsLine) -> None:
        state, metrics = self._state, line.metrics
        for name, items in finished_evaluations(metrics).items():
            self._finished.add((name, line.step))
            self._sizes[name] = items
            state.evaluated_at[line.step] = line.time
        if failures := failure_counts(metrics):
            self._failures[line.step] = failures
        if REWARD in metrics:
            state.reward = state.rewards[line.step] = metrics[REWARD]
            state.rolled_out = max(state.rolled_out, line.step)
        health = {kind: metrics[key] for kind, key in GROUP_HEALTH.items() if key in metrics}
        state.health = health or state.health
        state.valid_graphs = metrics.get(VALID_GRAPHS, state.valid_graphs)
        speed = sampling_speed(metrics)
        state.tokens_per_second = state.tokens_per_second if speed is None else speed
        if is_training(line) and line.step > 0:
            losses = [metrics[name] for name in LOSS if name in metrics and not state.rewards]
            state.step = max(state.step, line.step)
            state.steps.append(
                StepState(
                    line.step,
                    line.time,
                    state.rewards.get(line.step, state.reward),
                    state.health,
                    state.tokens_per_second,
                    self._failures.get(line.step, {}),
                    state.valid_graphs,
                    losses[0] if losses else None,
                )
            )

    def _read_records(self) -> None:
        folder = self.run_dir / FOLDER
        for step, path in record_files(folder):
            key = path.parent.relative_to(folder).as_posix(), step
            self._records.setdefault(key, LineTail(path))
        for key, tail in self._records.items():
            lines, anew = tail.read()
            scores = self._scores.setdefault(key, {})
            if anew:
                scores.clear()
            for text in lines:
                with contextlib.suppress(ValueError):
                    record = EvalRecord.from_line(text)
                    scores[record.item, record.run] = record.score

    def _logs(self) -> list[Path]:
        return sorted((self.run_dir / "log").glob("*.log")) if self._follows_logs else []

    def _progress(self) -> Progress:
        state = self._state
        state.warning, state.held_out = self._warning, {}
        state.evaluated_now, state.evaluated_of = 0, None
        totals: Counter[str] = Counter()
        for failures in self._failures.values():
            totals.update(failures)
        state.failures = dict(totals)
        for (name, step), scores in sorted(self._scores.items()):
            points = state.held_out.setdefault(name, [])
            if (name, step) in self._finished:
                means = mean_by_item((item, score) for (item, _), score in scores.items())
                if means:
                    points.append((step, mean(list(means.values()))))
            elif scores and self._is_growing(name, step):
                state.evaluated_now = len({item for item, _ in scores})
                state.evaluated_of = self._sizes.get(name)
        return state

    def _is_growing(self, name: str, step: int) -> bool:
        try:
            path = record_path(self.run_dir / FOLDER, name, step)
            return path.stat().st_mtime >= self._since
        except FileNotFoundError:
            return False


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
        self.console = console or Console()
        self.live: Any = None
        self._follower = RunFollower(
            run_dir, total_steps, since=time.time(), sizes=held_out_items, logs=True
        )
        self._phase = "starting"
        self._own_warning: str | None = None
        self._started = self._last_sign = time.monotonic()
        self._steps_began = time.time()
        self._rolled_out = False
        self._first_step = 0
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
        with _harmless():  # what a resumed run logged before is not news
            progress = self._follower.update()
            self._first_step = progress.step
            self._printed |= {("step", state.step) for state in progress.steps}
            for name, points in progress.held_out.items():
                self._printed |= {(name, step) for step, _ in points}
        with _harmless():
            console = self.console
            if console.is_terminal and not console.is_jupyter and not console.is_dumb_terminal:
                from rich.live import Live

                live = Live(console=console, refresh_per_second=4, transient=False)
                live.start()
                self.live = live
        with contextlib.suppress(RuntimeError):  # no more threads: the final state is still shown
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
        seconds = progress.seconds_left(time.time(), self._steps_began, self._first_step)
        return None if seconds is None else clock(seconds)

    def _now(self, progress: Progress) -> str:
        """The phase, with what the files tell beyond it."""
        if progress.evaluated_now:
            size = f" of {progress.evaluated_of}" if progress.evaluated_of else ""
            return f"evaluating: {progress.evaluated_now}{size} items"
        if "rolling out and training" in self._phase:
            if progress.rolled_out > progress.step:
                return f"training on step {progress.rolled_out}"
            if progress.step < progress.total:
                return f"rolling out step {progress.step + 1}"
        return self._phase

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
        if progress.reward is None and losses:
            label, told, values = "loss", f"{losses[max(losses)]:.4g}", losses
        else:
            label, values = "reward", progress.rewards
            told = _reward(progress.reward, progress.health)
        trend = "" if self.console.options.ascii_only else sparkline(values)
        table.add_row(label, Text(f"{told}  {trend}".rstrip()))
        if progress.valid_graphs is not None:
            table.add_row("valid graphs", f"{progress.valid_graphs:.0%}")
        for name, points in progress.held_out.items():
            table.add_row("held-out", Text(f"{_held_out(points)}  [{name}]"))
        if progress.failures:
            table.add_row("failed", Text(_failures(progress.failures), style="yellow"))
        if progress.tokens_per_second:
            table.add_row("sampling", f"{progress.tokens_per_second:.0f} tokens/s")
        left = self._left(progress)
        elapsed = clock(time.monotonic() - self._started)
        table.add_row("time", elapsed + (f", about {left} left" if left else ""))
        warning = self._own_warning or progress.warning
        if warning:
            table.add_row("warning", Text(_shortened(warning), style="yellow"))
        return Box(table, title="aflow-tune", subtitle=Text(self.run_dir.name), expand=False)

    def _print_lines(self, progress: Progress) -> None:
        for name, points in progress.held_out.items():
            for step, value in points:
                self._once((name, step), f"held-out {value:.3f} at step {step} [{name}]")
        for state in progress.steps:
            if ("step", state.step) not in self._printed:
                self._once(("step", state.step), self._step_line(state, progress))
        if progress.evaluated_now and time.monotonic() - self._last_sign > _SIGN_OF_LIFE_SECONDS:
            self._print(self._now(progress))
        if progress.warning:
            text = f"warning: {_shortened(progress.warning)}"
            self._once(("warning", progress.warning), text)

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
        line = f"[{clock(time.monotonic() - self._started)}] {text}"
        with _harmless():
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
            if self.console.file is sys.stdout:
                sys.stdout.flush()


def sparkline(values: Mapping[int, float], width: int = 24) -> str:
    """The latest values as a row of bars from the lowest to the highest."""
    latest = [values[step] for step in sorted(values)][-width:]
    if len(latest) < 2:
        return ""
    low, high = min(latest), max(latest)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in latest)


def clock(seconds: float) -> str:
    """`4:05`, or from an hour on `1:04:05`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
    """The first and the last value."""
    ends = [value for _, value in (points if len(points) < 3 else (points[0], points[-1]))]
    return " -> ".join(f"{value:.3f}" for value in ends) or "-"


def _failures(failures: Mapping[str, float]) -> str:
    return ", ".join(f"{count:.0f} {kind}" for kind, count in sorted(failures.items()))


def _shortened(text: str, width: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."
