"""Shared by the commands: the argument parser, a short way to declare options, option types
with clear messages, and output."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from aflow_tune.errors import BadInput, Fault

SETTING = re.compile(r"[A-Za-z_][\w.\[\]-]*=")
"""The beginning of a `key=value`."""


class Parser(argparse.ArgumentParser):
    """Keeps the line breaks of help texts, and accepts `key=value` settings anywhere."""

    def __init__(self, **settings: Any) -> None:
        if settings.get("epilog") or "\n" in (settings.get("description") or ""):
            settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, which gives the words of a verb to the verb's own parser here."""
        return super().parse_known_args(None if args is None else self.arranged(args), namespace)

    def arranged(self, words: Sequence[str]) -> list[str]:
        """The words reordered: CONFIG, then every `key=value`, then the options with their values.

        argparse accepts positional arguments in one place only, and would take a setting after
        `--checkpoint` for a value of it. A word after an option that takes exactly one value is
        its value, whatever it looks like.
        """
        if not any(action.dest == "overrides" for action in self._get_positional_actions()):
            return list(words)
        positional: list[str] = []
        settings: list[str] = []
        options: list[str] = []
        takes: Any = 0  # values that the option before may still take; "+": any number
        for word in words:
            if word.startswith("-"):
                action = self._option_string_actions.get(word)
                takes = 0 if action is None else 1 if action.nargs is None else action.nargs
                options.append(word)
            elif takes == 1 or (takes and not SETTING.match(word)):
                takes = takes if takes == "+" else takes - 1
                options.append(word)
            else:
                (settings if SETTING.match(word) else positional).append(word)
        return [*positional, *settings, *options]


REPEATED: dict[str, Any] = {"action": "append", "default": []}
SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
"""argparse settings of an option that may be repeated, or also take several values at once."""


def paced(often: str, out: TextIO) -> Callable[[str], None]:
    """A function that prints lines of progress to `out`: those that begin with `often` at most
    every five seconds, others all."""
    last = 0.0

    def say(text: str) -> None:
        nonlocal last
        if not text.startswith(often) or time.monotonic() - last > 5.0:
            last = time.monotonic()
            print(text, file=out, flush=True)

    return say


# -- options -------------------------------------------------------------------------------


def add_command(
    commands: Any,
    name: str,
    action: Callable[[argparse.Namespace], int],
    help: str,
    description: str | None = None,
    epilog: str | None = None,
) -> Parser:
    """Add a command, or a verb of one, that runs `action`; returns its parser."""
    parser: Parser = commands.add_parser(name, help=help, description=description, epilog=epilog)
    parser.set_defaults(action=action)
    return parser


def option(target: Any, names: str, help: str | None = None, **settings: Any) -> None:
    """Add to a parser or group `--name METAVAR`, a flag `--name` or a positional `name METAVAR`.

    `settings` are those of `add_argument`. Without METAVAR, choices and nargs it is a flag.
    """
    words = names.split()
    strings = [word for word in words if word.startswith("-")] or words[:1]
    if len(words) > len(strings):
        settings["metavar"] = words[-1]
    elif not {"choices", "nargs"} & settings.keys():
        settings["action"] = "store_true"
    target.add_argument(*strings, help=help, **settings)


def reader(expected: str, read: Callable[[str], Any], holds: Callable[[Any], bool]) -> Any:
    """An argparse type: `read` the text and test it; the error message states `expected`."""

    def checked(text: str) -> Any:
        try:
            value = read(text)
        except ValueError:
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"{expected}, not {text!r}")
        return value

    return checked


def _bytes(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])i?B?", text.strip(), re.IGNORECASE)
    return float(match[1]) * 1024 ** ("KMGT".index(match[2].upper()) + 1) if match else 0.0


count = reader("a whole number, 1 or more", int, lambda number: number >= 1)
natural = reader("a whole number, 0 or more", int, lambda number: number >= 0)
amount = reader("a number above 0", float, lambda number: 0 < number < float("inf"))
size = reader("a size with its unit, such as 24GB", _bytes, lambda number: number > 0)
seeds = reader(
    "different whole numbers such as 0,1,2",
    lambda text: tuple(map(int, text.split(","))),
    lambda numbers: min(numbers) >= 0 and len(set(numbers)) == len(numbers),
)


def checked(
    expected: str, holds: Callable[[Any], bool], read: Callable[[str], Any] = int, place: str = ""
) -> dict[str, Any]:
    """argparse settings of an option with a tested value; BadInput at `place` or its name."""

    class Checked(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, name: Any = None) -> None:
            if not holds(values):
                where, title = place.format(name, values) or name, "The command line does not fit."
                raise BadInput.of(title, where, expected, str(values), f"{name} {expected}")
            setattr(namespace, self.dest, values)

    return {"type": read, "action": Checked}


COUNT = checked("1 or more", lambda number: number >= 1, place="{} {}")
NATURAL = checked("0 or more", lambda number: number >= 0, place="{} {}")


def names(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


# -- helpers of several commands -----------------------------------------------------------


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named. BadInput: it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error}") from error


def picked(options: argparse.Namespace, kind: type[Any], **more: Any) -> Any:
    """An instance of the dataclass `kind`, filled from options of the same names and `more`."""
    fields = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in vars(options).items() if name in fields}
    return kind(**given | more)


def refuse(title: str, faults: Sequence[Fault]) -> None:
    if faults:
        raise BadInput(title, list(faults))


def together(options: Mapping[str, Any], title: str) -> None:
    """Require all of these options or none. BadInput: only some are given."""
    missing = ", ".join(name for name, value in options.items() if not value)
    given = ", ".join(name for name, value in options.items() if value)
    if given and missing:
        raise BadInput.of(title, given, f"{missing} beside it", f"no {missing}", f"add {missing}")


def config_arguments(
    parser: Parser,
    config: str = "the YAML file",
    settings: str = "settings that win over the file",
    **more: Any,
) -> None:
    """Add the positional CONFIG and the `key=value` settings after it."""
    option(parser, "config CONFIG", config, type=Path, **more)
    option(parser, "overrides key=value", settings, nargs="*")


def key_variable(parser: Parser) -> None:
    """Add `--key-variable`, which names the variable with the key of `--endpoint`."""
    text = "environment variable with the endpoint's key; OPENAI_API_KEY for OpenAI's own"
    option(parser, "--key-variable NAME", text)
