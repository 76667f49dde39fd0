"""`aflow-tune eval CONFIG`: measure a workflow on its held-out tasks, without training."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import (
    COUNT,
    REPEATED,
    SETTING,
    SEVERAL,
    add_command,
    config_arguments,
    key_variable,
    option,
    picked,
    print_json,
    together,
)
from aflow_tune.errors import BadInput, ExitCode, RunFailed

if TYPE_CHECKING:
    from aflow_tune.evaluation.columns import Request

_DESCRIPTION = """\
Run the workflow of a configuration on its held-out task sets and tell how well it does: mean and
pass@k with 95% intervals, failures by kind, tokens and cost, calls by caller. Nothing is trained.
The base model is always the first column; every other column is compared with it on the same
tasks with the same random numbers.

Of a chain of stages the last one that trained is measured; its base model is what the stages
before it left.

The same command goes on where it was stopped, and measures only what is not there yet.
"""

_EPILOG = """\
examples:
  aflow-tune eval my.yaml                                base model and newest checkpoint
  aflow-tune eval my.yaml --checkpoint best 10 --samples 4
  aflow-tune eval my.yaml --compare last workflow:flows/other.py:solve
  aflow-tune eval --compare runs/sft runs/dpo            two runs, or two stages of a chain
  aflow-tune eval my.yaml --vary temperature=0.2,0.7,1.0 --limit 50
  aflow-tune eval my.yaml --endpoint http://127.0.0.1:8000/v1 --model base-name tuned-name

what a checkpoint may be:
  base, last, best (by the run's own evaluations), a step such as 20, a stage of the chain, or a
  folder: a checkpoint, a PEFT adapter, a merged model, or another run. --compare also takes
  workflow:FILE.py:FUNCTION or the folder of an operator graph (with the base model), and another
  YAML (its workflow and base model). Without CONFIG it is that of the last folder named.

exit codes: 0 measured, 1 failed or no run could be scored, 2 bad input, 3 interrupted, 4 a limit
of budget reached.
"""

_LOG_WIDTH = 200
"""Characters per line when the output is no terminal."""


def add_parser(commands: Any) -> None:
    text = "measure a workflow on its held-out tasks: base model, checkpoints, endpoints"
    parser = add_command(commands, "eval", _run, text, _DESCRIPTION, _EPILOG)
    text = "the YAML file; default: that of the run of the last folder named"
    config_arguments(parser, text, nargs="?")
    text = "weights to measure beside the base model (see below)"
    option(parser, "--checkpoint WHICH", text, **SEVERAL, dest="checkpoints")
    pair: dict[str, Any] = {"nargs": 2, "metavar": ("A", "B"), "default": ()}
    option(parser, "--compare", "measure two and compare them in pairs", **pair)
    option(parser, "--samples K", "runs of each task", **COUNT, default=1)
    option(parser, "--limit N", "only the first N tasks of each set", **COUNT)
    text = "a column for each value of temperature, top_p, top_k or max_tokens; may be repeated"
    option(parser, "--vary KEY=V1,V2", text, **REPEATED)
    option(
        parser, "--prompts FILE", "a column for each YAML of operator prompts", type=Path, **SEVERAL
    )
    option(parser, "--endpoint URL", "an OpenAI-compatible API to ask instead")
    text = "models of the endpoint, the base model first"
    option(parser, "--model NAME", text, **SEVERAL, dest="served_models")
    key_variable(parser)
    text = "score from which on a run has solved its task (default 1)"
    option(parser, "--solved-at SCORE", text, type=float, default=1.0)
    option(parser, "--retry-failed", "make runs that failed before once more", dest="again")
    text = (
        "keep the answers of executors and judges here and use them again; never those of the "
        "model that is measured"
    )
    option(parser, "--cache DIR", text, type=Path)
    option(parser, "--out DIR", "default: eval in the run folder", type=Path)
    option(parser, "--json", "print the result as JSON")


def _find_config(options: argparse.Namespace) -> None:
    """Without a CONFIG, take that of the run to which the last folder named belongs. BadInput: it
    has none, or none is named."""
    from aflow_tune.evaluation.trained import RESOLVED, find_weights

    if options.config is not None and SETTING.match(str(options.config)):
        options.overrides.insert(0, str(options.config))  # a setting, where no CONFIG was given
        options.config = None
    if options.config is not None:
        return
    named = [*options.checkpoints, *options.compare]
    folders = [path for path in map(Path, named) if path.is_dir()]
    run_dir = find_weights(folders[-1]).run_dir if folders else None
    if run_dir is None:
        title, expected = "It is not known what to measure.", "a YAML file, or the folder of a run"
        found = f"no CONFIG, and {', '.join(named) or 'nothing'} to compare"
        raise BadInput.of(title, "CONFIG", expected, found, "aflow-tune eval my.yaml")
    options.config = run_dir / RESOLVED


def _run(options: argparse.Namespace) -> int:
    beside = {"--endpoint": options.endpoint, "--model": options.served_models}
    together(beside, "The evaluation cannot be started.")
    from aflow_tune.config.quiet import quiet

    quiet()
    from aflow_tune.evaluation.columns import Request

    _find_config(options)
    return measure(picked(options, Request), as_json=options.json)


def measure(request: Request, *, as_json: bool = False) -> int:
    """Measure, and print the result. Raises RunFailed: nothing was measured."""
    from rich.console import Console

    from aflow_tune.evaluation.evaluate import JSON_NAME, EvalProgress, evaluate
    from aflow_tune.evaluation.results import PAGE_NAME, print_result

    result, out = evaluate(request, EvalProgress(Console(stderr=as_json)))
    if as_json:
        print_json(result.to_json())
    else:
        console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
        print_result(result, console)
        for label, name in (("page", PAGE_NAME), ("numbers", JSON_NAME), ("records", "columns")):
            console.print(f"{label + ':':<10}{out / name}", markup=False, soft_wrap=True)
    why = result.why_nothing()
    if why is not None:
        raise RunFailed(f"nothing was measured: {why} (--retry-failed makes them once more)")
    return ExitCode.DONE
