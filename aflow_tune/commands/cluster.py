"""`aflow-tune cluster` and `aflow-tune submit`: start and stop a Ray that outlives commands; submit
runs to it as jobs, follow, list and stop them."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from pathlib import Path
from typing import Any

from aflow_tune.commands.options import add_command, config_arguments, option
from aflow_tune.errors import BadInput, ExitCode

_EPILOG = """\
examples:
  aflow-tune cluster up                              a Ray on this machine, on loopback
  aflow-tune cluster up --num-cpus 4                 with fewer processors
  aflow-tune cluster up gpu1 gpu2 --venv /opt/aflow  several hosts by ssh, the first is the head
  aflow-tune cluster up cluster.yaml                 any cluster that `ray up` can start
  aflow-tune cluster status
  aflow-tune cluster down

`aflow-tune CONFIG` and `aflow-tune submit CONFIG` find the Ray of this machine by themselves.
Hosts need ssh without a password, and the same versions of Python and aflow-tune. A token in
~/.ray/auth_token, made where there is none, guards the cluster.

exit codes:
  0  started, answering, or ended
  1  it failed: the reason is printed last
  2  bad input, such as a cluster that is not there
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "cluster",
        help="start, show or end a Ray on this machine or on several",
        description="Start, show or end a Ray that runs are then made on.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    verb = add_command(actions, "up", _up, "start one", epilog=_EPILOG)
    option(verb, "where HOST|YAML", "hosts, or a Ray cluster YAML (here)", nargs="*")
    option(verb, "--num-cpus N", "on this machine (all)", type=int)
    option(verb, "--num-gpus N", "on this machine (all)", type=int)
    option(verb, "--user NAME", "ssh user of the hosts (yours)")
    option(verb, "--ssh-key FILE", "private key for the hosts (ssh's own)")
    option(verb, "--venv DIR", "virtual environment on every host")
    for name, text in (("status", "show it"), ("down", "end it")):
        verb = add_command(actions, name, _status_or_down, text, epilog=_EPILOG)
        option(verb, "yaml yaml", "a Ray cluster YAML (the last one)", type=Path, nargs="?")
        verb.set_defaults(verb=name)
    _add_submit(commands)


def _up(options: argparse.Namespace) -> int:
    from aflow_tune.cluster import machines
    from aflow_tune.find_ray import ray_base

    where = options.where
    sizes = {"--num-cpus": options.num_cpus, "--num-gpus": options.num_gpus}
    given = [f"{name}={value}" for name, value in sizes.items() if value is not None]
    if not where:
        started = machines.up_here(given)
        print(f"a Ray runs at {started['address']}; dashboard {started['dashboard']}")
        print(f"its files: {ray_base() / 'ray'}")
        return ExitCode.DONE
    if given:
        cure = "leave them out, or set them in a Ray cluster YAML"
        raise BadInput.of("nothing was started", "--num-cpus", "one machine", "several", cure)
    if len(where) == 1 and where[0].endswith((".yaml", ".yml")):
        config = Path(where[0])
    else:
        user = options.user or getpass.getuser()
        config = machines.hosts_yaml(where, user, options.ssh_key, options.venv)
    started = machines.up_several(config, environment=options.venv)
    print(f"the cluster of {config} is up")
    print(f"next: ray dashboard {config}; aflow-tune submit CONFIG --address http://127.0.0.1:8265")
    if started["address"]:
        print(f"on a node: RAY_ADDRESS={started['address']} aflow-tune CONFIG")
    return ExitCode.DONE


def _status_or_down(options: argparse.Namespace) -> int:
    from aflow_tune.cluster import machines

    print(getattr(machines, options.verb)(options.yaml))
    return ExitCode.DONE


# -- submit -------------------------------------------------------------------------------

_SUBMIT_EPILOG = """\
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


def _add_submit(commands: Any) -> None:
    text = "run a configuration as a job of a Ray cluster"
    about = "Send a configuration with its code, data and keys to a Ray cluster and run it there."
    parser = add_command(commands, "submit", _submit, text, about, _SUBMIT_EPILOG)
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
    """Follow a job until it ends. The first Ctrl-C stops the job, the second the following."""
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
