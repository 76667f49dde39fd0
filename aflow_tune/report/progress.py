"""The state of a run as its files tell it, kept up to date by reading what is new.

Works for every engine, because it reads only what explorer and trainer write wherever they are:
`metrics.jsonl`, the evaluation records and the logs. What is shown of it is `panel.py`'s matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aflow_tune.report.evaluation import FOLDER
from aflow_tune.report.metrics import FILE_NAME, MetricsLine, parse_line
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
from aflow_tune.report.records import EvalRecord
from aflow_tune.report.statistics import mean
from aflow_tune.report.tail import LineTail

_RECENT_STEPS = 10
_WARNING = re.compile(rb"\b(?:WARNING|ERROR|CRITICAL) .*?\.py:\d+\]? (.*)")
"""A line of Trinity's logs or of `driver.log`; the message follows the place in the source."""
_NOT_NEWS = (b"Save experiences in",)


@dataclass(frozen=True)
class StepState:
    """What was known when the trainer finished a step. `time`: seconds since the epoch."""

    step: int
    time: float
    reward: float | None
    health: dict[str, float]
    tokens_per_second: float | None
    failures: dict[str, float]
    valid_graphs: float | None = None
    loss: float | None = None
    """Where there were no rewards: of the step's batch from the data set."""


@dataclass
class Progress:
    """The state of a run.

    `health` holds the shares of groups of the last rollout, `valid_graphs` the share of its runs
    that wrote a valid graph (None where none are written), `failures` the runs that failed in
    training by kind, `held_out` the mean score of each finished evaluation by task set.
    `evaluated_now` of `evaluated_of` items are done of the evaluation under way (0 of None: none
    is under way; of None: it is the first, its size is not known).
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
    """When the evaluation of a step was finished, seconds since the epoch."""

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
        self.run_dir = run_dir
        self.total = total
        self._since = since
        self._given_sizes = dict(sizes or {})
        self._metrics = LineTail(run_dir / FILE_NAME)
        self._records: dict[Path, LineTail] = {}
        self._logs: dict[Path, LineTail] | None = {} if logs else None
        self._warning: str | None = None
        if logs:
            self._logs = {path: LineTail(path, at_end=True) for path in self._log_files()}
        self._forget_metrics()
        self._scores: dict[tuple[str, int], dict[tuple[int, int], float | None]] = {}

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
        self._read_logs()
        return self._progress()

    def _forget_metrics(self) -> None:
        self._state = Progress(total=self.total)
        self._finished: dict[tuple[str, int], int] = {}
        self._sizes = dict(self._given_sizes)
        self._failures_by_step: dict[int, dict[str, float]] = {}

    def _take(self, line: MetricsLine) -> None:
        state, metrics = self._state, line.metrics
        for name, items in finished_evaluations(metrics).items():
            self._finished[name, line.step] = items
            self._sizes[name] = items
            state.evaluated_at[line.step] = line.time
        failures = failure_counts(metrics)
        if failures:
            self._failures_by_step[line.step] = failures
        if REWARD in metrics:
            state.reward = metrics[REWARD]
            state.rewards[line.step] = metrics[REWARD]
            state.rolled_out = max(state.rolled_out, line.step)
        health = {kind: metrics[key] for kind, key in GROUP_HEALTH.items() if key in metrics}
        state.health = health or state.health
        state.valid_graphs = metrics.get(VALID_GRAPHS, state.valid_graphs)
        speed = sampling_speed(metrics)
        state.tokens_per_second = state.tokens_per_second if speed is None else speed
        if is_training(line) and line.step > 0:
            state.step = max(state.step, line.step)
            state.steps.append(
                StepState(
                    line.step,
                    line.time,
                    state.rewards.get(line.step, state.reward),
                    state.health,
                    state.tokens_per_second,
                    self._failures_by_step.get(line.step, {}),
                    state.valid_graphs,
                    loss=None if state.rewards else _first(LOSS, metrics),
                )
            )

    def _read_records(self) -> None:
        folder = self.run_dir / FOLDER
        for path in folder.rglob("step_*.jsonl"):
            number = path.stem.removeprefix("step_")
            if number.isdigit() and path not in self._records:
                self._records[path] = LineTail(path)
        for path, tail in self._records.items():
            name = path.parent.relative_to(folder).as_posix()
            key = (name, int(path.stem.removeprefix("step_")))
            lines, anew = tail.read()
            scores = self._scores.setdefault(key, {})
            if anew:
                scores.clear()
            for text in lines:
                try:
                    record = EvalRecord.from_line(text)
                except ValueError:
                    continue
                scores[record.item, record.run] = record.score

    def _read_logs(self) -> None:
        if self._logs is None:
            return
        for path in self._log_files():
            tail = self._logs.setdefault(path, LineTail(path))
            for text in tail.read()[0]:
                found = _WARNING.search(text)
                if found and not any(words in text for words in _NOT_NEWS):
                    self._warning = found[1].decode(errors="replace").strip() or self._warning

    def _log_files(self) -> list[Path]:
        return sorted((self.run_dir / "log").glob("*.log"))

    def _progress(self) -> Progress:
        state = self._state
        state.warning = self._warning
        state.failures = {}
        for failures in self._failures_by_step.values():
            for kind, count in failures.items():
                state.failures[kind] = state.failures.get(kind, 0.0) + count
        state.held_out = {}
        state.evaluated_now, state.evaluated_of = 0, None
        for (name, step), scores in sorted(self._scores.items()):
            points = state.held_out.setdefault(name, [])
            if (name, step) not in self._finished:
                if scores and self._is_growing(name, step):
                    state.evaluated_now = len({item for item, _ in scores})
                    state.evaluated_of = self._sizes.get(name)
                continue
            value = _score(scores)
            if value is not None:
                points.append((step, value))
        return state

    def _is_growing(self, name: str, step: int) -> bool:
        try:
            path = self.run_dir / FOLDER / name / f"step_{step}.jsonl"
            return path.stat().st_mtime >= self._since
        except FileNotFoundError:
            return False


def read_progress(run_dir: Path, total: int) -> Progress:
    """The state of a run, read once."""
    return RunFollower(run_dir, total).update()


def _first(names: Sequence[str], metrics: Mapping[str, float]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)


def _score(scores: Mapping[tuple[int, int], float | None]) -> float | None:
    """Mean over items of the mean over their scored runs, as the report computes it."""
    by_item: dict[int, list[float]] = {}
    for (item, _), score in scores.items():
        if score is not None:
            by_item.setdefault(item, []).append(score)
    return mean([mean(values) for values in by_item.values()]) if by_item else None
