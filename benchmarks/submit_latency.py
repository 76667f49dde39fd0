"""Time from `aflow-tune submit` to the first rollout, against a plain driver with the same engines.

    python benchmarks/submit_latency.py [--runs 5] [--json]

The plain driver is what one would write without us: `ray.init`, then Trinity's `run_stage` with
the local engine's explorer and trainer in place of its own; its code is on a path that all workers
see. `aflow-tune submit` does the same through the job server, with the code traced and uploaded,
keys handed over and every node checked first. Both start as a new process on the same warm cluster
of two nodes (`ray start`), in turns. The clock stops at the first call of the workflow, not at the
end of the first rollout; the run must then succeed. The model is tiny and random, so that start-up
dominates. The load of the machine is printed.

The plain driver uses our configuration loader and our engines, so their cost is on both sides;
compared is how code, keys and the command reach the workers. Needs bubblewrap, which hides the
driver's folder from the workers.

The target: at most 1.3 times the plain driver, by the median ratio of a turn. Exit code 1: missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "tests")]

TARGET = 1.3
LONGEST_SECONDS = 300
WORKFLOW = """
import os
import time
from pathlib import Path
from typing import Dict

from aflow_tune import TrinityChatModel

FIRST = Path({first!r})


async def flow(task: Dict, model: TrinityChatModel) -> float:
    try:
        with FIRST.open("x") as file:
            file.write(repr(time.time()))
    except FileExistsError:
        pass
    answer = await model([{{"role": "user", "content": task["question"]}}])
    return float(len(str(answer.content)))
"""
PLAIN = """
import sys
import aflow_tune.engines.trinity
import ray
import trinity.explorer.explorer, trinity.trainer.trainer
from trinity.cli.launcher import run_stage
from aflow_tune.config.load import load_config
from aflow_tune.engines.trinity.rollout.explorer import LocalExplorer
from aflow_tune.running.run import make_run
from aflow_tune.engines.trinity.training.trainer import LocalTrainActor
from flow import flow

config = load_config(sys.argv[1], sys.argv[2:])
run = make_run(config, flow, None)
run.prepare()
with run.claimed():
    from aflow_tune.config.accounting import spend_of

    run.spend = spend_of(config)
    run._inject()
    trinity.explorer.explorer.Explorer = LocalExplorer
    trinity.trainer.trainer.Trainer = LocalTrainActor
    ray.init(address="auto", namespace=config.ray_namespace, log_to_driver=False,
             runtime_env={"env_vars": {**config.get_envs(), "OMP_WAIT_POLICY": "PASSIVE"}})
    status = run_stage(config)
    assert status.success, status
"""


def seconds_to_first(command: list[str], first: Path, folder: Path, env: dict[str, str]) -> float:
    """Seconds from the start of `command` to the first call of the workflow; waits for its end."""
    first.unlink(missing_ok=True)
    with (folder / "output.txt").open("w+") as output:
        started = time.time()
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(LONGEST_SECONDS)
        except BaseException:
            process.terminate()
            raise
        if code or not first.exists():
            output.seek(0)
            sys.exit(f"{command} ended with {code}:\n{output.read()[-3000:]}")
    return float(first.read_text()) - started


def main() -> int:
    """Measure and print; 0 if the target is met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="of each kind")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    from project import write_project
    from ray_nodes import ray_nodes
    from tiny import write_tiny_model

    folder = Path(tempfile.mkdtemp(prefix="aflow-submit-"))
    try:
        hidden = folder / "hidden"
        hidden.mkdir()
        first = folder / "first"
        text = WORKFLOW.format(first=str(first))
        model = write_tiny_model(folder / "model")
        config = write_project(folder / "project", model, steps=1, workflow=text)
        spec = config.read_text().replace("flow.py:two_calls", "flow.py:flow")
        config.write_text(spec.replace("report: {score: letters, transcripts: 2}\n", ""))
        plain = folder / "project" / "plain.py"
        plain.write_text(PLAIN)
        taken: dict[str, list[float]] = {"plain": [], "submit": []}
        with ray_nodes(hidden, workers=1) as nodes:
            path = f"{nodes.environment['PYTHONPATH']}:{folder / 'project'}"
            env = {**nodes.environment, "PYTHONPATH": path, "RAY_ADDRESS": nodes.address}
            for number in range(options.runs + 1):
                settings = [str(config), "explorer.eval_interval=1", f"name=plain{number}"]
                settings.append("explorer.eval_on_startup=false")
                plain_command = [sys.executable, str(plain), *settings]
                settings[2] = f"name=submit{number}"
                submit_command = [sys.executable, "-m", "aflow_tune.cli", "submit", *settings]
                submit_command += ["--address", nodes.dashboard]
                turn = [("plain", plain_command), ("submit", submit_command)]
                for name, command in turn if number % 2 else reversed(turn):
                    seconds = seconds_to_first(command, first, folder / "project", env)
                    print(f"turn {number}, {name}: {seconds:.1f} s", file=sys.stderr, flush=True)
                    if number:  # the first turn fills the file caches
                        taken[name].append(seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    pairs = zip(taken["submit"], taken["plain"], strict=True)
    ratio = statistics.median(ours / plain for ours, plain in pairs)
    told = {"seconds": taken, "medians": medians, "ratio": ratio, "load": os.getloadavg()[0]}
    if options.json:
        print(json.dumps(told))
        return int(ratio > TARGET)
    for name, values in taken.items():
        print(f"{name:<7} median {medians[name]:6.1f} s   all {[round(v, 1) for v in values]}")
    print(f"ratio   {ratio:.2f} (target: at most {TARGET}); load {told['load']:.1f}")
    return int(ratio > TARGET)


if __name__ == "__main__":
    sys.exit(main())
