"""The speed of grading programs: the reference solutions of HumanEval or MBPP, in the sandbox.

    python benchmarks/code_scoring.py [--data FILE.jsonl] [--benchmark humaneval] [--json]

Each program is graded by both rules, as `aflow-tune score` does: in one sandboxed process together
with its tests and, as these programs are right, in one apart from the tests. The first round also
sets up the sandbox and its pool and is reported separately. Target: the 33 rows of
humaneval_validate within 5 s on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from aflow_tune.sandbox import detect
from aflow_tune.scoring import Benchmark, find
from aflow_tune.scoring.benchmarks import Scores, score_all

DATA = Path(__file__).parents[2] / "shared/data/benchmarks"


async def timed(benchmark: Benchmark, rows: list[dict[str, Any]]) -> tuple[float, Scores]:
    """Seconds for one round over the rows, and its scores."""
    started = time.perf_counter()
    scores = await score_all(benchmark, rows)
    return time.perf_counter() - started, scores


async def measure(benchmark: Benchmark, rows: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Seconds of the first round and of the others, with facts about the machine."""
    first, scores = await timed(benchmark, rows)
    warm = [(await timed(benchmark, rows))[0] for _ in range(rounds)]
    return {
        "rows": len(rows),
        "right": scores.values("strict").count(1.0),
        "first_seconds": round(first, 2),
        "warm_seconds": [round(seconds, 2) for seconds in warm],
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "sandbox": str(detect().level),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--benchmark", default="humaneval", choices=("humaneval", "mbpp"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    benchmark = find(options.benchmark)
    rows = benchmark.load(options.data or DATA / f"{options.benchmark}_validate.jsonl")
    found = asyncio.run(measure(benchmark, rows, options.rounds))
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:14} {value}")


if __name__ == "__main__":
    main()
