"""The command line: `aflow-tune CONFIG.yaml [key=value ...]`, and the modules of `commands/`.

Parses arguments, runs the command, prints errors and returns the exit code. Each command imports
heavy packages only when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence

from aflow_tune.commands import runs
from aflow_tune.commands.options import Parser
from aflow_tune.contract.import_faults import package_fault
from aflow_tune.errors import AflowTuneError, ExitCode, disk_fault
from aflow_tune.quick_start import import_quickly

_COMMAND_MODULES: tuple[str, ...] = (
    "run",
    "eval",
    "asking",
    "export",
    "runs",
    "sweep",
    "harvest",
    "search",
    "agent",
    "estimate",
    "score",
    "data",
    "tools",
    "graph",
    "sandbox",
    "gpus",
    "doctor",
    "cluster",
)
"""Modules of `aflow_tune.commands`, in the order in which `--help` lists them."""
_EPILOG = """\
examples:
  aflow-tune configs/quickstart.yaml                 tune on this machine, no GPU needed
  aflow-tune configs/quickstart.yaml seed=1 name=second buffer.total_steps=20
  aflow-tune configs/quickstart.yaml --inline        one process, without Ray
  aflow-tune configs/quickstart.yaml --dry-run       one scripted step on a tiny model
  aflow-tune validate configs/quickstart.yaml        check everything, start nothing
  aflow-tune init my_project                         a workflow, a YAML and a test to begin with
  aflow-tune runs                                    what runs there are, and what became of them
  aflow-tune sweep my.yaml --space algorithm.optimizer.lr=log:1e-6..1e-4

Settings given as key=value win over the file. The same command again resumes an interrupted
run from its last checkpoint.

exit codes:
  0  done: the target step was reached and the last checkpoint loads
  1  failed: the reason is printed last
  2  bad input: nothing was started
  3  interrupted (Ctrl-C, SIGTERM): the state is saved
  4  a configured budget was reached: the state is saved
  5  already finished: this configuration reached its target in this folder before
"""


def command() -> int:
    """Entry point of the `aflow-tune` script: `main`, with fast imports."""
    import_quickly()
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Run `argv`, by default the arguments of this process. Returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # escape characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, commands = _parsers()
    if not arguments:
        parser.print_help()
        return ExitCode.BAD_INPUT
    try:
        options = parser.parse_args(_arranged(commands, arguments))
        return int(options.action(options))
    except AflowTuneError as error:
        print(f"\naflow-tune: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("\naflow-tune: stopped at once; what was saved before is kept.", file=sys.stderr)
        return int(ExitCode.FAILED)
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.FAILED)
    except Exception as error:
        problem = disk_fault(error) if isinstance(error, OSError) else None
        broken = None if problem else package_fault(error)
        if broken is not None:
            text = f"a package is missing or damaged (`aflow-tune doctor`).\n1. {broken}"
        elif problem is not None:
            text = f"a file could not be written: {problem}"
        else:
            raise
        print(f"\naflow-tune: {text}", file=sys.stderr)
        return int(ExitCode.FAILED)


def _arranged(commands: Mapping[str, Parser], arguments: list[str]) -> list[str]:
    """Put the command first: the first word that is no flag if it is a command, else `run`."""
    words = [word for word in arguments if not word.startswith("-")]
    if not words:
        return arguments
    name = words[0] if words[0] in commands else "run"
    if name == "runs":
        return runs.arrange(arguments)
    if name in ("run", "validate") or arguments[0] == name:
        if words[0] == name:
            arguments.remove(name)
        arguments = [name, *commands[name].arranged(arguments)]
    return arguments


def _parsers() -> tuple[Parser, Mapping[str, Parser]]:
    """The parser of the whole command line, and those of its commands by name."""
    parser = Parser(
        prog="aflow-tune",
        description="Reinforcement learning for agent workflows: tune the model behind an async "
        "function, on a laptop or on a cluster, from one YAML file.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    for name in _COMMAND_MODULES:
        importlib.import_module(f"aflow_tune.commands.{name}").add_parser(commands)
    return parser, commands.choices


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"aflow-tune {version('aflow-tune')}"
    except (PackageNotFoundError, OSError, UnicodeDecodeError):  # a checkout; a damaged install
        return "aflow-tune of an unknown version"


if __name__ == "__main__":
    sys.exit(command())
