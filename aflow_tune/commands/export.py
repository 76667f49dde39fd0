"""`aflow-tune export`: what a run has to give to other tools, written into a new folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aflow_tune.commands.options import refuse, too_small
from aflow_tune.errors import ExitCode, Fault

_DESCRIPTION = """\
Write what a run has to give to other tools. Nothing that exists is written over.

  adapter    a PEFT folder, for PeftModel, vLLM and the hub
  merged     base model and adapter together, as a Hugging Face folder
  workflows  the best workflows that the policy wrote, as round_N folders of AFlow with its
             results.json, and an index.json with reward, uses and type of problem
"""

_EPILOG = """\
The run may be going on: a checkpoint is there whole or not at all, and its hashes are checked.

examples:
  aflow-tune export --run runs/my_project/my_run --what merged --out my_model
  aflow-tune export --run runs/my_project/my_run --what adapter --checkpoint best --out my_adapter
  aflow-tune export --run runs/my_project/my_run --what workflows --top 5 \\
    --out workspace/GSM8K/workflows

Workflows are compared by structure and type of problem, by their mean reward over all uses in
training, its evaluations and those of `aflow-tune eval`; of each structure the text is kept that
was rewarded best.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write a run's adapter, merged model or best workflows for other tools",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        metavar="DIR",
        help="the run folder; of a chain of stages its own or a stage's",
    )
    parser.add_argument(
        "--what", required=True, choices=("adapter", "merged", "workflows"), help="see above"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where to; made if missing"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help="for adapter and merged: last (the default), best (by the run's own evaluations), "
        "or a step",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="in place of the run's resolved.yaml"
    )
    parser.add_argument(
        "--top", type=int, metavar="N", help="for workflows: how many at most (default 10)"
    )
    parser.add_argument(
        "--least-uses",
        type=int,
        metavar="N",
        help="for workflows: leave out structures with fewer uses (default 3)",
    )
    parser.add_argument(
        "--dataset",
        metavar="NAME",
        help="for workflows: what AFlow calls the data set, if the path of --out does not say it",
    )
    parser.set_defaults(action=_run)


def _run(options: argparse.Namespace) -> int:
    _check(options)
    from aflow_tune.config.quiet import quiet

    quiet()
    from aflow_tune.using.export import export_checkpoint, export_workflows

    if options.what == "workflows":
        written = export_workflows(
            options.run,
            options.out,
            top=10 if options.top is None else options.top,
            least_uses=3 if options.least_uses is None else options.least_uses,
            dataset=options.dataset,
            config=options.config,
        )
    else:
        which = options.checkpoint or "last"
        written = export_checkpoint(
            options.run, which, options.what, options.out, config=options.config
        )
    for path in written.paths:
        print(path)
    for note in written.notes:
        print(note)
    return ExitCode.DONE


def _check(options: argparse.Namespace) -> None:
    """Options that do not belong to what is written.

    Raises:
        BadInput: with every one of them.
    """
    faults = []
    for_workflows = {
        "--top": options.top,
        "--least-uses": options.least_uses,
        "--dataset": options.dataset,
    }
    for_weights = {"--checkpoint": options.checkpoint}
    workflows = options.what == "workflows"
    for name, value in (for_weights if workflows else for_workflows).items():
        if value is not None:
            found = f"--what {options.what}"
            faults.append(Fault(name, "an export that it means something for", found, "remove it"))
    faults += too_small(("--top", options.top, 1), ("--least-uses", options.least_uses, 1))
    refuse("Nothing was exported.", faults)
