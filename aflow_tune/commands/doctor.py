"""`aflow-tune doctor`: check what this machine, and a configuration, lack for a run."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import add_command, config_arguments, option, print_json
from aflow_tune.errors import ExitCode

if TYPE_CHECKING:
    from aflow_tune.doctor.lines import Line

_EPILOG = """\
Every line says ok, note or FAULT, what was found, and the command that puts it right. Nothing is
trained and no token is paid for. The endpoints of `models` are asked for their list of models,
which proves the keys; keys are never shown. --offline asks neither them nor the hub.

examples:
  aflow-tune doctor                                  this machine
  aflow-tune doctor configs/quickstart.yaml          and all that this configuration needs
  aflow-tune doctor my.yaml engine=trinity cluster.ray_address=10.0.0.1:6379
  aflow-tune doctor my.yaml --json --offline

exit codes:
  0  no fault; there may be notes
  1  a fault of the machine or the cluster
  2  a fault of what was given: configuration, function, data, model, key
"""
_LAST_SECONDS = 0.5


def add_parser(commands: Any) -> None:
    text = "what this machine, or a configuration, still lacks for a run"
    about = (
        "Look at versions, GPUs, Ray, the sandbox and the disk; with CONFIG also at everything "
        "that `validate` checks, at model, data, keys, and the cluster it names."
    )
    parser = add_command(commands, "doctor", _doctor, text, about, _EPILOG)
    config_arguments(parser, nargs="?")
    option(parser, "--offline", "ask neither the hub nor endpoints of models")
    option(parser, "--json", "print one JSON object")


def _doctor(options: argparse.Namespace) -> int:
    from aflow_tune.doctor.doctor import examination
    from aflow_tune.doctor.lines import CHECK_THREAD, State, run_checks

    started = time.monotonic()
    told: list[Line] = []
    out = sys.stdout
    # Libraries and the user's modules may print when imported: keep that off our output.
    silent = _silent_output() if options.json else contextlib.nullcontext()
    with silent, contextlib.redirect_stdout(sys.stderr):
        checks = examination(options.config, options.overrides, offline=options.offline)
        for lines in run_checks(checks):
            told += lines
            if not options.json:
                print("".join(_text(line) for line in lines), end="", file=out, flush=True)
    faults = [line for line in told if line.state is State.FAULT]
    seconds = time.monotonic() - started
    if options.json:
        content: dict[str, Any] = {"ok": not faults, "faults": len(faults)}
        content |= {"seconds": round(seconds, 2), "lines": [dict(vars(line)) for line in told]}
        print_json(content)
    else:
        print(f"\n{len(faults) or 'no'} fault{'s' * (len(faults) > 1)}; {seconds:.1f} s")
    code = ExitCode.FAILED if faults else ExitCode.DONE
    if any(line.given for line in faults):
        code = ExitCode.BAD_INPUT
    looking = [item for item in threading.enumerate() if item.name.startswith(CHECK_THREAD)]
    for thread in looking:
        thread.join(_LAST_SECONDS)  # it may just be ending
    if any(thread.is_alive() for thread in looking):
        # A hanging thread of a pool would block the interpreter's exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@contextlib.contextmanager
def _silent_output() -> Iterator[None]:
    """Redirect file descriptor 1 to stderr: output of C code and of child processes too."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _text(line: Line) -> str:
    state = line.state.value.upper() if line.state.value == "fault" else line.state.value
    cure = f"{'':21}do: {line.cure}\n" if line.cure else ""
    return f"{state:<6} {line.check:<13} {line.found}\n{cure}"
