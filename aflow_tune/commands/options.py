"""What commands share: a parser that helps, options that recur, types with a plain refusal, and the
options of those that ask what was trained (`infer`, `serve`)."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.errors import BadInput, Fault

if TYPE_CHECKING:
    from aflow_tune.using.inferring import Inferer

_SETTING = re.compile(r"[A-Za-z_][\w.\[\]-]*=")


class Parser(argparse.ArgumentParser):
    """Keeps the lines of a text as they are, and names the options that were probably meant."""

    def __init__(self, **settings: Any) -> None:
        if settings.get("epilog") or "\n" in (settings.get("description") or ""):
            settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word for word in unknown if word.startswith("--")]
            hints = [f"{word}: {self._meant(word.partition('=')[0])}" for word in options]
            said = "; ".join(hints) or f"see {self.prog} --help"
            self.error(f"unrecognized arguments: {' '.join(unknown)} ({said})")
        return found, unknown

    def _meant(self, word: str) -> str:
        """Options that are spelt alike, or share a word."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        words = set(word.strip("-").split("-"))
        near = difflib.get_close_matches(word, known, 2)
        near += [name for name in known if words & set(name.strip("-").split("-"))]
        names = " or ".join(list(dict.fromkeys(near))[:3])
        return f"did you mean {names}?" if names else f"see {self.prog} --help"

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


def add_config(
    parser: argparse.ArgumentParser,
    overrides: str = "settings that win over the file",
    config: str = "the YAML file",
    **more: Any,
) -> None:
    """Add CONFIG and the settings that may follow it, with their help texts."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help=config, **more)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides)


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


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number above 0, not {text!r}")
    return int(text)


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0, not {text!r}")
    return value


WHAT_IS_A_CHECKPOINT = """\
what DIR may be:
  a run folder (its newest checkpoint; of a chain of stages the last one that trained), a
  checkpoint global_step_N, or export/adapter or export/merged of a run. The configuration is the
  run's resolved.yaml unless --config names another.
"""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a command's parser."""
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="what was trained (below)")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the YAML to go by; alone: the base model"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="a setting that wins over the file, such as models.executor.base_url=...; may be "
        "repeated",
    )
    parser.add_argument(
        "--endpoint", metavar="URL", help="the policy is behind this OpenAI-compatible API"
    )
    parser.add_argument("--model", metavar="NAME", help="what the endpoint calls the policy")
    parser.add_argument(
        "--key-variable",
        metavar="NAME",
        help="environment variable with the endpoint's key; OPENAI_API_KEY for OpenAI's own",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="of the policy; default: as the configuration evaluates held-out tasks",
    )


def inferer_of(options: argparse.Namespace) -> Inferer:
    """What the options mean, ready to be opened.

    Raises:
        BadInput: options that do not fit, or whatever is wrong with folder and configuration.
    """
    _check_model(options)
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


def _check_model(options: argparse.Namespace) -> None:
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
