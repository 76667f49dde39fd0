"""`aflow-tune gpus`: show and watch this machine's GPUs and their processes; free some."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from aflow_tune.commands.options import REPEATED, add_command, checked, option, refuse
from aflow_tune.errors import BadInput, ExitCode, Fault

_EPILOG = """\
examples:
  aflow-tune gpus                                    each GPU, its processes, whose they are
  aflow-tune gpus --monitor --interval 5 --log gpus.jsonl
  aflow-tune gpus free 0                             end your own processes on GPU 0, after a yes
  aflow-tune gpus free --pid 4711 --pid 4712 --yes --grace 30
  aflow-tune gpus free 0 1 --protect 4711 --config my.yaml

A device is named by its number, by its UUID (or its beginning), or as GPU:INSTANCE where a GPU is
divided (MIG). --json prints one object; with --monitor one object a line, which, like the lines
of --log, leaves out the arguments of commands. docs/gpus.md says what each figure means.

exit codes:
  0  shown; with free: all that was named is gone and the named devices have no process left
  1  there is no NVIDIA driver or no GPU; with free also: something is still there, or no yes
  2  bad input: a device or process that is not there, is not yours or is protected; nothing was
     signalled
"""
_FREE = """\
End processes of your own on GPUs: those named with --pid, or all of yours on the named devices.
They are shown first. After a typed `yes` (or with --yes) each gets SIGTERM, and SIGKILL if it is
still there after --grace seconds. Never ended: other users' processes (under sudo: those of
others than the one who typed it), this command and what runs it, protected processes with all
that descends from them or that they descend from.
"""


def add_parser(commands: Any) -> None:
    text = "show what runs on the GPUs and whose it is; watch them; free one"
    about = (
        "Show the NVIDIA GPUs of this machine: use, memory, temperature, power, and every process "
        "on them with its user, memory, start and command."
    )
    parser = add_command(commands, "gpus", _show, text, about, _EPILOG)
    option(parser, "--json", "print JSON and nothing else")
    option(parser, "--monitor", "go on showing, until Ctrl-C")
    option(
        parser,
        "--interval S",
        "seconds between two looks of --monitor (2)",
        **checked("0.1 to 86400", lambda number: 0.1 <= number <= 86400, float),
        default=2.0,
    )
    option(parser, "--log FILE", "also append each look to FILE, as a line of JSON", type=Path)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    text = "end processes of your own on a GPU, after showing them"
    texts = {"help": text, "description": _FREE, "epilog": _EPILOG}
    verb = add_command(actions, "free", _free, **texts)
    option(verb, "devices DEVICE", "a number, UUID, GPU:INSTANCE", nargs="*")
    option(
        verb, "--pid PID", "a process on a GPU; may be given several times", type=int, **REPEATED
    )
    text = "a process to leave alone; may be given several times"
    option(verb, "--protect PID", text, type=int, **REPEATED)
    option(verb, "--config CONFIG", "a YAML whose protected_pids count as well", type=Path)
    grace = checked("0 to 86400", lambda number: 0 <= number <= 86400, float)
    option(verb, "--grace S", "seconds between SIGTERM and SIGKILL (10)", **grace, default=10.0)
    option(verb, "--yes", "do not ask")


def _show(options: argparse.Namespace) -> int:
    from aflow_tune.gpus.devices import NvmlUnavailable, snapshot
    from aflow_tune.gpus.processes import invoking_user
    from aflow_tune.gpus.showing import append, render, watch

    owner = invoking_user()
    try:
        if options.monitor:
            watch(options.interval, owner=owner, log=options.log, as_json=options.json)
            return ExitCode.DONE
        now = snapshot()
        if options.log is not None:
            append(options.log, now, owner)
    except NvmlUnavailable as error:
        if not options.json:
            raise
        print(json.dumps({"devices": [], "problem": error.reason, "cure": error.cure}))
        return ExitCode.FAILED
    except BrokenPipeError:
        raise
    except OSError as error:
        title, expected = "The log cannot be written.", "a file that can be written"
        where, cure = f"--log {options.log}", "name another file"
        raise BadInput.of(title, where, expected, str(error), cure) from None
    print(json.dumps(now.to_json(owner)) if options.json else render(now))
    return ExitCode.DONE if now.devices else ExitCode.FAILED


def _free(options: argparse.Namespace) -> int:
    from aflow_tune.gpus.freeing import free, pid_faults

    faults = pid_faults(options.pid, "--pid") + pid_faults(options.protect, "--protect")
    if not options.devices and not options.pid:
        cure = "aflow-tune gpus free 0, or --pid PID"
        faults.append(Fault("gpus free", "a device or a --pid", "neither", cure))
    if options.json or options.monitor or options.log:
        flags = "--json, --monitor and --log"
        faults.append(Fault("gpus free", "flags of `free`", f"one of {flags}", "leave it out"))
    refuse("Nothing was signalled.", faults)
    protected = list(options.protect)
    if options.config is not None:  # its other settings need only be readable
        from aflow_tune.config.quiet import quiet

        quiet()
        from aflow_tune.config.load import load_config

        config = load_config(options.config)
        where = config.positions.where("protected_pids")
        refuse("Nothing was signalled.", pid_faults(config.protected_pids, where))
        protected += config.protected_pids
    freed = free(
        options.devices,
        options.pid,
        protect=protected,
        grace=options.grace,
        confirm=(lambda count: True) if options.yes else _confirm,
    )
    return ExitCode.DONE if freed.whole else ExitCode.FAILED


def _confirm(count: int) -> bool:
    try:
        answer = input(f"End these {count} processes? Type yes: ")
    except (EOFError, RuntimeError, UnicodeDecodeError):  # end of input; stdin closed; not UTF-8
        print("\nnobody answered; where nobody can, --yes confirms")
        return False
    return answer.strip().lower() == "yes"
