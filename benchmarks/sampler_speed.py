"""Tokens a second of our sampler against transformers' padded `generate`, in one process.

    python benchmarks/sampler_speed.py                       # fp32 and bf16; 16, 32, 64 sequences
    python benchmarks/sampler_speed.py --dtype bf16 --sequences 64 --repeats 5 --json out.json
    python benchmarks/sampler_speed.py --vllm /path/to/venv/bin/python

Every repeat draws new prompts (random tokens, all distinct: nothing to share) and runs both
sides on them, taking turns at going first; the table shows medians. Both sides sample at
temperature 1 with the end of sequence switched off, so that both make exactly
sequences x new tokens; prefill is inside the time. Ours also computes log-probabilities.
`--group N` repeats each prompt N times, as a GRPO group does.

`--vllm` runs the same workload in another interpreter that has vLLM's CPU build. Set
OMP_WAIT_POLICY=PASSIVE if other torch processes share the cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

VLLM_SCRIPT = """
import json, sys, time
from vllm import LLM, SamplingParams
job = json.load(sys.stdin)
llm = LLM(model=job["model"], dtype=job["dtype"], max_model_len=job["max_model_len"],
          max_num_seqs=job["max_num_seqs"], seed=0)
params = SamplingParams(max_tokens=job["new_tokens"], temperature=1.0, ignore_eos=True, logprobs=0)
seconds = []
for prompts in [job["batches"][0], *job["batches"]]:
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    seconds.append(time.perf_counter() - start)
print("SECONDS " + json.dumps(seconds[1:]))
"""
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16"}

Prompts = list[list[int]]


def make_prompts(count: int, length: int, group: int, vocabulary: int, seed: int) -> Prompts:
    """`count` prompts of random tokens, every `group` of them equal."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    distinct = torch.randint(10, vocabulary, (-(-count // group), length), generator=generator)
    return distinct.repeat_interleave(group, dim=0)[:count].tolist()


def ours(model_dir: Path, dtype: Any, threads: int, args: argparse.Namespace) -> Callable:
    """A function that completes prompts with our sampler."""
    import torch

    from aflow_tune.engines.local.models import load_model, load_tokenizer
    from aflow_tune.engines.local.sampler import Sampler, SamplingParams

    sampler = Sampler(
        load_model(model_dir, dtype, torch.device("cpu")),
        load_tokenizer(model_dir),
        max_batch=max(args.sequences),
        max_model_len=args.prompt_tokens + args.new_tokens,
        threads=threads,
    )
    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)

    def complete(prompts: Prompts) -> None:
        done = sampler.generate(prompts, [params] * len(prompts))
        assert all(len(c[0].token_ids) == args.new_tokens for c in done)

    return complete


def padded_generate(
    model_dir: Path, dtype: Any, threads: int, args: argparse.Namespace
) -> Callable:
    """A function that completes prompts with transformers' `generate`."""
    import torch

    from aflow_tune.engines.local.models import load_model

    torch.set_num_threads(threads)
    model = load_model(model_dir, dtype, torch.device("cpu"))
    model.generation_config.eos_token_id = None

    def complete(prompts: Prompts) -> None:
        ids = torch.tensor(prompts)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.new_tokens,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
        )
        assert out.shape[1] == args.prompt_tokens + args.new_tokens

    return complete


def measure(sides: dict[str, Callable], batches: Sequence[Prompts]) -> dict[str, list[float]]:
    """Seconds of every side on every batch, after one unmeasured round; sides take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for complete in sides.values():
        complete(batches[0])
    for number, prompts in enumerate(batches[1:]):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in order:
            start = time.perf_counter()
            sides[name](prompts)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def measure_vllm(
    python: str, model_dir: Path, dtype: str, batches: Sequence[Prompts], args: argparse.Namespace
) -> list[float]:
    """Seconds of vLLM on every batch, in an interpreter that has it."""
    job = {
        "model": str(model_dir),
        "dtype": DTYPE_NAMES[dtype],
        "new_tokens": args.new_tokens,
        "max_model_len": args.prompt_tokens + args.new_tokens,
        "max_num_seqs": max(args.sequences),
        "batches": batches[1:],
    }
    outcome = subprocess.run(
        [python, "-c", VLLM_SCRIPT], input=json.dumps(job), capture_output=True, text=True
    )
    for line in outcome.stdout.splitlines():
        if line.startswith("SECONDS "):
            return json.loads(line.removeprefix("SECONDS "))
    raise SystemExit(f"vLLM did not run in {python}:\n{outcome.stderr[-3000:]}")


def main() -> None:
    """Parse the command line, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a name, folder or hub id")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPE_NAMES), default=["fp32", "bf16"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--prompt-tokens", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--group", type=int, default=1, help="equal prompts in a row")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: physical cores")
    parser.add_argument("--only-ours", action="store_true", help="leave transformers out")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM (CPU)")
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    args = parser.parse_args()

    import psutil
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    from aflow_tune.engines.local.models import resolve_model

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model_dir = resolve_model(args.model)
    threads = args.threads or psutil.cpu_count(logical=False)
    vocabulary = AutoConfig.from_pretrained(model_dir).get_text_config().vocab_size
    print(
        f"{args.model}, prompts of {args.prompt_tokens} tokens in groups of {args.group}, "
        f"{args.new_tokens} new tokens, {threads} threads, median of {args.repeats}, tokens/s"
    )
    print(
        f"{'dtype':6}{'sequences':>10}{'ours':>9}{'generate':>10}{'ratio':>7}{'vLLM':>9}{'ratio':>7}"
    )
    rows = []
    for dtype in args.dtype:
        number_format = getattr(torch, DTYPE_NAMES[dtype])
        sides = {"ours": ours(model_dir, number_format, threads, args)}
        if not args.only_ours:
            sides["generate"] = padded_generate(model_dir, number_format, threads, args)
        for count in args.sequences:
            batches = [
                make_prompts(count, args.prompt_tokens, args.group, vocabulary, seed)
                for seed in range(args.repeats + 1)
            ]
            seconds = measure(sides, batches)
            if args.vllm:
                seconds["vllm"] = measure_vllm(args.vllm, model_dir, dtype, batches, args)
            speed = {
                name: count * args.new_tokens / statistics.median(values)
                for name, values in seconds.items()
            }
            cells = f"{dtype:6}{count:>10}{speed['ours']:>9.0f}"
            for other, width in (("generate", 10), ("vllm", 9)):
                if other in speed:
                    cells += f"{speed[other]:>{width}.0f}{speed['ours'] / speed[other]:>7.2f}"
                else:
                    cells += f"{'-':>{width}}{'-':>7}"
            print(cells, flush=True)
            rows.append({"dtype": dtype, "sequences": count, "speed": speed, "seconds": seconds})
        sides.clear()
    if args.json:
        settings = {k: v for k, v in vars(args).items() if k != "json"}
        args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
