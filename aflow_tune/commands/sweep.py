"""`aflow-tune sweep`: search settings of a configuration by repeated training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import (
    REPEATED,
    add_command,
    amount,
    config_arguments,
    count,
    option,
    picked,
    print_json,
    seeds,
)
from aflow_tune.errors import ExitCode
from aflow_tune.sweeps import Request

if TYPE_CHECKING:
    from aflow_tune.sweeps.sweep import Ended

_EPILOG = """\
what to try, for any key of the configuration (--space may be repeated, or names a YAML file):
  algorithm.repeat_times=4,8,16            these values
  model.temperature=0.6..1.0               any number between
  algorithm.optimizer.lr=log:1e-6..1e-4    any number between, evenly by its logarithm
  buffer.batch_size=int:2..16              any whole number between

examples:
  aflow-tune sweep my.yaml --space algorithm.optimizer.lr=log:1e-6..1e-4 --trials 12
  aflow-tune sweep my.yaml --space space.yaml --sampler grid --seeds 0,1,2 --parallel 3
  aflow-tune sweep my.yaml buffer.total_steps=20 --space local.dtype=fp32,bf16 --prune median

Every trial is a run in a folder of its own below NAME-sweep, so that `aflow-tune runs` lists,
resumes and cleans it. Its score is the held-out mean of `report.score`. Everything is checked
before the first trial begins. The same command goes on with a sweep that was stopped or killed,
unfinished trials first; --trials, --timeout and --parallel may change, what decides a score may
not. At the end stands a table; sweep.html has the plots, sweep.json the numbers.

exit codes:
  0  every trial has ended, and at least one has a score
  1  the first three trials failed, or none has a score
  2  bad input: nothing was started
  3  interrupted (Ctrl-C, SIGTERM), or trials were killed: the same command goes on
  4  --timeout is over: the same command goes on
  5  all trials had ended before
"""


def add_parser(commands: Any) -> None:
    text = "try a configuration with other settings, and compare by held-out score"
    about = (
        "Train one configuration again and again with other settings, drawn by Optuna, and compare "
        "the trials by their held-out score."
    )
    parser = add_command(commands, "sweep", _sweep, text, about, _EPILOG)
    config_arguments(parser, settings="settings that every trial has")
    text = "a key and what to try for it, or a YAML file of such lines; may be repeated"
    option(parser, "--space KEY=WHAT|FILE", text, **REPEATED, required=True)
    group = parser.add_argument_group("what is drawn, and how it is compared")
    option(group, "--trials N", "trials in all (20; a grid: all)", type=count)
    text = (
        "tpe learns from the trials before (default), random does not, grid tries every "
        "combination once"
    )
    option(group, "--sampler", text, choices=["tpe", "random", "grid"], default="tpe")
    option(group, "--seed N", "of what is drawn (0)", type=int, default=0)
    text = "run each trial once with each of these seeds and take the mean"
    option(group, "--seeds 0,1,2", text, type=seeds, default=())
    text = "the best evaluation of a run (default), or its last"
    option(group, "--objective", text, choices=["best", "last"], default="best")
    text = (
        "stop a trial whose held-out score falls behind: below the median of earlier trials, or "
        "not in the better half when the steps have doubled (default: none)"
    )
    option(group, "--prune", text, choices=["none", "median", "halving"], default="none")
    group = parser.add_argument_group("how much at once, and where")
    option(group, "--parallel K", "runs at once (1)", type=count, default=1)
    option(group, "--timeout SECONDS", "stop this command after that long", type=amount)
    text = (
        "start runs through this Ray: HOST:PORT, auto for one that runs here, none for "
        "processes of this machine (default: what cluster.ray_address or RAY_ADDRESS names)"
    )
    option(group, "--ray ADDRESS", text)
    option(parser, "--json", "print the content of sweep.json at the end")


def _sweep(options: argparse.Namespace) -> int:
    from aflow_tune.tuning import with_stop

    request = picked(options, Request)

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    def work(stop: Callable[[], bool]) -> Ended:
        from aflow_tune.sweeps.sweep import run_sweep

        return run_sweep(request, ray=options.ray, stop=stop, say=say)

    ended = with_stop(work)
    print_json(ended.content) if options.json else print(f"\n{ended.text}")
    return ExitCode.DONE
