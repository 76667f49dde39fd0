"""The error of `aflow-tune estimate`: real runs of the local engines, estimated and measured.

    python benchmarks/estimate_memory.py                  every case, inline and through Ray
    python benchmarks/estimate_memory.py --only tiny          cases whose name holds 'tiny'
    python benchmarks/estimate_memory.py --inline --json out.json

Each case is a small project: a workflow of two calls, a configuration, one model. The command
estimates it, then runs it for three steps; compared is the peak memory of the run's process tree
(shared pages divided among their sharers). Exit code 1 if any is off by more than 20%.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from aflow_tune.engines.local.models import resolve_model

ALLOWED = 0.2

WORKFLOW = """
from typing import Dict

from aflow_tune import TrinityChatModel, text_of

PADDING = "Here is a remark that has nothing to do with it. " * {remarks}


async def two_calls(task: Dict, model: TrinityChatModel) -> float:
    first = await model([{{"role": "user", "content": PADDING + task["question"]}}])
    text = text_of(first.content)
    second = await model([{{"role": "user", "content": task["question"] + " " + text[:20]}}])
    text += text_of(second.content)
    return sum(c.isalpha() for c in text) / max(1, len(text))
"""


@dataclass(frozen=True)
class Case:
    """One configuration. `rank` None: train the full weights. `remarks` lengthen the prompts."""

    name: str
    model: str
    tasks: int = 4
    repeats: int = 4
    response: int = 16
    rank: int | None = 16
    dtype: str = "fp32"
    remarks: int = 2
    micro: int = 2048
    max_batch: int = 64
    longest: int = 512
    load_in: str | None = None


CASES = (
    Case("tiny", "tiny"),
    Case("tiny, long, rank 64", "tiny", tasks=8, repeats=8, response=128, rank=64, remarks=8),
    Case("tiny, full weights", "tiny", rank=None, response=64),
    Case("smollm2, fp32", "smollm2-135m"),
    Case("smollm2, bf16", "smollm2-135m", dtype="bf16"),
    Case("smollm2, bf16, batch 8 x 8", "smollm2-135m", tasks=8, repeats=8, dtype="bf16"),
    Case("smollm2, fp32, rank 64, long", "smollm2-135m", rank=64, response=96, remarks=12),
    Case("smollm2, fp32, 512 at once", "smollm2-135m", tasks=8, micro=512),
    Case("smollm2, bf16, full weights", "smollm2-135m", rank=None, dtype="bf16"),
    Case("smollm2, fp32, full, long", "smollm2-135m", rank=None, response=96, remarks=12),
    Case(
        "smollm2, fp32, responses of 256",
        "smollm2-135m",
        tasks=2,
        repeats=8,
        response=256,
        longest=1024,
        remarks=20,
    ),
    Case(
        "smollm2, bf16, 4,096 at once",
        "smollm2-135m",
        tasks=8,
        repeats=16,
        dtype="bf16",
        response=64,
        micro=4096,
    ),
    Case("smollm2, bf16, 4 bits", "smollm2-135m", dtype="bf16", load_in="4bit"),
)


@dataclass(frozen=True)
class Outcome:
    """Bytes. `error` is (estimated - measured) / measured."""

    name: str
    inline: bool
    estimated: float
    measured: float

    @property
    def error(self) -> float:
        """Relative; above 0: the estimate is too high."""
        return (self.estimated - self.measured) / self.measured


def write_project(case: Case, root: Path, inline: bool) -> Path:
    """Write workflow, data and configuration; returns the configuration's path."""
    import yaml

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from tiny import write_tiny_model

    model = case.model
    if model == "tiny":
        model = str(write_tiny_model(root / "tiny"))
    else:
        resolve_model(model)  # an estimate without the tokenizer has only the limits
    (root / "flow.py").write_text(WORKFLOW.format(remarks=case.remarks))
    rows = [json.dumps({"question": f"What is {n} + {n + 1}?"}) for n in range(64)]
    (root / "train.jsonl").write_text("\n".join(rows) + "\n")
    (root / "held_out.jsonl").write_text(json.dumps({"question": "What is 100 + 1?"}) + "\n")
    settings: dict[str, Any] = {
        "project": "estimate",
        "name": "case",
        "checkpoint_root_dir": str(root / "runs"),
        "workflow": f"{root}/flow.py:two_calls",
        "engine": "local",
        "inline": inline,
        "local": {
            "dtype": case.dtype,
            "load_in": case.load_in,
            "micro_batch_tokens": case.micro,
            "max_batch": case.max_batch,
        },
        "algorithm": {
            "algorithm_type": "multi_step_grpo",
            "repeat_times": case.repeats,
            "kl_loss_fn": "none",
            "optimizer": {"lr": 1e-4},
        },
        "model": {
            "model_path": model,
            "max_prompt_tokens": case.longest - case.response,
            "max_response_tokens": case.response,
            "max_model_len": case.longest,
        },
        "buffer": {
            "batch_size": case.tasks,
            "total_steps": 3,
            "explorer_input": {
                "taskset": {"name": "train", "path": f"{root}/train.jsonl"},
                "eval_tasksets": [{"name": "held_out", "path": f"{root}/held_out.jsonl"}],
            },
        },
    }
    if case.rank is not None:
        settings["model"]["lora_configs"] = [{"lora_rank": case.rank, "lora_alpha": 2 * case.rank}]
    config = root / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    return config


def estimated_bytes(config: Path) -> float:
    """The estimate of the process tree's memory, from the command."""
    command = [sys.executable, "-m", "aflow_tune.cli", "estimate", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the estimate exited with {done.returncode}:\n{done.stderr}")
    return float(json.loads(done.stdout)["peak_bytes"]["memory"])


def run_measured(command: Sequence[str], folder: Path) -> tuple[int, float, str]:
    """Run a command; returns its exit code, the peak memory of its process tree in bytes, and its
    output. Shared pages are divided among their sharers where that is known (Linux)."""
    peak = 0.0
    with (folder / "output.txt").open("w+", errors="replace") as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                total = 0.0
                for one in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        full = one.memory_full_info()
                        total += getattr(full, "pss", full.uss)
                peak = max(peak, total)
                with contextlib.suppress(psutil.TimeoutExpired):
                    process.wait(0.5)
        finally:
            if process.poll() is None:
                process.terminate()  # its handler saves and shuts down its Ray
                process.wait()
        output.seek(0)
        return process.returncode, peak, output.read()


def measured_bytes(config: Path, root: Path) -> float:
    """The peak memory of the run's process tree."""
    own = "cluster.ray_address=local"  # another Ray is not in our process tree
    command = [sys.executable, "-m", "aflow_tune.cli", str(config), own]
    code, peak, output = run_measured(command, root)
    if code:
        raise RuntimeError(f"the run exited with {code}:\n{output}")
    return peak


def main() -> int:
    """Run the cases and print the table; returns 1 if an error is larger than allowed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--inline", action="store_true", help="not through Ray")
    parser.add_argument("--ray", action="store_true", help="not in one process")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    options = parser.parse_args()
    ways = [True] * (not options.ray) + [False] * (not options.inline)
    outcomes = []
    print(f"{os.cpu_count()} cores; load {os.getloadavg()[0]:.1f}")
    print(f"{'case':32} {'how':8} {'estimated':>10} {'measured':>10} {'error':>7}")
    for case in CASES:
        for inline in ways if options.only in case.name else []:
            with tempfile.TemporaryDirectory(prefix="estimate-memory-") as folder:
                config = write_project(case, Path(folder), inline)
                estimated = estimated_bytes(config)
                outcome = Outcome(
                    case.name, inline, estimated, measured_bytes(config, Path(folder))
                )
            outcomes.append(outcome)
            how = "inline" if inline else "Ray"
            print(
                f"{case.name:32} {how:8} {outcome.estimated / 1e9:7.2f} GB "
                f"{outcome.measured / 1e9:7.2f} GB {outcome.error:+7.0%}",
                flush=True,
            )
            if options.json:
                found = [asdict(item) | {"error": item.error} for item in outcomes]
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    off = [outcome for outcome in outcomes if abs(outcome.error) > ALLOWED]
    print(f"{len(outcomes) - len(off)} of {len(outcomes)} within {ALLOWED:.0%}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
