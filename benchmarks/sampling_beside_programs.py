"""How much programs of rollouts slow the model that samples beside them.

    python benchmarks/sampling_beside_programs.py [--model smollm2-135m] [--rows 48]

Milliseconds of a decode step in bf16: alone, beside another thread's OpenMP workers that do nothing
(best of three, in turns), beside two callers that run sandboxed programs without a pause, and
beside two that run the same programs as plain subprocesses of equal priority.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import torch

from aflow_tune.engines.local.models import load_model, load_tokenizer, resolve_model
from aflow_tune.engines.local.sampler import Sampler, SamplingParams

PROGRAM = "import json, re\nprint(sum(i * i for i in range(100_000)))"
SANDBOXED = f"from aflow_tune.sandbox import run_program_sync as run\nrun({PROGRAM!r})\n"
PLAIN = f"""\
import subprocess, sys
subprocess.run([sys.executable, '-I', '-c', {PROGRAM!r}], stdout=subprocess.DEVNULL)
"""
CALLER = "import os, time\nwhile True:\n    {}\n    os.write(1, b'%f\\n' % time.time())"
PROMPT, STEPS, CALLERS, WARM = 340, 32, 2, 3.0


def caller(program: str, out: IO[str]) -> subprocess.Popen[bytes]:
    setup, run = program.splitlines()
    code = f"{setup}\n{CALLER.format(run)}"
    return subprocess.Popen([sys.executable, "-c", code], stdout=out)


def milliseconds(sampler: Sampler, rows: int) -> float:
    """Of a decode step, the prefill included."""
    prompts = [[100 + i for i in range(PROMPT - 8)] + [200 + row // 8] * 8 for row in range(rows)]
    params = [SamplingParams(max_tokens=STEPS, seed=row, ignore_eos=True) for row in range(rows)]
    begin = time.perf_counter()
    sampler.generate(prompts, params)
    return (time.perf_counter() - begin) / STEPS * 1000


def compute(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.relu(torch.randn(2000, 2000))


def main() -> None:
    """Print the four."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=48)
    options = parser.parse_args()
    folder = resolve_model(options.model)
    model = load_model(folder, torch.bfloat16, torch.device("cpu"))
    sampler = Sampler(model, load_tokenizer(folder), max_model_len=PROMPT + STEPS + 1)
    milliseconds(sampler, options.rows)
    alone = pooled = math.inf
    for _ in range(3):
        alone = min(alone, milliseconds(sampler, options.rows))
        with ThreadPoolExecutor(1) as thread:  # its pool ends with it
            thread.submit(compute, sampler.threads).result()
            pooled = min(pooled, milliseconds(sampler, options.rows))
    print(f"alone: {alone:.0f} ms a step", flush=True)
    print(f"beside an idle pool: {pooled:.0f} ms ({pooled / alone:.1f} times)", flush=True)
    for name, program in (("sandboxed programs", SANDBOXED), ("plain programs", PLAIN)):
        with tempfile.TemporaryFile("w+") as out:
            callers = [caller(program, out) for _ in range(CALLERS)]
            time.sleep(WARM)
            begin = time.time()
            took = milliseconds(sampler, options.rows)
            end = time.time()
            for process in callers:
                process.kill()
                process.wait()
            out.seek(0)
            done = sum(begin <= float(line) <= end for line in out)
        rate = done / (end - begin)
        print(
            f"beside {name}: {took:.0f} ms ({took / alone:.1f} times), {rate:.1f} of them a second"
        )
    sampler.close()


if __name__ == "__main__":
    main()
