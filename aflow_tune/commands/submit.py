"""`aflow-tune submit`: a run as a job of a Ray cluster, followed, stopped or left alone."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from aflow_tune.commands.options import add_command, config_arguments, option
from aflow_tune.errors import BadInput, ExitCode

_EPILOG = """\
examples:
  aflow-tune submit my.yaml                          submit, follow the log, end as the run ends
  aflow-tune submit my.yaml seed=1 name=second --detach
  aflow-tune submit --follow JOB                     the log of a job, until it ends
  aflow-tune submit --stop JOB                       save the state and end
  aflow-tune submit --list

--address is the cluster's dashboard, http://HEAD:8265 (or RAY_API_SERVER_ADDRESS); without it the
Ray of this machine is used. `checkpoint_root_dir` has to be an absolute path that every node
sees. Code and data files travel; keys go to the job in memory.

Ctrl-C while following stops the run with its state saved; twice leaves the job alone.

exit codes: as those of `aflow-tune CONFIG`; 0 with --detach and --stop once the cluster took it
"""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "submit",
        _submit,
        help="run a configuration as a job of a Ray cluster",
        description="Send a configuration with its code, data and keys to a Ray cluster and run "
        "it there.",
        epilog=_EPILOG,
    )
    config_arguments(parser, settings="settings that win", nargs="?")
    option(parser, "--address URL", "the cluster's dashboard (this machine's)")
    option(parser, "--detach", "do not follow the log")
    option(parser, "--follow JOB", "follow the log of a job")
    option(parser, "--stop JOB", "ask a job to save its state and end")
    option(parser, "--list", "list the jobs of ours")
    option(parser, "--json", "with --list: print JSON")


def _submit(options: argparse.Namespace) -> int:
    given = {"CONFIG": options.config, "--follow": options.follow, "--stop": options.stop}
    named = [name for name, value in given.items() if value] + ["--list"] * options.list
    if len(named) != 1:
        found = " and ".join(named) or "none of them"
        expected = "one of CONFIG, --follow JOB, --stop JOB, --list"
        raise BadInput.of("nothing was submitted", "command line", expected, found, "name one")
    from aflow_tune.config.quiet import quiet

    quiet()
    from aflow_tune.cluster.jobs import Jobs

    jobs = Jobs(options.address)
    if options.list:
        rows = jobs.listed()
        lines = [
            f"{row['job']}  {row['status']:<10} {row['seconds']:>9.0f} s  {row['run']}"
            for row in rows
        ]
        print(json.dumps(rows) if options.json else "\n".join(lines) or "no job of ours")
        return ExitCode.DONE
    if options.stop:
        asked = jobs.stop(options.stop)
        print(f"asked {options.stop} to save and end" if asked else f"{options.stop} has ended")
        return ExitCode.DONE
    job = options.follow
    if job is None:
        job = jobs.submit(options.config, options.overrides)
        if options.detach:
            print(f"follow: aflow-tune submit --follow {job}\nstop:   ... --stop {job}")
            return ExitCode.DONE
    return _followed(jobs, job)


def _followed(jobs: Any, job: str) -> int:
    """Follow a job; the first Ctrl-C stops it, the second one only us."""
    asked = False
    while True:
        try:
            code: int = jobs.follow(job, _write)
            return code
        except KeyboardInterrupt:
            if asked:
                print(f"\n{job} goes on saving; aflow-tune submit --follow {job}", flush=True)
                return ExitCode.INTERRUPTED
            asked = True
            print(f"\nstopping {job}; once more to leave it alone", flush=True)
            jobs.stop(job)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
