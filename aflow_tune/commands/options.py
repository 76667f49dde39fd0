"""What commands share: a parser that helps, tables that declare options, types with a plain
refusal, and the options of those that ask what was trained (`infer`, `serve`)."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.errors import BadInput, Fault

if TYPE_CHECKING:
    from aflow_tune.using.inferring import Inferer

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
        if not any(
            action.dest == "overrides" and not action.option_strings for action in self._actions
        ):
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


# -- tables of options ---------------------------------------------------------------------


def add_command(
    commands: Any,
    name: str,
    action: Callable[[argparse.Namespace], int],
    options: str = "",
    **texts: str,
) -> Parser:
    """Add a command or one of its verbs, with `help`, `description` and `epilog` as `texts`."""
    parser: Parser = commands.add_parser(name, **texts)
    add_options(parser, options)
    parser.set_defaults(action=action)
    return parser


def add_options(parser: argparse.ArgumentParser, table: str) -> None:
    """Add what a table declares, a line each; deeper indentation continues a line.

    `--name  help` is a flag, `--name METAVAR marks  help` an option, `name METAVAR marks  help` a
    positional argument. METAVAR `{a,b}` lists choices, `.` is argparse's own. Marks are a name of
    `_TYPES`, one of `_MARKS`, or `=DEFAULT`. `[title]` begins a group, `[]` ends it; `[either]`
    and `[either, required]` begin options that exclude each other.
    """
    target: Any = parser
    for line in table.replace("\n    ", " ").splitlines():
        head, _, text = line.partition("  ")
        if head.startswith("[either"):
            target = parser.add_mutually_exclusive_group(required="required" in head)
        elif head.startswith("["):
            target = parser.add_argument_group(head[1:-1]) if head != "[]" else parser
        else:
            words = head.split()
            names = [word for word in words if word.startswith("-")] or words[:1]
            target.add_argument(*names, help=text or None, **_settings(words[len(names) :]))


def _settings(words: Sequence[str]) -> dict[str, Any]:
    if not words:
        return {"action": "store_true"}
    metavar, *marks = words
    found: dict[str, Any] = {}
    if metavar.startswith("{"):
        found["choices"] = metavar[1:-1].split(",")
    elif metavar != ".":
        found["metavar"] = tuple(metavar.split(",")) if "two" in marks else metavar
    for mark in marks:
        if mark in _TYPES:
            found["type"] = _TYPES[mark]
        else:
            found |= {"default": mark[1:]} if mark.startswith("=") else _MARKS[mark]
    return found


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number above 0, not {text!r}")
    return int(text)


def natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"give a whole number from 0 on, not {text!r}")
    return int(text)


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0, not {text!r}")
    return value


def size(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])i?B?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        meant = f"; did you mean {text.strip()}GB?" if text.strip().isdigit() else ""
        raise argparse.ArgumentTypeError(f"a size with its unit, such as 24GB, not {text!r}{meant}")
    return float(match[1]) * 2 ** (10 * ("KMGT".index(match[2].upper()) + 1))


def seeds(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not re.fullmatch(r"\d+(,\d+)*", text) or len(set(map(int, numbers))) < len(numbers):
        raise argparse.ArgumentTypeError(f"different whole numbers such as 0,1,2, not {text!r}")
    return tuple(map(int, numbers))


def names(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


_TYPES: dict[str, Callable[[str], Any]] = {
    "amount": amount,
    "count": count,
    "float": float,
    "int": int,
    "names": names,
    "natural": natural,
    "path": Path,
    "seeds": seeds,
    "size": size,
}
_MARKS: dict[str, dict[str, Any]] = {
    "required": {"required": True},
    "two": {"nargs": 2},
    "flag": {"action": "store_true"},
    "kept": {"default": argparse.SUPPRESS},
    "each": {"action": "append", "default": []},
    "many": {"nargs": "+", "action": "extend", "default": []},
    "overrides": {"dest": "overrides"},
    "?": {"nargs": "?"},
    "*": {"nargs": "*"},
    "+": {"nargs": "+"},
}


# -- what several commands say -------------------------------------------------------------


def print_json(content: Any) -> None:
    """As one indented object."""
    print(json.dumps(content, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named. Raises BadInput."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error}") from error


def refuse(title: str, faults: Sequence[Fault]) -> None:
    """Raises BadInput if there are faults."""
    if faults:
        raise BadInput(title, list(faults))


def too_small(*given: tuple[str, int | None, int]) -> list[Fault]:
    """Faults of options below their least value, from (option, value or None, least)."""
    return [
        Fault(f"{name} {value}", f"{least} or more", str(value), f"{name} {max(least, 1)}")
        for name, value, least in given
        if value is not None and value < least
    ]


CONFIG = """\
config CONFIG path  the YAML file
overrides key=value *  settings that win over the file
"""
"""The configuration, and the settings that may follow it."""
WHAT_IS_A_CHECKPOINT = """\
what DIR may be:
  a run folder (its newest checkpoint; of a chain of stages the last one that trained), a
  checkpoint global_step_N, or export/adapter or export/merged of a run. The configuration is the
  run's resolved.yaml unless --config names another.
"""
MODEL_OPTIONS = """\
--checkpoint DIR path  what was trained (below)
--config FILE path  the YAML to go by; alone: the base model
--set KEY=VALUE each overrides  a setting that wins over the file, such as
    models.executor.base_url=...; may be repeated
--endpoint URL  the policy is behind this OpenAI-compatible API
--model NAME  what the endpoint calls the policy
--key-variable NAME  environment variable with the endpoint's key; OPENAI_API_KEY for OpenAI's own
--temperature T float  of the policy; default: as the configuration evaluates held-out tasks
"""
"""Of the commands that ask what was trained; `inferer_of` reads them."""


def inferer_of(options: argparse.Namespace) -> Inferer:
    """What `MODEL_OPTIONS` mean, ready to be opened.

    Raises:
        BadInput: options that do not fit, or whatever is wrong with folder and configuration.
    """
    faults = []
    if options.checkpoint is None and options.config is None:
        cure = "--checkpoint runs/my_project/my_run"
        faults.append(Fault("--checkpoint", "a folder, or --config FILE", "neither", cure))
    if bool(options.endpoint) != bool(options.model):
        given, missing = ("--endpoint", "--model NAME")
        if options.model:
            given, missing = ("--model", "--endpoint URL")
        faults.append(Fault(given, f"{missing} beside it", "it alone", f"add {missing}"))
    if options.temperature is not None and not 0 <= options.temperature <= 100:
        found = f"{options.temperature:g}"
        faults.append(Fault("--temperature", "0 or more", found, "--temperature 0"))
    refuse("The model cannot be asked.", faults)
    import transformers.utils.logging

    from aflow_tune.using.inferring import open_trained

    transformers.utils.logging.disable_progress_bar()
    return open_trained(
        options.checkpoint,
        config=options.config,
        overrides=options.overrides,
        endpoint=options.endpoint,
        served_model=options.model,
        key_variable=options.key_variable,
        temperature=options.temperature,
    )
