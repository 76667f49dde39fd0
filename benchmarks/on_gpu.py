"""The local engine on a GPU beside the CPU: the same numbers, and tokens a second.

    python benchmarks/on_gpu.py --model DIR            what agrees, by part
    python benchmarks/on_gpu.py --model DIR --speed    train tokens a second, share of its peak

Everything is compared with the CPU in fp32 in the same run: log-probabilities of rows that the
model did not write, before and after one step of SFT; the gradient norm of that step; what is drawn
from equal seeds; log-probabilities that the sampler reports beside the trainer's of the same tokens
(`rollout/mismatch`). Adam's first step is about the signs of a gradient, so that bf16's rounding
moves whole weights: after it only fp32 can agree. `--speed` takes Qwen2.5-1.5B's shape with random
weights too, since speed does not depend on them, and as the peak the rate of a product of two
8192 x 8192 matrices in bf16. Sampling beside vLLM: `benchmarks/sampler_speed.py --device cuda`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quantised import DATA, AnswerLoss, samples_of

from aflow_tune.engines.local.models import load_model, load_tokenizer, resolve_model
from aflow_tune.engines.local.packed_model import Sample
from aflow_tune.engines.local.sampler import Completion, Sampler, SamplingParams
from aflow_tune.engines.local.trainer import LocalTrainer, Schedule, TrainerSettings
from aflow_tune.engines.local.weights import LoraSpec

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16
QWEN_1_5B = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip


def named(device: torch.device, dtype: torch.dtype, *more: str) -> str:
    return " ".join([str(device), str(dtype).removeprefix("torch."), *more])


def trainer_on(
    folder: Path, device: torch.device, dtype: torch.dtype, tokens: int = 2048, **more: Any
) -> LocalTrainer:
    settings = TrainerSettings(
        lora=LoraSpec(16, 32.0),
        schedule=Schedule("constant", 5e-4, 0, 10),
        micro_batch_tokens=tokens,
        dtype=dtype,
        device=device,
        **more,
    )
    return LocalTrainer(folder, settings)


def scored(folder: Path, device: torch.device, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    """Log-probabilities of held-out answers before and after one step, and its gradient norm."""
    tokenizer = load_tokenizer(folder)
    rows, held_out = (
        samples_of(tokenizer, DATA / f"{name}.jsonl")[:32] for name in ("train", "held_out")
    )
    trainer = trainer_on(folder, device, dtype, **more)
    on = trainer.policy
    found: dict[str, Any] = {"before": torch.cat(trainer.logprobs(held_out))}
    metrics = trainer.step([[row] for row in rows], AnswerLoss())
    found["after"] = torch.cat(trainer.logprobs(held_out))
    found["norm"] = metrics["actor/grad_norm"]
    found["paths"] = [name for name in ("packed", "fused_head", "fused_norms") if getattr(on, name)]
    return found


def agreement(folder: Path) -> None:
    reference = scored(folder, CPU, FP32)
    cases: list[tuple[torch.device, torch.dtype, dict[str, Any]]] = [
        (GPU, FP32, {}), (CPU, BF16, {}), (GPU, BF16, {}),
        (CPU, BF16, {"load_in": "4bit"}), (GPU, BF16, {"load_in": "4bit"}),
    ]  # fmt: skip
    print(f"cpu fp32: gradient norm {reference['norm']:.5f}, {', '.join(reference['paths'])}")
    for device, dtype, more in cases:
        name = named(device, dtype, *more.values())
        try:
            found = scored(folder, device, dtype, **more)
        except ImportError as error:
            print(f"{name}: {error}")
            continue
        gaps = [(found[at] - reference[at]).abs() for at in ("before", "after")]
        told = "; ".join(
            f"mean {float(gap.mean()):.2g}, max {float(gap.max()):.2g}" for gap in gaps
        )
        paths = ", ".join(found["paths"])
        print(f"{name}: |log p - cpu fp32| {told}; gradient norm {found['norm']:.5f}, {paths}")


def drawn(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, float]:
    """Completions of 32 prompts by seeds, with top-p, a grammar and plain ones among them; and the
    mean difference between the log-probabilities reported and the trainer's."""
    tokenizer = load_tokenizer(folder)
    prompts = [
        row.tokens_T[: row.prompt_length].tolist()
        for row in samples_of(tokenizer, DATA / "held_out.jsonl")[:32]
    ]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"json_schema": schema}, {"temperature": 0}]
    params = [SamplingParams(24, seed=7 * i, **kinds[i % 4]) for i in range(len(prompts))]
    sampler = Sampler(load_model(folder, dtype, device), tokenizer, max_model_len=512)
    found: list[Completion] = [one for (one,) in sampler.generate(prompts, params)]
    sampler.close()
    samples = [
        Sample(
            torch.tensor(prompt + one.token_ids),
            len(prompt),
            torch.ones(len(one.token_ids), dtype=torch.bool),
        )
        for prompt, one in zip(prompts, found, strict=True)
    ]
    trained = torch.cat(trainer_on(folder, device, dtype).logprobs(samples))
    reported = torch.tensor([value for one in found for value in one.logprobs])
    return [one.token_ids for one in found], float((trained - reported).abs().mean())


def drawing(folder: Path) -> None:
    reference, mismatch = drawn(folder, CPU, FP32)
    print(f"cpu fp32: sampler against trainer {mismatch:.2g}")
    for device, dtype in ((GPU, FP32), (CPU, BF16), (GPU, BF16)):
        tokens, mismatch = drawn(folder, device, dtype)
        same = sum(a == b for a, b in zip(tokens, reference, strict=True))
        told = f"sampler against trainer {mismatch:.2g}; {same} of {len(tokens)} drawn alike"
        print(f"{named(device, dtype)}: {told}")


def write_random(folder: Path) -> None:
    """Writes a model of Qwen2.5-1.5B's shape."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    with torch.device(GPU):
        Qwen2ForCausalLM(Qwen2Config(**QWEN_1_5B)).to(BF16).save_pretrained(folder)


def train_speed(folder: Path, rows: int = 16, length: int = 1024) -> None:
    """A step of SFT on `rows` rows without a common prefix. A product with frozen weights takes 2
    operations a weight and token forwards and as many backwards, for the gradient of its input."""
    peak = product_rate()
    trainer = trainer_on(folder, GPU, BF16, tokens=rows * length)
    weights = sum(it.numel() for it in trainer.base.parameters() if not it.requires_grad)
    draw = torch.Generator().manual_seed(0)
    learned = torch.ones(length - 1, dtype=torch.bool)
    seconds = []
    for _ in range(6):
        tokens = torch.randint(9, 40000, (rows, length), generator=draw)
        groups = [[Sample(tokens_T, 1, learned)] for tokens_T in tokens]
        seconds.append(trainer.step(groups, AnswerLoss())["time/train_step"])
    rate = rows * length / statistics.median(seconds[1:])
    share = 4 * weights * rate / peak
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"training {weights / 1e9:.2f}B weights, LoRA 16, {rows} x {length} tokens: "
        f"{rate:,.0f} tokens/s, {share:.1%} of {peak / 1e12:.0f} TFLOP/s, {memory:.1f} GiB"
    )


def product_rate(size: int = 8192) -> float:
    """Operations a second of a bf16 product, the median of ten."""
    a, b = (torch.randn(size, size, device=GPU, dtype=BF16) for _ in range(2))
    taken = []
    for _ in range(12):
        torch.cuda.synchronize()
        started = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(taken[2:])


def speed(folder: Path) -> None:
    train_speed(folder)
    with tempfile.TemporaryDirectory() as scratch:
        write_random(Path(scratch))
        train_speed(Path(scratch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="our name, a folder or a hub id")
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    folder = resolve_model(options.model)
    parts: list[Callable[[Path], None]] = [speed] if options.speed else [agreement, drawing]
    failed = False
    for part in parts:
        try:
            part(folder)
        except Exception:
            failed = True
            traceback.print_exc()
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
