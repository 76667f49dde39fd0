"""`aflow-tune cluster`: a Ray that outlives single commands, on one machine or several."""

from __future__ import annotations

import argparse
import getpass
from pathlib import Path
from typing import Any

from aflow_tune.commands.options import add_command, option
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
    verb = add_command(actions, "up", _up, help="start one", epilog=_EPILOG)
    option(verb, "where HOST|YAML", "hosts, or a Ray cluster YAML (here)", nargs="*")
    option(verb, "--num-cpus N", "on this machine (all)", type=int)
    option(verb, "--num-gpus N", "on this machine (all)", type=int)
    option(verb, "--user NAME", "ssh user of the hosts (yours)")
    option(verb, "--ssh-key FILE", "private key for the hosts (ssh's own)")
    option(verb, "--venv DIR", "virtual environment on every host")
    for name, text in (("status", "show it"), ("down", "end it")):
        verb = add_command(actions, name, _status_or_down, help=text, epilog=_EPILOG)
        option(verb, "yaml yaml", "a Ray cluster YAML (the last one)", type=Path, nargs="?")
        verb.set_defaults(verb=name)


def _up(options: argparse.Namespace) -> int:
    from aflow_tune.cluster import machines
    from aflow_tune.find_ray import ray_base

    where = options.where
    if not where:
        sizes = {"--num-cpus": options.num_cpus, "--num-gpus": options.num_gpus}
        given = [f"{name}={value}" for name, value in sizes.items() if value is not None]
        started = machines.up_here(given)
        print(f"a Ray runs at {started.address}; dashboard {started.dashboard}")
        base, moved = ray_base()
        print(f"its files: {base / 'ray'}{f' ({moved})' if moved else ''}")
        print("next: aflow-tune CONFIG, or aflow-tune submit CONFIG; then aflow-tune cluster down")
        return ExitCode.DONE
    if options.num_cpus is not None or options.num_gpus is not None:
        cure = "leave them out, or set them in a Ray cluster YAML"
        found = "--num-cpus or --num-gpus for several"
        raise BadInput.of("nothing was started", "--num-cpus", "one machine", found, cure)
    if len(where) == 1 and where[0].endswith((".yaml", ".yml")):
        config = Path(where[0])
    else:
        user = options.user or getpass.getuser()
        config = machines.hosts_yaml(where, user, options.ssh_key, options.venv)
    started = machines.up_several(config, environment=options.venv)
    print(f"the cluster of {config} is up")
    print(f"next: ray dashboard {config}, and in another terminal")
    print("      aflow-tune submit CONFIG --address http://127.0.0.1:8265")
    if started.address:
        print(f"on a node: RAY_ADDRESS={started.address} aflow-tune CONFIG")
    return ExitCode.DONE


def _status_or_down(options: argparse.Namespace) -> int:
    from aflow_tune.cluster import machines

    print(getattr(machines, options.verb)(options.yaml))
    return ExitCode.DONE
