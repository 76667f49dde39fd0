"""`aflow-tune estimate`: memory, tokens, time and money of a run, before it starts."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

from aflow_tune.commands.options import CONFIG, add_command
from aflow_tune.errors import ExitCode

_EPILOG = """\
examples:
  aflow-tune estimate configs/quickstart.yaml --inline
  aflow-tune estimate configs/writer_qwen7b.yaml --gpu-memory 80GB --gpus 2 --usd-per-gpu-hour 2.5
  aflow-tune estimate my.yaml model.max_model_len=8192 --gpu-memory 24GB
  aflow-tune estimate my.yaml --measure            a short run on this machine first, local engine

Nothing of the configuration is started, but the workflow function is rehearsed: it runs on a few
training rows with a stand-in for the model that answers at once, which shows how many calls a run
makes and how long its prompts are. A configuration with models behind an API is not rehearsed, nor
one whose rows are not on this machine. A workflow or a judge that makes an API client of its own
spends in a rehearsal what a few of its runs cost: --no-rehearsal leaves it out everywhere. What
is then unknown is bounded by the limits, and called an upper bound. Speeds are never assumed: they
come from an earlier run in the same folder, from --measure, or from you. docs/estimate.md says what
is counted and how well.

exit codes:
  0  everything fits, or no limit is known to compare with
  1  something does not fit: what to change is printed; or the short run of --measure failed
  2  bad input, or a model or engine that cannot be estimated
"""
_OPTIONS = f"""\
{CONFIG.replace("the file", "the file, such as local.max_batch=16")}\
--inline  as `aflow-tune CONFIG --inline`: one process
[what there is]
--gpu-memory SIZE size  of each GPU: 24GB (this machine's)
--gpus N count  GPUs in all (the configuration's)
--memory SIZE size  of each machine: 64GB (what is free here)
--usd-per-gpu-hour USD amount
[what you know of the run]
--prompt-tokens N count  of a call, on average
--response-tokens N count  of a call, on average
--calls N count  of the tuned model in a run
--tokens-per-second N amount  sampled, in all
--train-tokens-per-second N amount
[]
--no-rehearsal  do not call the workflow function
--measure  run two steps here first (local engine), in a folder that is removed
--json  print JSON and nothing else
"""


def add_parser(commands: Any) -> None:
    add_command(
        commands,
        "estimate",
        _estimate,
        _OPTIONS,
        help="memory, tokens, time and money of a run, and what to change to make it fit",
        description="Work out what a configuration needs, by role: memory for weights, gradients, "
        "optimizer, activations and KV cache; tokens, time and money of a step. Says whether it "
        "fits and what to change if it does not.",
        epilog=_EPILOG,
    )


def _estimate(options: argparse.Namespace) -> int:
    from aflow_tune.config.quiet import quiet

    quiet()
    from aflow_tune.estimate.estimating import estimate
    from aflow_tune.estimate.needs import as_json, overall, render
    from aflow_tune.estimate.quantities import EstimateOptions

    overrides = [*options.overrides, *(["inline=true"] if options.inline else [])]
    asked = EstimateOptions(
        prompt_tokens=options.prompt_tokens,
        response_tokens=options.response_tokens,
        calls=options.calls,
        tokens_per_second=options.tokens_per_second,
        train_tokens_per_second=options.train_tokens_per_second,
        gpu_memory=options.gpu_memory,
        gpus=options.gpus,
        memory=options.memory,
        usd_per_gpu_hour=options.usd_per_gpu_hour,
        rehearse=not options.no_rehearsal,
        measure=options.measure,
    )
    with contextlib.redirect_stdout(sys.stderr):  # the workflow may print
        found = estimate(options.config, overrides, asked)
    print(json.dumps(as_json(found)) if options.json else render(found))
    return ExitCode.FAILED if overall(found) is False else ExitCode.DONE
