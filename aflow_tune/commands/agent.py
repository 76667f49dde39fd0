"""`aflow-tune agent`: train and evaluate an agent that uses tools, from a folder of dialogues.

Writes the YAML that the options stand for and runs it; `aflow_tune.agents` builds it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aflow_tune.commands.options import COUNT, add_command, amount, option
from aflow_tune.errors import BadInput, ExitCode

_TRAIN = """\
Train a model on dialogues with tools: by one method, or by several one after the other. The
options stand for a YAML, which is written to OUTPUT/agent.yaml and printed first: run that file
with `aflow-tune FILE` to change anything else.

methods:
  sft    the assistant's messages are learned as they are
  dpo    num-samples answers to each turn are sampled and scored, the best and the worst of a turn
         are a pair, and pairs are learned
  ppo    answers to each turn, with a value head (on a cluster: a critic)
  grpo   the same in groups of num-samples answers to one turn, without one
"""

_EPILOG = """\
DATA is a file of dialogues, or a folder. In a folder are found, by what their rows are: dialogues
to learn from, perhaps a catalogue of tools (for rows that only name theirs), and perhaps a
benchmark, which the model is evaluated on. Forms: OpenAI messages, ShareGPT, Hermes, xLAM, BFCL,
Seal-Tools, SAGE; `aflow-tune data show FILE` prints what is learned of them.

examples:
  aflow-tune agent train sft --data my_data --output runs/first
  aflow-tune agent train sft dpo --data my_data --num-samples 8 --beta 0.1
  aflow-tune agent train grpo --base-model runs/first/export/merged --data my_data
  aflow-tune agent train sft --data sage --task-weights selection=0.5,planning=0.3,timing=0.2
  aflow-tune agent evaluate runs/first --data my_data
"""

_EVALUATE = """\
Measure models on the benchmark of DATA: tool selection, arguments, plans, steps, timing and the
whole answer, with intervals, by type of task, the base model first and each other in pairs with it.
Prints the `aflow-tune eval` command that it stands for.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "agent",
        help="train and evaluate an agent that uses tools, from dialogues",
        description="Agents that use tools: from a folder of dialogues to an evaluated model.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    text = "train on dialogues: sft, dpo, ppo, grpo, or several of them"
    verb = add_command(actions, "train", _train, text, _TRAIN, _EPILOG)
    text = "sft, dpo, ppo or grpo; several run one after the other"
    option(verb, "methods METHOD", text, nargs="+")
    _shared(verb)
    option(verb, "--epochs N", "passes over the dialogues (1)", **COUNT, default=1)
    text = "share of each batch by type of task: selection=0.35,planning=0.3,..."
    option(verb, "--task-weights TYPE=SHARE", text, default="")
    option(verb, "--batch-size N", "dialogues a step (16)", **COUNT, default=16)
    option(verb, "--lr RATE", "learning rate of sft (2e-4)", type=amount, default=2e-4)
    option(verb, "--rl-lr RATE", "of dpo, ppo and grpo (5e-5)", type=amount, default=5e-5)
    option(verb, "--beta BETA", "dpo: how near the reference (0.1)", type=amount, default=0.1)
    option(verb, "--num-samples N", "answers to each turn (4)", **COUNT, default=4)
    option(verb, "--load-in", "a quantised base under the adapter", choices=("4bit", "8bit"))
    option(verb, "--print", "print the YAML and end")
    text = "measure models on a benchmark of dialogues"
    verb = add_command(actions, "evaluate", _evaluate, text, _EVALUATE)
    text = "run folders, adapters or merged models, beside the base model"
    option(verb, "models MODEL", text, nargs="*")
    _shared(verb)
    option(verb, "--samples K", "answers to each turn (1)", **COUNT, default=1)


def _shared(verb: Any) -> None:
    text = "the model to begin with: a folder, or a name of the hub (smollm2-135m)"
    option(verb, "--base-model MODEL", text, default="smollm2-135m")
    option(verb, "--data DATA", "dialogues: a file, or a folder", type=Path, required=True)
    text = "the run folder (runs/agent)"
    option(verb, "--output DIR", text, type=Path, default=Path("runs/agent"))
    text = "tokens of prompt and answer together (1024)"
    option(verb, "--max-length N", text, **COUNT, default=1024)
    option(verb, "--max-response N", "tokens of an answer (128)", **COUNT, default=128)
    option(verb, "--seed SEED", "what is drawn (0)", type=int, default=0)


def _train(options: argparse.Namespace) -> int:
    from aflow_tune.agents import AgentSFTTrainer, RLTrainingConfig, text_of
    from aflow_tune.tuning import run_config

    config = RLTrainingConfig(
        **_common(options),
        methods=tuple(options.methods),
        epochs=options.epochs,
        task_weights=_weights(options.task_weights),
        batch_size=options.batch_size,
        learning_rate=options.lr,
        rl_learning_rate=options.rl_lr,
        beta=options.beta,
        num_samples=options.num_samples,
        load_in=options.load_in,
    )
    print(text_of(config.as_yaml()), flush=True)
    if options.print:
        return ExitCode.DONE
    path = AgentSFTTrainer(config).write()
    print(f"written to {path}; the same as: aflow-tune {path} --inline\n", flush=True)
    run_config(path, inline=True)
    return ExitCode.DONE


def _evaluate(options: argparse.Namespace) -> int:
    from aflow_tune.config.quiet import quiet

    quiet()
    from aflow_tune.agents import AgentSFTConfig, AgentTrainingEvaluator
    from aflow_tune.commands.eval import measure

    evaluator = AgentTrainingEvaluator(AgentSFTConfig(**_common(options)))
    request = evaluator.request(*options.models, samples=options.samples)
    words = ["--checkpoint", *options.models] if options.models else []
    words = [str(request.config), *words, "--samples", str(options.samples)]
    print(f"the same as: aflow-tune eval {' '.join(words)}\n", flush=True)
    return measure(request)


def _common(options: argparse.Namespace) -> dict[str, Any]:
    names = ("base_model", "data", "output", "max_length", "max_response", "seed")
    return {name: getattr(options, name) for name in names}


def _weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, share = part.partition("=")
        try:
            weights[name.strip()] = float(share)
        except ValueError:
            expected = "selection=0.35,planning=0.3,timing=0.2,retrieval=0.15"
            title, fix = "The weights cannot be read.", f"--task-weights {expected}"
            raise BadInput.of(title, "--task-weights", expected, repr(part), fix) from None
    return weights
