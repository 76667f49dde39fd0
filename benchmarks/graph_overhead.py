"""The time that running a graph in the sandbox adds to calling its operators directly.

    python benchmarks/graph_overhead.py [--runs 30] [--policy auto] [--json]

A scripted model answers at once. A graph with 1, 5 or 20 calls of Custom is run, and the operator
is called as often without a graph; the difference is the overhead. It is measured with a sandbox
that is already started, as when models take time between two graphs. It includes other load on the
machine, so both the median and the lower quartile are printed. For comparison: a trusted graph,
which has no sandbox, and graphs without a pause, each of which waits for a new process.

The target, sandbox warm: at most 10 ms and 1 ms a call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from aflow_tune.graph.graph import Graph
from aflow_tune.models import ScriptedModel
from aflow_tune.operators import Custom

BASE_MS, CALL_MS = 10.0, 1.0
CALLS = (1, 5, 20)
REFILL_SECONDS = 0.4
"""Pause between two warm runs, in which another sandbox starts."""
PROBLEM = "A farmer has 17 sheep and buys 25 more. How many sheep are there now? " * 4
CODE = """\
class Workflow:
    def __init__(self, name, llm_config, dataset):
        self.llm = create_llm_instance(llm_config)
        self.solve = operator.Custom(self.llm)

    async def __call__(self, problem):
        for _ in range({calls}):
            solution = await self.solve(input=problem)
        return solution["response"], self.llm.get_usage_summary()["total_cost"]
"""


def model() -> ScriptedModel:
    """A model that answers at once."""
    return ScriptedModel(lambda _: "There are 42 sheep.")


async def milliseconds(work: Callable[[], Awaitable[Any]]) -> float:
    """Wall time of one call of `work`."""
    started = time.perf_counter()
    await work()
    return 1000 * (time.perf_counter() - started)


async def direct(calls: int) -> None:
    """Call the graph's operator `calls` times, without the graph."""
    solve = Custom(model(), name="solve")
    for _ in range(calls):
        await solve(input=PROBLEM)


async def through(graph: Graph, policy: str) -> None:
    """One run of the graph."""
    ran = await graph.run(PROBLEM, model=model(), sandbox=policy)
    if not ran.ok:
        raise RuntimeError(f"the graph failed: {ran.ending.value}: {ran.reason}")


async def measure(calls: int, runs: int, policy: str) -> dict[str, float]:
    """Milliseconds of overhead of a graph with this many calls."""
    graph = Graph("benchmark", {"graph.py": CODE.format(calls=calls)})
    trusted = replace(graph, trust=True)
    await through(graph, policy)
    await through(graph, policy)
    without, warm, inside = [], [], []
    for _ in range(runs):
        await asyncio.sleep(REFILL_SECONDS)
        without.append(await milliseconds(lambda: direct(calls)))
        warm.append(await milliseconds(lambda: through(graph, policy)))
        inside.append(await milliseconds(lambda: through(trusted, policy)))
    rest = statistics.median(without)
    busy = await milliseconds(lambda: repeat(lambda: through(graph, policy), runs))
    return {
        "direct_ms": rest,
        "median_ms": statistics.median(warm) - rest,
        "fastest_quarter_ms": statistics.quantiles(warm, n=4)[0] - rest,
        "trusted_ms": statistics.median(inside) - rest,
        "one_after_the_other_ms": busy / runs - rest,
        "target_ms": BASE_MS + CALL_MS * calls,
    }


async def repeat(work: Callable[[], Awaitable[Any]], times: int) -> None:
    """Call `work` repeatedly without a pause."""
    for _ in range(times):
        await work()


async def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """All results."""
    found = {str(n): await measure(n, arguments.runs, arguments.policy) for n in CALLS}
    return {"load": os.getloadavg()[0], "cores": os.cpu_count(), "calls": found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    given = parser.parse_args()
    figures = asyncio.run(main(given))
    if given.json:
        print(json.dumps(figures))
        sys.exit()
    print(f"{figures['cores']} cores, load {figures['load']:.1f}; milliseconds a run")
    print(
        f"{'calls':>5} {'direct':>8} {'median':>8} {'fastest':>8} {'target':>8}"
        f" {'trusted':>8} {'no pause':>9}"
    )
    for count, row in figures["calls"].items():
        print(
            f"{count:>5} {row['direct_ms']:8.2f} {row['median_ms']:8.2f}"
            f" {row['fastest_quarter_ms']:8.2f} {row['target_ms']:8.1f}"
            f" {row['trusted_ms']:8.2f} {row['one_after_the_other_ms']:9.2f}"
        )
