"""The simulated cluster on queues that can be computed by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from rollout_simulation import (
    Clock,
    Cluster,
    Costs,
    Engine,
    StepTimes,
    Sync,
    Work,
    simulate,
)

SERVER = StepTimes(((1, 0.2),))
"""200 ms a call, any number at once."""


def rate(runners: int, costs: Costs, calls: int = 1, tasks: int = 0, **cluster: Any) -> float:
    """Runs a second against `SERVER`, with cores enough unless said otherwise."""
    made = Cluster(1, runners, SERVER, **{"cores": 1000, **cluster})
    return simulate(made, Work(calls), costs, tasks or 10 * runners).runs_per_second


@pytest.mark.parametrize(
    ("expected", "runners", "costs", "more"),
    [
        # Runners that only wait are linear.
        (5.0, 1, Costs(), {}),
        (80.0, 16, Costs(), {}),
        (25.0, 10, Costs(), {"calls": 2}),
        # 20 ms scheduler, 30 ms on the way, 40 ms of its own, 2 calls of 200 ms: 490 ms.
        (1 / 0.49, 1, Costs(scheduler=0.02, runner=0.04, delay=0.03), {"calls": 2}),
        # The scheduler hands out one task after the other: never waited for (5 x 20 < 220 ms), and
        # one every 20 ms.
        (5 / 0.22, 5, Costs(scheduler=0.02), {}),
        (50.0, 100, Costs(scheduler=0.02), {}),
        # 200 ms of a processor a run, in one process, on one or two cores, or two nodes.
        (5.0, 10, Costs(runner=0.2), {"tasks": 500, "one_process": True}),
        (10.0, 10, Costs(runner=0.2), {"tasks": 500, "cores": 2}),
        (10.0, 10, Costs(runner=0.2), {"tasks": 500, "cores": 1, "nodes": 2}),
        (25.0, 10, Costs(runner=0.2), {"tasks": 500}),
        (5.0, 10, Costs(other=0.1, runner=0.1), {"tasks": 500, "cores": 1}),
    ],
)
def test_rates(expected: float, runners: int, costs: Costs, more: dict[str, Any]) -> None:
    close = 0.03 if "tasks" in more else 1e-6
    assert rate(runners, costs, **more) == pytest.approx(expected, rel=close)


def test_a_group_runs_side_by_side_and_waits_for_its_last() -> None:
    cluster = Cluster(1, 1, SERVER, cores=8)
    found = simulate(cluster, Work(1, group=4), Costs(), 5)
    assert found.runs_per_second == pytest.approx(20.0)
    spread = simulate(cluster, Work(1, group=4, spread=0.5), Costs(), 500)
    # The longest of four even draws from 100 to 300 ms is 100 + 4 / 5 x 200 = 260 ms on average.
    assert spread.runs_per_second == pytest.approx(4 / 0.26, rel=0.03)


def test_a_batch_waits_for_its_last_run_and_for_the_weights() -> None:
    # 4 tasks on 2 runners are 400 ms, 600 ms of weights: 4 runs a second.
    found = simulate(Cluster(1, 2, SERVER, cores=8), Work(1), Costs(), 12, Sync(4, 0.6))
    assert found.runs_per_second == pytest.approx(4.0)
    assert found.seconds == pytest.approx(3.0)
    assert found.slots == pytest.approx(0.4)
    # A fifth task of a batch is a third wave, in which the second runner has none.
    found = simulate(Cluster(1, 2, SERVER, cores=8), Work(1), Costs(), 10, Sync(5, 0.6))
    assert found.runs_per_second == pytest.approx(5 / 1.2)


def ends(arrivals: list[tuple[float, float]], times: StepTimes, pause: Any = None) -> list[float]:
    """When calls of (arrival, tokens) end on one engine; `pause`: (when, seconds)."""
    clock, found = Clock(), [0.0] * len(arrivals)
    engine = Engine(clock, times)
    for number, (arrival, tokens) in enumerate(arrivals):

        def end(number: int = number) -> None:
            found[number] = clock.now

        def come(tokens: float = tokens, end: Any = end) -> None:
            engine.ask(tokens, end)

        clock.after(arrival, come)
    if pause:
        clock.after(pause[0], lambda: engine.pause(pause[1]))
    clock.run()
    return found


def test_a_batch_slows_down_and_speeds_up_with_its_size() -> None:
    times = StepTimes(((1, 0.010), (2, 0.015)), limit=2)
    assert ends([(0, 100)], times) == pytest.approx([1.0])
    assert ends([(0, 100), (0, 100)], times) == pytest.approx([1.5, 1.5])
    # 50 tokens alone (0.5 s), 50 beside the second (0.75 s); the second then 50 alone (0.5 s).
    assert ends([(0, 100), (0.5, 100)], times) == pytest.approx([1.25, 1.75])
    # The third waits until the batch has room.
    assert ends([(0, 100), (0, 100), (0, 100)], times) == pytest.approx([1.5, 1.5, 2.5])
    # Paused from 0.3 s to 0.5 s.
    assert ends([(0, 100)], times, pause=(0.3, 0.2)) == pytest.approx([1.2])
    assert ends([(0.4, 100)], times, pause=(0.3, 0.2)) == pytest.approx([1.5])
