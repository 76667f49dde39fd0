"""Does the quickstart learn? One whole command a seed, with its interval, time and memory.

    python benchmarks/learn.py                    seeds 0, 1, 2 through Ray
    python benchmarks/learn.py --inline --seeds 0
    python benchmarks/learn.py --ablate RUN_DIR   blanks the prompt of each call in turn

Every number comes from the records that the run itself wrote. Seeds that do not improve are
printed like the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil

from aflow_tune.report.evaluation import first_and_last
from aflow_tune.report.metrics import read_metrics

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"


@dataclass
class Outcome:
    """One seed. Times in seconds from the start of the command; memory of the process tree."""

    seed: int
    before: float
    after: float
    difference: float
    low: float | None
    high: float | None
    items: int
    first_step_seconds: float
    total_seconds: float
    peak_gigabytes: float


def run_seed(seed: int, inline: bool, root: Path) -> Outcome:
    """Run the quickstart's command once, as a user would.

    Raises:
        RuntimeError: it did not exit with 0; its output is in the message.
    """
    command = [sys.executable, "-m", "aflow_tune.cli", str(CONFIG)]
    command += [f"seed={seed}", f"checkpoint_root_dir={root}"] + ["--inline"] * inline
    started, peak = time.time(), 0.0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, _tree_bytes(process.pid))
            time.sleep(1)
        total = time.time() - started
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"seed {seed} exited with {process.returncode}:\n{output.read()}")
    run_dir = root / "aflow-tune" / f"quickstart-seed{seed}"
    (comparison,) = first_and_last(run_dir).values()
    trained = [line.time for line in read_metrics(run_dir) if line.role == "trainer"]
    change = comparison.difference
    return Outcome(
        seed=seed,
        before=comparison.mean_before,
        after=comparison.mean_after,
        difference=change.mean,
        low=change.low,
        high=change.high,
        items=change.count,
        first_step_seconds=min(trained) - started,
        total_seconds=total,
        peak_gigabytes=peak / 1e9,
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


def ablate(run_dir: Path) -> dict[str, float]:
    """Held-out share of right answers of a trained model, whole and with a prompt blanked."""
    from aflow_tune.context import RunContext
    from aflow_tune.engines.local.models import load_model, load_tokenizer, pick_device, pick_dtype
    from aflow_tune.engines.local.sampler import Sampler, SamplingParams
    from aflow_tune.plugins import resolve

    path, device = run_dir / "export" / "merged", pick_device("auto")
    tokenizer = load_tokenizer(path)
    model = load_model(path, pick_dtype("auto", device), device)
    sampler = Sampler(model, tokenizer, max_model_len=256)
    function = resolve(str(ROOT / "workflows/three_terms.py") + ":add_three_terms")
    module = sys.modules[function.__module__]
    data = ROOT / "workflows/data/three_terms/held_out.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]

    async def call(messages: list[dict[str, str]], seed: int) -> SimpleNamespace:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        (completion,) = await sampler.submit(ids, SamplingParams(max_tokens=12, seed=seed))
        return SimpleNamespace(content=[{"type": "text", "text": completion.text}])

    async def one(index: int, row: dict) -> float:
        context = RunContext()
        with context.activate():
            await function(task=row, model=lambda messages: call(messages, index))
        return context.metrics["correct"]

    async def share() -> float:
        scores = await asyncio.gather(*(one(index, row) for index, row in enumerate(rows)))
        return sum(scores) / len(scores)

    first, second = module.FIRST_PROMPT, module.SECOND_PROMPT
    result = {"whole": asyncio.run(share())}
    module.FIRST_PROMPT = ""
    result["first prompt blanked"] = asyncio.run(share())
    module.FIRST_PROMPT, module.SECOND_PROMPT = first, ""
    result["second prompt blanked"] = asyncio.run(share())
    module.SECOND_PROMPT = second
    sampler.close()
    return result


def main() -> int:
    """Run the seeds, print the table; 0 if at least two of three intervals exclude zero."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--inline", action="store_true", help="one process without Ray")
    parser.add_argument("--root", type=Path, default=Path("runs/learn"), help="run folders")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    parser.add_argument("--ablate", type=Path, metavar="RUN_DIR", help="only this")
    options = parser.parse_args()
    if options.ablate:
        for name, value in ablate(options.ablate).items():
            print(f"{name:24} {value:.3f}")
        return 0
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
    improved = sum(o.low is not None and o.low > 0 for o in outcomes)
    print(f"{improved} of {len(outcomes)} seeds improved with an interval above zero")
    return 0 if improved * 3 >= len(outcomes) * 2 else 1


if __name__ == "__main__":
    sys.exit(main())
