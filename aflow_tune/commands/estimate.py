"""`aflow-tune estimate`: memory, tokens, time and money of a run, before it starts."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from typing import Any

from aflow_tune.commands.options import add_config, amount, count
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
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "estimate",
        help="memory, tokens, time and money of a run, and what to change to make it fit",
        description="Work out what a configuration needs, by role: memory for weights, gradients, "
        "optimizer, activations and KV cache; tokens, time and money of a step. Says whether it "
        "fits and what to change if it does not.",
        epilog=_EPILOG,
    )
    add_config(parser, "settings that win over the file, such as local.max_batch=16")
    parser.add_argument(
        "--inline", action="store_true", help="as `aflow-tune CONFIG --inline`: one process"
    )
    room = parser.add_argument_group("what there is")
    room.add_argument(
        "--gpu-memory", type=_bytes, metavar="SIZE", help="of each GPU: 24GB (this machine's)"
    )
    room.add_argument("--gpus", type=count, metavar="N", help="GPUs in all (the configuration's)")
    room.add_argument(
        "--memory", type=_bytes, metavar="SIZE", help="of each machine: 64GB (what is free here)"
    )
    room.add_argument("--usd-per-gpu-hour", type=amount, metavar="USD")
    known = parser.add_argument_group("what you know of the run")
    known.add_argument("--prompt-tokens", type=count, metavar="N", help="of a call, on average")
    known.add_argument("--response-tokens", type=count, metavar="N", help="of a call, on average")
    known.add_argument("--calls", type=count, metavar="N", help="of the tuned model in a run")
    known.add_argument("--tokens-per-second", type=amount, metavar="N", help="sampled, in all")
    known.add_argument("--train-tokens-per-second", type=amount, metavar="N")
    parser.add_argument(
        "--no-rehearsal", action="store_true", help="do not call the workflow function"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run two steps here first (local engine), in a folder that is removed",
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.set_defaults(action=_estimate)


def _estimate(options: argparse.Namespace) -> int:
    from aflow_tune.config.quiet import quiet

    quiet()
    from aflow_tune.estimate.estimate_lengths import Given
    from aflow_tune.estimate.estimating import EstimateOptions, estimate
    from aflow_tune.estimate.render import as_json, overall, render

    overrides = [*options.overrides, *(["inline=true"] if options.inline else [])]
    given = Given(
        options.prompt_tokens,
        options.response_tokens,
        options.calls,
        options.tokens_per_second,
        options.train_tokens_per_second,
    )
    with contextlib.redirect_stdout(sys.stderr):  # the workflow may print
        found = estimate(
            options.config,
            overrides,
            EstimateOptions(
                given,
                gpu_memory=options.gpu_memory,
                gpus=options.gpus,
                memory=options.memory,
                usd_per_gpu_hour=options.usd_per_gpu_hour,
                rehearse=not options.no_rehearsal,
                measure=options.measure,
            ),
        )
    print(json.dumps(as_json(found)) if options.json else render(found))
    return ExitCode.FAILED if overall(found) is False else ExitCode.DONE


def _bytes(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])i?B?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        meant = f"; did you mean {text.strip()}GB?" if text.strip().isdigit() else ""
        raise argparse.ArgumentTypeError(f"a size with its unit, such as 24GB, not {text!r}{meant}")
    return float(match[1]) * _UNITS[match[2].upper()]
