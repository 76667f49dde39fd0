"""The options of `aflow-tune run` that play one step by a script (`--dry-run`), and the action."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from aflow_tune.commands.options import count, refuse
from aflow_tune.errors import ExitCode, Fault

EPILOG = """\
dry run:
  aflow-tune run --dry-run my.yaml                        one step, scripted; no GPU, no model
  aflow-tune run --dry-run my.yaml --answers answers.jsonl
  aflow-tune run --dry-run gpu.yaml --inline --json       one process, without Ray

  Plays one training step through your rows, workflow, rewards, the adapter, Ray workers, buffer and
  advantages, with an optimiser step on a tiny random model. What the policy says is scripted: in
  each group even runs say what the row gives as its answer, odd ones plain words. --answers FILE
  says it better, a JSON line for an item:

    {"item": 0, "good": "<answer>13</answer>", "bad": "no idea"}
    {"item": "*", "good": "<answer>{answer}</answer>"}          {answer}: the row's own field

  No number is what the model would do. Exit code 0: a batch was filled and a step was made;
  1: not, and the first traceback is shown; 2: refused, nothing was started. docs/dry_run.md
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `run`."""
    group = parser.add_argument_group("a dry run")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="play one step by a script on a tiny random model; no GPU, nothing is kept",
    )
    group.add_argument(
        "--answers", type=Path, metavar="FILE", help="what a good and a bad policy would say"
    )
    group.add_argument(
        "--call-apis",
        action="store_true",
        help="call the models behind APIs, which costs money; else plain words stand in for them",
    )
    group.add_argument(
        "--tasks",
        type=count,
        metavar="N",
        help="tasks to play (a whole step, up to 256 runs); sums are scaled to the step",
    )
    group.add_argument("--stage", metavar="NAME", help="the stage to play (the first that can be)")
    group.add_argument("--json", action="store_true", help="print JSON and nothing else")


def refuse_alone(options: argparse.Namespace) -> None:
    """Raises BadInput where an option of a dry run was given to a run that is none."""
    given = {
        "--answers": options.answers,
        "--call-apis": options.call_apis,
        "--tasks": options.tasks,
        "--stage": options.stage,
        "--json": options.json,
    }
    faults = [
        Fault(f"command line: {name}", "--dry-run beside it", "a real run", f"--dry-run {name}")
        for name, value in given.items()
        if value
    ]
    refuse("These options are those of a dry run.", faults)


def run_dry(options: argparse.Namespace) -> int:
    """The action of `run --dry-run`; returns the exit code."""
    from aflow_tune.dry_run.render import as_json, render
    from aflow_tune.tuning import dry_run_config

    with contextlib.redirect_stdout(sys.stderr):  # the workflow may print
        result = dry_run_config(
            options.config,
            options.overrides,
            answers=options.answers,
            call_apis=options.call_apis,
            tasks=options.tasks,
            stage=options.stage,
            inline=options.inline,
        )
    print(json.dumps(as_json(result)) if options.json else render(result))
    return ExitCode.DONE if result.good else ExitCode.FAILED
