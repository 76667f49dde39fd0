"""What commands share: a parser that helps, one way to declare options, types with a
plain refusal."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault

_SETTING = re.compile(r"[A-Za-z_][\w.\[\]-]*=")


class Parser(argparse.ArgumentParser):
    """Keeps the lines of a text as they are, and takes settings anywhere."""

    def __init__(self, **settings: Any) -> None:
        if settings.get("epilog") or "\n" in (settings.get("description") or ""):
            settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)

    def arranged(self, words: Sequence[str]) -> list[str]:
        """The words with CONFIG first, then every `key=value`, then the options with their values.

        argparse takes positional arguments in one place only, and would give a setting that
        follows `--checkpoint` to that option. The value of an option that takes exactly one is
        left where it is, whatever it looks like.
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
            elif takes == 1 or (takes and not _SETTING.match(word)):
                takes = takes if takes == "+" else takes - 1
                options.append(word)
            else:
                (settings if _SETTING.match(word) else positional).append(word)
        return [*positional, *settings, *options]


REPEATED: dict[str, Any] = {"action": "append", "default": []}
SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
"""Settings of an option that may be repeated, or take several values, or both."""

# -- options -------------------------------------------------------------------------------


def add_command(
    commands: Any,
    name: str,
    action: Callable[[argparse.Namespace], int],
    help: str,
    description: str | None = None,
    epilog: str | None = None,
) -> Parser:
    """Add a command or one of its verbs."""
    parser: Parser = commands.add_parser(name, help=help, description=description, epilog=epilog)
    parser.set_defaults(action=action)
    return parser


def option(target: Any, names: str, help: str | None = None, **settings: Any) -> None:
    """Add to a parser or group `--name METAVAR`, a flag `--name` or a positional `name METAVAR`.

    `settings` are argparse's. An option without METAVAR and choices is a flag.
    """
    words = names.split()
    strings = [word for word in words if word.startswith("-")] or words[:1]
    if len(words) > len(strings):
        settings["metavar"] = words[-1]
    elif not {"choices", "nargs"} & settings.keys():
        settings["action"] = "store_true"
    target.add_argument(*strings, help=help, **settings)


def reader(expected: str, read: Callable[[str], Any], holds: Callable[[Any], bool]) -> Any:
    """A type for `option` with a plain refusal."""

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
    """Settings of an option whose value has to hold; else BadInput at `place`, or its name."""

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


# -- what several commands say -------------------------------------------------------------


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named. Raises BadInput."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error}") from error


def picked(options: argparse.Namespace, kind: type[Any], **more: Any) -> Any:
    """A dataclass with the fields that options have the names of."""
    fields = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in vars(options).items() if name in fields}
    return kind(**given | more)


def refuse(title: str, faults: Sequence[Fault]) -> None:
    if faults:
        raise BadInput(title, list(faults))


def together(options: Mapping[str, Any], title: str) -> None:
    """Refuse an option that stands without the other ones. Raises BadInput."""
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
    """The configuration, and the settings that may follow it."""
    option(parser, "config CONFIG", config, type=Path, **more)
    option(parser, "overrides key=value", settings, nargs="*")


def key_variable(parser: Parser) -> None:
    """Where the key of `--endpoint` comes from."""
    text = "environment variable with the endpoint's key; OPENAI_API_KEY for OpenAI's own"
    option(parser, "--key-variable NAME", text)
