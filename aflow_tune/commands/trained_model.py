"""Options of every command that asks what was trained: which weights, and how they are asked."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from aflow_tune.commands.options import refuse
from aflow_tune.errors import Fault

if TYPE_CHECKING:
    from aflow_tune.using.inferring import Inferer

WHAT_IS_A_CHECKPOINT = """\
what DIR may be:
  a run folder (its newest checkpoint; of a chain of stages the last one that trained), a
  checkpoint global_step_N, or export/adapter or export/merged of a run. The configuration is the
  run's resolved.yaml unless --config names another.
"""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a command's parser."""
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="what was trained (below)")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the YAML to go by; alone: the base model"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="a setting that wins over the file, such as models.executor.base_url=...; may be "
        "repeated",
    )
    parser.add_argument(
        "--endpoint", metavar="URL", help="the policy is behind this OpenAI-compatible API"
    )
    parser.add_argument("--model", metavar="NAME", help="what the endpoint calls the policy")
    parser.add_argument(
        "--key-variable",
        metavar="NAME",
        help="environment variable with the endpoint's key; OPENAI_API_KEY for OpenAI's own",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="of the policy; default: as the configuration evaluates held-out tasks",
    )


def inferer_of(options: argparse.Namespace) -> Inferer:
    """What the options mean, ready to be opened.

    Raises:
        BadInput: options that do not fit, or whatever is wrong with folder and configuration.
    """
    _check(options)
    import transformers.utils.logging

    from aflow_tune.using.inferring import open_trained

    transformers.utils.logging.disable_progress_bar()
    return open_trained(
        options.checkpoint,
        config=options.config,
        overrides=options.overrides,
        endpoint=options.endpoint,
        served_model=options.model,
        key_variable=options.key_variable,
        temperature=options.temperature,
    )


def _check(options: argparse.Namespace) -> None:
    faults = []
    if options.checkpoint is None and options.config is None:
        cure = "--checkpoint runs/my_project/my_run"
        faults.append(Fault("--checkpoint", "a folder, or --config FILE", "neither", cure))
    if bool(options.endpoint) != bool(options.model):
        given, missing = ("--endpoint", "--model NAME")
        if options.model:
            given, missing = ("--model", "--endpoint URL")
        faults.append(Fault(given, f"{missing} beside it", "it alone", f"add {missing}"))
    if options.temperature is not None and not 0 <= options.temperature <= 100:
        found = f"{options.temperature:g}"
        faults.append(Fault("--temperature", "0 or more", found, "--temperature 0"))
    refuse("The model cannot be asked.", faults)
