"""Programs a second in the sandbox, and one cold run against a plain subprocess.

    python benchmarks/sandbox_speed.py [--policy auto] [--runs 120] [--json]

Warm: a small function with three asserts, `--runs` times, with one, two and four at once; the
target is 30 a second on two cores. Cold: a sandbox started for the program, in turn with
`python -I` on the same file, `--cold` times each; the target is a ratio of medians of at most 1.5.
The first program of a new process, which also detects the sandbox backend, is measured in
processes of its own. On a busy machine only the ratios are meaningful.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aflow_tune.sandbox import detect, run_program, run_program_sync
from aflow_tune.sandbox.process import Job
from aflow_tune.sandbox.running import engine
from aflow_tune.sandbox.types import Level, Limits

TARGET_PER_SECOND = 30.0
TARGET_RATIO = 1.5
PROGRAM = """\
def count_upper(s):
    return sum(1 for c in s[::2] if c in "AEIOU")
assert count_upper("aBCdEf") == 1
assert count_upper("abcdefg") == 0
assert count_upper("dBBE") == 0
"""
FIRST = """
import sys, time
from aflow_tune.sandbox import run_program_sync
begin = time.perf_counter()
assert run_program_sync(sys.argv[2], policy=sys.argv[1]).ok
print(time.perf_counter() - begin)
"""


async def warm(policy: str, runs: int, at_once: int) -> dict[str, float]:
    """Programs a second, and the median milliseconds of one."""
    slots = asyncio.Semaphore(at_once)
    each: list[float] = []

    async def one() -> None:
        async with slots:
            begin = time.perf_counter()
            execution = await run_program(PROGRAM, policy=policy)
            each.append(time.perf_counter() - begin)
            if not execution.ok:
                raise RuntimeError(f"the program {execution.ending.value}: {execution.stderr}")

    begin = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(runs)))
    seconds = time.perf_counter() - begin
    return {"per_second": runs / seconds, "median_ms": statistics.median(each) * 1000}


def cold(level: Level, file: Path) -> float:
    """Milliseconds of one program in a sandbox that is started for it."""
    home = engine()

    async def from_nothing() -> float:
        begin = time.perf_counter()
        limits = Limits()
        sandbox = await home.start(level, limits.disk_mb)
        try:
            execution = await sandbox.run(Job(file.read_text(), "", limits, {}, False))
        finally:
            await sandbox.close()
            sandbox.channel.close()
        if not execution.ok:
            raise RuntimeError(execution.stderr)
        return (time.perf_counter() - begin) * 1000

    return home.submit(from_nothing()).result()


def plain(file: Path) -> float:
    """Milliseconds of one program in a plain subprocess."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-I", str(file)], check=True, capture_output=True)
    return (time.perf_counter() - begin) * 1000


def first(policy: str) -> float:
    """Milliseconds of the first program of a new process, without imports."""
    words = [sys.executable, "-c", FIRST, policy, PROGRAM]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout) * 1000


def measure(policy: str, runs: int, cold_runs: int) -> dict[str, Any]:
    """All numbers of the table."""
    level = detect(policy).level
    if level is None:
        raise SystemExit(f"no sandbox here: {detect(policy).why}")
    for _ in range(5):
        run_program_sync(PROGRAM, policy=policy)
    table: dict[str, Any] = {"level": level.value, "cores": len(os.sched_getaffinity(0))}
    for at_once in (1, 2, 4):
        table[f"warm_{at_once}_at_once"] = asyncio.run(warm(policy, runs, at_once))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(PROGRAM)
        pairs = [(plain(file), cold(level, file)) for _ in range(cold_runs)]
    plains, colds = zip(*pairs, strict=True)
    table["plain_ms"], table["cold_ms"] = statistics.median(plains), statistics.median(colds)
    table["cold_ratio"] = table["cold_ms"] / table["plain_ms"]
    table["first_of_process_ms"] = statistics.median(first(policy) for _ in range(5))
    table["best_per_second"] = max(table[f"warm_{n}_at_once"]["per_second"] for n in (1, 2, 4))
    return table


def main() -> None:
    """Run and print the table; exit code 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--runs", type=int, default=120)
    parser.add_argument("--cold", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options = parser.parse_args()
    table = measure(options.policy, options.runs, options.cold)
    if options.json:
        print(json.dumps(table))
    else:
        print(f"{table['level']}, {table['cores']} cores")
        for at_once in (1, 2, 4):
            row = table[f"warm_{at_once}_at_once"]
            print(
                f"warm, {at_once} at once   {row['per_second']:7.1f} a second   "
                f"median {row['median_ms']:6.1f} ms"
            )
        print(f"plain subprocess  {table['plain_ms']:7.1f} ms")
        print(f"cold run          {table['cold_ms']:7.1f} ms      {table['cold_ratio']:.2f}x plain")
        print(f"first of process  {table['first_of_process_ms']:7.1f} ms")
    missed = table["best_per_second"] < TARGET_PER_SECOND or table["cold_ratio"] > TARGET_RATIO
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
