"""A stand-in for `aflow-tune CONFIG key=value...` in tests of what starts runs and reads them.

A program of its own: it holds the run folder, writes states and evaluations through our writers,
saves and stops on SIGTERM, goes on from where it was, and learns nothing. What it does is told by
the environment variable STAND_IN, in JSON, each by the number of the trial (from the run's name):

    root      the folder of the sweeps
    steps     how many steps a run has, each evaluated on ten items
    scores    number of a trial -> its share of right items, or a list of shares by step
    by_seed   added to the share, by seed
    codes     number of a trial -> the exit code to end with after its first step
    wait      numbers of trials that stop after their first step until SIGTERM comes; a second
              start of the same run does not wait
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def main() -> int:
    """Do what STAND_IN says; returns the exit code."""
    from fake_run import write_evaluation

    from aflow_tune.runs.folder import locked, new_state, read_state, write_state

    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    wanted: dict[str, Any] = json.loads(os.environ["STAND_IN"])
    settings = dict(item.split("=", 1) for item in sys.argv[2:])
    name = settings["name"]
    number = str(int(name.partition("-seed")[0].rpartition("-")[2]))
    folder = Path(wanted["root"]) / settings["group"] / name
    share = wanted.get("scores", {}).get(number, 0.5)
    code = wanted.get("codes", {}).get(number, 0)
    steps = wanted.get("steps", 1)
    with locked(folder):
        before = read_state(folder)
        if before is not None and before.status == "finished":
            return 5
        first = before.step if before is not None else 0
        with (folder / "begun.txt").open("a") as file:
            file.write(f"{first}\n")
        state = new_state(steps, first, {"settings": sorted(sys.argv[2:])}, None)
        write_state(folder, state)
        for step in range(first + 1, steps + 1):
            now = share[step - 1] if isinstance(share, list) else share
            now += wanted.get("by_seed", {}).get(settings.get("seed", ""), 0.0)
            right = round(10 * now)
            write_evaluation(folder, step, [1.0] * right + [0.0] * (10 - right))
            state.step = step
            write_state(folder, state)
            if code:
                print(f"ending with {code}", flush=True)
                state.status, state.error = "failed", f"told to end with {code}"
                if code < 0:
                    os.kill(os.getpid(), -code)
                write_state(folder, state)
                return code
            while int(number) in wanted.get("wait", []) and before is None and not asked:
                time.sleep(0.02)
            if asked:
                state.status = "interrupted"
                write_state(folder, state)
                return 3
        state.status = "finished"
        write_state(folder, state)
    return 0


if __name__ == "__main__":
    sys.exit(main())
