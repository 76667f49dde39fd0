"""Simulated rollouts a second of 1 to 1,000 GPUs, with the bottleneck at each size.

    python benchmarks/runner_scaling.py --json scaling.json
    python benchmarks/simulated_cluster.py scaling.json [--engine engine.json] [--gpus 1 8 64]

First the simulation (`rollout_simulation.py`) is calibrated on measurements with 1, 2 and 4
runners. The scheduler's processor seconds per task and a runner's per rollout are slopes over the
rate; the intercepts and the use by other processes are the background; the delay of a task is the
part of its time that these do not explain. The predicted rates with more runners are printed
beside the measured ones. The target: within 10% for 8 and for 16.

Then a cluster with Trinity's own layout: each engine has one GPU, each runner is a process, spread
over the nodes in turn, and one scheduler is on the first node. All GPUs here roll out; those that
train come on top. After each batch of tasks (`--tasks` for each GPU) all wait for its last rollout
and for the weights. One such batch is simulated at every size, so the work grows with the cluster.
To find the bottleneck it is simulated again with one thing changed at a time; the change that
helps most is named.

Engines: `--engine FILE` holds measured seconds of a step by batch size, such as
{"source": "vLLM, 7B, H100", "step_seconds": {"1": 0.011, "32": 0.014, "128": 0.021}}. Without it
they come from a formula and are not measured: a decoding step reads the weights once and the keys
and values of each sequence (Pope et al., arXiv:2211.05102), here those of a model of 7.6 billion
parameters in bf16 with 56 KiB a token and contexts of 1,000 tokens, at half of 3.35 TB/s.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollout_simulation import Cluster, Costs, Outcome, StepTimes, Sync, Work, simulate

CALIBRATED_ON = (1, 2, 4)
PREDICTED = (8, 16)
WITHIN = 0.1
WAVES = 50
"""Tasks per runner when a measurement is simulated."""
LOOKS = 0.01
"""Seconds between two polls of the scheduler for idle runners (trinity/explorer/scheduler.py,
`_scheduler_loop`); the delay of a task varies by as much."""
NEARLY = 0.9
"""A cheaper change is named if it helps at least this fraction of what the best one does."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
MUST_FAIL = """\
Where this must fail:
- Network and object store: tasks, experiences and weights move in no time here. Long transcripts,
  images and full weights of large models do not.
- The head node: Ray's control of thousands of actors, their starts, sockets and open files is
  not in it, and the scheduler's cost of a task is taken not to grow with the runners.
- Stragglers: lengths are spread evenly around their mean. Heavy tails, runs that hang until their
  time-out, tools that wait and slow or dying nodes make every batch wait longer.
- GPUs: prefill, prefix caching, preemption where the cache is full, and whoever else uses a GPU
  are only in it as far as the seconds of a step hold them. The trainer only pauses the engines.
- Processors: those of the nodes are taken to be as fast as these. All of the processor time of
  a runner's process counts as one thread's; Ray's part in it is not, so near one whole core of
  that process the simulation is too low.
- A calibration made while the machine was busy otherwise, and workflows that compute: the
  measured one only waits for its model."""


@dataclass(frozen=True)
class Calibration:
    """From 1, 2 and 4 runners. `background`: cores in use by others and by idle processes."""

    costs: Costs
    background: float


def measured_rows(told: dict[str, Any], runners: Sequence[int]) -> list[dict[str, Any]]:
    """The rows with these numbers of runners. Exits if one is missing."""
    rows = {row["runners"]: row for row in told["measured"]}
    missing = [number for number in runners if number not in rows]
    if missing:
        sys.exit(
            f"no measurement with {missing} runners: python benchmarks/runner_scaling.py "
            "--runners 1 2 4 8 16 --json FILE"
        )
    return [rows[number] for number in runners]


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, intercept) of the least-squares line, neither of them negative."""
    x0 = statistics.fmean(x for x, _ in points)
    y0 = statistics.fmean(y for _, y in points)
    slope = sum((x - x0) * (y - y0) for x, y in points) / sum((x - x0) ** 2 for x, _ in points)
    if slope < 0:
        return 0.0, y0
    if y0 - slope * x0 < 0:
        return sum(x * y for x, y in points) / sum(x * x for x, _ in points), 0.0
    return slope, y0 - slope * x0


def calibrate(told: dict[str, Any]) -> Calibration:
    """Costs from the rows with 1, 2 and 4 runners of what `runner_scaling.py --json` wrote."""
    rows = measured_rows(told, CALIBRATED_ON)
    rates = [row["window_runs"] / row["window_seconds"] for row in rows]
    used = [
        {role: seconds / row["window_seconds"] for role, seconds in row["cpu_seconds"].items()}
        for row in rows
    ]
    kinds = {"scheduler": ("scheduler",), "runner": ("runner",)}
    kinds["other"] = tuple(role for role in used[0] if role not in kinds)
    slopes, background = {}, 0.0
    for kind, roles in kinds.items():
        shares = [sum(row[role] for role in roles) for row in used]
        slopes[kind], idle = line(list(zip(rates, shares, strict=True)))
        background += idle
    if told["processors"] == told["cores"]:  # else others may use the rest of the machine
        others = [
            row["machine_busy"] * told["processors"] - sum(shares.values())
            for row, shares in zip(rows, used, strict=True)
        ]
        background += max(0.0, statistics.fmean(others))
    group = told["group"]
    costs = Costs(slopes["scheduler"] * group, slopes["runner"], slopes["other"])
    found = Calibration(costs, min(background, 0.9 * told["cores"]))
    left = [
        row["runners"] * group * (1 / row["runs_per_second"] - 1 / rate)
        for row, rate in ((row, predict(told, found, row["runners"])) for row in rows)
    ]
    delay = max(0.0, statistics.fmean(left))
    costs = replace(costs, delay=delay, delay_spread=min(delay, LOOKS / 2))
    return replace(found, costs=costs)


def predict(told: dict[str, Any], found: Calibration, runners: int) -> float:
    """Rollouts a second of `runners` runners on the measured machine."""
    cores = told["cores"]
    stretch = cores / (cores - found.background)  # others are assumed to use all cores equally
    costs = replace(
        found.costs,
        scheduler=found.costs.scheduler * stretch,
        runner=found.costs.runner * stretch,
        other=found.costs.other * stretch,
    )
    server = StepTimes(((1, told["latency"]),))
    cluster = Cluster(1, runners, server, cores, one_process=True)
    work = Work(told["calls"], group=told["group"])
    return simulate(cluster, work, costs, WAVES * runners).runs_per_second


def by_formula(
    weights: float = 15.2e9,
    token: float = 56 * 1024,
    context: float = 1000.0,
    bandwidth: float = 0.5 * 3.35e12,
    most: int = 128,
) -> StepTimes:
    """Seconds of a memory-bound decoding step: bytes of the weights and of each sequence's keys and
    values, over bytes a second. `most`: sequences of the largest batch."""
    step = [(weights + batch * context * token) / bandwidth for batch in (1, most)]
    return StepTimes(((1, step[0]), (most, step[1])), most)


def from_file(path: Path) -> tuple[StepTimes, str]:
    """Measured step times, and their source. Exits if the file has another form."""
    try:
        told = json.loads(path.read_text())
        points = sorted((int(size), float(s)) for size, s in told["step_seconds"].items())
        source = str(told["source"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        sys.exit(f"{path}: {error!r}; expected the form that --help shows")
    if len(points) < 2 or points[0][0] < 1 or min(seconds for _, seconds in points) <= 0:
        sys.exit(f"{path}: step_seconds needs two sizes or more, from 1 on, and positive seconds")
    return StepTimes(tuple(points), points[-1][0]), source


@dataclass(frozen=True)
class Plan:
    """A cluster of any size."""

    times: StepTimes
    work: Work
    costs: Costs
    runners: int = 4
    """Per engine: `explorer.runner_per_model`."""
    tasks: int = 8
    """Per engine, between two weight syncs."""
    sync: float = 5.0
    """Seconds that engines stop for new weights."""
    gpus_per_node: int = 8
    cores_per_node: int = 64

    def play(self, gpus: int) -> Outcome:
        """One batch of tasks and its weight sync."""
        nodes = math.ceil(gpus / self.gpus_per_node)
        runners = gpus * self.runners
        cluster = Cluster(gpus, runners, self.times, self.cores_per_node, nodes)
        tasks = gpus * self.tasks
        return simulate(cluster, self.work, self.costs, tasks, Sync(tasks, self.sync))

    def changes(self) -> dict[str, Plan]:
        """Copies with one thing changed each, the cheapest change first."""
        points = tuple((batch, seconds / 2) for batch, seconds in self.times.points)
        fast = replace(self.times, points=points)
        free = replace(self.costs, runner=0.0, other=0.0)
        return {
            "runners (twice as many)": replace(self, runners=2 * self.runners),
            "scheduler (free)": replace(self, costs=replace(self.costs, scheduler=0.0)),
            "processors of runners (free)": replace(self, costs=free),
            "weight sync (at once)": replace(self, sync=0.0),
            "engines (twice as fast)": replace(self, times=fast),
        }


def limit(plan: Plan, gpus: int, rate: float) -> tuple[str, float]:
    """(bottleneck, relative gain without it): the change that helps most, or a cheaper one that
    helps nearly as much."""
    gains = {
        name: changed.play(gpus).runs_per_second / rate - 1
        for name, changed in plan.changes().items()
    }
    best = max(gains.values())
    name = next(name for name, gain in gains.items() if gain >= NEARLY * best)
    return name, gains[name]


def show_predictions(told: dict[str, Any], found: Calibration) -> bool:
    """Print simulated beside measured rates; returns whether the target is met."""
    costs = found.costs
    print(
        f"calibrated on {CALIBRATED_ON} runners: scheduler {costs.scheduler * 1e3:.2f} ms a task, "
        f"runner {costs.runner * 1e3:.2f} ms a run, other processes {costs.other * 1e3:.2f} ms a "
        f"run, delay {costs.delay * 1e3:.1f} ms a task; background {found.background:.2f} of "
        f"{told['cores']} cores"
    )
    print(f"{'runners':>7} {'measured':>9} {'simulated':>9} {'error':>7}  runs a second")
    errors = {}
    for row in told["measured"]:
        runners, measured = row["runners"], row["runs_per_second"]
        simulated = predict(told, found, runners)
        errors[runners] = simulated / measured - 1
        note = "calibrated on it" if runners in CALIBRATED_ON else "predicted"
        print(f"{runners:>7} {measured:>9.2f} {simulated:>9.2f} {errors[runners]:>+7.1%}  {note}")
    met = all(abs(errors[runners]) <= WITHIN for runners in PREDICTED)
    print(f"target: {PREDICTED} within {WITHIN:.0%}: {'met' if met else 'missed'}")
    return met


def show_cluster(plan: Plan, sizes: Sequence[int]) -> None:
    """Print the table by number of GPUs."""
    print(
        f"{'GPUs':>5} {'runs/s':>8} {'of linear':>9} {'scheduler':>9} {'cores':>6} {'engines':>8} "
        f"{'runners':>8}  what limits"
    )
    first = None
    for gpus in sizes:
        outcome = plan.play(gpus)
        each = outcome.runs_per_second / gpus
        first = first or each
        name, gain = limit(plan, gpus, outcome.runs_per_second)
        print(
            f"{gpus:>5} {outcome.runs_per_second:>8.1f} {each / first:>9.0%} "
            f"{outcome.scheduler:>9.0%} {outcome.cores:>6.0%} {outcome.engines or 0:>8.0%} "
            f"{outcome.slots:>8.0%}  {name}: {gain:+.0%}",
            flush=True,
        )


def main() -> None:
    """Print both tables; exit code 1 if the prediction misses its target."""
    options = _options()
    try:
        told = json.loads(options.measured.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{options.measured}: {error}; write it with runner_scaling.py --json")
    measured_rows(told, (*CALIBRATED_ON, *PREDICTED))
    found = calibrate(told)
    met = show_predictions(told, found)
    times, source = by_formula(), "given by the formula that --help tells, not measured"
    if options.engine:
        times, source = from_file(options.engine)
    work = Work(options.calls or told["calls"], options.tokens, options.spread, options.group)
    plan = Plan(
        times,
        work,
        found.costs,
        options.runners,
        options.tasks,
        options.sync,
        options.gpus_per_node,
        options.cores_per_node,
    )
    print(f"\nengines: {source}; {times.limit} sequences take {times.best_rate():,.0f} tokens/s")
    print(
        f"runs of {work.calls} calls of {work.tokens:g} tokens (+- {work.spread:.0%}), groups of "
        f"{work.group}; {plan.runners} runners and {plan.tasks} tasks an engine between weight "
        f"syncs of {plan.sync:g} s;\nnodes of {plan.gpus_per_node} GPUs and "
        f"{plan.cores_per_node} cores"
    )
    print(
        "shares: of the time that the scheduler's process and the busiest node's cores work, of\n"
        "the tokens that engines could make, of the time that runners have a task\n"
    )
    show_cluster(plan, options.gpus)
    print(f"\n{MUST_FAIL}")
    raise SystemExit(int(not met))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path, help="what runner_scaling.py --json wrote")
    parser.add_argument("--engine", type=Path, help="measured step times (JSON)")
    parser.add_argument("--gpus", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--cores-per-node", type=int, default=64)
    parser.add_argument("--runners", type=int, default=4, help="of each engine")
    parser.add_argument("--group", type=int, default=8, help="runs of a task, side by side")
    parser.add_argument("--tasks", type=int, default=8, help="for each GPU between weight syncs")
    parser.add_argument("--calls", type=int, help="of a run (as measured)")
    parser.add_argument(
        "--tokens", type=float, default=256.0, help="new ones of a call, on average"
    )
    parser.add_argument("--spread", type=float, default=0.5, help="of the tokens, 0 to 1")
    parser.add_argument("--sync", type=float, default=5.0, help="seconds of a weight sync")
    options = parser.parse_args()
    whole = [options.gpus_per_node, options.cores_per_node, options.runners, options.group]
    if min(*whole, options.tasks, *options.gpus, options.calls or 1) < 1 or options.tokens <= 0:
        parser.error("GPUs, cores, runners, group, tasks, calls and tokens are positive")
    if not 0 <= options.spread < 1 or options.sync < 0:
        parser.error("--spread is from 0 to less than 1, --sync not negative")
    return options


if __name__ == "__main__":
    main()
