"""What the quickstart learns: one whole command per seed, with interval, time and memory.

    python benchmarks/learn.py                    seeds 0, 1, 2 through Ray
    python benchmarks/learn.py --inline --seeds 0
    python benchmarks/learn.py --ablate RUN_DIR   blanks the prompt of each call in turn

Scores come from the records of the run itself. Seeds that do not improve are printed like the
others. An ablation runs the trained model on the held-out items three times with the same sampling
seeds: unchanged, with the first call's prompt blanked, with the second's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil

from aflow_tune.report.evaluation import compare_ends, load_evaluations, pair
from aflow_tune.report.metrics import read_metrics, series

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"
WORKFLOW = ROOT / "workflows" / "three_terms.py"
HELD_OUT = ROOT / "workflows" / "data" / "three_terms" / "held_out.jsonl"


_MEASURED_EVERY = 5
"""Seconds between two memory measurements, which are slow with many processes."""


@dataclass
class Outcome:
    """One seed. Times are seconds since the start of the command; memory is of the process tree."""

    seed: int
    before: float
    after: float
    difference: float
    low: float | None
    high: float | None
    items: int
    steps: int
    first_step_seconds: float
    total_seconds: float
    peak_gigabytes: float
    cpus: int
    """Processor cores that the run was allowed to use."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each training step."""
    held_out: dict[int, float] = field(default_factory=dict)
    """Mean held-out score by step."""
    run_dir: str = ""


def run_command(
    config: Path, seed: int, root: Path, flags: list[str], verb: str = "run"
) -> tuple[Path, float]:
    """Run a recipe's command once; returns its new folder under `root` and the peak bytes.

    Raises:
        RuntimeError: it did not exit with 0; its output is in the message.
    """
    root.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix=f"seed{seed}-", dir=root))  # never resumes an older run
    command = [sys.executable, "-m", "aflow_tune.cli", verb, str(config)]
    command += [f"seed={seed}", f"checkpoint_root_dir={root}", *flags]
    peak = 0.0
    with (root / "output.txt").open("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, _tree_bytes(process.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_MEASURED_EVERY)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"seed {seed} exited with {process.returncode}:\n{output.read()}")
    return root, peak


def run_seed(seed: int, inline: bool, root: Path) -> Outcome:
    """Run the quickstart once. Raises as `run_command`."""
    started = time.time()
    root, peak = run_command(CONFIG, seed, root, ["--inline"] * inline)
    total = time.time() - started
    (run_dir,) = (path.parent for path in root.glob("*/*/metrics.jsonl"))
    (comparison,) = compare_ends(load_evaluations(run_dir)).values()
    (evaluations,) = load_evaluations(run_dir).values()
    lines = read_metrics(run_dir)
    trained = [line.time for line in lines if line.role == "trainer"]
    change = comparison.difference
    return Outcome(
        seed=seed,
        before=comparison.primary.mean_before,
        after=comparison.primary.mean_after,
        difference=change.mean,
        low=change.low,
        high=change.high,
        items=change.count,
        steps=comparison.after.step,
        first_step_seconds=min(trained) - started,
        total_seconds=total,
        peak_gigabytes=peak / 1e9,
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        rewards=[round(value, 4) for _, value in series(lines, "rollout/reward/mean")],
        held_out={
            step: round(sum(scores.values()) / len(scores), 4)
            for step, evaluation in evaluations.items()
            if (scores := evaluation.scores())
        },
        run_dir=str(run_dir),
    )


def _tree_bytes(pid: int) -> float:
    """Memory of a process and its children; shared pages are divided among their sharers."""
    total = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
    except psutil.Error:
        pass
    return total


def ablate(run_dir: Path) -> dict[str, dict[int, float]]:
    """Held-out scores of a trained model by item: as it is, and with each call's prompt blanked."""
    from aflow_tune.context import RolloutContext
    from aflow_tune.contract.plugins import resolve
    from aflow_tune.engines.local.models import load_model, load_tokenizer, pick_device, pick_dtype
    from aflow_tune.engines.local.sampler import Sampler, SamplingParams

    path, device = run_dir / "export" / "merged", pick_device("auto")
    tokenizer = load_tokenizer(path)
    model = load_model(path, pick_dtype("auto", device), device)
    sampler = Sampler(model, tokenizer, max_model_len=256)
    function = resolve(f"{WORKFLOW}:add_three_terms")
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]

    async def one(index: int, blank: int | None) -> float:
        calls = 0

        async def call(messages: list[dict[str, str]]) -> SimpleNamespace:
            nonlocal calls
            calls += 1
            if calls == blank:
                messages = [*messages[:-1], {"role": "user", "content": ""}]
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            params = SamplingParams(max_tokens=12, seed=2 * index + calls)
            (completion,) = await sampler.submit(ids, params)
            return SimpleNamespace(content=[{"type": "text", "text": completion.text}])

        context = RolloutContext()
        with context.activate():
            await function(task=rows[index], model=call)
        return context.metrics["correct"]

    async def scores(blank: int | None) -> dict[int, float]:
        items = range(len(rows))
        return dict(zip(items, await asyncio.gather(*(one(i, blank) for i in items)), strict=True))

    names = {"whole": None, "first prompt blanked": 1, "second prompt blanked": 2}
    try:
        return {name: asyncio.run(scores(blank)) for name, blank in names.items()}
    finally:
        sampler.close()


def print_ablation(run_dir: Path) -> int:
    """Print the scores; 0 if each blanked prompt lowers the score with an interval below zero."""
    found = ablate(run_dir)
    whole = found.pop("whole")
    print(f"{'whole':22} {sum(whole.values()) / len(whole):.3f}")
    needed = True
    for name, scores in found.items():
        paired = pair(whole, scores)
        assert paired is not None
        change = paired.difference
        print(
            f"{name:22} {paired.mean_after:.3f}  change {change.mean:+.3f}, "
            f"95% interval {change.low:+.3f} to {change.high:+.3f}"
        )
        needed = needed and paired.direction < 0
    return 0 if needed else 1


def main() -> int:
    """Run the seeds, print the table; 0 if the intervals of two thirds of them are above zero."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--inline", action="store_true", help="one process without Ray")
    parser.add_argument("--root", type=Path, default=Path("runs/learn"), help="run folders")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    parser.add_argument("--ablate", type=Path, metavar="RUN_DIR", help="only this")
    options = parser.parse_args()
    if options.ablate:
        return print_ablation(options.ablate)
    root = options.root.resolve()
    outcomes = []
    print("seed  before  after   change  95% interval       items  first step  total   peak")
    for seed in options.seeds:
        outcome = run_seed(seed, options.inline, root)
        outcomes.append(outcome)
        interval = f"{outcome.low:+.3f} to {outcome.high:+.3f}"
        print(
            f"{seed:4}  {outcome.before:.3f}   {outcome.after:.3f}  {outcome.difference:+.3f}  "
            f"{interval:17}  {outcome.items:5}  {outcome.first_step_seconds:8.0f} s  "
            f"{outcome.total_seconds:4.0f} s  {outcome.peak_gigabytes:.1f} GB",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    print("run folders:", *(outcome.run_dir for outcome in outcomes), sep="\n  ")
    improved = sum(o.low is not None and o.low > 0 for o in outcomes)
    print(f"{improved} of {len(outcomes)} seeds improved with an interval above zero")
    return 0 if improved * 3 >= len(outcomes) * 2 else 1


if __name__ == "__main__":
    sys.exit(main())
