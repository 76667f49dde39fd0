"""Seconds of one GRPO step (rollout, train, sync), ours and TRL's GRPOTrainer, in turns.

    python benchmarks/grpo_step.py --trl /path/to/other-venv/bin/python

Both sides get the same model folder, prompts, group size, number of new tokens (the end token
is ignored), LoRA, learning rate and dtype. Rewards are seeded random numbers, so every group is
mixed and nothing is skipped. TRL runs in an interpreter of its own
(`pip install trl==1.16.*` beside torch, transformers and peft), as a child of this process that
waits for its turn: one step of ours, one of TRL's, and so on. The first step of each side is a
warm-up and is not counted. Gradient checkpointing, on by default in TRL, is off.

Without `--trl` only our side runs. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORDS = (
    "river stone cloud winter market silver garden letter window bridge music paper "
    "simple bright narrow early heavy quiet hollow modern walks turns finds keeps moves"
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="our name, a folder or a hub id")
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter that has trl")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="counted steps of each side")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--micro-batch-tokens", type=int, default=2400, help="ours")
    parser.add_argument("--trl-micro-batch", type=int, default=16, help="TRL's, in sequences")
    parser.add_argument("--trl-child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_prompts(tokenizer: Any, count: int, tokens: int) -> list[str]:
    """`count` distinct texts of exactly `tokens` tokens."""
    draw = random.Random(0)
    prompts = []
    while len(prompts) < count:
        ids = tokenizer(" ".join(draw.choices(WORDS.split(), k=2 * tokens)))["input_ids"][:tokens]
        text = tokenizer.decode(ids)
        if len(tokenizer(text)["input_ids"]) == tokens:
            prompts.append(text)
    return prompts


# --- our side ---------------------------------------------------------------------------------


class Ours:
    """Sampler, trainer and Trinity's GRPO in this process."""

    def __init__(self, args: argparse.Namespace, folder: Path, prompts: list[str]) -> None:
        import torch

        from aflow_tune.engines.local.models import load_model, load_tokenizer
        from aflow_tune.engines.local.sampler import Sampler
        from aflow_tune.engines.local.trainer import LocalTrainer, Schedule, TrainerSettings
        from aflow_tune.engines.local.weights import LoraSpec
        from aflow_tune.engines.trinity.training.algorithm import TrainStep

        torch.set_num_threads(args.threads)
        dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
        lora = LoraSpec(args.rank, 2.0 * args.rank)
        self.args, self.version = args, 0
        self.tokenizer = load_tokenizer(folder)
        self.prompts = [self.tokenizer(text)["input_ids"] for text in prompts]
        self.sampler = Sampler(
            load_model(folder, dtype, torch.device("cpu")),
            self.tokenizer,
            max_batch=args.groups * args.group_size,
            max_model_len=args.prompt_tokens + args.new_tokens,
            threads=args.threads,
            lora=lora,
        )
        self.trainer = LocalTrainer(
            folder,
            TrainerSettings(
                lora=lora,
                schedule=Schedule(peak=1e-5),
                micro_batch_tokens=args.micro_batch_tokens,
                dtype=dtype,
            ),
        )
        self.train = TrainStep(grpo_config(), self.trainer)

    def step(self, index: int) -> dict[str, float]:
        from aflow_tune.engines.local.sampler import SamplingParams

        args, started = self.args, time.perf_counter()
        params = SamplingParams(
            max_tokens=args.new_tokens, n=args.group_size, seed=1000 * index, ignore_eos=True
        )
        mine = self.prompts[index * args.groups : (index + 1) * args.groups]
        groups = self.sampler.generate(mine, [params] * len(mine))
        rolled = time.perf_counter()
        self.train(experiences(mine, groups, index))
        trained = time.perf_counter()
        self.version += 1
        self.sampler.update_weights(self.trainer.weights(), self.version)
        synced = time.perf_counter()
        return {
            "rollout": rolled - started,
            "train": trained - rolled,
            "sync": synced - trained,
            "step": synced - started,
        }


def grpo_config() -> Any:
    """Trinity's GRPO without a KL term, which is TRL's default as well."""
    from trinity.common.config import Config
    from trinity.common.config_validator import AlgorithmConfigValidator

    config = Config()
    config.algorithm.algorithm_type = "grpo"
    config.algorithm.kl_loss_fn = "none"
    AlgorithmConfigValidator().validate(config)
    return config


def experiences(prompts: list[list[int]], groups: list[list[Any]], index: int) -> list[Any]:
    """Trinity experiences with seeded random rewards and GRPO advantages."""
    from trinity.algorithm import ADVANTAGE_FN
    from trinity.common.experience import EID, Experience

    draw = random.Random(index)
    exps = [
        Experience(
            eid=EID(batch=index, task=task, run=run),
            tokens=prompt + completion.token_ids,
            prompt_length=len(prompt),
            logprobs=completion.logprobs,
            reward=draw.random(),
        )
        for task, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
        for run, completion in enumerate(group)
    ]
    return ADVANTAGE_FN.get("grpo")().process(exps)[0]


# --- TRL's side -------------------------------------------------------------------------------


def trl_child(args: argparse.Namespace) -> None:
    """Runs in TRL's interpreter: makes a step for each line on stdin, writes seconds to stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    import tempfile

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = make_prompts(tokenizer, args.groups * (args.rounds + 1), args.prompt_tokens)
    runs = args.groups * args.group_size
    draw = random.Random(0)

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            answers.write("ready\n")
            answers.flush()
            sys.stdin.readline()
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            answers.write(f"{time.perf_counter() - self.started}\n")
            answers.flush()

    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=lambda completions, **_: [draw.random() for _ in completions],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=args.rounds + 1,
            per_device_train_batch_size=args.trl_micro_batch,
            gradient_accumulation_steps=runs // args.trl_micro_batch,
            num_generations=args.group_size,
            max_completion_length=args.new_tokens,
            generation_kwargs={"min_new_tokens": args.new_tokens},
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-5,
            bf16=args.dtype == "bf16",
            model_init_kwargs={"dtype": "bfloat16" if args.dtype == "bf16" else "float32"},
            gradient_checkpointing=False,
            shuffle_dataset=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"),
        callbacks=[Turns()],
    )
    trainer.train()


class Trl:
    """The child process, one step at a time."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        options = {**vars(args), "model": str(folder)}
        command = [args.trl, str(Path(__file__).resolve()), "--trl-child"]
        for name, value in options.items():
            if name not in ("trl", "trl_child") and value is not None:
                command += [f"--{name.replace('_', '-')}", str(value)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._expect("ready")

    def _line(self) -> str:
        assert self.child.stdout is not None
        line = self.child.stdout.readline().strip()
        if not line:
            raise SystemExit(f"TRL's process ended (exit code {self.child.wait()})")
        return line

    def _expect(self, word: str) -> None:
        if (line := self._line()) != word:
            raise SystemExit(f"TRL's process said {line!r} instead of {word!r}")

    def step(self, index: int) -> float:
        if index:
            self._expect("ready")
        assert self.child.stdin is not None
        self.child.stdin.write("go\n")
        self.child.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        self.child.kill()
        self.child.wait()


def main() -> None:
    args = parse()
    if args.trl_child:
        trl_child(args)
        return
    from aflow_tune.engines.local.models import load_tokenizer, resolve_model

    folder = resolve_model(args.model)
    count = args.groups * (args.rounds + 1)
    prompts = make_prompts(load_tokenizer(folder), count, args.prompt_tokens)
    trl = Trl(args, folder) if args.trl else None
    ours = Ours(args, folder, prompts)
    mine: list[dict[str, float]] = []
    theirs: list[float] = []
    try:
        for index in range(args.rounds + 1):
            result = ours.step(index)
            other = trl.step(index) if trl else None
            label = "warm-up" if index == 0 else f"round {index}"
            parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result.items())
            print(f"{label}: ours {parts}" + (f"; TRL {other:.2f} s" if other else ""), flush=True)
            if index:
                mine.append(result)
                theirs += [] if other is None else [other]
    finally:
        if trl:
            trl.close()
        ours.sampler.close()
    summary: dict[str, Any] = {
        "settings": {name: value for name, value in vars(args).items() if "trl" not in name},
        "ours": {name: statistics.median(r[name] for r in mine) for name in mine[0]},
        "ours_rounds": mine,
    }
    if theirs:
        summary["trl"] = {"step": statistics.median(theirs)}
        summary["trl_rounds"] = theirs
        summary["ratio"] = summary["ours"]["step"] / summary["trl"]["step"]
        print(f"ours takes {summary['ratio']:.2f} of TRL's time")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
