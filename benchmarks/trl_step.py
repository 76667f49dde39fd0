"""Seconds of one train step, ours and TRL's, in turns: GRPO with its rollout, SFT or DPO.

    python benchmarks/trl_step.py grpo --trl /path/to/other-venv/bin/python
    python benchmarks/trl_step.py sft  --trl ...
    python benchmarks/trl_step.py dpo  --trl ... --loss ipo

Both sides get the same model folder, tokens, LoRA, learning rate and dtype. TRL runs in an
interpreter of its own (`pip install trl==1.16.*` beside torch, transformers and peft), as a child
of this process that waits for its turn: one step of ours, one of TRL's, and so on. The first step
of each side is a warm-up and is not counted. Gradient checkpointing, on by default in TRL, is off.

grpo: the same prompts and number of new tokens (the end token is ignored). Rewards are seeded
random numbers, so every group is mixed and nothing is skipped.
sft, dpo: the dialogues of workflows/data/agent, rendered by us; of a pair, the rejected answer is
that of another row. Both sides start from one adapter that is not zero, so that the losses of the
first step, which are printed, are of the same tensors and have to agree.

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
import tempfile
import time
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "workflows" / "data" / "agent"
WORDS = (
    "river stone cloud winter market silver garden letter window bridge music paper "
    "simple bright narrow early heavy quiet hollow modern walks turns finds keeps moves"
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("method", choices=("grpo", "sft", "dpo"))
    parser.add_argument("--model", default="smollm2-135m", help="our name, a folder or a hub id")
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter that has trl")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16, help="rows or pairs of a step (sft, dpo)")
    parser.add_argument("--loss", choices=("sigmoid", "hinge", "ipo"), default="sigmoid")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="counted steps of each side")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--micro-batch-tokens", type=int, default=2400, help="ours")
    parser.add_argument("--trl-micro-batch", type=int, help="TRL's, in sequences; 16, sft, dpo: 4")
    parser.add_argument("--trl-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)  # rows and adapter, a folder
    args = parser.parse_args()
    args.trl_micro_batch = args.trl_micro_batch or (16 if args.method == "grpo" else 4)
    return args


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


def make_trainer(args: argparse.Namespace, folder: Path) -> tuple[Any, Any]:
    """The local trainer, and Trinity's algorithm on it."""
    import torch

    from aflow_tune.engines.local.trainer import LocalTrainer, Schedule, TrainerSettings
    from aflow_tune.engines.local.weights import LoraSpec
    from aflow_tune.engines.trinity.training.algorithm import TrainStep

    torch.set_num_threads(args.threads)
    settings = TrainerSettings(
        lora=LoraSpec(args.rank, 2.0 * args.rank),
        schedule=Schedule(peak=1e-5),
        micro_batch_tokens=args.micro_batch_tokens,
        dtype=torch.bfloat16 if args.dtype == "bf16" else torch.float32,
    )
    trainer = LocalTrainer(folder, settings)
    return trainer, TrainStep(algorithm_config(args), trainer)


class Ours:
    """Sampler, trainer and Trinity's GRPO in this process."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        from aflow_tune.engines.local.compute import COMPUTE
        from aflow_tune.engines.local.models import load_model, load_tokenizer
        from aflow_tune.engines.local.sampler import Sampler

        self.trainer, self.train = COMPUTE.submit(make_trainer, args, folder).result()
        settings = self.trainer.settings
        self.args, self.version = args, 0
        self.tokenizer = load_tokenizer(folder)
        prompts = make_prompts(self.tokenizer, args.groups * (args.rounds + 1), args.prompt_tokens)
        self.prompts = [self.tokenizer(text)["input_ids"] for text in prompts]
        self.sampler = Sampler(
            load_model(folder, settings.dtype, settings.device),
            self.tokenizer,
            max_batch=args.groups * args.group_size,
            max_model_len=args.prompt_tokens + args.new_tokens,
            threads=args.threads,
            lora=settings.lora,
        )

    def step(self, index: int) -> dict[str, float]:
        from aflow_tune.engines.local.compute import COMPUTE
        from aflow_tune.engines.local.sampler import SamplingParams

        args, started = self.args, time.perf_counter()
        params = SamplingParams(
            max_tokens=args.new_tokens, n=args.group_size, seed=1000 * index, ignore_eos=True
        )
        mine = self.prompts[index * args.groups : (index + 1) * args.groups]
        groups = self.sampler.generate(mine, [params] * len(mine))
        rolled = time.perf_counter()
        COMPUTE.submit(self.train, experiences(mine, groups, index)).result()
        trained = time.perf_counter()
        self.version += 1
        self.sampler.update_weights(COMPUTE.submit(self.trainer.weights).result(), self.version)
        synced = time.perf_counter()
        return {
            "rollout": rolled - started,
            "train": trained - rolled,
            "sync": synced - trained,
            "step": synced - started,
        }


def algorithm_config(args: argparse.Namespace) -> Any:
    """Trinity's algorithm; GRPO without a KL term, which is TRL's default as well."""
    from trinity.common.config import Config, ExperienceBufferConfig
    from trinity.common.config_validator import AlgorithmConfigValidator

    from aflow_tune.engines.trinity.training.pair_loss import PairLoss

    config = Config()
    config.mode = "both" if args.method == "grpo" else "train"
    algorithm = config.algorithm
    algorithm.algorithm_type = args.method
    if args.method == "grpo":
        algorithm.kl_loss_fn = "none"
    else:
        rows = ExperienceBufferConfig(path=str(args.start / "rows.json"))
        config.buffer.trainer_input.experience_buffer = rows
    if args.method == "dpo":
        algorithm.policy_loss_fn = f"{PairLoss.__module__}.PairLoss"
        algorithm.policy_loss_fn_args = {"beta": 0.1, "loss_type": args.loss}
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


class OursOffline:
    """SFT or DPO in this process; writes the rows and the adapter that both sides start from."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        import torch
        from safetensors.torch import save_file

        from aflow_tune.engines.local.lora import load_adapter_state

        self.args = args
        self.trainer, self.train = make_trainer(args, folder)
        state = self.trainer.weights()
        draw = torch.Generator().manual_seed(0)
        for name, tensor in state.items():
            if name.endswith(".B"):
                tensor.normal_(std=0.01, generator=draw)
        load_adapter_state(self.trainer.peft, state)
        self.rows = agent_rows(folder, args.rows * (args.rounds + 1))
        save_file(state, args.start / "adapter.safetensors")
        (args.start / "rows.json").write_text(json.dumps(self.rows))

    def step(self, index: int) -> dict[str, float]:
        import torch
        from trinity.common.experience import Experience

        exps = []
        for row in self.rows[index * self.args.rows : (index + 1) * self.args.rows]:
            prompt, chosen, rejected = (torch.tensor(row[key]) for key in ROW)
            made: dict[str, Any] = {"chosen": chosen, "rejected": rejected, "tokens": prompt}
            if self.args.method == "sft":
                mask = torch.ones(len(chosen), dtype=torch.bool)
                made = {"tokens": torch.cat([prompt, chosen]), "action_mask": mask}
            exps.append(Experience(prompt_length=len(prompt), **made))
        started = time.perf_counter()
        found = self.train(exps)
        seconds = time.perf_counter() - started
        return {"step": seconds, "loss": found["actor/final_loss"]}


ROW = ("prompt", "chosen", "rejected")


def agent_rows(folder: Path, count: int) -> list[dict[str, list[int]]]:
    """The tokens of prompts and answers of the dialogues, each answer beside another row's."""
    from aflow_tune.data.catalogue import read_catalogue
    from aflow_tune.data.dialogues import as_dialogue
    from aflow_tune.engines.local.chat import Renderer
    from aflow_tune.engines.local.models import end_tokens, load_tokenizer

    catalogue = {tool.name: tool for tool in read_catalogue(DATA / "catalogue.jsonl")}
    renderer = Renderer(load_tokenizer(folder), end_tokens(folder))
    rows = []
    for line in (DATA / "dialogues.jsonl").read_text(encoding="utf-8").splitlines():
        dialogue = as_dialogue(json.loads(line), catalogue)
        for it in renderer.examples(dialogue["messages"], dialogue["tools"], last_only=True):
            at = it.prompt_length
            rows.append({"prompt": it.tokens_T[:at], "chosen": it.tokens_T[at:]})
    random.Random(0).shuffle(rows)
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        row["rejected"] = other["chosen"]
    return rows[:count]


# --- TRL's side -------------------------------------------------------------------------------


def trl_child(args: argparse.Namespace) -> None:
    """Runs in TRL's interpreter: makes a step for each line on stdin, writes its seconds and its
    loss to stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    per_step = args.groups * args.group_size if args.method == "grpo" else args.rows

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            answers.write("ready\n")
            answers.flush()
            sys.stdin.readline()
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds = time.perf_counter() - self.started

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            if "loss" in logs:
                answers.write(json.dumps({"step": self.seconds, "loss": logs["loss"]}) + "\n")
                answers.flush()

    shared = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": args.rounds + 1,
        "per_device_train_batch_size": args.trl_micro_batch,
        "gradient_accumulation_steps": per_step // args.trl_micro_batch,
        "learning_rate": 1e-5,
        "bf16": args.dtype == "bf16",
        "model_init_kwargs": {"dtype": "bfloat16" if args.dtype == "bf16" else "float32"},
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    given = {
        "model": args.model,
        "processing_class": tokenizer,
        "peft_config": LoraConfig(
            r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"
        ),
        "callbacks": [Turns()],
    }
    if args.method == "grpo":
        from trl import GRPOConfig, GRPOTrainer

        draw = random.Random(0)
        prompts = make_prompts(tokenizer, args.groups * (args.rounds + 1), args.prompt_tokens)
        config = GRPOConfig(
            num_generations=args.group_size,
            max_completion_length=args.new_tokens,
            generation_kwargs={"min_new_tokens": args.new_tokens},
            temperature=1.0,
            beta=0.0,
            shuffle_dataset=False,
            **shared,
        )
        GRPOTrainer(
            reward_funcs=lambda completions, **_: [draw.random() for _ in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            **given,
        ).train()
        return
    import trl
    from safetensors.torch import load_file

    rows = json.loads((args.start / "rows.json").read_text())
    shared |= {"max_length": None, "train_sampling_strategy": "sequential"}
    made: list[dict[str, list[int]]]
    if args.method == "sft":
        base: Any = trl.SFTTrainer
        made = [
            {
                "input_ids": row["prompt"] + row["chosen"],
                "labels": [-100] * len(row["prompt"]) + row["chosen"],
            }
            for row in rows
        ]
        config = trl.SFTConfig(**shared)
    else:
        base = trl.DPOTrainer
        made = [{f"{key}_ids": row[key] for key in ROW} for row in rows]
        config = trl.DPOConfig(beta=0.1, loss_type=args.loss, **shared)

    class Prepared(base):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # tokens already

    trainer = Prepared(args=config, train_dataset=Dataset.from_list(made), **given)
    adapter = load_file(args.start / "adapter.safetensors")
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                module, _, kind = name.removeprefix("base_model.model.").rpartition(".lora_")
                parameter.copy_(adapter.pop(f"lora.{module}.{kind[0]}"))
    assert not adapter, sorted(adapter)
    trainer.train()


class Trl:
    """The child process, one step at a time."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        options = {**vars(args), "model": str(folder)}
        command = [args.trl, str(Path(__file__).resolve()), args.method, "--trl-child"]
        for name, value in options.items():
            if name not in ("trl", "trl_child", "method") and value is not None:
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

    def step(self, index: int) -> dict[str, float]:
        if index:
            self._expect("ready")
        assert self.child.stdin is not None
        self.child.stdin.write("go\n")
        self.child.stdin.flush()
        found: dict[str, float] = json.loads(self._line())
        return found

    def close(self) -> None:
        self.child.kill()
        self.child.wait()


def main() -> None:
    args = parse()
    if args.trl_child:
        trl_child(args)
        return
    from aflow_tune.engines.local.models import resolve_model

    folder = resolve_model(args.model)
    args.start = Path(tempfile.mkdtemp())
    ours = Ours(args, folder) if args.method == "grpo" else OursOffline(args, folder)
    trl = Trl(args, folder) if args.trl else None
    mine: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    try:
        for index in range(args.rounds + 1):
            sides = [ours.step(index), *([trl.step(index)] if trl else [])]
            label = "warm-up" if index == 0 else f"round {index}"
            told = "; TRL ".join(", ".join(f"{k} {v:.4g}" for k, v in it.items()) for it in sides)
            print(f"{label}: ours {told}", flush=True)
            for kept, side in zip((mine, theirs), sides, strict=False):
                kept.append(side)
    finally:
        if trl:
            trl.close()
        if isinstance(ours, Ours):
            ours.sampler.close()

    def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
        return {name: statistics.median(r[name] for r in rounds[1:]) for name in rounds[0]}

    summary: dict[str, Any] = {
        "settings": {n: str(v) for n, v in vars(args).items() if "trl" not in n and n != "start"},
        "ours": medians(mine),
        "ours_rounds": mine,
    }
    if theirs:
        summary |= {"trl": medians(theirs), "trl_rounds": theirs}
        summary["ratio"] = summary["ours"]["step"] / summary["trl"]["step"]
        print(f"ours takes {summary['ratio']:.2f} of TRL's time")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
