"""Rollouts a second of 1, 2, 4, 8, 16 workflow runners, with a model server of 200 ms latency.

    python benchmarks/runner_scaling.py [--runners 1 2 4 8 16 32 64] [--json scaling.json]

Trinity's scheduler and runners with our adapter on a local Ray, as in the local engine: a runner is
a slot of one actor process and works on one task at a time. The workflow calls the model three
times in turn. The server is scripted, in a process of its own, and answers each request after the
latency; its processor use is printed, to show that it is not the limit.

For each number of runners: `--rounds` rounds of `--waves` tasks a runner. The rate of a round
leaves out its first wave, which starts everything at once; the median is printed. `of linear` is
the rate over that of one runner times the number of runners. `machine` is the share of all
processors in use, `ours` that of this benchmark's processes; the other columns are the processor
seconds a second of each process (1.00 is one whole core).

The target: 90% of linear for 1 to 16 runners while the processors are less than 90% busy. From 16
runners on it stops when either no longer holds; a further round, which is not counted, is profiled
there (`thread_sampler.py`) and its profile printed. `--json` writes everything, for
`simulated_cluster.py`. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from fixed_server import policy_answer, serve_fixed

EFFICIENCY = 0.9
BUSY = 0.9
JUDGED_TO = 16
"""The target applies up to this many runners; more show what limits."""
ROUND_SECONDS = 300.0
"""Time limit of a round: longer means that something hangs."""
SERVER_SHARE = 0.5
"""A server that uses more than this share of a core may be the limit."""
SETTLED_SHARE = 0.1
"""Ray counts as started when its processes use less than this share of a core."""
ROLES = ("scheduler", "runner", "engine", "server", "ray")


def serve(port_to: Connection, latency: float) -> None:
    """The model server's process."""
    serve_fixed(port_to, policy_answer(64), latency)


@dataclass
class Measured:
    """Results for one number of runners. `window_*` and `*_seconds` include the first waves."""

    runners: int
    rates: list[float] = field(default_factory=list)
    window_seconds: float = 0.0
    window_runs: int = 0
    machine_seconds: float = 0.0
    cpu_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROLES, 0.0))

    @property
    def rate(self) -> float:
        """Rollouts a second: the median of the rounds."""
        return statistics.median(self.rates)

    def machine_busy(self, processors: int) -> float:
        """Share of all the machine's processors in use, by any process."""
        return self.machine_seconds / (self.window_seconds * processors)

    def ours_busy(self, cores: int) -> float:
        """Share of the cores allowed to this benchmark that its own processes used."""
        return sum(self.cpu_seconds.values()) / (self.window_seconds * cores)


class Usage:
    """Processor seconds of this benchmark's processes by role, and of the machine.

    Args:
        pids: the process id of each role; all other descendants of this process are `ray`.
    """

    def __init__(self, pids: dict[str, int]) -> None:
        self.role_of = {pid: role for role, pid in pids.items()}

    def now(self) -> tuple[float, float, dict[int, float]]:
        """(clock, machine, each process by its id), in seconds."""
        of_process = {}
        me = psutil.Process()
        for process in [me, *me.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.Error:  # it has just ended
                continue
            of_process[process.pid] = times.user + times.system
        all_times = psutil.cpu_times()
        idle = all_times.idle + getattr(all_times, "iowait", 0.0)
        guests = getattr(all_times, "guest", 0.0) + getattr(all_times, "guest_nice", 0.0)
        return time.perf_counter(), sum(all_times) - guests - idle, of_process  # guests are twice

    def add(self, to: Measured, before: tuple[float, float, dict[int, float]], runs: int) -> None:
        """Add the use since `before`."""
        after = self.now()
        to.window_seconds += after[0] - before[0]
        to.machine_seconds += after[1] - before[1]
        to.window_runs += runs
        for pid, seconds in after[2].items():
            role = self.role_of.get(pid, "ray")
            to.cpu_seconds[role] += seconds - before[2].get(pid, 0.0)


async def play_round(scheduler: Any, number: int, tasks: list[Any], skip: int) -> float:
    """Schedule the tasks and wait; returns tasks a second after the first `skip` of them.

    Raises RuntimeError if a rollout failed or the round takes longer than `ROUND_SECONDS`.
    """
    finished = scheduler.finished
    finished.clear()
    scheduler.schedule(tasks, batch_id=number)
    try:
        async with asyncio.timeout(ROUND_SECONDS):
            while len(finished) < len(tasks):
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        came = f"{len(finished)} of {len(tasks)} tasks in {ROUND_SECONDS:g} s"
        raise RuntimeError(f"something hangs: {came}") from error
    if scheduler.fault:
        raise RuntimeError(scheduler.fault)
    return (len(tasks) - skip) / (finished[-1] - finished[skip - 1])


async def measure(
    runners: int, options: argparse.Namespace, pids: dict[str, int], first: Measured | None
) -> tuple[Measured, dict[str, Any] | None]:
    """Measure one number of runners; with a profile if it no longer scales or is the last."""
    import ray
    from measured_runners import MeasuredScheduler, config_of, make_tasks

    scheduler = MeasuredScheduler(config_of(runners), options.calls)
    await scheduler.start()
    actor = scheduler.actor
    try:
        usage = Usage({**pids, "runner": await actor.process_id.remote()})
        measured, count = Measured(runners), options.waves * runners

        async def play(number: int, waves: int) -> float:
            tasks = make_tasks(waves * runners, options.group, options.calls)
            rate = await play_round(scheduler, number, tasks, skip=runners)
            await scheduler.get_payload_results(batch_id=number)
            scheduler.discard_completed_results(number)
            return rate * options.group

        await play(0, 2)  # opens connections
        await settle(usage)
        for number in range(1, options.rounds + 1):
            before = usage.now()
            measured.rates.append(await play(number, options.waves))
            usage.add(measured, before, count * options.group)
        limited = runners >= JUDGED_TO and not scales(measured, first or measured)
        if not limited and runners != options.runners[-1]:
            return measured, None
        return measured, await watched(play, scheduler, options)
    finally:
        ray.kill(actor)  # first: `stop` waits for what still runs
        await scheduler.stop()


async def settle(usage: Usage) -> None:
    """Wait until Ray has started its processes, at most a minute."""
    for _ in range(30):
        before, used = usage.now(), Measured(0)
        await asyncio.sleep(2.0)
        usage.add(used, before, 0)
        if used.cpu_seconds["ray"] / used.window_seconds < SETTLED_SHARE:
            return


async def watched(play: Any, scheduler: Any, options: argparse.Namespace) -> dict[str, Any]:
    """One more round, with the threads of the scheduler's and the runner's process profiled."""
    from thread_sampler import ThreadSampler

    here = ThreadSampler()
    await scheduler.actor.start_sampling.remote()
    here.start()
    rate = await play(options.rounds + 1, options.waves)
    return {
        "runs_per_second": rate,
        "scheduler": here.stop(),
        "runner": await scheduler.actor.stop_sampling.remote(),
    }


def scales(measured: Measured, first: Measured) -> bool:
    """Whether the rate is nearly linear and the processors are not saturated."""
    linear = measured.rate / (first.rate / first.runners * measured.runners)
    return linear >= EFFICIENCY and busy(measured) < BUSY


def busy(measured: Measured) -> float:
    """Share of processors in use: of the machine's, or of those allowed to us if that is larger."""
    processors = os.cpu_count() or 1
    return max(measured.machine_busy(processors), measured.ours_busy(_cores()))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def main() -> None:
    """Measure and print; exit code 1 if the target is missed or there is no verdict."""
    options = _options()
    from aflow_tune.config.quiet import quiet

    quiet()
    import ray
    from measured_runners import NAMESPACE, start_engine
    from thread_sampler import table
    from trinity.common.constants import LOG_DIR_ENV_VAR

    from aflow_tune.cluster.local_ray import local_ray

    context = multiprocessing.get_context("spawn")
    port_from, port_to = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(port_to, options.latency / 1000), daemon=True)
    server.start()
    rows: list[Measured] = []
    profile = None
    try:
        with tempfile.TemporaryDirectory(prefix="aflow-scaling-") as logs:
            workers = {
                LOG_DIR_ENV_VAR: logs,  # runners log a line per task, as in every run
                "OMP_WAIT_POLICY": "PASSIVE",
                "TOKENIZERS_PARALLELISM": "false",
            }
            with local_ray(NAMESPACE, workers):
                engine = start_engine(f"http://127.0.0.1:{port_from.recv()}")
                pids = {
                    "scheduler": os.getpid(),
                    "engine": ray.get(engine.process_id.remote()),
                    "server": int(server.pid or 0),
                }
                _head()
                for runners in options.runners:
                    first = rows[0] if rows else None
                    measured, profile = asyncio.run(measure(runners, options, pids, first))
                    rows.append(measured)
                    _show(measured, rows[0])
                    if profile is not None:
                        break
    finally:
        server.terminate()
    assert profile is not None  # the last number is always profiled
    last = rows[-1]
    print(f"\nwatched at {last.runners} runners ({profile['runs_per_second']:.2f} runs/s then);")
    print("it scales still" if scales(last, rows[0]) else "here it no longer scales")
    for process in ("scheduler", "runner"):
        print(f"\nthe {process}'s process: " + "\n".join(table(profile[process])))
    if last.cpu_seconds["server"] / last.window_seconds > SERVER_SHARE:
        print("\nthe scripted server was busy for more than half of a core: it may be the limit")
    missed, verdict = judged(rows)
    print(f"\n{verdict}")
    if options.json:
        options.json.write_text(json.dumps(_told(rows, profile, options, not missed), indent=1))
    raise SystemExit(int(missed))


def judged(rows: list[Measured]) -> tuple[bool, str]:
    """(whether the target is missed or cannot be judged, the verdict as text)."""
    first = rows[0]
    asked = [row for row in rows if row.runners <= JUDGED_TO]
    if not asked:
        return True, f"no verdict: the target is about {JUDGED_TO} runners and fewer"
    if busy(first) >= BUSY:
        return True, "no verdict: the processors are busy already with the first number of runners"
    counted = [row for row in asked if busy(row) < BUSY]
    bad = [row.runners for row in counted if not scales(row, first)]
    left_out = [row.runners for row in asked if row not in counted]
    text = f"target: {EFFICIENCY:.0%} of linear up to {JUDGED_TO} runners while processors are "
    text += f"less than {BUSY:.0%} busy: "
    text += f"missed with {bad} runners" if bad else "met"
    if left_out:
        text += f"; not judged, since the processors were busier: {left_out}"
    most = max(row.runners for row in asked)
    if most < JUDGED_TO and not bad and not left_out:
        text += f" as far as measured ({most} runners)"
    return bool(bad), text


def _head() -> None:
    shares = " ".join(f"{role:>9}" for role in ROLES)
    print(f"load {os.getloadavg()[0]:.1f} on {_cores()} cores")
    print(f"{'runners':>7} {'runs/s':>8} {'of linear':>9} {'machine':>8} {'ours':>6} {shares}")


def _show(row: Measured, first: Measured) -> None:
    linear = row.rate / (first.rate / first.runners * row.runners)
    shares = [row.cpu_seconds[role] / row.window_seconds for role in ROLES]
    print(
        f"{row.runners:>7} {row.rate:>8.2f} {linear:>9.1%} "
        f"{row.machine_busy(os.cpu_count() or 1):>8.0%} {row.ours_busy(_cores()):>6.0%} "
        + " ".join(f"{share:>9.2f}" for share in shares)
        + f"   rounds {min(row.rates):.2f} to {max(row.rates):.2f}",
        flush=True,
    )


def _told(
    rows: list[Measured], profile: dict[str, Any], options: argparse.Namespace, met: bool
) -> dict[str, Any]:
    """What `--json` writes; times in seconds."""
    return {
        "latency": options.latency / 1000,
        "calls": options.calls,
        "group": options.group,
        "cores": _cores(),
        "processors": os.cpu_count(),
        "met": met,
        "measured": [
            {
                "runners": row.runners,
                "runs_per_second": row.rate,
                "rounds": row.rates,
                "machine_busy": row.machine_busy(os.cpu_count() or 1),
                "window_seconds": row.window_seconds,
                "window_runs": row.window_runs,
                "cpu_seconds": row.cpu_seconds,
            }
            for row in rows
        ],
        "profile": {"runners": rows[-1].runners, **profile},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = [1, 2, 4, 8, 16, 32, 64]
    parser.add_argument("--runners", type=int, nargs="+", default=numbers, help="in this order")
    parser.add_argument("--latency", type=float, default=200.0, help="milliseconds of a call")
    parser.add_argument("--calls", type=int, default=3, help="calls of a run")
    parser.add_argument("--group", type=int, default=1, help="runs of a task, side by side")
    parser.add_argument("--waves", type=int, default=10, help="tasks a runner and round, 2 or more")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write everything there")
    options = parser.parse_args()
    least = min(options.calls, options.group, options.rounds, *options.runners)
    if least < 1 or options.waves < 2 or options.latency < 0:
        sys.exit("runners, calls, group and rounds are at least 1, waves at least 2")
    return options


if __name__ == "__main__":
    main()
