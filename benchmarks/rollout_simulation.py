"""A discrete-event simulation of rollouts: scheduler, runners, processors, engines, weight syncs.

Events are processed in order of time; the parts queue for each other:

- the scheduler is one process, which hands out one task after the other;
- a runner (a slot of Trinity's scheduler) works on one task at a time, with all rollouts of its
  group in parallel; a rollout is `calls` calls in turn, with a piece of processor work before each
  and after the last;
- a process does one piece of work at a time (Python's interpreter lock), and each piece also needs
  a core of its node;
- an engine batches continuously: every sequence of the batch gets a token each step, and the time
  of a step depends on the batch size; sequences that do not fit into the batch wait;
- after each batch of tasks all wait for the last one, and the weights are synchronised.

All times are simulated seconds. The numbers come from `simulated_cluster.py`, which also lists what
the simulation leaves out.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Then = Callable[[], None]
"""A callback for the end of something."""


class Clock:
    """A queue of events by time; those at the same time in the order of insertion."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, then: Then) -> None:
        """Call `then` `seconds` from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), then))

    def run(self) -> None:
        """Process events until none is left."""
        while self._events:
            self.now, _, then = heapq.heappop(self._events)
            then()


class Servers:
    """`count` identical servers with one queue, first come first served."""

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock = clock
        self._count = count
        self._taken = 0
        self._line: deque[Callable[[Then], None]] = deque()
        self.busy_seconds = 0.0
        """Summed over all servers."""

    def take(self, then: Callable[[Then], None]) -> None:
        """Wait for a server, then call `then` with a function that releases it."""
        if self._taken == self._count:
            self._line.append(then)
            return
        self._taken += 1
        self._begin(then)

    def serve(self, seconds: float, then: Then) -> None:
        """Wait for a server, hold it for `seconds`, then call `then`."""

        def begin(give_back: Then) -> None:
            def done() -> None:
                give_back()
                then()

            self._clock.after(seconds, done)

        self.take(begin)

    def _begin(self, then: Callable[[Then], None]) -> None:
        since = self._clock.now

        def give_back() -> None:
            self.busy_seconds += self._clock.now - since
            if self._line:
                self._begin(self._line.popleft())
            else:
                self._taken -= 1

        then(give_back)


def compute(process: Servers, cores: Servers, seconds: float, then: Then) -> None:
    """A piece of work: waits for its process, then for a core of the node."""
    if not seconds:
        then()
        return

    def begin(give_back: Then) -> None:
        def done() -> None:
            give_back()
            then()

        cores.serve(seconds, done)

    process.take(begin)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step of an engine by the size of its batch: measured or given.

    `points` are (sequences, seconds) in order of sequences. Seconds are interpolated linearly
    between them, and constant beyond the first and the last.
    """

    points: tuple[tuple[int, float], ...]
    limit: int | None = None
    """Sequences of the largest batch; None: no limit."""

    def seconds(self, batch: int) -> float:
        """Seconds of a step with `batch` sequences."""
        sizes = [size for size, _ in self.points]
        after = bisect.bisect_left(sizes, batch)
        if after in (0, len(sizes)):
            return self.points[max(0, after - 1)][1]
        (low, fast), (high, slow) = self.points[after - 1 : after + 1]
        return fast + (slow - fast) * (batch - low) / (high - low)

    def best_rate(self) -> float | None:
        """Most tokens a second of one engine; None without a limit."""
        if self.limit is None:
            return None
        return max(batch / self.seconds(batch) for batch in range(1, self.limit + 1))


class Engine:
    """An engine with continuous batching.

    The engine counts its steps; a sequence that enters at step s and needs n tokens is done at
    step s + n. Only the next end of a sequence is an event, replaced when the batch changes.
    """

    def __init__(self, clock: Clock, times: StepTimes) -> None:
        self._clock = clock
        self._limit = times.limit
        self._seconds = functools.cache(times.seconds)
        self._batch: list[tuple[float, int, Then]] = []
        self._line: deque[tuple[float, Then]] = deque()
        self._numbers = itertools.count()
        self._steps = 0.0
        self._told = 0.0
        self._paused = False
        self._plan = 0
        self.tokens = 0.0
        """Generated so far."""

    def ask(self, tokens: float, then: Then) -> None:
        """Add a sequence of `tokens` tokens; `then` is called when it is done."""
        self._advance()
        self._line.append((tokens, then))
        self._next()

    def pause(self, seconds: float) -> None:
        """Stop for `seconds`; the sequences stay in the batch and continue afterwards."""
        self._advance()
        self._paused = True

        def go_on() -> None:
            self._told = self._clock.now
            self._paused = False
            self._next()

        self._next()
        self._clock.after(seconds, go_on)

    def _advance(self) -> None:
        now = self._clock.now
        if self._batch and not self._paused:
            steps = (now - self._told) / self._seconds(len(self._batch))
            self._steps += steps
            self.tokens += steps * len(self._batch)
        self._told = now

    def _next(self) -> None:
        """Admit waiting sequences, and schedule the next end of one."""
        while self._line and (self._limit is None or len(self._batch) < self._limit):
            tokens, then = self._line.popleft()
            heapq.heappush(self._batch, (self._steps + tokens, next(self._numbers), then))
        self._plan += 1
        if self._batch and not self._paused:
            left = max(0.0, self._batch[0][0] - self._steps)
            seconds = left * self._seconds(len(self._batch))
            self._clock.after(seconds, functools.partial(self._end, self._plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:  # the batch has changed since
            return
        self._advance()
        self._steps = max(self._steps, self._batch[0][0])  # rounding must not leave a remainder
        done = []
        while self._batch and self._batch[0][0] <= self._steps * (1 + 1e-12):
            done.append(heapq.heappop(self._batch)[2])
        self._next()
        for then in done:
            then()


@dataclass(frozen=True)
class Work:
    """Tasks of `group` parallel rollouts; a rollout is `calls` calls in turn, with tokens drawn
    uniformly from tokens x (1 - spread) to tokens x (1 + spread)."""

    calls: int
    tokens: float = 1.0
    spread: float = 0.0
    group: int = 1


@dataclass(frozen=True)
class Costs:
    """Seconds of processor time, and of waiting."""

    scheduler: float = 0.0
    """Per task, in the scheduler's process."""
    runner: float = 0.0
    """Per rollout, in its runner's process."""
    other: float = 0.0
    """Per rollout, in other processes of the node; nothing waits for it."""
    delay: float = 0.0
    """Per task, without a processor: between processes, and until the scheduler looks again."""
    delay_spread: float = 0.0
    """The delay is uniform from this much less to this much more. Without it, runners that started
    together would never contend again."""


@dataclass(frozen=True)
class Cluster:
    """Engines, runners and nodes; the scheduler runs on the first node."""

    engines: int
    runners: int
    times: StepTimes
    cores: int
    """Per node."""
    nodes: int = 1
    one_process: bool = False
    """All runners are slots of one process on the first node (the local engine)."""


@dataclass(frozen=True)
class Sync:
    """After every `tasks` tasks, all wait for the last one and the engines stop for `seconds`."""

    tasks: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The result. Shares are of the time until the end of the last task, or of its weight sync."""

    runs_per_second: float
    seconds: float
    scheduler: float
    """Share of time that the scheduler's process works or waits for a core."""
    process: float
    """The same of the busiest runner process."""
    cores: float
    """Share of the cores in use, on the busiest node."""
    engines: float | None
    """Tokens generated, over those that all engines could generate at their best batch size."""
    slots: float
    """Share of time that runners have a task."""


def simulate(
    cluster: Cluster, work: Work, costs: Costs, tasks: int, sync: Sync | None = None, seed: int = 0
) -> Outcome:
    """Simulate `tasks` tasks.

    Without syncs the rate excludes as many tasks as there are runners, as in the measurement; with
    syncs it is over all the time.

    Raises:
        ValueError: no syncs, and no more tasks than runners, so that no rate is defined.
    """
    if sync is None and tasks <= cluster.runners:
        raise ValueError(f"{tasks} tasks are too few for {cluster.runners} runners")
    return _Play(cluster, work, costs, tasks, sync, seed).outcome()


class _Play:
    def __init__(
        self, cluster: Cluster, work: Work, costs: Costs, tasks: int, sync: Sync | None, seed: int
    ) -> None:
        self.cluster, self.work, self.costs, self.sync = cluster, work, costs, sync
        self.clock = Clock()
        # Separate generators: the lengths stay the same whatever else changes.
        self.lengths, self.delays = random.Random(seed), random.Random(seed + 1)
        self.nodes = [Servers(self.clock, cluster.cores) for _ in range(cluster.nodes)]
        self.scheduler = Servers(self.clock, 1)
        processes = 1 if cluster.one_process else cluster.runners
        self.processes = [Servers(self.clock, 1) for _ in range(processes)]
        self.engines = [Engine(self.clock, cluster.times) for _ in range(cluster.engines)]
        self.idle = deque(range(cluster.runners))
        self.since = [0.0] * cluster.runners
        self.slot_seconds = 0.0
        self.left, self.pending, self.running = tasks, 0, 0
        self.finished: list[float] = []
        self.ended = 0.0
        self._next_batch()

    def outcome(self) -> Outcome:
        """Run the simulation to its end."""
        self.clock.run()
        cluster, seconds = self.cluster, self.ended if self.sync else self.finished[-1]
        skipped = 0 if self.sync else cluster.runners
        begun = self.finished[skipped - 1] if skipped else 0.0
        best = cluster.times.best_rate()
        tokens = sum(engine.tokens for engine in self.engines)
        return Outcome(
            (len(self.finished) - skipped) * self.work.group / (seconds - begun),
            seconds,
            self.scheduler.busy_seconds / seconds,
            max(process.busy_seconds for process in self.processes) / seconds,
            max(node.busy_seconds for node in self.nodes) / seconds / cluster.cores,
            None if best is None else tokens / (seconds * best * cluster.engines),
            self.slot_seconds / (seconds * cluster.runners),
        )

    def _next_batch(self) -> None:
        self.pending = self.left if self.sync is None else min(self.left, self.sync.tasks)
        self.left -= self.pending
        self.ended = self.clock.now
        self._hand_out()

    def _hand_out(self) -> None:
        """The scheduler gives a task to each idle runner, one after the other."""
        while self.pending and self.idle:
            self.pending -= 1
            self.running += 1
            slot = self.idle.popleft()
            self.since[slot] = self.clock.now
            begin = functools.partial(self._begin, slot, self._draw())
            compute(self.scheduler, self.nodes[0], self.costs.scheduler, begin)

    def _begin(self, slot: int, task: list[list[float]]) -> None:
        low = self.costs.delay - self.costs.delay_spread
        seconds = low + 2 * self.costs.delay_spread * self.delays.random()
        self.clock.after(seconds, functools.partial(self._runs, slot, task))

    def _runs(self, slot: int, task: list[list[float]]) -> None:
        left = len(task)

        def done() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._finish(slot)

        for calls in task:
            self._run(slot, calls, done)

    def _run(self, slot: int, calls: list[float], done: Then) -> None:
        """The rest of a rollout; `calls`: tokens of its remaining calls, the next one last."""
        node, process = self._place(slot)
        piece = self.costs.runner / (self.work.calls + 1)

        def ready() -> None:
            if calls:
                engine = self.engines[slot % len(self.engines)]
                engine.ask(calls.pop(), lambda: self._run(slot, calls, done))
                return
            if self.costs.other:
                node.serve(self.costs.other, lambda: None)
            done()

        compute(process, node, piece, ready)

    def _place(self, slot: int) -> tuple[Servers, Servers]:
        if self.cluster.one_process:
            return self.nodes[0], self.processes[0]
        return self.nodes[slot % len(self.nodes)], self.processes[slot]

    def _draw(self) -> list[list[float]]:
        """Tokens of each call of each rollout of a task."""
        work = self.work
        low, width = 1 - work.spread, 2 * work.spread
        return [
            [work.tokens * (low + width * self.lengths.random()) for _ in range(work.calls)]
            for _ in range(work.group)
        ]

    def _finish(self, slot: int) -> None:
        self.finished.append(self.clock.now)
        self.slot_seconds += self.clock.now - self.since[slot]
        self.running -= 1
        self.idle.append(slot)
        self._hand_out()
        if self.sync is not None and not self.running and not self.pending:
            for engine in self.engines:
                engine.pause(self.sync.seconds)
            self.clock.after(self.sync.seconds, self._next_batch)
