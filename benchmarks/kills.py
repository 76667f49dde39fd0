"""Kill -9 at random moments: does the same command end where an uninterrupted run ends?

    python benchmarks/kills.py [--kills 20] [--ray] [--who command|any] [--steps 6] [--seed 0]

A tiny random model is trained without interruption. Then each of `--kills` runs, in a folder of its
own, is killed at a moment drawn uniformly from the length of the uninterrupted run, and the same
command is repeated until it succeeds. Every third run is killed a second time, while it resumes.
With `--who any` and `--ray` the victim is any process of the run: command, explorer, trainer,
sampler, Ray's own servers.

Checked for each: exit code 0 in the end (5 if the kill came after the run had finished, so that the
next command finds a finished run), the same last step, the same tasks in every training step, and
the same weights bit for bit (by the hashes in the checkpoint's manifest). If a command ends by
itself with another exit code, the next one must be able to resume. Prints a line a run; exit code 1
if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.errors import ExitCode

ROOT = Path(__file__).resolve().parents[1]
MOST_COMMANDS = 6
"""A run that needs more commands than this counts as stuck."""
WORKFLOW = """
from typing import Dict

from aflow_tune import TrinityChatModel, text_of
from aflow_tune.context import keep


async def letters(task: Dict, model: TrinityChatModel) -> float:
    answer = await model([{"role": "user", "content": task["question"]}])
    text = text_of(answer.content)
    keep("question", task["question"])
    return sum(c.isalpha() for c in text) / max(1, len(text))
"""


@dataclass(frozen=True)
class End:
    """The final state of a run, which must be equal."""

    step: int
    tasks: dict[int, list[str]]
    """The questions of every training step, sorted."""
    weights: str

    @classmethod
    def of(cls, run: Path) -> End:
        """Read from a run folder."""
        state = json.loads((run / "run.json").read_text())
        tasks: dict[int, list[str]] = {}
        for path in (run / "rollouts").glob("step_*.jsonl"):
            kept: dict[tuple[int, int], str] = {}
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                kept[entry["task"], entry["run"]] = entry["kept"]["question"]
            tasks[int(path.stem.removeprefix("step_"))] = sorted(kept.values())
        manifest = json.loads((run / f"global_step_{state['step']}" / "manifest.json").read_text())
        return cls(state["step"], tasks, manifest["files"]["weights.safetensors"]["sha256"])


def main() -> int:
    """Run the benchmark; returns the exit code."""
    options = _options()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        root = Path(scratch)
        length = options.limit
        for name in ("cold", "whole"):  # the first run warms the caches
            started = time.monotonic()
            code, _ = _command(_project(root / name, options), options, None, draw)
            length = min(length, time.monotonic() - started)
            if code != 0:
                print("the uninterrupted run failed")
                return 1
        whole = End.of(_run_dir(root / "whole"))
        print(f"uninterrupted: step {whole.step} in {length:.1f} s; load {os.getloadavg()[0]:.1f}")
        good = 0
        for number in range(options.kills):
            good += _one(number, root / f"run_{number}", whole, length, options, draw)
    kind = "through Ray" if options.ray else "in one process"
    print(f"{good} of {options.kills} runs {kind} ended as the uninterrupted one")
    return 0 if good == options.kills else 1


def _one(
    number: int,
    folder: Path,
    whole: End,
    length: float,
    options: argparse.Namespace,
    draw: random.Random,
) -> bool:
    config = _project(folder, options)
    moments = [draw.uniform(0, length) for _ in range(2 if number % 3 == 2 else 1)]
    told = []
    for attempt in range(MOST_COMMANDS):
        moment = moments[attempt] if attempt < len(moments) else None
        code, said = _command(config, options, moment, draw)
        told.append(said)
        done = code == 0 or (attempt > 0 and code == ExitCode.ALREADY_FINISHED)
        if done:
            break
    if not done:
        print(f"{number:3}  {'; '.join(told)}: not finished after {MOST_COMMANDS} commands")
        return False
    end = End.of(_run_dir(folder))
    same_tasks = end.step == whole.step and end.tasks == whole.tasks
    same_weights = end.weights == whole.weights
    verdict = f"step {end.step}, {'same' if same_tasks else 'OTHER'} tasks, "
    verdict += f"{'same' if same_weights else 'OTHER'} weights"
    print(f"{number:3}  {'; '.join(told)}: {verdict}", flush=True)
    return same_tasks and same_weights


def _command(
    config: Path, options: argparse.Namespace, moment: float | None, draw: random.Random
) -> tuple[int, str]:
    """Run the command once, killed after `moment` seconds; returns its exit code, and a text."""
    words = [sys.executable, "-m", "aflow_tune.cli", str(config)]
    words += ["cluster.ray_address=local"] if options.ray else ["--inline"]
    log = config.parent / "output.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=config.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        victim = ""
        try:
            if moment is not None and _still_runs(process, moment):
                victim = _kill(process, options, draw)
            process.wait(timeout=options.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return 1, f"{victim or 'nothing'} killed, HUNG for {options.limit:.0f} s"
    code = process.returncode
    when = "" if moment is None else f"{victim or 'nothing'} killed at {moment:.1f} s, "
    if code > 0:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        if code == ExitCode.ALREADY_FINISHED:
            return code, "had finished"
        return code, f"{when}exit {code}: {lines[-1] if lines else 'nothing was said'}"
    return code, f"{when}{'done' if code == 0 else 'gone'}"


def _still_runs(process: subprocess.Popen[Any], seconds: float) -> bool:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _kill(process: subprocess.Popen[Any], options: argparse.Namespace, draw: random.Random) -> str:
    """Kill the command, or with `--who any` one of its processes; returns the victim's name."""
    import psutil

    family = [psutil.Process(process.pid)]
    if options.who == "any":
        family += family[0].children(recursive=True)
    victim = draw.choice(family)
    try:
        name = "command" if victim.pid == process.pid else " ".join(victim.cmdline())[:40]
        victim.kill()
    except psutil.NoSuchProcess:
        return "nothing"
    return name or "a process"


def _project(folder: Path, options: argparse.Namespace) -> Path:
    sys.path.insert(0, str(ROOT / "tests"))
    from project import write_project
    from tiny import write_tiny_model

    model = folder.parent / "model"
    if not model.is_dir():
        write_tiny_model(model)
    config = write_project(folder, model, steps=options.steps, workflow=WORKFLOW)
    text = config.read_text().replace(":two_calls", ":letters")
    text = text.replace("report: {score: letters, ", "report: {")
    text = text.replace("save_interval: 1", f"save_interval: {options.save_interval}")
    config.write_text(f"{text}deterministic: true\n")
    return config


def _run_dir(folder: Path) -> Path:
    return folder / "runs" / "tests" / "tiny"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="runs that are killed (20)")
    parser.add_argument("--ray", action="store_true", help="explorer and trainer through Ray")
    parser.add_argument("--who", choices=("command", "any"), default="command", help="whom to kill")
    parser.add_argument("--steps", type=int, default=6, help="training steps (6)")
    parser.add_argument("--save-interval", type=int, default=2, help="steps (2)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a command (600)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
