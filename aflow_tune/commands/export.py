"""`aflow-tune export`: write a run's adapter, merged model or workflows for other tools."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aflow_tune.commands.options import COUNT, add_command, option, refuse
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
    text = "write a run's adapter, merged model or best workflows for other tools"
    parser = add_command(commands, "export", _run, text, _DESCRIPTION, _EPILOG)
    text = "the run folder; of a chain of stages its own or a stage's"
    option(parser, "--run DIR", text, type=Path, required=True)
    option(parser, "--what", "see above", choices=["adapter", "merged", "workflows"], required=True)
    option(parser, "--out DIR", "where to; made if missing", type=Path, required=True)
    text = (
        "for adapter and merged: last (the default), best (by the run's own evaluations), or a step"
    )
    option(parser, "--checkpoint WHICH", text)
    option(parser, "--config FILE", "in place of the run's resolved.yaml", type=Path)
    option(parser, "--top N", "for workflows: how many at most (default 10)", **COUNT)
    text = "for workflows: leave out structures with fewer uses (default 3)"
    option(parser, "--least-uses N", text, **COUNT)
    text = "for workflows: what AFlow calls the data set, if the path of --out does not say it"
    option(parser, "--dataset NAME", text)


def _run(options: argparse.Namespace) -> int:
    workflows = options.what == "workflows"
    foreign = ("--checkpoint",) if workflows else ("--top", "--least-uses", "--dataset")
    expected = "an export that it means something for"
    faults = [
        Fault(name, expected, f"--what {options.what}", "remove it")
        for name in foreign
        if getattr(options, name[2:].replace("-", "_")) is not None
    ]
    refuse("Nothing was exported.", faults)
    from aflow_tune.config.quiet import quiet

    quiet()
    from aflow_tune.using.export import export_checkpoint, export_workflows

    if workflows:
        written = export_workflows(
            options.run,
            options.out,
            top=options.top or 10,
            least_uses=options.least_uses or 3,
            dataset=options.dataset,
            config=options.config,
        )
    else:
        which = options.checkpoint or "last"
        written = export_checkpoint(
            options.run, which, options.what, options.out, config=options.config
        )
    print(*written.paths, *written.notes, sep="\n")
    return ExitCode.DONE
