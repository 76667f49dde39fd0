"""A measured calibration: two steps of the real run on this machine, in a folder that is removed.

The command itself is run, in a process of its own, with the configuration's settings and without
evaluations. Its metrics say what an estimate cannot know: how long responses are, tokens a second,
seconds of a step; its process tree says how much memory it took. Only for the local engine: what a
GPU cluster does has to be measured there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from aflow_tune.config.engine import choose_engine
from aflow_tune.config.load import AflowConfig
from aflow_tune.errors import BadInput, Fault, RunFailed
from aflow_tune.estimate.estimate_lengths import Earlier

STEPS = 2
"""The first step also warms up; of a metric the mean of both counts."""
_MEASURED_EVERY = 0.5


def calibrate(
    path: str | Path, overrides: Sequence[str], parts: Sequence[tuple[str, AflowConfig]]
) -> dict[int, Earlier]:
    """Run two steps of each stage that trains on rollouts; its metrics, by the stage's number.

    Raises:
        BadInput: the configuration is not one that can be measured here.
        RunFailed: the short run failed; the end of its output is in the message.
    """
    engine = choose_engine(parts[0][1])[0]
    if engine != "local" or len(parts) > 1 or parts[0][1].mode != "both":
        found = f"engine {engine}" if engine != "local" else "a chain of stages, or another mode"
        cure = "leave --measure out; give --tokens-per-second, or measure a run of one stage"
        expected = "one run of `mode: both` on the local engine"
        raise BadInput(
            "Only such a run can be measured.", [Fault("--measure", expected, found, cure)]
        )
    with tempfile.TemporaryDirectory(prefix="aflow-measure-") as folder:
        peak = _run(path, [*overrides, *_short(Path(folder))], Path(folder))
        (metrics,) = Path(folder).rglob("metrics.jsonl")
        earlier = Earlier.of(metrics.parent, f"{STEPS} steps measured on this machine just now")
    earlier.peak = peak
    return {0: earlier}


def _short(folder: Path) -> list[str]:
    """Overrides that leave two training steps and nothing else."""
    return [
        f"checkpoint_root_dir={folder}",
        "cluster.ray_address=local",  # the memory of another Ray is not in our process tree
        f"buffer.total_steps={STEPS}",
        "trainer.total_steps=null",
        "buffer.explorer_input.eval_tasksets=[]",
        "explorer.eval_on_startup=false",
        "trainer.save_hf_checkpoint=never",
        f"trainer.save_interval={STEPS}",
    ]


def _run(path: str | Path, overrides: Sequence[str], folder: Path) -> float:
    """Run the command; the largest memory of its process tree, in bytes."""
    command = [sys.executable, "-m", "aflow_tune.cli", "run", str(path), *overrides]
    print(f"measuring {STEPS} steps ...", file=sys.stderr, flush=True)
    peak = 0.0
    with (folder / "output.txt").open("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ}
        )
        try:
            while process.poll() is None:
                peak = max(peak, tree_bytes(process.pid))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_MEASURED_EVERY)
        finally:
            if process.poll() is None:
                process.terminate()  # its own handler saves and takes its Ray down
                process.wait()
        if process.returncode:
            output.seek(0)
            last = "\n".join(output.read().splitlines()[-20:])
            raise RunFailed(f"the short run exited with {process.returncode}:\n{last}")
    return peak


def tree_bytes(pid: int) -> float:
    """Memory of a process and its children; shared pages are divided among their sharers."""
    total = 0.0
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            full = process.memory_full_info()
            # Proportional shares are known on Linux only; elsewhere what is the process's alone.
            total += getattr(full, "pss", full.uss)
    return total
