"""`aflow-tune estimate`: memory, tokens, time and money of a run, before it starts."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

from aflow_tune.commands.options import (
    add_command,
    amount,
    config_arguments,
    count,
    option,
    picked,
    size,
)
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


def add_parser(commands: Any) -> None:
    text = "memory, tokens, time and money of a run, and what to change to make it fit"
    about = (
        "Work out what a configuration needs, by role: memory for weights, gradients, optimizer, "
        "activations and KV cache; tokens, time and money of a step. Says whether it fits and what "
        "to change if it does not."
    )
    parser = add_command(commands, "estimate", _estimate, text, about, _EPILOG)
    config_arguments(parser, settings="settings that win over the file, such as local.max_batch=16")
    option(parser, "--inline", "as `aflow-tune CONFIG --inline`: one process")
    group = parser.add_argument_group("what there is")
    option(group, "--gpu-memory SIZE", "of each GPU: 24GB (this machine's)", type=size)
    option(group, "--gpus N", "GPUs in all (the configuration's)", type=count)
    option(group, "--memory SIZE", "of each machine: 64GB (what is free here)", type=size)
    option(group, "--usd-per-gpu-hour USD", type=amount)
    group = parser.add_argument_group("what you know of the run")
    option(group, "--prompt-tokens N", "of a call, on average", type=count)
    option(group, "--response-tokens N", "of a call, on average", type=count)
    option(group, "--calls N", "of the tuned model in a run", type=count)
    option(group, "--tokens-per-second N", "sampled, in all", type=amount)
    option(group, "--train-tokens-per-second N", type=amount)
    option(parser, "--no-rehearsal", "do not call the workflow function")
    option(
        parser, "--measure", "run two steps here first (local engine), in a folder that is removed"
    )
    option(parser, "--json", "print JSON and nothing else")


def _estimate(options: argparse.Namespace) -> int:
    from aflow_tune.config.quiet import quiet

    quiet()
    from aflow_tune.estimate.estimating import estimate
    from aflow_tune.estimate.needs import as_json, overall, render
    from aflow_tune.estimate.quantities import EstimateOptions

    overrides = [*options.overrides, *(["inline=true"] if options.inline else [])]
    asked = picked(options, EstimateOptions, rehearse=not options.no_rehearsal)
    with contextlib.redirect_stdout(sys.stderr):  # the workflow may print
        found = estimate(options.config, overrides, asked)
    print(json.dumps(as_json(found)) if options.json else render(found))
    return ExitCode.FAILED if overall(found) is False else ExitCode.DONE
