"""`aflow-tune sandbox`: show the isolation available here, and run one program in it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from aflow_tune.commands.options import REPEATED, Parser, add_command, option
from aflow_tune.errors import BadInput, ExitCode, Fault

_EPILOG = """\
examples:
  aflow-tune sandbox                                 the wall found here, what it covers
  aflow-tune sandbox run program.py --time 5         run one program behind it
  aflow-tune sandbox run program.py --stdin input.txt --memory 256 --json
  aflow-tune sandbox run program.py --package numpy --package sympy

--json prints {"outcome": ..., "exit_code": ..., "stdout": ..., "stderr": ..., "limits_hit": [...],
"level": ..., "seconds": ...}. Outcomes: finished (exit status 0), failed, timed_out,
out_of_memory, too_much_output.

exit codes:
  0  a wall was found; with run: the program finished
  1  no wall can be built here and nothing was run; with run also: the program did not finish
  2  bad input, such as a file that is not there
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "sandbox",
        help="show the wall that model-written programs run behind; run one program",
        description="Show the wall that programs written by a model run behind on this machine. "
        "It is proved by starting a program behind it.",
        epilog=_EPILOG,
    )
    _common(parser)
    parser.set_defaults(action=_show, policy="auto", json=False)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    text = "run one Python program"
    about = "Run one Python program in the sandbox and say how it ended."
    verb = add_command(actions, "run", _run, text, about, _EPILOG)
    option(verb, "program FILE.py", "the program", type=Path)
    option(verb, "--stdin FILE", "what it reads from stdin", type=Path)
    option(verb, "--time S", "seconds of wall clock (15)", type=float)
    option(verb, "--memory MB", "for all its processes (512)", type=int)
    text = "an installed package that it may import, such as numpy; again for more"
    option(verb, "--package NAME", text, **REPEATED)
    _common(verb)


def _common(parser: Parser) -> None:
    # No defaults: those of `run` would overwrite options given before the verb.
    option(
        parser,
        "--policy",
        "which wall; unsafe_subprocess is none (auto: the strongest that can be built)",
        choices=["auto", "bubblewrap", "landlock", "unsafe_subprocess"],
        default=argparse.SUPPRESS,
    )
    option(parser, "--json", "print JSON and nothing else", default=argparse.SUPPRESS)


def _show(options: argparse.Namespace) -> int:
    from aflow_tune.sandbox import detect
    from aflow_tune.sandbox.backends import COVERS, DOES_NOT_COVER, unavailable
    from aflow_tune.sandbox.types import SandboxUnavailable

    found = detect(options.policy)
    level = found.level
    facts: dict[str, Any] = {"level": level and level.value, "reasons": found.reasons}
    facts["covers"] = COVERS[level] if level else []
    facts["does_not_cover"] = DOES_NOT_COVER[level] if level else []
    if options.json:
        print(json.dumps(facts))
        return ExitCode.DONE if level else ExitCode.FAILED
    if level is None:
        raise SandboxUnavailable(unavailable(options.policy, found))
    print(f"level: {level.value}", *(f"  {n}: {why}" for n, why in found.reasons.items()), sep="\n")
    for key in ("covers", "does_not_cover"):
        print(f"{key.replace('_', ' ')}:", *(f"  - {line}" for line in facts[key]), sep="\n")
    return ExitCode.DONE


def _run(options: argparse.Namespace) -> int:
    from aflow_tune.sandbox import Limits, run_program_sync

    texts, faults = [], []
    for path in (options.program, options.stdin):
        try:
            texts.append("" if path is None else path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            found = getattr(error, "strerror", None) or str(error)
            faults.append(Fault(str(path), "a readable text file", found, "name another file"))
    if faults:
        raise BadInput("nothing was run", faults)
    given = {"seconds": options.time, "memory_mb": options.memory}
    limits = Limits(**{name: value for name, value in given.items() if value is not None})
    policy = "+".join((options.policy, *options.package))
    execution = run_program_sync(texts[0], stdin=texts[1], limits=limits, policy=policy)
    if options.json:
        print(json.dumps(execution.to_json()))
    else:
        for name, value in execution.to_json().items():
            told = ", ".join(value) or "none" if isinstance(value, list) else str(value)
            lead = "\n" if name in ("stdout", "stderr") and told else " "
            print(f"{name.replace('_', ' ')}:{lead}{_harmless(told)}".rstrip())
    return ExitCode.DONE if execution.ok else ExitCode.FAILED


def _harmless(text: str) -> str:
    """The text with control characters escaped, so that it cannot control the terminal."""
    return "".join(
        character if character in "\n\t" or character.isprintable() else repr(character)[1:-1]
        for character in text
    )
