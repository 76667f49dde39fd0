"""What a search over workflows costs by itself, with an executor that answers at once.

    python benchmarks/search_overhead.py [--rollouts 10000] [--pool 100000] [--seed 0]

First a search from workflows/graphs/plain by typed edits, with the static check of every graph and
a pool on disk, until its rollouts are used up; prints the processor's milliseconds a rollout, and
how large the tree became. Then a pool of many trials is opened, and a search starts over it. The
targets are 5 ms a rollout, and under a second.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path

from aflow_tune.graph.graph import load_graph
from aflow_tune.operators import OPERATORS
from aflow_tune.search import (
    RLEnhancedOptimizer,
    SearchSettings,
    SharedExperiencePool,
    TaskSet,
    WorkflowState,
)
from aflow_tune.search.pool import SearchEdge, Trial
from aflow_tune.search.proposers import Edits
from aflow_tune.writer.check import check_loaded
from aflow_tune.writer.types import CheckLimits

PLAIN = Path(__file__).parents[1] / "workflows" / "graphs" / "plain"
ALLOWED = ("Custom", "Programmer", "AnswerGenerate", "ScEnsemble")
TOLD = {"brief": "Give only the answer.", "steps": "Think step by step.", "twice": "Check it."}
WORDS = ("how", "many", "cost", "total", "what", "each")
LIMITS = CheckLimits(model_calls=40)
TASKSET = "questions"


def chance(*parts: str) -> float:
    return zlib.crc32("/".join(parts).encode()) / 2**32


async def at_once(taskset: TaskSet, state: WorkflowState, problem: str) -> Trial:
    """A workflow is as good as its text is lucky, and a little better for each operator."""
    good = 0.3 + 0.3 * chance(state.key) + 0.02 * min(10, state.structure.count(" "))
    return Trial(float(chance(state.key, problem) < good), tokens=100, usd=0.001)


def check(state: WorkflowState) -> str:
    operators = {name: OPERATORS[name] for name in ALLOWED}
    verdict = check_loaded(state.graph(), operators=operators, limits=LIMITS)
    return "; ".join(map(str, verdict.refusals))


def search(pool: SharedExperiencePool, settings: SearchSettings) -> RLEnhancedOptimizer:
    problems = [f"problem {number}" for number in range(48)]
    words = {word: [chance(word, problem) < 0.5 for problem in problems] for word in WORDS}
    operators = {name: OPERATORS[name] for name in ALLOWED}
    edits = Edits(operators, {TASKSET: words}, {TASKSET: TOLD}, {TASKSET: [" and "]})
    seed = WorkflowState.of(TASKSET, load_graph(PLAIN))
    taskset = TaskSet(TASKSET, seed, problems, check=check)
    return RLEnhancedOptimizer(pool, [taskset], at_once, [edits], settings)


def measure_search(path: Path, rollouts: int, seed: int) -> None:
    settings = SearchSettings(seed=seed, rollouts=rollouts, patience=None)
    one = search(SharedExperiencePool(path), settings)
    started, busy = time.perf_counter(), time.process_time()
    asyncio.run(one.run())
    seconds, processor = time.perf_counter() - started, time.process_time() - busy
    (tree,), done = one.trees, one.spent["rollouts"]
    print(
        f"{done:,} rollouts in {seconds:.1f} s, {processor:.1f} s of processor time: "
        f"{1000 * processor / done:.2f} ms a rollout; {len(tree.edges):,} edges, "
        f"{len(tree.tried):,} workflows, {len(tree.nodes):,} kept; pool of "
        f"{path.stat().st_size / 2**20:.1f} MiB"
    )


def fill(path: Path, trials: int) -> None:
    """A pool of one search: 20 trials a workflow, and an edge for each."""
    pool, seed, edges = SharedExperiencePool(path), WorkflowState.of(TASKSET, load_graph(PLAIN)), []
    for number in range(trials // 20):
        state = replace(seed, instructions={"ask": str(number)})
        pool.add_workflow(state)
        for place in range(20):
            problem = f"problem {place}"
            trial = Trial(chance(state.key, problem), tokens=100, usd=0.001, answer="It is 42.")
            pool.add_trial(TASKSET, "", state.key, problem, trial, "earlier")
        told = seed.key, state.key, "edits", "instruct", "instruct Custom"
        anchor = f"{TASKSET} | {seed.structure} {number % 500} | wrong | instruct"
        edges.append(SearchEdge(number, number // 4, *told, gain=0.1, shared=20, anchor=anchor))
    pool.add_edges("earlier", TASKSET, edges)


def measure_opening(path: Path, trials: int, seed: int) -> None:
    fill(path, trials)
    started = time.perf_counter()
    one = search(SharedExperiencePool(path), SearchSettings(name="later", seed=seed))
    opened = time.perf_counter() - started
    asyncio.run(one.trees[0].start())
    seconds = time.perf_counter() - started
    counts = ", ".join(f"{count:,} {name}" for name, count in one.pool.describe().items())
    print(
        f"a pool of {counts} ({path.stat().st_size / 2**20:.0f} MiB): open after {opened:.2f} s, "
        f"started after {seconds:.2f} s, {one.spent['reused']} trials taken over"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--pool", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure_search(Path(folder) / "search.sqlite", options.rollouts, options.seed)
        measure_opening(Path(folder) / "large.sqlite", options.pool, options.seed)


if __name__ == "__main__":
    main()
