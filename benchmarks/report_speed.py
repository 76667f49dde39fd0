"""How long the report of a long run takes, for a policy that writes workflows.

    python benchmarks/report_speed.py [--steps 200] [--runs 64] [--items 100] [--json]

Writes the folder of such a run (with records from `tests/fake_writer.py`), then its report and the
summary. Prints seconds, the page's size and this process's peak memory; the target is 10 s for 200
steps of 64 rollouts.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from aflow_tune.report.html import summary_text, write_report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

TARGET_SECONDS = 10.0


def measure(folder: Path, steps: int, runs: int, items: int) -> dict[str, float]:
    """Seconds of the report and of the summary, kilobytes of the page, megabytes of memory."""
    from fake_writer import write_writer_run

    run_dir = write_writer_run(folder / "run", steps=steps, runs=runs, items=items)
    start = time.perf_counter()
    page = write_report(run_dir)
    written = time.perf_counter()
    summary_text(run_dir, page)
    return {
        "report_seconds": round(written - start, 2),
        "summary_seconds": round(time.perf_counter() - written, 2),
        "page_kb": round(page.stat().st_size / 1000, 1),
        "memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=int, default=64, help="training runs a step (64)")
    parser.add_argument("--items", type=int, default=100, help="held-out items (100)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.steps, options.runs, options.items)
    if options.json:
        print(json.dumps(found))
    else:
        print(f"{options.steps} steps of {options.runs} runs, target {TARGET_SECONDS:g} s")
        for name, value in found.items():
            print(f"  {name:<16}{value:>8}")
    return 0 if found["report_seconds"] <= TARGET_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
