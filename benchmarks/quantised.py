"""A base in 16, 8 and 4 bits: bytes of its layers, held-out loss after equal training, time.

    python benchmarks/quantised.py                     seeds 0, 1 and 2
    python benchmarks/quantised.py --seeds 0 --steps 10

Three trainers of SmolLM2-135M differ in `load_in` only. They learn the same rows in the same order,
taking turns step by step, so that other work on the machine slows all of them; a time is the median
of the ratios of a step to the unquantised one's beside it. The loss is the mean over the answers'
tokens of `workflows/data/two_questions/held_out.jsonl`, end token included, in nats. `export`: of
the merged export, which is made from the unquantised base. `sampling`: 16 sequences of 32 tokens.

The last line of the output is one JSON object. Exit code 1: 4 bits take more than half the bytes of
16, or their mean loss differs by more than 2%.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from aflow_tune.engines.local.models import load_model, load_tokenizer, resolve_model
from aflow_tune.engines.local.packed_model import PackedModel, Sample, micro_batches
from aflow_tune.engines.local.quantised import quantised_layers
from aflow_tune.engines.local.sampler import Sampler, SamplingParams
from aflow_tune.engines.local.trainer import LocalTrainer, LossBatch, Schedule, TrainerSettings
from aflow_tune.engines.local.weights import LoraSpec

DATA = Path(__file__).parents[1] / "workflows" / "data" / "two_questions"
KINDS = (None, "8bit", "4bit")
MOST_BYTES, MOST_LOSS = 0.5, 0.02


class AnswerLoss:
    """Mean negative log-probability of the answers' tokens."""

    needs_entropy = per_group = False

    def __call__(self, batch: LossBatch) -> tuple[torch.Tensor, dict[str, float]]:
        mask = batch.action_mask_BR
        return -(batch.logprobs_BR * mask).sum() / mask.sum(), {}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="our name, a folder or a hub id")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16, help="rows a step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def samples_of(tokenizer: Any, file: Path) -> list[Sample]:
    """The rows of a file as conversations of one question and its answer."""
    found = []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        asked = [{"role": "user", "content": row["question"]}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = tokenizer(row["answer"] + tokenizer.eos_token, add_special_tokens=False)
        tokens, count = torch.tensor(prompt + answer["input_ids"]), len(answer["input_ids"])
        found.append(Sample(tokens, len(prompt), torch.ones(count, dtype=torch.bool)))
    return found


def mean_loss(logprobs: list[torch.Tensor]) -> float:
    return -float(torch.cat(logprobs).mean())


def exported_loss(folder: Path, held_out: list[Sample], dtype: torch.dtype) -> float:
    model = PackedModel(load_model(folder, dtype, torch.device("cpu")))
    found = []
    with torch.no_grad():
        for indices in micro_batches(held_out, [[i] for i in range(len(held_out))], 2048):
            part = [held_out[i] for i in indices]
            width = max(len(sample.action_mask_R) for sample in part)
            rows = zip(model.scores(part, width)[0], part, strict=True)
            found += [row[: len(sample.action_mask_R)] for row, sample in rows]
    return mean_loss(found)


def trained(args: argparse.Namespace, folder: Path, seed: int) -> dict[str, dict[str, float]]:
    """Losses and ratios of step times, by `load_in`, of one seed."""
    tokenizer = load_tokenizer(folder)
    rows, held_out = (samples_of(tokenizer, DATA / f"{it}.jsonl") for it in ("train", "held_out"))
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    trainers = {
        str(kind): LocalTrainer(
            folder,
            TrainerSettings(
                lora=LoraSpec(args.rank, 2.0 * args.rank),
                schedule=Schedule("cosine", args.lr, 5, args.steps),
                dtype=dtype,
                seed=seed,
                load_in=kind,
            ),
        )
        for kind in KINDS
    }
    found = {name: {"before": mean_loss(it.logprobs(held_out))} for name, it in trainers.items()}
    times: dict[str, list[float]] = {name: [] for name in trainers}
    order, draw = list(range(len(rows))), random.Random(seed)
    for step in range(args.steps):
        at = step * args.batch % (len(rows) - args.batch)
        if at < args.batch:
            draw.shuffle(order)
        batch = [rows[i] for i in order[at : at + args.batch]]
        for name, trainer in trainers.items():
            metrics = trainer.step([[sample] for sample in batch], AnswerLoss())
            times[name].append(metrics["time/train_step"])
    for name, trainer in trainers.items():
        pairs = zip(times[name], times["None"], strict=True)
        found[name]["step"] = statistics.median(mine / plain for mine, plain in pairs)
        found[name]["after"] = mean_loss(trainer.logprobs(held_out))
        with tempfile.TemporaryDirectory() as scratch:
            trainer.export_merged(Path(scratch) / "merged")
            found[name]["export"] = exported_loss(Path(scratch) / "merged", held_out, dtype)
    return found


def sampled(args: argparse.Namespace, folder: Path) -> tuple[dict[str, int], dict[str, float]]:
    """Bytes of the layers, and ratios of the time to draw 16 x 32 tokens, by `load_in`."""
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    plain = load_model(folder, dtype, torch.device("cpu"))
    model = load_model(folder, dtype, torch.device("cpu"), "4bit")
    paths = [path for path, _ in quantised_layers(model)]
    held = {"None": sum(plain.get_submodule(path).weight.nbytes for path in paths)}
    samplers = {}
    for kind in KINDS:
        model = load_model(folder, dtype, torch.device("cpu"), kind)
        if kind is not None:
            held[kind] = sum(layer.held_bytes() for _, layer in quantised_layers(model))
        sizes = {"max_batch": 16, "max_model_len": 64, "threads": args.threads}
        samplers[str(kind)] = Sampler(model, load_tokenizer(folder), **sizes)
    params = SamplingParams(max_tokens=32, n=16, seed=0, ignore_eos=True)
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for turn in range(6):
        for name, sampler in samplers.items():
            started = time.perf_counter()
            sampler.generate([list(range(100, 116))], [params])
            if turn:  # the first one warms up
                times[name].append(time.perf_counter() - started)
    for sampler in samplers.values():
        sampler.close()
    pairs = {name: zip(mine, times["None"], strict=True) for name, mine in times.items()}
    return held, {name: statistics.median(a / b for a, b in it) for name, it in pairs.items()}


def main() -> int:
    args = parse()
    torch.set_num_threads(args.threads)
    folder = resolve_model(args.model)
    held, sampling = sampled(args, folder)
    runs = {seed: trained(args, folder, seed) for seed in args.seeds}
    names = ("before", "after", "export", "step")
    table = {
        name: {
            "bytes": held[name],
            "sampling": sampling[name],
            **{it: statistics.mean(run[name][it] for run in runs.values()) for it in names},
        }
        for name in map(str, KINDS)
    }
    plain = table["None"]
    print("load_in      MB  share   before    after   export     step  sampling")
    for name, row in table.items():
        print(
            f"{name:8} {row['bytes'] / 1e6:6.1f} {row['bytes'] / plain['bytes']:6.3f} "
            f"{row['before']:8.4f} {row['after']:8.4f} {row['export']:8.4f} "
            f"{row['step']:7.2f}x {row['sampling']:8.2f}x"
        )
    share = held["4bit"] / held["None"]
    differs = table["4bit"]["after"] / plain["after"] - 1
    print(
        f"4bit: {share:.3f} of the bytes (at most {MOST_BYTES}), loss {differs:+.2%} (at most 2%)"
    )
    print(json.dumps({"dtype": args.dtype, "steps": args.steps, "table": table, "seeds": runs}))
    return int(share > MOST_BYTES or abs(differs) > MOST_LOSS)


if __name__ == "__main__":
    sys.exit(main())
